"""Grades what a workspace holds, with the problem's own tests, in a sandbox of its own.

Enters: a problem, a workspace no process works on any more, how the harness ended. Leaves: a Grade. Invariants: a
private copy of the tests appears at /tests only while a verifier runs; /logs is fresh for each attempt, so nothing
the agent left can stand for a reward; each attempt has the verifier's whole time limit, whatever the agent used; a
verifier that fails is tried again up to the budget, then the rollout is excluded with the reason, never given a 0.
"""

import asyncio
import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gyre_core.config.models import GradingConfig
from gyre_core.errors import GyreError
from gyre_core.grading.outcomes import classify, ungraded
from gyre_core.grading.problems import Problem
from gyre_core.types import Grade, HarnessResult, Outcome

logger = logging.getLogger(__name__)

TESTS_DIR, LOGS_DIR = "/tests", "/logs"
MAX_REWARD_BYTES = 65536  # a number, or a small JSON object of them
_TEXT_FILE, _JSON_FILE = "reward.txt", "reward.json"


class SandboxRunner(Protocol):
    """Runs a command on a workspace where neither the host nor other rollouts can be seen or harmed.

    Contract: the workspace is the working directory; `read_write` are (host path, path inside) pairs; the result says
    how it went and no process is left; failures of the sandbox are results with `error`; cancellation is re-raised.
    """

    async def run(
        self,
        argv: Sequence[str],
        *,
        workspace: Path,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        read_only: Sequence[tuple[Path, str]] = (),
        read_write: Sequence[tuple[Path, str]] = (),
        log_path: Path | None = None,
    ) -> HarnessResult: ...


class BadRewardError(GyreError, ValueError):
    """A verifier left no usable reward; the message says what it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a verifier wrote. Example: Reward(value=0.5, metrics={"passed": 3.0})"""

    value: float  # in [0, 1]
    metrics: dict[str, float] = field(default_factory=dict)


async def grade_workspace(
    problem: Problem,
    *,
    workspace: Path,
    sandbox: SandboxRunner,
    grading: GradingConfig,
    harness: HarnessResult,
    num_calls: int,
    scratch: Path,
    time_limit: str = "",
) -> Grade:
    """Grade an ended rollout.

    `scratch` is a folder of the rollout's own for copies of tests, logs and reward files; `time_limit` says in words
    which limit the harness had.
    """
    kept = workspace.is_dir() and not workspace.is_symlink()
    decision = classify(harness, num_calls=num_calls, workspace_kept=kept, time_limit=time_limit)
    if not decision.to_grade:
        return ungraded(decision, grading)
    timeout_s = problem.verifier_timeout_s or grading.timeout_s
    verifier_s, failure = 0.0, ""
    for attempt in range(1, grading.attempts + 1):
        result, reward, failure = await _attempt(
            problem, workspace, sandbox, timeout_s, scratch / f"verifier-{attempt}"
        )
        verifier_s += result.duration_s if result is not None else 0.0
        if reward is not None:
            return Grade(
                outcome=decision.outcome,
                reward=reward.value,
                reason=f"{decision.reason}; the verifier wrote {reward.value:g}",
                verifier_attempts=attempt,
                verifier_s=verifier_s,
                metrics=reward.metrics,
            )
        logger.warning("problem %s: verifier attempt %d/%d: %s", problem.problem_id, attempt, grading.attempts, failure)
    return Grade(
        outcome=Outcome.VERIFIER_FAILED,
        reward=None,
        reason=f"{decision.reason}; the verifier failed {grading.attempts} time(s), last: {failure}",
        verifier_attempts=grading.attempts,
        verifier_s=verifier_s,
    )


