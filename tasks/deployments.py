"""Gyre's deployments and automations on a Prefect server.

Enters: infra/prefect.yaml and infra/automations.yaml, and what a person chose (run, configuration, schedule, time box).
Leaves: a work pool, deployments, automations. Applying again changes what differs and makes nothing twice.

The files stay Prefect's own format: `{{ $NAME }}` is filled in here as `prefect deploy` does it from the environment.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import yaml
from prefect._internal.versioning import VersionType
from prefect.automations import AutomationCore
from prefect.blocks.webhook import Webhook
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.schedules import construct_schedule
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentEventTrigger
from prefect.events.actions import CallWebhook, DoNothing
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.types.entrypoint import EntrypointType
from pydantic import SecretStr, ValidationError

from gyre_core.errors import ConfigError, SetupError

RUNS_POOL = "gyre-runs"  # flow runs of deployments; gyre-rollout and gyre-train show the cells' capacity instead
NOTIFY_BLOCK = "gyre-notify"
# Rendered by the server when a warning fires; the event's own fields are in the payload of what Gyre emitted.
NOTIFY_PAYLOAD = """{"automation": "{{ automation.name }}", "event": "{{ event.event }}",
 "resource": "{{ event.resource.id }}", "message": "{{ event.payload.message }}"}"""

_PLACEHOLDER = re.compile(r"\{\{\s*\$(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a person chooses for a run's deployments.

    Example: Choices(run="nightly", config=Path("/data/run.toml"), runs_dir=Path("/data/runs"), interval_s=3600.0)
    """

    run: str
    config: Path
    runs_dir: Path
    pool: str = RUNS_POOL
    interval_s: float | None = None  # of train; None with no cron: the file's
    cron: str | None = None
    overrides: Sequence[str] = ()
    max_wall_s: float | None = None
    restart: bool = True  # start a crashed run again
    environment: Mapping[str, str] | None = None  # of the flow runs, beside the file's
    only: Sequence[str] = ()  # flow names; none: all


def read_deployments(path: Path, choices: Choices) -> list[dict[str, Any]]:
    """The file's deployments with the choices in them; raises ConfigError."""
    values = {
        "GYRE_RUN": choices.run,
        "GYRE_CONFIG": str(choices.config.resolve()),
        "GYRE_RUNS_DIR": str(choices.runs_dir.resolve()),
        "GYRE_POOL": choices.pool,
    }
    content = _read(path, values)
    try:
        PrefectYamlModel.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path} is not what Prefect takes: {error}") from error
    chosen = []
    for entry in content["deployments"]:
        flow = str(entry["entrypoint"]).rpartition(".")[2]
        if choices.only and flow not in choices.only:
            continue
        if flow == "train":
            _choose_training(entry, choices)
        elif flow == "evaluate":
            entry["parameters"]["overrides"] = list(choices.overrides)
        job = dict(entry["work_pool"].get("job_variables") or {})  # YAML's anchor is one object for all entries
        job["env"] = {**job.get("env", {}), **(choices.environment or {})}
        entry["work_pool"] = {**entry["work_pool"], "job_variables": job}
        chosen.append(entry)
    return chosen


def _choose_training(entry: dict[str, Any], choices: Choices) -> None:
    entry["parameters"] |= {"overrides": list(choices.overrides), "max_wall_s": choices.max_wall_s}
    schedule = entry["schedules"][0]
    if choices.cron is not None:
        schedule.pop("interval", None)
        schedule |= {"cron": choices.cron, "timezone": schedule.get("timezone", "UTC")}
    elif choices.interval_s is not None:
        schedule["interval"] = choices.interval_s
    for trigger in entry.get("triggers", []):
        trigger["enabled"] = choices.restart


def apply_deployments(entries: Sequence[dict[str, Any]], *, pool: str, pool_limit: int | None = None) -> dict[str, str]:
    """Make the pool and the deployments, or bring them up to date; returns deployment ids by `flow/name`."""
    with get_client(sync_client=True) as client:
        ensure_pool(client, pool, limit=pool_limit)
    return {deployment.full_name: str(deployment.apply()) for deployment in map(_deployment, entries)}


