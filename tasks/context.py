"""What the tasks of one run share. Plain classes on purpose: Prefect walks into dataclasses and models that it gets as
parameters, and a trajectory has thousands of nodes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gyre_core.config import RunConfig
from gyre_core.grading.problems import Problem
from gyre_core.metrics import MetricsWriter
from gyre_core.rollout.environment import Environment
from gyre_core.rollout.keep import WorkspaceKeeper
from gyre_core.run_folder import RunFolder
from gyre_core.store import Store
from gyre_core.tracing.spans import NO_TRACING, Tracing
from tasks.progress import RunProgress
from tasks.reporting import RunReporter
from tasks.services import Services

if TYPE_CHECKING:
    from tasks.scheduling import Scheduling

T = TypeVar("T")


class Box(Generic[T]):
    """A value that Prefect passes on without looking inside; `label` names task runs that take it.

    Example: Box(rollout, label="step 1 / rollout p07-03").value
    """

    __slots__ = ("label", "value")

    def __init__(self, value: T, *, label: str = "") -> None:
        self.value = value
        self.label = label


class RunContext:
    """One run's objects, built once by the flow and handed to every task.

    Mutable parts: `policy_version` (the committed one, moved by commit_step alone), `cell_version` (the core's, ahead
    of it between the optimizer step and the commit), `scheduling`, `stream`, and the reporting lists.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        folder: RunFolder,
        store: Store,
        problems: dict[str, Problem],
        heldout: dict[str, Problem],
        services: Services,
        sandbox: Environment,
        progress: RunProgress,
        reporter: RunReporter,
        scheduling: "Scheduling",
        metrics: MetricsWriter,
        policy_version: int,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.config = config
        self.folder = folder
        self.store = store
        self.problems = problems
        self.heldout = heldout
        self.services = services
        self.sandbox = sandbox
        self.progress = progress
        self.reporter = reporter
        self.metrics = metrics
        self.tracing = tracing
        self.keeper = WorkspaceKeeper(store, config.grading)
        self.policy_version = policy_version
        self.cell_version = policy_version
        self.scheduling = scheduling
        self.stream: Any = None  # the flow's RolloutStream, made at its first use
        self.outcome_rows: list[dict[str, Any]] = []

    def problem(self, problem_id: str) -> Problem:
        """A training or held-out problem by id."""
        return self.problems[problem_id] if problem_id in self.problems else self.heldout[problem_id]

    def workspace_root(self, rollout_id: str) -> Path:
        """The folder of a rollout's workspace, private to it."""
        return self.folder.work / "rollouts" / rollout_id
