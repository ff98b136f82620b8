"""`gyre bench tree-train`: what computing shared prefixes once saves a training step, beside what it could save.

Enters: a model's size and prefix-sharing ratios (tree tokens / branch tokens). Leaves: for each ratio the wall time and
tokens a second of a step over one seeded synthetic forest, packed and branch by branch, and their gradients' largest
relative difference. Both variants train the same branches with the same budget in one process, in turns whose order
alternates; a step is packing, forward and backward of its micro-steps, and the optimizer step (learning rate 0). With
one thread the speed-up is that of CPU seconds, which other programs of the machine disturb less than wall time, else
that of wall time.

The bound is 1/ratio: the linear layers' work is proportional to the tokens that go through them. Attention and the
projection to the vocabulary save less (a branch's own tokens attend to the whole prefix either way, and every target is
projected once either way), so `flops_bound` says what the counted operations allow (gyre_core/train/flops.py).
"""

import contextlib
import ctypes
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre_core.config.models import TrainConfig
from gyre_core.train.flops import model_cost
from gyre_core.train.packing import PackedMicroStep, pack_branches
from gyre_core.types import Role, TrainingBranch

if TYPE_CHECKING:
    from gyre_core.train.megatron.backend import MegatronTrainer

VARIANTS = ("packed", "per_branch")
_BRANCHES_PER_TREE = 8  # the smallest ratio is 1 / 8
_TARGET_SHARE = 0.4  # of the tokens that a branch adds
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTrainSize:
    """How much is measured. Example: QUICK"""

    layers: int
    hidden: int
    heads: int
    vocab: int
    branch_tokens: int  # length of each branch
    trees: int  # of eight branches each, in a step
    budget_tokens: int
    rounds: int


FULL = TreeTrainSize(
    layers=4, hidden=256, heads=4, vocab=1024, branch_tokens=1024, trees=1, budget_tokens=8192, rounds=3
)
QUICK = TreeTrainSize(
    layers=2, hidden=128, heads=2, vocab=256, branch_tokens=512, trees=1, budget_tokens=4096, rounds=3
)
RATIOS = (0.9, 0.5, 0.2)