def ensure_pool(client: SyncPrefectClient, name: str, *, limit: int | None = None) -> None:
    """A process work pool of that name, unless there is one of any type."""
    try:
        client.create_work_pool(
            WorkPoolCreate(
                name=name, type="process", concurrency_limit=limit, description="flow runs of Gyre's deployments"
            )
        )
    except ObjectAlreadyExists:
        return


def _deployment(entry: dict[str, Any]) -> RunnerDeployment:
    flow = load_flow_from_entrypoint(entry["entrypoint"], use_placeholder_flow=False)
    deployment = flow.to_deployment(
        name=entry["name"],
        description=entry.get("description"),
        tags=entry.get("tags"),
        version=metadata.version("gyre-rl"),
        version_type=VersionType.SIMPLE,
        parameters={name: value for name, value in entry.get("parameters", {}).items() if value is not None},
        concurrency_limit=ConcurrencyLimitConfig.model_validate(entry["concurrency_limit"]),
        work_pool_name=entry["work_pool"]["name"],
        job_variables=entry["work_pool"]["job_variables"],
        triggers=[DeploymentEventTrigger.model_validate(trigger) for trigger in entry.get("triggers", [])],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    if not isinstance(deployment, RunnerDeployment):
        raise SetupError("deployments are applied from ordinary code, not from inside an event loop")
    if entry.get("schedules"):
        deployment.schedules = [_schedule(schedule) for schedule in entry["schedules"]]
    return deployment


def _schedule(schedule: dict[str, Any]) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(
        schedule=construct_schedule(
            interval=schedule.get("interval"), cron=schedule.get("cron"), timezone=schedule.get("timezone")
        ),
        active=schedule.get("active", True),
        slug=schedule.get("slug"),
    )


def apply_automations(path: Path, *, notify_url: str | None = None) -> list[str]:
    """Make the file's automations, or bring those of the same name up to date; returns their names.

    With `notify_url` the warnings (whose action is do-nothing: they are seen in the event feed) POST to it.
    """
    try:
        automations = [AutomationCore.model_validate(entry) for entry in _read(path, {})["automations"]]
    except ValidationError as error:
        raise ConfigError(f"{path} is not what Prefect takes: {error}") from error
    if notify_url is not None:
        block = Webhook(method="POST", url=SecretStr(notify_url), allow_private_urls=True)
        block_id = cast(UUID, block.save(NOTIFY_BLOCK, overwrite=True))
        call = CallWebhook(block_document_id=block_id, payload=NOTIFY_PAYLOAD)
        for automation in automations:
            if any(isinstance(action, DoNothing) for action in automation.actions):
                automation.actions = [call]
    with get_client(sync_client=True) as client:
        for automation in automations:
            known = client.read_automations_by_name(automation.name)
            if known:
                client.update_automation(known[0].id, automation)
            else:
                client.create_automation(automation)
    return [automation.name for automation in automations]


def pause_deployment(name: str, *, paused: bool = True) -> None:
    """Stop a deployment's schedules, or let them go on; `name` is `flow/name`. Raises ConfigError."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(name)
        except ObjectNotFound:
            raise ConfigError(f"the server has no deployment {name}") from None
        for schedule in client.read_deployment_schedules(found.id):
            client.update_deployment_schedule(found.id, schedule.id, active=not paused)


def _read(path: Path, values: Mapping[str, str]) -> Any:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; give it with --file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    try:
        return _fill(content, values)
    except KeyError as name:
        raise ConfigError(f"{path}: {{{{ ${name.args[0]} }}}} is not one of {', '.join(values)}") from None


def _fill(node: Any, values: Mapping[str, str]) -> Any:
    if isinstance(node, str):
        return _PLACEHOLDER.sub(lambda match: values[match[1]], node)
    if isinstance(node, list):
        return [_fill(item, values) for item in node]
    if isinstance(node, dict):
        return {key: _fill(value, values) for key, value in node.items()}
    return node
