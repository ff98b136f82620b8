"""`gyre inspect`: a run's steps and rollouts from its store, or one rollout's tree with the trained tokens marked; as
text, as data or as a page.
"""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gyre_core.errors import GyreError, StoreError
from gyre_core.store import Store
from gyre_core.store.run_store import newest_run, open_run_store
from gyre_core.store.tables import locate_branch
from gyre_core.train.accounting import PHASES, flops_per_s, phase_shares
from gyre_core.trajectory.text import render_tree
from gyre_core.trajectory.tree import TrajectoryTree
from gyre_core.types import TrainingBranch

# Short ones: the table fits 100 columns.
_PHASE_NAMES = {
    "forward_backward": "fwd+bwd",
    "gradients": "grads",
    "optimizer": "optim",
    "checkpoint": "ckpt",
    "publication": "publish",
}


def inspect_run(runs_dir: Path, run_id: str | None) -> tuple[dict[str, Any], str]:
    """A run's steps, evaluations and rollouts: as data and as text."""
    folder = newest_run(runs_dir, run_id)
    _, store = open_run_store(folder)
    steps = [
        {
            "step": record.step + 1,
            "reward": round(float(record.stats["reward_mean"]), 4),
            "groups_trained": len(record.groups_trained),
            "groups_dropped": dict(record.groups_dropped),
            "tokens_sampled": int(record.stats["tokens_sampled"]),
            "tokens_trained": int(record.stats["tokens_trained"]),
            "grad_norm": float(record.stats["grad_norm"]),
            "outcomes": dict(record.outcomes),
            "time": _time_row(record.stats),
        }
        for record in store.read_steps()
    ]
    evaluations = [dict(commit.record) for commit in store.commits("evaluation")]
    rollouts = []
    for kind in ("group", "heldout-group"):
        for commit in store.commits(kind):
            rewards = commit.record["rewards_by_rollout"]
            rollouts += [
                {"rollout": rollout_id, "reward": reward, "group": commit.record["group_id"], "kind": kind}
                for rollout_id, reward in rewards.items()
            ]
    result = {"run": folder.run_id, "steps": steps, "evaluations": evaluations, "rollouts": rollouts}
    return result, _run_text(result)


def inspect_rollout(runs_dir: Path, run_id: str, rollout: str) -> tuple[dict[str, Any], str]:
    """One rollout: its grade and its tree. `rollout` is an id or any part of one that fits a single rollout."""
    folder = newest_run(runs_dir, run_id or None)
    config, store = open_run_store(folder)
    commit, rollout_id = _find(store, rollout)
    stored = store.read_rollout(rollout_id)
    trajectory = stored.trajectory
    trained: Counter[int] = Counter()
    branches = [branch for branch in store.read_branches(commit) if branch.rollout_id == rollout_id]
    for branch in branches:
        _count_trained(trajectory.tree, branch, trained)

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(config.model.path / "tokenizer.json"))
    text = render_tree(
        trajectory,
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        width=max(160, Console().width),
        trained=(lambda node: trained[node.node_id]) if branches else None,
    )
    grade = stored.grade
    reward = "none" if grade.reward is None else f"{grade.reward:g}"
    advantage = f", advantage {branches[0].advantage:+.3f}" if branches else ""
    head = (
        f"{rollout_id}: {grade.outcome.value}, reward {reward}{advantage} ({grade.reason})\n"
        f"harness {stored.harness.duration_s:.1f} s, verifier {grade.verifier_s:.2f} s; "
        + (f"{len(branches)} selected branch(es)" if branches else "not trained")
    )
    result = {
        "run": folder.run_id,
        "rollout": rollout_id,
        "outcome": grade.outcome.value,
        "reward": grade.reward,
        "reason": grade.reason,
        "calls": len(trajectory.calls),
        "roles": dict(Counter(call.role.value for call in trajectory.calls)),
        "substitutions": dict(Counter(call.substitution.value for call in trajectory.calls)),
        "branches": len(trajectory.tree.leaves()),
        "unique_tokens": trajectory.tree.unique_tokens,
        "sampled_tokens": trajectory.tree.sampled_tokens,
        "trained_tokens": sum(trained.values()),
    }
    return result, f"{head}\n{text}"


