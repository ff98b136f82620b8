"""`gyre replay`: one stored step told again, as a Prefect flow; its result as data and as text."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gyre_core.cli.train import in_prefect
from gyre_core.errors import ConfigError
from gyre_core.replay.errors import ReplayMismatchError
from gyre_core.replay.report import Sheet, sheet_of
from gyre_core.replay.reselect import parse_selection
from gyre_core.replay.stored import find_record, read_step_records
from gyre_core.run_folder import RunFolder
from gyre_core.store.run_store import open_run_store


def run_replay(
    runs_dir: Path,
    run: str,
    step: int,
    *,
    chosen: Mapping[str, bool],
    settings: Sequence[str],
    role_order: str | None,
    problems: Path | None,
) -> tuple[dict[str, Any], str]:
    """Run the flow; a step that is not as stored is a result with `ok` false. Raises ConfigError and StoreError."""
    modes = [mode for mode, wanted in chosen.items() if wanted]
    if len(modes) > 1:
        raise ConfigError(f"give one of {', '.join('--' + mode for mode in chosen)}, not {len(modes)}")
    mode = modes[0] if modes else "check"
    if (settings or role_order is not None) and mode != "reselect":
        raise ConfigError(f"{', '.join(settings) or '--role-order'}: selection settings need --reselect")
    if problems is not None and mode != "regrade":
        raise ConfigError("--problems needs --regrade")
    config, store = open_run_store(RunFolder.open(runs_dir, run))  # bad input must not cost a server's boot
    find_record(read_step_records(store), step)
    parse_selection(config.selection, settings, role_order)

    def call() -> dict[str, Any]:
        from flows.replay import replay

        try:
            return replay(
                run,
                step,
                mode,  # pyright: ignore[reportArgumentType]
                runs_dir=str(runs_dir),
                settings=list(settings),
                role_order=role_order,
                problems=str(problems) if problems is not None else None,
            )
        except ReplayMismatchError as error:
            return error.result

    result = in_prefect(config, call, quiet=False)
    return result, _text(sheet_of(result))


def _text(sheet: Sheet) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=max(100, Console().width))
    console.print(sheet.title, style="bold", highlight=False)
    if sheet.rows:
        table = Table(*sheet.header)
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    for note in sheet.notes:
        console.print(f"- {note}", highlight=False, markup=False, soft_wrap=True)
    return buffer.getvalue().rstrip()
