"""Pages of a few rollouts of each step, for people who look at a run while it goes on.

Enters: a committed step. Leaves: files under the run's `rollouts/` and one artifact that names them. Bounded: three
rollouts a step, none larger than `MAX_TOKENS`, `MAX_PAGES` files in all. A page that cannot be made is a line in the
log, never the end of a run.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gyre_core.errors import GyreError
from gyre_core.store import StepRecord
from gyre_core.viewer.page import rollout_page
from gyre_core.viewer.stored import page_name, stored_rollout_model, write_page
from gyre_core.viewer.vocabulary import load_vocabulary
from tasks.context import RunContext

logger = logging.getLogger(__name__)

MAX_TOKENS = 1_000_000  # of a rollout; 700,000 tokens take 0.2 s and one to four megabytes
MAX_PAGES = 60  # in the folder; the oldest go first


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rollout that may be shown.

    Example: Candidate(rollout_id="s0003-p07-02", reward=0.5, branches=3, tokens=9000)
    """

    rollout_id: str
    reward: float | None
    branches: int  # selected
    tokens: int  # unique


def choose(candidates: list[Candidate]) -> dict[str, list[str]]:
    """Rollout ids and what each is: `best`, `worst`, `most branches`; ties go to the first id. At most three."""
    if not candidates:
        return {}
    ordered = sorted(candidates, key=lambda one: one.rollout_id)
    rewarded = [one for one in ordered if one.reward is not None]
    chosen: dict[str, list[str]] = {}
    picks = {"most branches": max(ordered, key=lambda one: (one.branches, one.tokens))}
    if rewarded:
        best = max(rewarded, key=lambda one: one.reward or 0.0)
        worst = min(rewarded, key=lambda one: one.reward or 0.0)
        picks = {"best": best, "worst": worst, **picks}
    for what, one in picks.items():
        chosen.setdefault(one.rollout_id, []).append(what)
    return chosen


def show_rollouts(run: RunContext, record: StepRecord) -> None:
    """Write the step's pages and their artifact."""
    try:
        rows = _write_pages(run, record)
    except (GyreError, OSError, ValueError) as error:
        logger.warning("no pages of rollouts for step %d: %s", record.step + 1, error)
        return
    if rows:
        run.reporter.rollout_pages(rows, folder=run.folder.path / "rollouts")


def _write_pages(run: RunContext, record: StepRecord) -> list[dict[str, str]]:
    candidates = {one.rollout_id: one for one in _candidates(run, record.step)}
    chosen = choose(list(candidates.values()))
    if not chosen:
        return []
    vocabulary = load_vocabulary(run.config.model.path)
    folder = run.folder.path / "rollouts"
    rows = []
    for rollout_id, what in chosen.items():
        model = stored_rollout_model(run.store, rollout_id, vocabulary, run_id=run.folder.run_id)
        path = folder / page_name(rollout_id)
        write_page(path, rollout_page(model))
        rows.append(_row(run, record.step, candidates[rollout_id], what, path))
    _drop_oldest(folder)
    return rows


def _candidates(run: RunContext, step: int) -> list[Candidate]:
    found = []
    for commit in run.store.commits("group"):
        if commit.record["step"] != step:
            continue
        branches = Counter(run.store.read_table(commit, "selections").column("rollout_id").to_pylist())
        table = run.store.read_table(commit, "rollouts")
        sizes = dict(zip(table["rollout_id"].to_pylist(), table["unique_tokens"].to_pylist(), strict=True))
        found += [
            Candidate(rollout_id=rollout_id, reward=reward, branches=branches[rollout_id], tokens=sizes[rollout_id])
            for rollout_id, reward in commit.record["rewards_by_rollout"].items()
            if sizes[rollout_id] <= MAX_TOKENS
        ]
    return found


def _row(run: RunContext, step: int, one: Candidate, what: list[str], path: Path) -> dict[str, str]:
    return {
        "step": str(step + 1),
        "which": ", ".join(what),
        "rollout": one.rollout_id,
        "reward": "none" if one.reward is None else f"{one.reward:g}",
        "trained branches": str(one.branches),
        "tokens": f"{one.tokens:,}",
        "page": str(path.resolve()),
    }


def _drop_oldest(folder: Path) -> None:
    pages = sorted(folder.glob("*.html"), key=lambda path: (path.stat().st_mtime, path.name))
    for path in pages[: max(0, len(pages) - MAX_PAGES)]:
        path.unlink(missing_ok=True)