def write_html(runs_dir: Path, run_id: str | None, rollout: str | None, target: Path) -> tuple[dict[str, Any], str]:
    """Write the page of a rollout, or of the whole run; raises GyreError when the file cannot be written."""
    from gyre_core.viewer.page import rollout_page, run_page
    from gyre_core.viewer.stored import stored_rollout_model, stored_run_model, write_page
    from gyre_core.viewer.vocabulary import load_vocabulary

    folder = newest_run(runs_dir, run_id or None)
    config, store = open_run_store(folder)
    if rollout is None:
        shown = folder.run_id
        page = run_page(stored_run_model(store, folder.run_id, beside=target.parent))
    else:
        _, shown = _find(store, rollout)
        vocabulary = load_vocabulary(config.model.path)
        page = rollout_page(stored_rollout_model(store, shown, vocabulary, run_id=folder.run_id))
    try:
        write_page(target, page)
    except OSError as error:
        raise GyreError(f"cannot write {target}: {error.strerror or error}; give another --html FILE") from error
    result = {"run": folder.run_id, "rollout": None if rollout is None else shown, "html": str(target)}
    return {**result, "size_bytes": len(page)}, f"{target}: {shown}, {len(page) / 1e3:,.0f} kB"


def _find(store: Store, wanted: str) -> tuple[Any, str]:
    matches = []
    for kind in ("group", "heldout-group"):
        for commit in store.commits(kind):
            for rollout_id in commit.record["rewards_by_rollout"]:
                if rollout_id == wanted:
                    return commit, rollout_id
                if wanted in rollout_id:
                    matches.append((commit, rollout_id))
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise StoreError(f"{store.storage.url} holds no rollout like {wanted!r}; `gyre inspect RUN` lists them")
    shown = ", ".join(rollout_id for _, rollout_id in matches[:5])
    raise StoreError(f"{wanted!r} fits {len(matches)} rollouts ({shown} ...): give more of the id")


def _count_trained(tree: TrajectoryTree, branch: TrainingBranch, trained: Counter[int]) -> None:
    """Add a branch's targets to the nodes of its path."""
    start = 0
    for node_id in tree.path(locate_branch(tree, branch)):
        end = start + len(tree.nodes[node_id].token_ids)
        trained[node_id] += int(branch.target[start:end].sum())
        start = end


def _time_row(stats: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where the step's time went; None when its record does not say."""
    shares = phase_shares(stats)
    if shares is None:
        return None
    return {
        "step_s": round(float(stats["step_s"]), 3),
        "shares": {phase: round(share, 4) for phase, share in shares.items()},
        "gflops_per_s": round(flops_per_s(stats) / 1e9, 3),
        "tokens_computed": int(stats.get("num_tokens", 0)),
    }


def _print_times(console: Console, steps: Sequence[Mapping[str, Any]]) -> None:
    rows = [(step["step"], step["time"]) for step in steps if step["time"] is not None]
    if not rows:
        return
    table = Table("step", "seconds", *(_PHASE_NAMES.get(phase, phase) for phase in PHASES), "GFLOP/s")
    for step, row in rows:
        shares = [f"{100 * row['shares'][phase]:.1f}%" for phase in PHASES]
        table.add_row(str(step), f"{row['step_s']:.1f}", *shares, f"{row['gflops_per_s']:.1f}")
    console.print(table)


def _run_text(result: dict[str, Any]) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, width=max(100, Console().width))
    console.print(f"run {result['run']}", style="bold")
    for evaluation in result["evaluations"]:
        reward = "none" if evaluation["reward"] is None else f"{evaluation['reward']:.3f}"
        console.print(f"held-out {evaluation['tag']}: {reward} at version {evaluation['policy_version']}")
    table = Table("step", "reward", "groups", "dropped", "sampled", "trained", "grad norm", "outcomes")
    for step in result["steps"]:
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(step["outcomes"].items()))
        numbers = [step["step"], step["reward"], step["groups_trained"], len(step["groups_dropped"])]
        tokens = [step["tokens_sampled"], step["tokens_trained"], f"{step['grad_norm']:.3f}", outcomes]
        table.add_row(*(str(value) for value in numbers + tokens))
    console.print(table)
    _print_times(console, result["steps"])
    by_group: dict[str, list[str]] = {}
    for rollout in result["rollouts"]:
        shown = "–" if rollout["reward"] is None else f"{rollout['reward']:.2f}"
        by_group.setdefault(rollout["group"], []).append(shown)
    groups = Table("group (rollout ids: <group>-<member>)", "rewards by member")
    for group, rewards in by_group.items():
        groups.add_row(group, " ".join(rewards))
    console.print(groups)
    return buffer.getvalue().rstrip()
