"""Batches of rollouts drawn from a workload.

Enters: a workload, a seed, a step. Leaves: groups of rollouts as plain lists. The same seed and step give the same
rollouts whatever was drawn before, so every policy runs the same work.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gyre_core.sim.model import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDraw:
    """One rollout's work: stretches of sampling and tools, in turns.

    Example: RolloutDraw(tokens=[900.0], tools_s=[5.0], contexts=[2000.0])
    """

    tokens: list[float]  # sampled in each segment
    tools_s: list[float]  # after each segment
    contexts: list[float]  # mean context in each segment
    failed: bool = False  # ends early for reasons outside; not trained


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDraw:
    """The rollouts of one problem.

    Example: GroupDraw(rollouts=[rollout], train_tokens=40_000.0, predicted=1.2)
    """

    rollouts: list[RolloutDraw]
    train_tokens: float  # what its training costs; 0 for a group without signal
    predicted: float  # mean length of its rollouts as foreseen, in means of the workload


Source = Callable[[int], list[GroupDraw]]  # step -> its groups


def source_of(workload: Workload, *, seed: int, share_prefixes: bool = True) -> Source:
    """Batches of `workload` by step."""

    def batch(step: int) -> list[GroupDraw]:
        return draw_batch(workload, seed=seed, step=step, share_prefixes=share_prefixes)

    return batch


def draw_batch(workload: Workload, *, seed: int, step: int, share_prefixes: bool = True) -> list[GroupDraw]:
    """One step's groups."""
    w = workload
    rng = np.random.default_rng([seed, step])
    groups, size, segments = w.groups, w.group_size, w.segments
    group_z = rng.standard_normal((groups, 1))
    z = w.sigma_group * group_z + w.sigma_rollout * rng.standard_normal((groups, size))
    length = np.exp(z - (w.sigma_group**2 + w.sigma_rollout**2) / 2)
    tokens = np.minimum(w.sampled_tokens * length, w.max_tokens)
    tool = w.tool_s * (tokens / w.sampled_tokens) * _lognormal(rng, w.tool_sigma, (groups, size))
    shares = rng.exponential(1.0, (groups, size, segments)) + 0.25
    shares /= shares.sum(axis=2, keepdims=True)
    tool_shares = rng.pareto(1.6, (groups, size, segments)) + 0.05
    tool_shares /= tool_shares.sum(axis=2, keepdims=True)
    grown = np.cumsum(shares, axis=2) - shares / 2
    contexts = np.minimum(w.context_tokens, w.prompt_tokens + tokens[..., None] * w.unique_ratio * grown)
    failed = rng.random((groups, size)) < w.failing_share
    cut = rng.integers(1, segments + 1, (groups, size))
    signal = rng.random(groups) < w.signal_share
    predicted = np.exp(w.sigma_group * group_z[:, 0]) * _lognormal(rng, w.prediction_sigma, (groups,))
    cost = tokens * w.unique_ratio + w.prompt_tokens
    if not share_prefixes:
        cost = cost * w.branch_ratio
    cost = np.where(failed, 0.0, cost).sum(axis=1) * signal
    piece_tokens = (tokens[..., None] * shares).tolist()
    piece_tools = (tool[..., None] * tool_shares).tolist()
    piece_contexts = contexts.tolist()
    ends = np.where(failed, cut, segments).tolist()
    return [
        GroupDraw(
            rollouts=[
                RolloutDraw(
                    tokens=piece_tokens[g][r][: ends[g][r]],
                    tools_s=piece_tools[g][r][: ends[g][r]],
                    contexts=piece_contexts[g][r][: ends[g][r]],
                    failed=bool(failed[g, r]),
                )
                for r in range(size)
            ],
            train_tokens=float(cost[g]),
            predicted=float(predicted[g]),
        )
        for g in range(groups)
    ]


def _lognormal(rng: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
    """Mean 1."""
    return np.exp(sigma * rng.standard_normal(shape) - sigma**2 / 2)