def bench_tree_train(
    size: TreeTrainSize,
    *,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    threads: int = 1,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure each ratio; raises ValueError for a ratio that eight branches cannot have.

    Keys: per_ratio (by ratio, see `_measure`), fraction_of_bound (the worst), fraction_of_flops_bound (the worst),
    max_rel_grad_err, peak_memory_mb by variant (above what the process held before), and the size.
    """
    from gyre_core.train.megatron.backend import MegatronTrainer

    started = time.monotonic()
    forests = {ratio: synthetic_forest(ratio, size, seed=seed) for ratio in ratios}
    config = TrainConfig(
        learning_rate=0.0, clip_low=0.9, clip_high=9.0, micro_step_tokens=size.budget_tokens, threads=threads
    )
    per_ratio: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gyre-tree-train-") as folder:
        write_random_qwen3(Path(folder), size, seed=seed)
        trainer = MegatronTrainer(Path(folder), config, seed)
        try:
            for ratio, branches in forests.items():
                per_ratio[f"{ratio:g}"] = _measure(trainer, branches, size)
                report(f"ratio {ratio:g}: {per_ratio[f'{ratio:g}']['fraction_of_bound']:.3f} of the bound")
        finally:
            trainer.close()
    rows = list(per_ratio.values())
    return {
        "fraction_of_bound": min(row["fraction_of_bound"] for row in rows),
        "fraction_of_flops_bound": min(row["fraction_of_flops_bound"] for row in rows),
        "max_rel_grad_err": max(row["max_rel_grad_err"] for row in rows),
        "peak_memory_mb": {name: max(row["peak_memory_mb"][name] for row in rows) for name in VARIANTS},
        "per_ratio": per_ratio,
        "model": {"layers": size.layers, "hidden": size.hidden, "heads": size.heads, "vocab": size.vocab},
        "branches": _BRANCHES_PER_TREE * size.trees,
        "branch_tokens": size.branch_tokens,
        "budget_tokens": size.budget_tokens,
        "rounds": size.rounds,
        "threads": threads,
        "wall_s": round(time.monotonic() - started, 1),
    }


def tree_train_lines(result: dict[str, Any]) -> list[str]:
    """The result for people, a line each."""
    model = result["model"]
    lines = [
        f"model      {model['layers']} layers, hidden {model['hidden']}, {model['heads']} heads, vocabulary "
        f"{model['vocab']}; {result['threads']} thread(s)",
        f"step       {result['branches']} branches of {result['branch_tokens']:,} tokens, micro-steps of at most "
        f"{result['budget_tokens']:,}; median of {result['rounds']} alternating rounds",
        "",
        "               tokens          wall s branch tokens/s                of the  FLOPs of the gradient",
        "ratio  packed  branch  packed  branch  packed  branch speed-up bound  bound  bound  bound     error",
    ]
    for ratio, row in result["per_ratio"].items():
        tokens, wall, rate = (row[name] for name in ("tokens", "wall_s", "branch_tokens_per_s"))
        lines.append(
            f"{ratio:5s} {tokens['packed']:7d} {tokens['per_branch']:7d} {wall['packed']:7.2f} "
            f"{wall['per_branch']:7.2f} {rate['packed']:7.0f} {rate['per_branch']:7.0f} {row['speedup']:8.2f} "
            f"{row['bound']:5.2f} {row['fraction_of_bound']:6.3f} {row['flops_bound']:6.2f} "
            f"{row['fraction_of_flops_bound']:6.3f} {row['max_rel_grad_err']:9.1e}"
        )
    memory = result["peak_memory_mb"]
    lines += ["", f"peak memory {memory['packed']:.0f} MB packed, {memory['per_branch']:.0f} MB branch by branch"]
    return lines


def synthetic_forest(ratio: float, size: TreeTrainSize, *, seed: int) -> list[TrainingBranch]:
    """Trees of eight branches of equal length whose unique tokens are `ratio` of the branches' tokens, to a token.

    Each branch but a tree's first leaves an earlier one at a random depth. Targets lie in what a branch adds, so each
    token is a target once; the sampler's log-probs are those of a uniform choice, which a random model is close to.
    """
    length, count = size.branch_tokens, _BRANCHES_PER_TREE
    fresh_total = round(ratio * count * length) - length
    if not count - 1 <= fresh_total <= (count - 1) * length:
        raise ValueError(f"ratio {ratio:g}: {count} branches have ratios above {1 / count:g} and up to 1")
    rng = np.random.default_rng((seed, round(ratio * 1000)))
    made: list[TrainingBranch] = []
    everything: list[np.ndarray] = []
    for tree in range(size.trees):
        paths: list[np.ndarray] = []
        kept = [0] + [length - fresh for fresh in _shares(fresh_total, count - 1, length, rng)]
        for shared in kept:
            above = paths[int(rng.integers(0, len(paths)))][:shared] if paths else np.empty(0, np.int64)
            own = rng.integers(0, size.vocab, length - shared)
            taken = {int(path[shared]) for path in everything if np.array_equal(path[:shared], above)}
            own[0] = next(token for token in range(size.vocab) if token not in taken)
            paths.append(np.concatenate([above, own]))
            everything.append(paths[-1])
        for index, (path, shared) in enumerate(zip(paths, kept, strict=True)):
            target = np.zeros(length, bool)
            first = max(1, shared)
            target[first:] = rng.random(length - first) < _TARGET_SHARE
            target[-1] = True
            made.append(
                TrainingBranch(
                    rollout_id=f"t{tree:03d}-r{index:02d}",
                    group_id=f"t{tree:03d}",
                    branch=0,
                    role=Role.MAIN,
                    token_ids=path.astype(np.int32),
                    target=target,
                    sampler_logprobs=np.where(target, -np.log(size.vocab), 0.0).astype(np.float32),
                    weights=np.where(target, 1.0 / target.sum(), 0.0).astype(np.float32),
                    advantage=float(rng.normal()),
                    temperature=1.0,
                    min_version=0,
                )
            )
    return made


def write_random_qwen3(folder: Path, size: TreeTrainSize, *, seed: int) -> None:
    """A Qwen3 checkpoint with small random weights: what is measured does not depend on their values."""
    import torch
    from safetensors.torch import save_file

    width, hidden, ffn, kv_heads = 64, size.hidden, 3 * size.hidden, max(1, size.heads // 2)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02

    tensors = {
        "model.embed_tokens.weight": matrix(size.vocab, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(size.vocab, hidden),
    }
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": torch.ones(hidden),
            f"{at}post_attention_layernorm.weight": torch.ones(hidden),
            f"{at}self_attn.q_norm.weight": torch.ones(width),
            f"{at}self_attn.k_norm.weight": torch.ones(width),
            f"{at}self_attn.q_proj.weight": matrix(size.heads * width, hidden),
            f"{at}self_attn.k_proj.weight": matrix(kv_heads * width, hidden),
            f"{at}self_attn.v_proj.weight": matrix(kv_heads * width, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, size.heads * width),
            f"{at}mlp.gate_proj.weight": matrix(ffn, hidden),
            f"{at}mlp.up_proj.weight": matrix(ffn, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, ffn),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": size.vocab,
        "hidden_size": hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "intermediate_size": ffn,
        "tie_word_embeddings": False,
        "max_position_embeddings": size.branch_tokens,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _shares(total: int, count: int, length: int, rng: np.random.Generator) -> list[int]:
    """`count` random numbers from 1 to `length` that add up to `total`."""
    raw = rng.uniform(0.5, 1.5, count)
    shares = np.clip(np.round(raw / raw.sum() * total).astype(int), 1, length)
    while (missing := total - int(shares.sum())) != 0:
        movable = np.flatnonzero(shares < length if missing > 0 else shares > 1)
        shares[rng.choice(movable)] += 1 if missing > 0 else -1
    return shares.tolist()


def _measure(trainer: "MegatronTrainer", branches: list[TrainingBranch], size: TreeTrainSize) -> dict[str, Any]:
    """One ratio: a warm-up of each variant, whose gradients are compared, then rounds in alternating order."""
    gradients, memory, packings = {}, {}, {}
    for name in VARIANTS:
        before = _reset_peak_memory()
        packings[name] = _micro_steps(name, branches, size)
        for packed in packings[name]:
            trainer.micro_step(packed)
        memory[name] = round(_peak_memory() - before, 1)
        gradients[name] = trainer.gradients()
        trainer.reset_gradients()
    errors = {
        key: float((gradients["packed"][key] - other).norm() / other.norm().clamp(min=1e-30))
        for key, other in gradients["per_branch"].items()
    }
    gradients.clear()
    walls: dict[str, list[float]] = {name: [] for name in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for index in range(size.rounds):
        for name in VARIANTS if index % 2 == 0 else VARIANTS[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            for packed in _micro_steps(name, branches, size):
                trainer.micro_step(packed)
            trainer.optimizer_step(len(branches))
            walls[name].append(time.perf_counter() - wall)
            seconds[name].append(time.process_time() - cpu)
    cost = model_cost(trainer.hf_model)
    tokens = {name: sum(packed.num_tokens for packed in packings[name]) for name in VARIANTS}
    branch_tokens = sum(len(branch.token_ids) for branch in branches)
    flops = {name: sum(cost.flops(packed).total for packed in packings[name]) for name in VARIANTS}
    parts = [cost.flops(packed) for packed in packings["packed"]]
    wall_s = {name: statistics.median(walls[name]) for name in VARIANTS}
    wall_speedup = _median_ratio(walls["per_branch"], walls["packed"])
    cpu_speedup = _median_ratio(seconds["per_branch"], seconds["packed"])
    speedup = cpu_speedup if trainer.config.threads == 1 else wall_speedup
    bound, flops_bound = branch_tokens / tokens["packed"], flops["per_branch"] / flops["packed"]
    return {
        "ratio": round(tokens["packed"] / branch_tokens, 4),
        "tokens": tokens,
        "micro_steps": {name: len(packings[name]) for name in VARIANTS},
        "wall_s": {name: round(value, 4) for name, value in wall_s.items()},
        "cpu_s": {name: round(statistics.median(seconds[name]), 4) for name in VARIANTS},
        "branch_tokens_per_s": {name: round(branch_tokens / wall_s[name], 1) for name in VARIANTS},
        "computed_tokens_per_s": {name: round(tokens[name] / wall_s[name], 1) for name in VARIANTS},
        "model_gflops_per_s": {name: round(flops[name] / wall_s[name] / 1e9, 2) for name in VARIANTS},
        "flops_share": {
            part: round(sum(getattr(item, part) for item in parts) / flops["packed"], 4)
            for part in ("linear", "attention", "head")
        },
        "speedup": round(speedup, 4),
        "wall_speedup": round(wall_speedup, 4),
        "bound": round(bound, 4),
        "fraction_of_bound": round(speedup / bound, 4),
        "flops_bound": round(flops_bound, 4),
        "fraction_of_flops_bound": round(speedup / flops_bound, 4),
        "max_rel_grad_err": max(errors.values()),
        "peak_memory_mb": memory,
    }


def _micro_steps(name: str, branches: list[TrainingBranch], size: TreeTrainSize) -> list[PackedMicroStep]:
    return pack_branches(branches, size.budget_tokens, share_prefixes=name == "packed")


def _median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median over rounds: what slows the machine for seconds slows both halves of a round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def _reset_peak_memory() -> float:
    """Give back what the allocator keeps and start a new peak, where Linux and glibc can; MB held now."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status_mb("VmRSS")


def _peak_memory() -> float:
    return _status_mb("VmHWM")


def _status_mb(key: str) -> float:
    for line in _STATUS.read_text().splitlines() if _STATUS.exists() else ():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    return 0.0
