"""The warm start: a tiny Qwen3 imitates the scripted transcripts (transcripts.py) until it can do the jobs, habits
included.

Enters: the tokenizer and seeds. Leaves: a trained model. Only sampled tokens carry loss. The system turn with the
tools is the same in all conversations of a kind, so it is computed once for a whole batch (with gradient) and, in the
early stages, left out: rotary positions are relative, so what is learned without it stays.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from renderers.qwen3 import Qwen3Renderer
from transcripts import MAIN_TOOLS, SUB_TOOLS, demonstrate, draw_jobs
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

logger = logging.getLogger(__name__)

# Muon learns to copy in a third of AdamW's steps here (loss after 350 steps of the first stage: 0.14 against 0.34).
MUON_LR = 2e-2  # weight matrices
ADAM_LR = 3e-3  # embeddings and norms
WARMUP_STEPS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of the curriculum.

    Example: Stage(name="single", steps=400, max_jobs=1, batch_tokens=2048, with_system=False, rate=1.0, rate_end=1.0)
    """

    name: str
    steps: int
    max_jobs: int
    batch_tokens: int  # of one step, padding included, the shared system turn not
    with_system: bool
    rate: float  # factor on the learning rates below at the first step, linear to rate_end
    rate_end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A rendered conversation, the system turn cut off.

    Example: Sample(ids=[...], sampled=[...], is_main=True)
    """

    ids: list[int]
    sampled: list[bool]
    is_main: bool


def tiny_config(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Qwen3Config:
    """About a million parameters in Qwen3's architecture."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        dtype="float32",
    )


def samples(renderer: Qwen3Renderer, rng: Random, max_jobs: int) -> Iterator[Sample]:
    """Endless rendered conversations."""
    system_length: dict[int, int] = {}
    while True:
        jobs = draw_jobs(rng, max_jobs=max_jobs)
        for conversation in demonstrate(jobs, rng):
            rendered = renderer.render(conversation.messages, tools=conversation.tools)
            assistant = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
            wanted = set(assistant[len(assistant) - conversation.num_targets :])
            cut = system_length.setdefault(len(conversation.tools), rendered.message_indices.index(1))
            mask = [
                sampled and index in wanted
                for sampled, index in zip(rendered.sampled_mask, rendered.message_indices, strict=True)
            ]
            yield Sample(ids=rendered.token_ids[cut:], sampled=mask[cut:], is_main=len(conversation.tools) == 2)


def batches(source: Iterator[Sample], batch_tokens: int, rng: Random) -> Iterator[list[Sample]]:
    """Batches of similar length and the same system turn; at most batch_tokens with padding (one sample may exceed)."""
    while True:
        pool = sorted((next(source) for _ in range(256)), key=lambda sample: (sample.is_main, len(sample.ids)))
        ready: list[list[Sample]] = [[]]
        for sample in pool:
            batch = ready[-1]
            full = len(sample.ids) * (len(batch) + 1) > batch_tokens
            if batch and (full or batch[0].is_main != sample.is_main):
                ready.append([])
            ready[-1].append(sample)
        rng.shuffle(ready)
        yield from ready


def prefix_cache(model: Qwen3ForCausalLM, prefix: torch.Tensor, batch_size: int) -> DynamicCache:
    """Keys and values of the system turn [1, P], computed once and shared by the rows of a batch (with gradient)."""
    cache = model.model(input_ids=prefix, use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys = layer.keys.expand(batch_size, -1, -1, -1)
        layer.values = layer.values.expand(batch_size, -1, -1, -1)
    return cache


def batch_loss(model: Qwen3ForCausalLM, batch: list[Sample], prefix: torch.Tensor | None) -> torch.Tensor:
    """Mean cross-entropy (nats) over the batch's sampled tokens."""
    longest = max(len(sample.ids) for sample in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    target = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, sample in enumerate(batch):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        target[row, : len(sample.ids)] = torch.tensor(sample.sampled)
    # Padding is on the right and carries no loss, so the causal mask alone is enough.
    cache = prefix_cache(model, prefix, len(batch)) if prefix is not None else None
    hidden = model.model(input_ids=ids, past_key_values=cache, use_cache=cache is not None).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][target[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][target[:, 1:]])


def train(model: Qwen3ForCausalLM, renderer: Qwen3Renderer, stages: tuple[Stage, ...], seed: int) -> None:
    """Run the curriculum in place."""
    rng = Random(seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = (
        (torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01, ns_steps=4), MUON_LR),
        (torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.01), ADAM_LR),
    )
    prefixes = {is_main: torch.tensor([system_turn(renderer, is_main)]) for is_main in (True, False)}
    started, done, mean = time.monotonic(), 0, 0.0
    for stage in stages:
        source = batches(samples(renderer, rng, stage.max_jobs), stage.batch_tokens, rng)
        for step in range(stage.steps):
            batch = next(source)
            rate = stage.rate + (stage.rate_end - stage.rate) * step / stage.steps
            rate *= min(1.0, (done + 1) / WARMUP_STEPS)
            loss = batch_loss(model, batch, prefixes[batch[0].is_main] if stage.with_system else None)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, lr in optimizers:
                optimizer.param_groups[0]["lr"] = lr * rate
                optimizer.step()
            done += 1
            mean = loss.item() if done == 1 else 0.98 * mean + 0.02 * loss.item()
            if done % 50 == 0:
                logger.info("%s step %d loss %.4f (%.0f s)", stage.name, done, mean, time.monotonic() - started)


def system_turn(renderer: Qwen3Renderer, is_main: bool) -> list[int]:
    """Ids of the system turn of the main agent or a sub-agent."""
    conversation = next(
        found
        for found in demonstrate(draw_jobs(Random(0), max_jobs=1), Random(0), sub_agent=not is_main)
        if (len(found.tools) == len(MAIN_TOOLS)) == is_main
    )
    rendered = renderer.render(conversation.messages, tools=MAIN_TOOLS if is_main else SUB_TOOLS)
    return rendered.token_ids[: rendered.message_indices.index(1)]
