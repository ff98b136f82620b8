"""What the page of a whole run shows: its steps, its groups and one line for each rollout, as plain JSON.

Enters: a store. Leaves: JSON. No tokens are read.
"""

from collections import Counter
from typing import Any

from gyre_core.store import Store
from gyre_core.types import Json

_COLUMNS = ("rollout_id", "member", "duration_s", "num_calls", "unique_tokens", "sampled_tokens")
_KINDS = {"group": "training", "heldout-group": "held-out"}


def run_model(store: Store, run_id: str) -> Json:
    """Groups in commit order, members in order of their numbers. `page` of a rollout is filled in by the caller."""
    return {
        "run": run_id,
        "steps": [
            {
                "step": record.step + 1,
                "reward": float(record.stats["reward_mean"]),
                "groups_trained": len(record.groups_trained),
                "groups_dropped": len(record.groups_dropped),
                "tokens_sampled": int(record.stats["tokens_sampled"]),
                "tokens_trained": int(record.stats["tokens_trained"]),
                "grad_norm": float(record.stats["grad_norm"]),
                "outcomes": dict(record.outcomes),
            }
            for record in store.read_steps()
        ],
        "evaluations": [
            {name: commit.record[name] for name in ("tag", "reward", "policy_version")}
            for commit in store.commits("evaluation")
        ],
        "groups": [_group(store, commit) for kind in _KINDS for commit in store.commits(kind)],
    }


def _group(store: Store, commit: Any) -> Json:
    record = commit.record
    grades = {
        row["rollout_id"]: row
        for row in store.read_table(commit, "grades").select(["rollout_id", "outcome", "reward", "reason"]).to_pylist()
    }
    branches = Counter(store.read_table(commit, "selections").column("rollout_id").to_pylist())
    rollouts = [
        {
            "id": row["rollout_id"],
            "member": row["member"],
            "outcome": grades[row["rollout_id"]]["outcome"],
            "reward": grades[row["rollout_id"]]["reward"],
            "reason": grades[row["rollout_id"]]["reason"],
            "calls": row["num_calls"],
            "tokens": row["unique_tokens"],
            "sampled": row["sampled_tokens"],
            "branches": branches[row["rollout_id"]],
            "seconds": row["duration_s"],
            "page": "",
        }
        for row in store.read_table(commit, "rollouts").select(_COLUMNS).to_pylist()
    ]
    return {
        "id": record["group_id"],
        "kind": _KINDS[commit.kind],
        "step": record["step"],
        "problem": record["problem_id"],
        "version": record["policy_version"],
        "dropped_reason": record.get("dropped_reason"),
        "rollouts": sorted(rollouts, key=lambda row: (row["member"], row["id"])),
    }
