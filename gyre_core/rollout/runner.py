"""One rollout from its spec to a graded trajectory, in two stages that may run as separate tasks.

    execute_rollout: workspace -> proxy session -> harness in a sandbox -> sealed trajectory
    grade_rollout:   verifier on the workspace -> grade; the workspace goes

Enters: a RolloutSpec, its problem, a proxy, a sandbox. Leaves: a FinishedRollout. Invariants: whatever happens to one
rollout is an outcome with a reason, never an exception; only cancellation is re-raised, after its session is closed
and its processes are gone. Waits for: the harness (bounded by its time limit), the proxy, the verifier (bounded by
its own), all of them by the overall limit, of which the time between the stages is no part.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_core.clock import Clock, SystemClock
from gyre_core.config.models import GradingConfig, RolloutConfig
from gyre_core.errors import GyreError, ProxyError
from gyre_core.grading.outcomes import Decision, ungraded
from gyre_core.grading.problems import Problem, check_component
from gyre_core.grading.verifier import SandboxRunner, grade_workspace
from gyre_core.proxy.settings import HarnessName, LimitSettings, SamplingSettings
from gyre_core.rollout.harness import build_command
from gyre_core.rollout.keep import KeptWorkspace, WorkspaceKeeper
from gyre_core.rollout.shield import finish_even_if_cancelled
from gyre_core.rollout.workspace import prepare_workspace, remove_tree
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.types import Grade, HarnessResult, Outcome, RolloutSpec

logger = logging.getLogger(__name__)

SEAL_ATTEMPTS = 3  # a seal repeats harmlessly
CLEANUP_LIMIT_S = 30.0  # for closing a session when the rollout is being given up


class Session(Protocol):
    """Where a harness finds its model."""

    session_id: str
    api_key: str
    base_url: str


class SessionProxy(Protocol):
    """The admin verbs a rollout needs. Contract: failures are GyreErrors; `seal` may be called again."""

    async def create_session(
        self,
        *,
        rollout_id: str,
        policy_version: int,
        sampling: SamplingSettings,
        limits: LimitSettings,
        harness: HarnessName,
    ) -> Session: ...

    async def seal(self, session_id: str) -> Trajectory: ...

    async def delete(self, session_id: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTimes:
    """Measured durations in seconds. Example: RolloutTimes(prepare_s=0.1, harness_s=2.0, seal_s=0.1, grade_s=0.5)"""

    prepare_s: float = 0.0  # workspace and session
    harness_s: float = 0.0
    seal_s: float = 0.0
    grade_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.prepare_s + self.harness_s + self.seal_s + self.grade_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExecutedRollout:
    """A rollout whose harness has ended and whose calls are recorded, not graded yet.

    Example: executed = await execute_rollout(spec, problem, rollout=config.rollout, proxy=proxy, ...)
    """

    spec: RolloutSpec
    harness: HarnessResult
    trajectory: Trajectory  # without nodes when nothing was recorded
    workdir: Path  # the rollout's own folder
    time_limit: str  # the harness's, and who set it
    failure: str  # why there is nothing to grade beyond what `harness` says, else empty
    overall_expired: bool
    times: RolloutTimes

    @property
    def workspace(self) -> Path:
        return workspace_of(self.workdir)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedRollout:
    """A graded rollout.

    Example: FinishedRollout(spec=spec, trajectory=trajectory, grade=grade, harness=harness, times=times)
    """

    spec: RolloutSpec
    trajectory: Trajectory
    grade: Grade
    harness: HarnessResult
    times: RolloutTimes
    workspace_ref: str = ""  # of the kept workspace's archive in the store, "" when none was kept
    workspace_dropped: str = ""  # why a workspace that should be kept was not


def workspace_of(workdir: Path) -> Path:
    """Where a rollout's workspace lies in its folder."""
    return workdir / "workspace"


def harness_limit(problem: Problem, rollout: RolloutConfig) -> tuple[float, str]:
    """The harness's time limit in seconds and who set it: the shorter of the run's and the problem's."""
    if problem.agent_timeout_s is not None and problem.agent_timeout_s < rollout.time_limit_s:
        return problem.agent_timeout_s, f"{problem.agent_timeout_s:g} s, agent.timeout_sec of the problem"
    return rollout.time_limit_s, f"{rollout.time_limit_s:g} s, rollout.time_limit_s"


async def run_rollout(
    spec: RolloutSpec,
    problem: Problem,
    *,
    rollout: RolloutConfig,
    grading: GradingConfig,
    proxy: SessionProxy,
    sandbox: SandboxRunner,
    workdir: Path,
    keep_workspaces: bool = False,
    clock: Clock | None = None,
) -> FinishedRollout:
    """Both stages, one after the other."""
    executed = await execute_rollout(
        spec, problem, rollout=rollout, proxy=proxy, sandbox=sandbox, workdir=workdir, clock=clock
    )
    return await grade_rollout(
        executed,
        problem,
        grading=grading,
        rollout=rollout,
        sandbox=sandbox,
        keep_workspaces=keep_workspaces,
        clock=clock,
    )


