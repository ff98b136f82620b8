"""Prefect artifacts and events of a run: what the UI shows without opening anything else.

Keys are stable within a run, so the UI keeps a history of each: `<run>-progress`, `<run>-reward`, `<run>-outcomes`,
`<run>-steps`, `<run>-cells`, `<run>-rollouts`.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.events import emit_event

from gyre_core.pictures import CellSpan, LevelPoint, cell_timeline_png, reward_curve_png


class RunReporter:
    """Writes a run's artifacts; called from the flow between steps, never per call or token.

    Example: reporter = RunReporter("quickstart", num_steps=8); reporter.progress(3)
    """

    def __init__(self, run_id: str, *, num_steps: int) -> None:
        self._run_id = run_id
        self._key = run_id.replace("_", "-").replace(".", "-")  # artifact keys: lower-case letters, digits, dashes
        self._num_steps = num_steps
        self._progress_id: UUID | None = None

    def progress(self, steps_done: int) -> None:
        """The run's progress bar, in percent of its optimizer steps."""
        percent = 100.0 * steps_done / self._num_steps if self._num_steps else 100.0
        if self._progress_id is None:
            created = create_progress_artifact(
                progress=percent, key=f"{self._key}-progress", description=f"optimizer steps of {self._run_id}"
            )
            self._progress_id = created if isinstance(created, UUID) else None
        else:
            update_progress_artifact(self._progress_id, progress=percent)

    def reward_curve(
        self, steps: Sequence[int], rewards: Sequence[float], heldout: Sequence[tuple[int, float]]
    ) -> None:
        """Picture of training and held-out reward."""
        png = reward_curve_png(steps, rewards, heldout, title=f"{self._run_id}: reward")
        self._image("reward", png, "mean reward: training by step, held-out by version")

    def cell_timeline(self, spans: Sequence[CellSpan], levels: Sequence[LevelPoint]) -> None:
        """Picture of who served, trained and switched when, and the water level below it."""
        png = cell_timeline_png(spans, title=f"{self._run_id}: cells", levels=levels)
        self._image("cells", png, "what the cells did, and the water level")

    def outcomes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rollouts by outcome, step by step, with the reasons of exclusions."""
        create_table_artifact(
            [dict(row) for row in rows], key=f"{self._key}-outcomes", description="rollouts by outcome and reason"
        )

    def steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One row a step: reward, tokens, seconds, norms."""
        create_table_artifact([dict(row) for row in rows], key=f"{self._key}-steps", description="step by step")

    def store_link(self, url: str) -> None:
        """Where the trajectories are."""
        link = url if "://" in url else f"file://{url}"
        create_link_artifact(
            link, link_text=url, key=f"{self._key}-store", description="stored trajectories (gyre inspect reads them)"
        )

    def rollout_pages(self, rows: Sequence[Mapping[str, str]], *, folder: Path) -> None:
        """Where the pages of a few rollouts of the newest step are, and the command that makes any other one."""
        names = list(rows[0])
        lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
        lines += [f"| {' | '.join(_cell(row[name]) for name in names)} |" for row in rows]
        command = f"gyre inspect {self._run_id} ROLLOUT --html FILE --runs-dir {folder.parent.parent}"
        markdown = "\n".join([*lines, "", f"Open a page in a browser. Any other rollout: `{command}`"])
        create_markdown_artifact(
            markdown, key=f"{self._key}-rollouts", description=f"rollouts to look at, pages under {folder}"
        )

    def role_change(self, cell_id: str, to: str, reason: str, *, epoch: int) -> None:
        """An event for each move, with its reason."""
        emit_event(
            event=f"gyre.cell.{to}",
            resource={"prefect.resource.id": f"gyre.cell.{cell_id}", "prefect.resource.name": cell_id},
            payload={"run": self._run_id, "to": to, "reason": reason, "epoch": epoch},
        )

    def cell_event(self, cell_id: str, kind: str, reason: str) -> None:
        """An event for a cell that died or came back."""
        emit_event(
            event=f"gyre.cell.{kind}",
            resource={"prefect.resource.id": f"gyre.cell.{cell_id}", "prefect.resource.name": cell_id},
            payload={"run": self._run_id, "reason": reason},
        )

    def _image(self, name: str, png: bytes, description: str) -> None:
        url = "data:image/png;base64," + base64.b64encode(png).decode()
        create_markdown_artifact(f"![{description}]({url})", key=f"{self._key}-{name}", description=description)


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table: code where it holds a path, nothing that ends the cell."""
    shown = text.replace("|", "\\|").replace("\n", " ")
    return f"`{shown}`" if "/" in shown else shown
