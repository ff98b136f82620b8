"""Pages of what a store holds.

Enters: a store and a rollout's id. Leaves: pages as bytes, and files written whole. Only the rollout's own row groups
are read, and the selections of its commit.
"""

import os
from pathlib import Path

import pyarrow.compute as pc

from gyre_core.store import Store
from gyre_core.store.tables import read_branches
from gyre_core.types import Json
from gyre_core.viewer.model import RolloutModel, rollout_model
from gyre_core.viewer.run_model import run_model
from gyre_core.viewer.vocabulary import Vocabulary


def stored_rollout_model(store: Store, rollout_id: str, vocabulary: Vocabulary, *, run_id: str) -> RolloutModel:
    """The model of a stored rollout; StoreError when the store does not hold it or it is damaged."""
    commit = store.find(rollout_id)
    rollout = store.read_rollout(rollout_id)
    selections = store.read_table(commit, "selections")
    mine = selections.filter(pc.equal(selections.column("rollout_id"), rollout_id))  # type: ignore[attr-defined]
    return rollout_model(
        rollout,
        read_branches(mine, [rollout.trajectory]),
        vocabulary,
        run_id=run_id,
        group_rewards=commit.record.get("rewards_by_rollout", {}),
        dropped_reason=commit.record.get("dropped_reason"),
    )


def stored_run_model(store: Store, run_id: str, beside: Path) -> Json:
    """The model of a run, with links to those rollouts whose pages lie in the folder `beside` or in its `rollouts`."""
    model = run_model(store, run_id)
    for group in model["groups"]:
        for rollout in group["rollouts"]:
            name = page_name(rollout["id"])
            for place in (name, f"rollouts/{name}"):
                if (beside / place).is_file():
                    rollout["page"] = place
                    break
    return model


def page_name(rollout_id: str) -> str:
    """The name of a rollout's page: its id, without what a file name cannot hold."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in rollout_id).lstrip(".") + ".html"


def write_page(path: Path, page: bytes) -> None:
    """Write a page whole: a reader finds the old one or the new one. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(page)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