async def execute_rollout(
    spec: RolloutSpec,
    problem: Problem,
    *,
    rollout: RolloutConfig,
    proxy: SessionProxy,
    sandbox: SandboxRunner,
    workdir: Path,
    clock: Clock | None = None,
) -> ExecutedRollout:
    """Run the harness of one rollout and fetch what the proxy recorded.

    `workdir` is the rollout's own folder: what an earlier, killed process left in it is removed first. Raises
    ValueError when the spec is for another problem or its id is not usable as a name.
    """
    check_component(spec.rollout_id, "the rollout id")
    if spec.problem_id != problem.problem_id:
        raise ValueError(f"rollout {spec.rollout_id} is for problem {spec.problem_id}, not {problem.problem_id}")
    stage = _Execution(spec, problem, rollout, proxy, sandbox, workdir, clock or SystemClock())
    limit = asyncio.timeout(rollout.overall_limit_s)
    try:
        try:
            async with limit:
                await stage.run()
        except Exception as error:  # the one capture point: a bad rollout is data
            if isinstance(error, TimeoutError) and limit.expired():
                stage.overall_expired = True
            else:
                stage.failure = f"{stage.doing}: {error or type(error).__name__}"
                logger.warning(
                    "rollout %s: %s", spec.rollout_id, stage.failure, exc_info=not isinstance(error, GyreError)
                )
        await stage.close()
    except asyncio.CancelledError:
        await finish_even_if_cancelled(stage.give_up())
        raise
    return stage.result()


async def grade_rollout(
    executed: ExecutedRollout,
    problem: Problem,
    *,
    grading: GradingConfig,
    rollout: RolloutConfig,
    sandbox: SandboxRunner,
    keeper: WorkspaceKeeper | None = None,
    keep_workspaces: bool = False,
    clock: Clock | None = None,
) -> FinishedRollout:
    """Grade what a rollout left, then remove its folder unless `keep_workspaces`.

    A `keeper` puts the workspace, as it was before the verifier, into the store.
    """
    clock = clock or SystemClock()
    started = clock.monotonic_s()
    kept = KeptWorkspace()
    try:
        settle = await asyncio.to_thread(keeper.take, executed.spec, executed.workspace) if keeper else None
        grade = await _grade(executed, problem, grading, rollout, sandbox)
        if settle is not None:
            kept = await asyncio.to_thread(settle, grade)
    finally:
        if not keep_workspaces:
            await finish_even_if_cancelled(asyncio.to_thread(remove_tree, executed.workdir))
    times = executed.times
    return FinishedRollout(
        spec=executed.spec,
        trajectory=executed.trajectory,
        grade=grade,
        harness=executed.harness,
        times=RolloutTimes(
            prepare_s=times.prepare_s,
            harness_s=times.harness_s,
            seal_s=times.seal_s,
            grade_s=clock.monotonic_s() - started,
        ),
        workspace_ref=kept.ref,
        workspace_dropped=kept.dropped,
    )


async def _grade(
    executed: ExecutedRollout,
    problem: Problem,
    grading: GradingConfig,
    rollout: RolloutConfig,
    sandbox: SandboxRunner,
) -> Grade:
    expired = Grade(
        outcome=Outcome.CANCELLED,
        reward=None,
        reason=f"the overall limit ended the rollout ({rollout.overall_limit_s:g} s, rollout.overall_limit_s)",
    )
    if executed.overall_expired:
        return expired
    if executed.failure:
        decision = Decision(outcome=Outcome.NO_ARTIFACT, to_grade=False, reason=executed.failure)
        return ungraded(decision, grading)
    limit = asyncio.timeout(max(0.0, rollout.overall_limit_s - executed.times.total_s))
    try:
        async with limit:
            return await grade_workspace(
                problem,
                workspace=executed.workspace,
                sandbox=sandbox,
                grading=grading,
                harness=executed.harness,
                num_calls=len(executed.trajectory.calls),
                scratch=executed.workdir / "grading",
                time_limit=executed.time_limit,
            )
    except Exception as error:  # the second and last capture point
        if isinstance(error, TimeoutError) and limit.expired():
            return expired
        logger.exception("rollout %s: grading failed", executed.spec.rollout_id)
        return Grade(outcome=Outcome.VERIFIER_FAILED, reward=None, reason=f"grading failed: {error!r}")


