"""The flow `replay`: one stored step of a run told again from the store, without rollouts.

    check      advantages, selection and packing computed again must be those stored
    reselect   the selection with other settings, compared with the stored one
    regrade    kept workspaces graded again with the problems' present verifiers
    retrain    the step trained again must give the stored weights bit for bit

Nothing is written to the run's store. Its parameters are plain values, so a deployment can be run from the UI.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from gyre_core.replay.errors import ReplayMismatchError
from gyre_core.replay.regrade import regrade_report
from gyre_core.replay.reselect import parse_selection
from gyre_core.types import Json
from tasks.context import Box
from tasks.replay import (
    ReplayContext,
    check_stored_step,
    open_replay,
    prepare_regrade,
    read_step,
    regrade_stored_rollout,
    report_replay,
    reselect_step,
    retrain_step,
)

TASK_RUNNER: Any = ThreadPoolTaskRunner(max_workers=4)  # verifiers at once
Mode = Literal["check", "reselect", "regrade", "retrain"]


@flow(
    name="replay",
    flow_run_name="{run} step {step} {mode}",
    task_runner=TASK_RUNNER,
    persist_result=False,
)
def replay(
    run: str,
    step: int,
    mode: Mode = "check",
    runs_dir: str = "runs",
    settings: Sequence[str] = (),
    role_order: str | None = None,
    problems: str | None = None,
) -> Json:
    """Replay step `step` (from 1) of a run. `settings` ("J=3") and `role_order` are reselect's, `problems` regrade's.

    Raises ReplayMismatchError, which holds the result, when what was computed again is not what is stored.
    """
    with open_replay(Path(runs_dir), run) as context:
        found = _answer(context, step, mode, settings, role_order, problems)
        result = {"run": run, "step": step, "mode": mode, **found}
        report_replay(result, step)
    if not result["ok"]:
        raise ReplayMismatchError(f"step {step} of {run}: {mode} does not give what is stored", result)
    return result


def _answer(
    context: ReplayContext,
    step: int,
    mode: Mode,
    settings: Sequence[str],
    role_order: str | None,
    problems: str | None,
) -> Json:
    if mode == "retrain":
        retrained = retrain_step(context, step).value
        return {"ok": retrained.equal, **retrained.as_json()}
    stored = read_step(context, step)
    if mode == "reselect":
        selection = parse_selection(stored.value.selection, settings, role_order)
        return {"ok": True, **reselect_step(context, stored, selection).value.as_json()}
    if mode == "regrade":
        prepared = prepare_regrade(context, stored, problems)
        futures = [
            regrade_stored_rollout.submit(context, Box(rollout, label=rollout.spec.label), prepared)
            for _, rollout in stored.value.rollouts()
        ]
        regrades = [future.result().value for future in futures]
        return {"ok": True, **regrade_report(stored.value, regrades).as_json()}
    checked = check_stored_step(stored).value
    return {"ok": not checked.differences, **checked.as_json()}
