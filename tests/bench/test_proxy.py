"""`gyre bench proxy`: the table and the headline numbers, with real processes on tiny sizes; no claim about times."""

import json
from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from gyre_core.bench import proxy as module
from gyre_core.bench.proxy import Cell, bench_proxy, headline, proxy_lines, raise_unless_continued
from gyre_core.bench.proxy_client import read_answer
from gyre_core.bench.proxy_engine import Replies
from gyre_core.bench.proxy_history import Corpus
from gyre_core.cli.main import app
from gyre_core.engine.replies import parse_generation
from gyre_core.errors import GyreError

TINY = (
    Cell(sessions=1, history=600, rounds=3, streams=(False, True)),
    Cell(sessions=3, history=600, rounds=1),
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


def row(proxy: str, history: int, overhead_ms: float, *, parse_ms: float = 0.0) -> dict[str, Any]:
    return {
        "proxy": proxy,
        "sessions": 1,
        "history_tokens": history,
        "stream": False,
        "overhead_p50_ms": overhead_ms,
        "body_parse_ms": parse_ms,
    }


def test_history_has_about_as_many_tokens_as_asked_for(corpus: Corpus) -> None:
    history = corpus.history(3_000)

    body = orjson.loads(history.body(b"", stream=True))
    text = "".join(str(message["content"]) for message in body["messages"])
    assert 2_000 < corpus.count_tokens(text) < 3_600
    assert [message["role"] for message in body["messages"]][:4] == ["system", "user", "assistant", "tool"]
    assert body["stream"] is True and body["tools"]


def test_history_grows_by_the_reply_and_a_result(corpus: Corpus) -> None:
    turn = corpus.turn(corpus.reply(), "call_x", 0)

    messages = orjson.loads(corpus.history(600).body(turn, stream=False))["messages"]
    assert [message["role"] for message in messages][-2:] == ["assistant", "tool"]
    assert messages[-1]["tool_call_id"] == messages[-2]["tool_calls"][0]["id"] == "call_x"


def test_engine_generate_reply_is_one_that_the_proxy_takes(corpus: Corpus) -> None:
    reply = corpus.reply()

    response = Replies(reply).answer(b"/generate", b'{"rid":"r","input_ids":[5,6,7],"sampling_params":{}}')
    data = orjson.loads(response.partition(b"\r\n\r\n")[2])
    generation = parse_generation(data, num_prompt=3, vocab_size=100_000, rid="r")
    assert generation.output_ids.tolist() == reply.output_ids


@pytest.mark.parametrize("stream", [False, True])
def test_engine_chat_reply_is_read_back(corpus: Corpus, stream: bool) -> None:
    reply = corpus.reply()
    body = corpus.history(600).body(b"", stream=stream)

    answer = read_answer(Replies(reply).answer(b"/v1/chat/completions", body), 0.5, stream=stream)

    assert (answer.text, answer.call_id, answer.seconds) == (reply.text, "call_0", 0.5)
    assert answer.num_events == (len(reply.pieces) + 4 if stream else 1)  # role, text, call, finish, [DONE]


@pytest.mark.parametrize("response", [b"HTTP/1.1 503 Busy\r\n\r\n{}", b'HTTP/1.1 200 OK\r\n\r\n{"choices":[]}'])
def test_read_answer_error_is_not_a_measurement(response: bytes) -> None:
    with pytest.raises((GyreError, IndexError)):
        read_answer(response, 0.1, stream=False)


def test_headline_ratios_are_those_of_one_session_without_streaming() -> None:
    rows = [
        row("gyre", 2_000, 3.0, parse_ms=0.5),
        row("gyre", 20_000, 4.0),
        row("litellm", 20_000, 16.0),
        row("gyre", 200_000, 8.0, parse_ms=3.0),
    ]

    found = headline(rows)

    assert found["overhead_ratio_vs_litellm"] == 0.25
    assert found["overhead_200k_over_2k"] == 2.0  # (8 - 3) / (3 - 0.5)
    assert found["body_parse_ms"] == 3.0


def test_headline_without_litellm_has_no_ratio() -> None:
    assert headline([row("gyre", 20_000, 4.0)])["overhead_ratio_vs_litellm"] is None


@pytest.mark.parametrize(
    "counters", [{}, {"substitution_synthetic": 9}, {"substitution_clean": 9, "substitution_forked": 1}]
)
def test_sessions_that_were_not_continued_are_an_error(counters: Mapping[str, int]) -> None:
    with pytest.raises(GyreError, match="did not continue"):
        raise_unless_continued(counters)


@pytest.mark.integration
def test_bench_proxy_tiny_table_has_a_row_for_each_cell_and_mode() -> None:
    result = bench_proxy(TINY, litellm_environment=None)

    assert [(r["sessions"], r["stream"], r["calls"]) for r in result["table"]] == [
        (1, False, 3),
        (1, True, 3),
        (3, False, 3),
    ]
    for found in result["table"]:
        assert found["proxy"] == "gyre"
        assert 20 < found["memory_mb"] < 1_000  # of a Python process
        assert (found["events"] > 1) == found["stream"]
    # One conversation: opened and warmed by 2 calls, 3 rounds of 2 ways. Three: opened by 1 each, one of them warmed,
    # 1 round. Every call is counted, and each continues what was there.
    assert result["gyre_counters"] == {"substitution_clean": 2 + 6 + 3 + 1 + 3}


def test_proxy_lines_a_known_result_is_this_table() -> None:
    known = {
        **row("gyre", 2_000, 1.25),
        **{"overhead_p99_ms": 3.0, "direct_p50_ms": 0.5, "cpu_ms_a_call": 1.0, "memory_mb": 150.4},
    }
    assert list(proxy_lines({"body_parse_ms": 0.25, "table": [known]})) == [
        "sessions  history  stream  proxy     overhead p50   p99 (ms)  direct p50   CPU a call  memory (MB)",
        "       1     2000  no      gyre              1.25       3.00        0.50         1.00          150",
        "body_parse_ms                0.25",
    ]


@pytest.mark.integration
def test_bench_proxy_cli_json_is_one_object_with_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUICK", TINY[:1])

    done = CliRunner().invoke(app, ["bench", "proxy", "--json", "--quick", "--without-litellm"])

    assert done.exit_code == 0, done.output
    keys = {"overhead_ratio_vs_litellm", "overhead_200k_over_2k", "body_parse_ms", "stream_ms_per_event_p50", "table"}
    assert keys <= json.loads(done.stdout.splitlines()[-1]).keys()