class _Execution:
    """The state of one execution, so that whatever it reached can be told when it ends early."""

    def __init__(
        self,
        spec: RolloutSpec,
        problem: Problem,
        rollout: RolloutConfig,
        proxy: SessionProxy,
        sandbox: SandboxRunner,
        workdir: Path,
        clock: Clock,
    ) -> None:
        self.spec, self.problem, self.rollout = spec, problem, rollout
        self.proxy, self.sandbox, self.workdir, self.clock = proxy, sandbox, workdir, clock
        self.session: Session | None = None
        self.harness: HarnessResult | None = None
        self.trajectory: Trajectory | None = None
        self.doing = ""
        self.failure = ""
        self.overall_expired = False
        self.limit_s, self.time_limit = harness_limit(problem, rollout)
        self._started_s = clock.now_s()
        self._durations = {"prepare_s": 0.0, "harness_s": 0.0, "seal_s": 0.0}

    async def run(self) -> None:
        async with self._timed("prepare_s", "the workspace could not be prepared"):
            await finish_even_if_cancelled(asyncio.to_thread(self._prepare))
        async with self._timed("prepare_s", "the proxy gave no session"):
            self.session = await self._create_session()
        async with self._timed("harness_s", "the harness could not be run"):
            self.harness = await self._run_harness(self.session)
        async with self._timed("seal_s", "the recorded calls could not be fetched"):
            self.trajectory = await self._seal(self.session)

    async def close(self) -> None:
        """Fetch what was recorded if that is still to be done, and let the proxy forget the session."""
        if self.session is None:
            return
        if self.trajectory is None and not self.failure:
            with contextlib.suppress(GyreError, TimeoutError):
                async with self._timed("seal_s", self.doing), asyncio.timeout(CLEANUP_LIMIT_S):
                    self.trajectory = await self.proxy.seal(self.session.session_id)
        await self._delete(self.session)

    async def give_up(self) -> None:
        """After a cancellation: no session and no folder stay behind."""
        if self.session is not None:
            await self._delete(self.session)
        await asyncio.to_thread(remove_tree, self.workdir)

    def result(self) -> ExecutedRollout:
        rollout_id, finished_s = self.spec.rollout_id, self.clock.now_s()
        harness = self.harness or HarnessResult(
            exit_code=None,
            timed_out=False,
            duration_s=self._durations["harness_s"],
            log_tail="",
            started_s=self._started_s,
            finished_s=finished_s,
            error=self.failure or "the overall limit ended it",
        )
        empty = TrajectoryTree(rollout_id=rollout_id, nodes=())
        return ExecutedRollout(
            spec=self.spec,
            harness=harness,
            trajectory=self.trajectory or Trajectory(rollout_id=rollout_id, tree=empty, calls=()),
            workdir=self.workdir,
            time_limit=self.time_limit,
            failure=self.failure,
            overall_expired=self.overall_expired,
            times=RolloutTimes(**self._durations),
        )

    def _prepare(self) -> None:
        remove_tree(self.workdir)
        prepare_workspace(workspace_of(self.workdir), self.problem.files_dir)

    async def _create_session(self) -> Session:
        rollout = self.rollout
        return await self.proxy.create_session(
            rollout_id=self.spec.rollout_id,
            policy_version=self.spec.dispatch_version,
            sampling=SamplingSettings(
                temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens, seed=self.spec.seed
            ),
            limits=LimitSettings(
                max_calls=rollout.max_calls,
                max_tokens=rollout.max_rollout_tokens,
                max_time_s=rollout.overall_limit_s,  # ends calls that nobody waits for any more
            ),
            harness=HarnessName(name=rollout.harness.name, version=rollout.harness.version),
        )

    async def _run_harness(self, session: Session) -> HarnessResult:
        config = self.rollout.harness
        command = build_command(
            config, base_url=session.base_url, api_key=session.api_key, instruction=self.problem.instruction
        )
        return await self.sandbox.run(
            command.argv,
            workspace=workspace_of(self.workdir),
            timeout_s=self.limit_s,
            env=command.env,
            read_only=[(path, str(path.absolute())) for path in config.read_only],
            log_path=self.workdir / "harness.log",
        )

    async def _seal(self, session: Session) -> Trajectory:
        attempt = 1
        while True:
            try:
                trajectory = await self.proxy.seal(session.session_id)
                break
            except GyreError as error:
                if attempt == SEAL_ATTEMPTS:
                    raise
                logger.warning("rollout %s: seal %d/%d: %s", self.spec.rollout_id, attempt, SEAL_ATTEMPTS, error)
            await asyncio.sleep(0.1 * 2**attempt)
            attempt += 1
        if not trajectory.rollout_id == trajectory.tree.rollout_id == self.spec.rollout_id:
            raise ProxyError(f"they are those of {trajectory.rollout_id!r}")
        return trajectory

    async def _delete(self, session: Session) -> None:
        try:
            async with asyncio.timeout(CLEANUP_LIMIT_S):
                await self.proxy.delete(session.session_id)
        except (GyreError, TimeoutError) as error:
            logger.warning("rollout %s: session %s is left open: %s", self.spec.rollout_id, session.session_id, error)

    @contextlib.asynccontextmanager
    async def _timed(self, name: str, doing: str) -> AsyncIterator[None]:
        self.doing = doing
        started = self.clock.monotonic_s()
        try:
            yield
        finally:
            self._durations[name] += self.clock.monotonic_s() - started
