"""infra/prefect.yaml and infra/automations.yaml on a real Prefect server."""

from datetime import timedelta
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule

from gyre_core.errors import ConfigError
from gyre_core.sim.presets import PRESETS
from tasks.deployments import (
    NOTIFY_BLOCK,
    Choices,
    apply_automations,
    apply_deployments,
    pause_deployment,
    read_deployments,
)

INFRA = Path(__file__).parents[2] / "infra"


def choices(folder: Path, **changes: object) -> Choices:
    values = {"run": "nightly", "config": folder / "run.toml", "runs_dir": folder / "runs", "pool": "test-runs"}
    return Choices(**{**values, **changes})  # type: ignore[arg-type]


def test_deployments_applied_twice_are_there_once_with_limit_schedule_and_form(tmp_path: Path) -> None:
    entries = read_deployments(
        INFRA / "prefect.yaml", choices(tmp_path, interval_s=900.0, max_wall_s=600.0, overrides=("train.steps=4",))
    )
    first = apply_deployments(entries, pool="test-runs")
    changed = read_deployments(INFRA / "prefect.yaml", choices(tmp_path, cron="0 */6 * * *", restart=False))
    second = apply_deployments(changed, pool="test-runs")
    assert first == second
    assert sorted(first) == ["evaluate/nightly", "replay/nightly", "simulate/sweeps", "train/nightly"]
    with get_client(sync_client=True) as client:
        train = client.read_deployment_by_name("train/nightly")
        replay = client.read_deployment_by_name("replay/nightly")
        evaluate = client.read_deployment_by_name("evaluate/nightly")
        sweeps = client.read_deployment_by_name("simulate/sweeps")
        automations = client.read_resource_related_automations(f"prefect.deployment.{train.id}")
    assert train.entrypoint == "flows.scheduled.train" and train.work_pool_name == "test-runs"
    assert train.global_concurrency_limit is not None and train.global_concurrency_limit.limit == 1
    assert train.concurrency_options is not None
    assert train.concurrency_options.collision_strategy is ConcurrencyLimitStrategy.CANCEL_NEW
    assert [schedule.schedule for schedule in train.schedules] == [CronSchedule(cron="0 */6 * * *", timezone="UTC")]
    assert train.parameters["config"] == str((tmp_path / "run.toml").resolve())
    assert train.job_variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert [schedule.schedule for schedule in evaluate.schedules] == [CronSchedule(cron="0 3 * * *", timezone="UTC")]
    assert [automation.enabled for automation in automations] == [False], "--no-restart"
    presets = sweeps.parameter_openapi_schema["properties"]["preset"]["enum"]
    assert sorted(presets) == sorted(PRESETS), "the form offers the simulator's presets"
    form = replay.parameter_openapi_schema
    assert form["properties"]["mode"]["enum"] == ["check", "reselect", "regrade", "retrain"]
    selection = form["definitions"]["SelectionConfig"]["properties"]
    assert {"max_branches", "min_group", "advantage_eps", "role_order"} == set(selection)


def test_deployment_choices_of_the_first_start_reach_the_flow_run(tmp_path: Path) -> None:
    chosen = choices(
        tmp_path,
        interval_s=900.0,
        max_wall_s=600.0,
        overrides=("train.steps=4",),
        environment={"X": "1"},
        only=("train",),
    )
    (entry,) = read_deployments(INFRA / "prefect.yaml", chosen)
    assert entry["parameters"] == {
        "run": "nightly",
        "config": str((tmp_path / "run.toml").resolve()),
        "overrides": ["train.steps=4"],
        "max_wall_s": 600.0,
    }
    apply_deployments([{**entry, "name": "first-start"}], pool="test-runs")
    with get_client(sync_client=True) as client:
        train = client.read_deployment_by_name("train/first-start")
    assert train.parameters["max_wall_s"] == 600.0 and train.job_variables["env"]["X"] == "1"
    (schedule,) = train.schedules
    assert isinstance(schedule.schedule, IntervalSchedule) and schedule.schedule.interval == timedelta(seconds=900)
    pause_deployment("train/first-start")
    with get_client(sync_client=True) as client:
        assert [found.active for found in client.read_deployment_schedules(train.id)] == [False]


def test_automations_applied_twice_are_there_once_and_warnings_call_the_webhook(tmp_path: Path) -> None:
    names = apply_automations(INFRA / "automations.yaml")
    assert apply_automations(INFRA / "automations.yaml", notify_url="http://127.0.0.1:9/hook") == names
    with get_client(sync_client=True) as client:
        found = {name: client.read_automations_by_name(name) for name in names}
    assert all(len(automations) == 1 for automations in found.values())
    actions = {name: automations[0].actions[0].type for name, automations in found.items()}
    assert actions == {
        "gyre: silent flow runs are crashed": "change-flow-run-state",
        "gyre: held-out reward fell": "call-webhook",
        "gyre: outcomes turned bad": "call-webhook",
    }
    assert NOTIFY_BLOCK == "gyre-notify"


def test_deployment_file_with_an_unknown_name_in_it_says_which_are_known(tmp_path: Path) -> None:
    (tmp_path / "prefect.yaml").write_text("deployments: [{name: '{{ $GYRE_RUNN }}'}]")
    with pytest.raises(ConfigError, match=r"\{\{ \$GYRE_RUNN \}\} is not one of GYRE_RUN, GYRE_CONFIG"):
        read_deployments(tmp_path / "prefect.yaml", choices(tmp_path))
