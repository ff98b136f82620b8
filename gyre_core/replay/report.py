"""A replay's result as tables: rows for a terminal, Markdown for the Prefect UI. Pure text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre_core.types import Json

_MANY = 40  # rows of a table before the rest is only counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A title, a table, and sentences below it.

    Example: Sheet(title="...", header=("", "before", "after"), rows=[("branches", "48", "40")], notes=["..."])
    """

    title: str
    header: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        if self.rows:
            lines += [_markdown_row(self.header), _markdown_row(["---"] * len(self.header))]
            lines += [*(_markdown_row(row) for row in self.rows), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)]) + "\n"


def sheet_of(result: Json) -> Sheet:
    """The sheet of a replay's result, by its mode."""
    return _SHEETS[result["mode"]](result)


def _check(result: Json) -> Sheet:
    names = ("groups", "rollouts", "branches", "targets", "micro_steps")
    differences = result["differences"]
    return Sheet(
        title=_title(result, "computed again"),
        header=("compared", "count"),
        rows=[(name.replace("_", "-"), f"{result[name]:,}") for name in names],
        notes=differences or ["advantages, branches, targets, weights and the order of micro-steps are those stored"],
    )


def _reselect(result: Json) -> Sheet:
    before, after = result["before"], result["after"]
    rows = [
        _changed(label, before[name], after[name])
        for label, name in (
            ("rollouts with a branch", "rollouts"),
            ("branches", "branches"),
            ("targets (trained tokens)", "targets"),
            ("tokens in branches", "tokens_in_branches"),
            ("unique tokens computed", "unique_tokens"),
            ("micro-steps", "micro_steps"),
            ("forward and backward, s", "train_s"),
        )
    ]
    for label, name in (
        ("branches", "branches_by_role"),
        ("targets", "targets_by_role"),
        ("weight", "weights_by_role"),
    ):
        for role in sorted(before[name].keys() | after[name].keys()):
            rows.append(_changed(f"{label} of {role}", before[name].get(role, 0), after[name].get(role, 0)))
    old, new = result["selection_before"], result["selection_after"]
    settings = [f"{name}: {_text(old[name])} -> {_text(new[name])}" for name in old if old[name] != new[name]]
    return Sheet(
        title=_title(result, "selected again"),
        header=("", "stored", "selected again", "change"),
        rows=rows,
        notes=[
            *(settings or ["the settings are those stored"]),
            f"{result['branches_kept']} branches are in both; {result['rollouts_changed']} rollouts have others",
            f"groups dropped: {result['groups_dropped_before']} -> {result['groups_dropped_after']}",
            "nothing was written: the run's store is as it was",
        ],
    )


def _regrade(result: Json) -> Sheet:
    rows = []
    for rollout_id, row in sorted(result["rewards"].items()):
        stands = "" if row["graded_again"] else f" ({row['reason']})"
        if row["reward_before"] != row["reward_after"] or row["outcome_before"] != row["outcome_after"] or stands:
            before = f"{_text(row['reward_before'])} {row['outcome_before']}"
            rows.append((rollout_id, before, f"{_text(row['reward_after'])} {row['outcome_after']}{stands}"))
    more = [f"... and {len(rows) - _MANY} more rollouts"] if len(rows) > _MANY else []
    return Sheet(
        title=_title(result, "graded again"),
        header=("rollout", "stored", "graded again"),
        rows=rows[:_MANY],
        notes=[
            *more,
            f"{result['graded_again']} of {len(result['rewards'])} rollouts graded again, {result['rewards_changed']} "
            f"rewards changed: mean {_text(result['reward_mean_before'])} -> {_text(result['reward_mean_after'])}",
            f"advantages changed of {result['advantages_changed']} rollouts",
            f"sampled tokens {result['tokens_before']:,} -> {result['tokens_after']:,}, targets "
            f"{result['targets_before']:,} -> {result['targets_after']:,}, branches with other tokens, targets or "
            f"weights: {result['branches_changed']}",
            "nothing was written: the run's store is as it was",
        ],
    )


def _retrain(result: Json) -> Sheet:
    notes = [f"started from {result['started_from']}"]
    found = result["checkpoint"]
    if found is None:
        notes.append("the step's checkpoint is not there any more: compared by the digest in its record")
    else:
        notes.append(
            f"against the step's checkpoint: {len(found['different_weights'])} of {found['num_weights']} weight "
            f"tensors differ, largest difference {found['max_abs_weights']:g}; {len(found['different_moments'])} "
            f"optimizer tensors differ, largest difference {found['max_abs_moments']:g}"
        )
    changes = [f"{name}: {_text(old)} -> {_text(new)}" for name, (old, new) in result["back_end_changes"].items()]
    notes.append(f"back end: {'; '.join(changes)}" if changes else "back end: the same versions, device and threads")
    return Sheet(
        title=_title(result, "trained again"),
        header=("step", "micro-steps", "stored weights", "trained again", "bits"),
        rows=[
            (
                str(step["step"]),
                str(step["micro_steps"]),
                step["digest_stored"],
                step["digest_again"],
                "equal" if step["equal"] else "DIFFERENT",
            )
            for step in result["steps"]
        ],
        notes=notes,
    )


_SHEETS = {"check": _check, "reselect": _reselect, "regrade": _regrade, "retrain": _retrain}


def _title(result: Json, what: str) -> str:
    return f"{result['run']}, step {result['step']}: {what}" + ("" if result["ok"] else " - NOT as stored")


def _changed(label: str, before: Any, after: Any) -> tuple[str, ...]:
    change = ""
    if before and after is not None:
        change = f"{100.0 * (after - before) / before:+.1f} %"
    return label, _text(before), _text(after), change


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.4f}".rstrip("0").rstrip(".")
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
