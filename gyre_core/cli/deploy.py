"""`gyre deploy`: a run's deployments and Gyre's automations on a Prefect server."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_core.cli.options import ConfigArgument, JsonOption, RunsDirOption, SetOption, print_text
from gyre_core.errors import ConfigError, SetupError

FilesOption = Annotated[
    Path, typer.Option("--files", help="folder with prefect.yaml and automations.yaml", show_default="infra")
]


def deploy(
    config: ConfigArgument,
    run: Annotated[str | None, typer.Option("--run", help="name of the run; default: the config's")] = None,
    interval_s: Annotated[
        float | None, typer.Option("--interval-s", min=1, help="seconds between two schedules of train")
    ] = None,
    cron: Annotated[str | None, typer.Option("--cron", help="schedule of train, instead of an interval")] = None,
    max_wall_s: Annotated[
        float | None, typer.Option("--max-wall-s", min=1, help="time box of one flow run of train")
    ] = None,
    overrides: SetOption = None,
    pool: Annotated[str, typer.Option(help="work pool of the flow runs")] = "gyre-runs",
    only: Annotated[list[str] | None, typer.Option("--only", help="train, evaluate or replay (repeatable)")] = None,
    restart: Annotated[bool, typer.Option("--restart/--no-restart", help="start a crashed run again")] = True,
    notify_url: Annotated[
        str | None, typer.Option("--notify-url", help="POST warnings there (held-out reward fell, outcomes are bad)")
    ] = None,
    files: FilesOption = Path("infra"),
    runs_dir: RunsDirOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Apply infra/prefect.yaml for a run: train by schedule, evaluate each night, replay from a form; and automations.

    The server is PREFECT_API_URL's, or that of the team that is up in --runs-dir.
    """
    from gyre_core.config import load_run_config

    if interval_s is not None and cron is not None:
        raise ConfigError("give --interval-s or --cron, not both")
    loaded = load_run_config(config, overrides or [])  # a deployment of what cannot run helps nobody
    _find_server(runs_dir)
    from tasks.deployments import Choices, apply_automations, apply_deployments, read_deployments

    choices = Choices(
        run=run or loaded.name,
        config=config,
        runs_dir=loaded.runs_dir,
        pool=pool,
        interval_s=interval_s,
        cron=cron,
        overrides=tuple(overrides or ()),
        max_wall_s=max_wall_s,
        restart=restart,
        only=tuple(only or ()),
    )
    applied = apply_deployments(read_deployments(files / "prefect.yaml", choices), pool=pool)
    automations = apply_automations(files / "automations.yaml", notify_url=notify_url)
    result = {"deployments": applied, "automations": automations, "pool": pool}
    print_text(result, _describe(result), as_json)


def register(app: typer.Typer) -> None:
    """Add the command `deploy`."""
    app.command()(deploy)


def _find_server(runs_dir: Path) -> None:
    """Point this process's Prefect at the server; before Prefect is imported for the first time."""
    if os.environ.get("PREFECT_API_URL"):
        return
    if not (runs_dir / "team" / "team.json").is_file():
        raise SetupError(
            "no Prefect server to deploy to: set PREFECT_API_URL, or start a team's with "
            f"`gyre up --profile team --runs-dir {runs_dir}`"
        )
    from tasks.team import team_environment

    os.environ.update(team_environment(runs_dir))


def _describe(result: dict[str, Any]) -> str:
    lines = [f"deployment {name}" for name in result["deployments"]]
    lines += [f"automation {name}" for name in result["automations"]]
    first = next(iter(result["deployments"]), None)
    if first is not None:
        lines.append(f"start it now: prefect deployment run {first!r}; the pool is {result['pool']}")
    return "\n".join(lines)
