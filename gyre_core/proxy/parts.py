"""A call's output in parts: engines that each sampled a piece of it, and how the pieces are one output.

Enters: what engines returned, in order. Leaves: what to ask the next engine for, and one `Generation` in the end.
Invariants: no token is lost or twice; spans name the version that sampled each token; the output ends where one engine
alone would have ended it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gyre_core.types import FinishReason, Generation, SamplingParams, TokenIds, VersionSpan

Decode = Callable[[Sequence[int]], str]  # text of ids


@dataclass(slots=True, kw_only=True, eq=False)
class PartialCall:
    """A call over all engines that it meets.

    Example: PartialCall(session_id="s", call_id="r1-c0", prompt_ids=ids, params=params, seed=7)
    """

    session_id: str
    call_id: str
    prompt_ids: TokenIds
    params: SamplingParams
    seed: int | None
    decode: Decode | None = None  # None: stop strings that begin in one part and end in the next are not found
    parts: list[Generation] = field(default_factory=list)  # what engines sampled of it so far
    num_done: int = 0  # tokens of all parts
    fruitless: int = 0  # tries in a row without a token
    num_refused: int = 0  # answers since then that no retry mends
    num_tries: int = 0
    ticket: int | None = None  # its place in the router
    left_url: str | None = None  # engine that saw it last, None before the first
    settled_s: float = 0.0  # when that engine has written its keys and values where others find them

    def next_rid(self) -> str:
        """A name for the next try. Engines abort by prefix: none is the beginning of another."""
        self.num_tries += 1
        return f"{self.session_id}/{self.call_id}/{self.num_tries}/"

    def ids(self) -> TokenIds:
        """The prompt and what was sampled."""
        if not self.parts:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, *(part.output_ids for part in self.parts)])

    def rest(self) -> SamplingParams:
        """How to sample what is missing."""
        return replace(
            self.params,
            max_new_tokens=self.params.max_new_tokens - self.num_done,
            seed=call_seed(self.seed, self.call_id, len(self.parts)),
        )

    def add(self, part: Generation) -> bool:
        """Take what an engine sampled; True when nothing is missing. A call without any token is never complete."""
        if len(part.output_ids):
            part = self._cut_at_stop(part)
            self.parts.append(part)
            self.num_done += len(part.output_ids)
            self.fruitless = self.num_refused = 0
        ended = part.finish_reason is not FinishReason.ABORT or self.num_done >= self.params.max_new_tokens
        return ended and bool(self.parts)

    def _cut_at_stop(self, part: Generation) -> Generation:
        """A new part up to the end of a stop string that began in the parts before: its engine cannot see that."""
        if not self.params.stop or not self.parts or self.decode is None:
            return part
        reach = 4 * max(len(stop) for stop in self.params.stop)  # a character has up to four tokens
        before = np.concatenate([known.output_ids for known in self.parts])[-reach:].tolist()
        new = part.output_ids[:reach].tolist()
        if any(stop in self.decode(before + new) for stop in self.params.stop):
            for size in range(1, len(new) + 1):
                text = self.decode(before + new[:size])
                if any(stop in text for stop in self.params.stop):
                    return cut(part, size, FinishReason.STOP)
        return part


def cut(part: Generation, num_tokens: int, reason: FinishReason) -> Generation:
    """The first tokens of an output."""
    spans = tuple(replace(span, end=min(span.end, num_tokens)) for span in part.spans if span.start < num_tokens)
    return replace(
        part,
        output_ids=part.output_ids[:num_tokens],
        logprobs=part.logprobs[:num_tokens],
        finish_reason=reason,
        spans=spans,
    )


def joined(parts: Sequence[Generation], *, prompt_tokens: int) -> Generation:
    """Successive parts of one output as one generation; neighbouring spans of one version are joined."""
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.spans:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version and spans[-1].end == start:
                spans[-1] = replace(spans[-1], end=end)
            else:
                spans.append(VersionSpan(version=span.version, start=start, end=end))
        offset += len(part.output_ids)
    last = parts[-1].finish_reason
    return Generation(
        output_ids=np.concatenate([part.output_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        finish_reason=FinishReason.LENGTH if last is FinishReason.ABORT else last,
        spans=tuple(spans),
        prompt_tokens=prompt_tokens,
        cached_tokens=parts[0].cached_tokens,
    )


def call_seed(seed: int | None, call_id: str, part: int) -> int | None:
    """A sampling seed that depends on the session's seed, the call and the part only: [0, 2**31)."""
    if seed is None:
        return None
    text = f"{seed}/{call_id.rpartition('-')[2]}/{part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