async def _attempt(
    problem: Problem, workspace: Path, sandbox: SandboxRunner, timeout_s: float, folder: Path
) -> tuple[HarnessResult | None, Reward | None, str]:
    tests, logs = folder / "tests", folder / "logs"
    try:
        (logs / "verifier").mkdir(parents=True)
        await asyncio.to_thread(shutil.copytree, problem.tests_dir, tests, symlinks=True)
    except (OSError, shutil.Error) as error:
        return None, None, f"its tests could not be copied: {error}"
    result = await sandbox.run(
        ["bash", f"{TESTS_DIR}/test.sh"],
        workspace=workspace,
        timeout_s=timeout_s,
        env=problem.verifier_env,
        read_write=[(tests, TESTS_DIR), (logs, LOGS_DIR)],
        log_path=folder / "verifier.log",
    )
    if result.error:
        return result, None, f"it did not run: {result.error}"
    if result.timed_out:
        return result, None, f"it reached its time limit of {timeout_s:g} s"
    try:
        return result, read_reward(logs / "verifier"), ""
    except BadRewardError as error:
        tail = result.log_tail.strip()[-300:]
        return result, None, f"{error} (exit code {result.exit_code}, output ends with: {tail or 'nothing'})"


def read_reward(folder: Path) -> Reward:
    """The reward in `folder`: reward.txt (one number) before reward.json (an object of numbers), as in Harbor.

    reward.json's reward is its "reward", else its only number. Sandboxed code wrote the folder: no symlink is
    followed, only regular files of bounded size are read. Raises BadRewardError unless it is finite and in [0, 1].
    """
    text, document = _read_plain_file(folder, _TEXT_FILE), _read_plain_file(folder, _JSON_FILE)
    if text is None and document is None:
        raise BadRewardError(f"it wrote neither {_TEXT_FILE} nor {_JSON_FILE}")
    if text is not None:
        metrics: dict[str, float] = {}
        if document is not None:
            try:
                metrics = _numbers_of(document)
            except BadRewardError:
                logger.info("%s: %s is not usable, %s stands", folder, _JSON_FILE, _TEXT_FILE)
        metrics.pop("reward", None)
        return Reward(value=_checked(_parse_number(text)), metrics=metrics)
    assert document is not None
    numbers = _numbers_of(document)
    if "reward" in numbers:
        value = numbers.pop("reward")
    elif len(numbers) == 1:
        (value,) = numbers.values()
    else:
        raise BadRewardError(f'{_JSON_FILE} has no "reward" and {len(numbers)} numbers to choose from')
    return Reward(value=_checked(value), metrics=numbers)


def _parse_number(text: str) -> float:
    try:
        if "_" in text:
            raise ValueError("no underscores")
        return float(text)
    except ValueError:
        raise BadRewardError(f"{_TEXT_FILE} holds no number: {text.strip()[:80]!r}") from None


def _numbers_of(document: str) -> dict[str, float]:
    try:
        tree = json.loads(document)
    except (ValueError, RecursionError):
        raise BadRewardError(f"{_JSON_FILE} is not valid JSON: {document.strip()[:80]!r}") from None
    if not isinstance(tree, dict):
        raise BadRewardError(f"{_JSON_FILE} must hold an object, not {document.strip()[:80]!r}")
    if "reward" in tree and not _is_number(tree["reward"]):
        raise BadRewardError(f'the "reward" of {_JSON_FILE} is no number: {str(tree["reward"])[:80]!r}')
    return {name: _to_float(value) for name, value in tree.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _checked(value: float) -> float:
    if not math.isfinite(value) or not 0.0 <= value <= 1.0:
        raise BadRewardError(f"the reward must be a finite number in [0, 1], not {value!r}")
    return value + 0.0  # -0.0 becomes 0.0


def _read_plain_file(folder: Path, name: str) -> str | None:
    """Text of a regular file, None when there is none; raises BadRewardError for anything else under that name."""
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise BadRewardError(f"{LOGS_DIR}/{folder.name} is no folder any more: {error.strerror}") from None
    try:
        # O_NONBLOCK: a named pipe under that name must not hold the host up.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRewardError(f"{name} is not a readable plain file: {error.strerror}") from None
    finally:
        os.close(folder_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadRewardError(f"{name} is not a plain file")
        data = os.read(fd, MAX_REWARD_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_REWARD_BYTES:
        raise BadRewardError(f"{name} is larger than {MAX_REWARD_BYTES} bytes")
    return data.decode(errors="replace")
