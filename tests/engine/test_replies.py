"""Reading recorded replies of a real server, and refusing what such a reply must never be."""

import json
import math
from typing import Any

import numpy as np
import pytest

from gyre_core.engine.replies import error_message, parse_generation, parse_spans
from gyre_core.errors import EngineError
from gyre_core.types import FinishReason, Generation, VersionSpan
from tests.support.fixtures import recorded, recorded_body


def with_version(body: dict[str, Any], *names: tuple[str, str]) -> dict[str, Any]:
    """The recorded versions were words; Gyre's are decimal."""
    for span in body["meta_info"]["weight_versions"]:
        span["version"] = dict(names).get(span["version"], span["version"])
    return body


def parse(body: dict[str, Any], *, num_prompt: int, vocab_size: int = 1024) -> Generation:
    return parse_generation(body, num_prompt=num_prompt, vocab_size=vocab_size, rid="r")


def length_body() -> dict[str, Any]:
    return with_version(recorded_body("generate_length"), ("default", "3"))


def test_generation_length_keeps_ids_logprobs_and_version() -> None:
    result = parse(length_body(), num_prompt=8)
    assert result.output_ids.tolist() == [167, 672, 565, 292, 966, 157]
    assert result.output_ids.dtype == np.int32
    assert result.logprobs.dtype == np.float32
    assert result.logprobs[0] == np.float32(-7.126594543457031)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.spans == (VersionSpan(version=3, start=0, end=6),)
    assert (result.prompt_tokens, result.cached_tokens) == (8, 7)


def test_generation_aborted_is_a_result_with_partial_output() -> None:
    result = parse(with_version(recorded_body("generate_aborted"), ("default", "0")), num_prompt=64)
    assert result.finish_reason is FinishReason.ABORT
    assert len(result.output_ids) == len(result.logprobs) == 6


def test_generation_aborted_while_it_waited_is_a_result_without_output() -> None:
    result = parse(recorded_body("generate_aborted_waiting"), num_prompt=3)
    assert result.finish_reason is FinishReason.ABORT
    assert len(result.output_ids) == len(result.spans) == 0
    assert (result.prompt_tokens, result.cached_tokens) == (3, 0)


def test_generation_across_an_update_has_a_span_a_version() -> None:
    body = with_version(recorded_body("generate_two_versions"), ("default", "4"), ("v-in_place", "5"))
    assert parse(body, num_prompt=64).spans == (
        VersionSpan(version=4, start=0, end=4),
        VersionSpan(version=5, start=4, end=8),
    )


def test_generation_without_output_has_no_spans() -> None:
    body = length_body()
    body["output_ids"] = []
    body["meta_info"].update(output_token_logprobs=[], weight_versions=None, finish_reason={"type": "abort"})
    result = parse(body, num_prompt=8)
    assert result.output_ids.size == 0
    assert result.spans == ()


def broken(**changes: Any) -> dict[str, Any]:
    body = length_body()
    for name, value in changes.items():
        if name == "output_ids":
            body[name] = value
        else:
            body["meta_info"][name] = value
    return body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "unknown form"),
        (broken(finish_reason=None), "unknown form"),
        (broken(finish_reason={"type": "magic"}), "unknown form"),
        (broken(output_ids=[167, 672]), "2 output ids but 6 log-probs"),
        (broken(output_ids=[1, 2, 3, 4, 5, 6]), "other ids"),
        (broken(output_token_logprobs=[]), "6 output ids but 0 log-probs"),
        (broken(prompt_tokens=9), "9 prompt tokens, 8 were sent"),
        (broken(weight_versions=None), "which weights"),
        (broken(weight_versions=[{"version": "default", "start": 0, "end": 6}]), "not one that Gyre gave"),
        (broken(weight_versions=[{"version": "1", "start": 0, "end": 5}]), "cover 5 of 6"),
        (broken(weight_versions=[{"version": "1", "start": 1, "end": 6}]), "gap at output token 0"),
    ],
)
def test_generation_malformed_is_an_engine_error(body: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words) as caught:
        parse(body, num_prompt=8)
    assert not caught.value.retryable


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_generation_with_a_logprob_that_is_not_finite_is_refused(value: float | None) -> None:
    body = length_body()
    body["meta_info"]["output_token_logprobs"][2][0] = value
    with pytest.raises(EngineError, match="not finite"):
        parse(body, num_prompt=8)


def test_generation_with_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(EngineError, match="outside the vocabulary of 966"):
        parse(length_body(), num_prompt=8, vocab_size=966)


def test_generation_dropped_by_the_engine_is_retryable() -> None:
    reason = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    with pytest.raises(EngineError, match="queue is full") as caught:
        parse(broken(finish_reason=reason), num_prompt=8)
    assert caught.value.retryable


def test_spans_of_one_version_are_joined_and_empty_ones_left_out() -> None:
    entries = [
        {"version": "1", "start": 0, "end": 2},
        {"version": "1", "start": 2, "end": 3},
        {"version": "2", "start": 3, "end": 3},
        {"version": "3", "start": 3, "end": 5},
    ]
    assert parse_spans(entries, num_output=5, rid="r") == (
        VersionSpan(version=1, start=0, end=3),
        VersionSpan(version=3, start=3, end=5),
    )


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("generate_too_long", "The input (6400 tokens) is longer than"),
        ("generate_bad_parameter", "unknown field `bogus`"),
        ("weights_missing", "Failed to get weights iterator"),
    ],
)
def test_error_message_finds_the_words_in_recorded_errors(name: str, start: str) -> None:
    assert error_message(json.dumps(recorded(name)["body"])).startswith(start)


def test_error_message_of_plain_text_is_the_text() -> None:
    assert error_message("Flush cache failed.\n") == "Flush cache failed."
