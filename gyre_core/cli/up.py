"""`gyre up --profile team`: a team's services on this machine, until interrupted."""

import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gyre_core.cli.options import RunsDirOption, print_result

Profile = Literal["team"]


def up(
    profile: Annotated[Profile, typer.Option("--profile", help="team: PostgreSQL, SeaweedFS, Prefect server, workers")],
    runs_dir: RunsDirOption = Path("runs"),
    port: Annotated[int, typer.Option(help="of the Prefect UI; 0: the one that this folder had, else a free one")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="process workers of the pool")] = 1,
    pool: Annotated[str, typer.Option(help="work pool of the flow runs")] = "gyre-runs",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object when all is ready")] = False,
) -> None:
    """Start a team's services, all children of this process, and look after them until it is interrupted."""
    from tasks.team import describe_team, plan_team, running_team

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    for name in ("httpx", "alembic", "prefect"):
        logging.getLogger(name).setLevel(logging.WARNING)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _interrupt(stopping))
    plan = plan_team(runs_dir, port=port)
    with running_team(plan, pool=pool, workers=workers) as team:
        _tell(describe_team(plan, team), runs_dir, as_json=as_json)
        team.watch(stopping)


def env(runs_dir: RunsDirOption = Path("runs")) -> None:
    """Print the environment of the team that is up, as shell commands: eval "$(gyre env)"."""
    from tasks.team import team_environment

    for name, value in team_environment(runs_dir).items():
        sys.stdout.write(f"export {name}={json.dumps(value)}\n")


def register(app: typer.Typer) -> None:
    """Add the commands `up` and `env`."""
    app.command()(up)
    app.command()(env)


def _interrupt(stopping: threading.Event) -> None:
    """The first signal ends the watch, or the start that is going on; a second one changes nothing."""
    if not stopping.is_set():
        stopping.set()
        raise KeyboardInterrupt


def _tell(team: dict[str, Any], runs_dir: Path, *, as_json: bool) -> None:
    if as_json:
        print_result(team)
        return
    sys.stdout.write(
        f"Prefect UI:  {team['ui_url']}\nobject store: {team['store_endpoint']}, bucket {team['bucket']}\n"
        f"deploy:      gyre deploy CONFIG --run NAME --runs-dir {runs_dir}\n"
        f'other tools: eval "$(gyre env --runs-dir {runs_dir})"\n'
    )
    sys.stdout.flush()
