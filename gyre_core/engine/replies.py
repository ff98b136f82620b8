"""Reading what an SGLang server answered. Pure: JSON objects in, checked records out.

Contract fixtures: tests/engine/fixtures (replies of a real SGLang 0.5.23).
"""

import json
import math

import numpy as np

from gyre_core.errors import EngineError
from gyre_core.types import FinishReason, Generation, Json, VersionSpan

MESSAGE_LIMIT = 500  # characters of an engine's message that are worth quoting


def parse_generation(data: Json, *, num_prompt: int, vocab_size: int, rid: str) -> Generation:
    """A /generate reply as a Generation.

    Checks that ids and log-probs have one length and agree, that log-probs are finite, that ids are in the vocabulary
    and that version spans cover the output; anything else is an EngineError that a retry would not mend. A call that
    the engine gave up on by itself (full queue, shutdown) is a retryable one.
    """
    try:
        meta = data["meta_info"]
        reason = meta["finish_reason"]
        finish = FinishReason(reason["type"])
        output_ids = np.asarray(data["output_ids"], dtype=np.int64).reshape(-1)
        entries = meta.get("output_token_logprobs") or []
        logprobs = np.array([math.nan if entry[0] is None else entry[0] for entry in entries], dtype=np.float32)
        logprob_ids = np.array([entry[1] for entry in entries], dtype=np.int64)
        if finish is FinishReason.ABORT and not output_ids.size and "prompt_tokens" not in meta:
            prompt_tokens = num_prompt  # aborted while it waited: the engine had not begun and counts nothing
        else:
            prompt_tokens = int(meta["prompt_tokens"])
        cached_tokens = int(meta.get("cached_tokens") or 0)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineError(f"call {rid}: the engine's reply has an unknown form ({error!r})") from error
    if finish is FinishReason.ABORT and reason.get("status_code"):
        # Not our abort: the engine refused or dropped the call and says with which HTTP status it would have answered.
        status = int(reason["status_code"])
        raise EngineError(
            f"call {rid}: the engine dropped it with status {status}: {str(reason.get('message'))[:MESSAGE_LIMIT]}",
            retryable=status >= 429,
        )
    if len(output_ids) != len(logprobs):
        raise EngineError(f"call {rid}: {len(output_ids)} output ids but {len(logprobs)} log-probs")
    if not np.array_equal(output_ids, logprob_ids):
        raise EngineError(f"call {rid}: the log-probs belong to other ids than the output's")
    if output_ids.size and (output_ids.min() < 0 or output_ids.max() >= vocab_size):
        raise EngineError(f"call {rid}: an output id is outside the vocabulary of {vocab_size} ids")
    if not np.isfinite(logprobs).all():
        raise EngineError(f"call {rid}: a sampler log-prob is not finite; the engine's weights are broken")
    if prompt_tokens != num_prompt:
        raise EngineError(f"call {rid}: the engine counted {prompt_tokens} prompt tokens, {num_prompt} were sent")
    return Generation(
        output_ids=output_ids.astype(np.int32),
        logprobs=np.minimum(logprobs, np.float32(0.0)),  # log_softmax may round to a hair above 0
        finish_reason=finish,
        spans=parse_spans(meta.get("weight_versions"), num_output=len(output_ids), rid=rid),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def parse_spans(entries: object, *, num_output: int, rid: str) -> tuple[VersionSpan, ...]:
    """`meta_info.weight_versions` as spans that cover [0, num_output); neighbours of one version are joined.

    Versions are strings in SGLang; Gyre gives only decimal policy versions, so any other string is an EngineError.
    """
    if not num_output:
        return ()
    if not isinstance(entries, list) or not entries:
        raise EngineError(f"call {rid}: the engine does not say which weights sampled the output")
    spans: list[VersionSpan] = []
    position = 0
    for entry in entries:
        try:
            version, start, end = int(entry["version"]), int(entry["start"]), int(entry["end"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"call {rid}: weight version {entry!r} is not one that Gyre gave") from error
        if start == end:
            continue
        if start != position or end < start:
            raise EngineError(f"call {rid}: version spans leave a gap at output token {position}: {entries!r}")
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=end)
        else:
            spans.append(VersionSpan(version=version, start=start, end=end))
        position = end
    if position != num_output:
        raise EngineError(f"call {rid}: version spans cover {position} of {num_output} output tokens")
    return tuple(spans)


def error_message(text: str) -> str:
    """The human part of an error body: {"error": {"message": ...}}, {"error": ...}, {"message": ...} or plain text."""
    try:
        data = json.loads(text)
    except ValueError:
        return text.strip()[:MESSAGE_LIMIT]
    while isinstance(data, dict):
        inner = data.get("error", data.get("message", data.get("detail")))
        if inner is None:
            break
        data = inner
    return (data if isinstance(data, str) else json.dumps(data))[:MESSAGE_LIMIT]
