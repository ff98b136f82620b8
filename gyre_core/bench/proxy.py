"""`gyre bench proxy`: what Gyre's proxy adds to a call, beside what LiteLLM's proxy adds.

Enters: how many sessions at once, histories of how many tokens. Leaves: for each of them, streamed and not, the latency
through each proxy minus that of the same client calling the engine itself, in the same round. All speak the Chat API;
the engine answers at once with the same reply; engine, proxies and client are one process each. A round calls each
contender in turn, in an order that rotates, so that a noisy machine disturbs all of them alike.
"""

import asyncio
import contextlib
import gc
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import uvloop

from gyre_core.bench.proxy_client import Conversation
from gyre_core.bench.proxy_engine import FixedReply
from gyre_core.bench.proxy_history import Corpus
from gyre_core.bench.proxy_servers import (
    LITELLM,
    Server,
    admin_headers,
    engine_server,
    gyre_server,
    install_litellm,
    litellm_server,
)
from gyre_core.errors import GyreError
from gyre_core.trajectory.arrow import trajectory_from_ipc

DIRECT, GYRE, LITELLM_NAME = "direct", "gyre", "litellm"
_TURNS_A_CONVERSATION = 10  # measured calls before a lone conversation is replaced, so that its length stays near
_OPENING_AT_ONCE = 4  # first calls of sessions render the whole history
_SHORT, _MIDDLE, _LONG = 2_000, 20_000, 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the table.

    Example: Cell(sessions=64, history=20_000, rounds=4)
    """

    sessions: int  # conversations that call at once
    history: int  # tokens
    rounds: int
    streams: tuple[bool, ...] = (False,)  # a round calls once each way


_BOTH = (False, True)
QUICK = (
    Cell(sessions=1, history=_SHORT, rounds=40, streams=_BOTH),
    Cell(sessions=1, history=_MIDDLE, rounds=40, streams=_BOTH),
    Cell(sessions=1, history=_LONG, rounds=40, streams=_BOTH),
    Cell(sessions=64, history=_SHORT, rounds=3),
    Cell(sessions=64, history=_MIDDLE, rounds=2),
    Cell(sessions=512, history=_SHORT, rounds=1),
)
FULL = (
    *(Cell(sessions=1, history=history, rounds=60, streams=_BOTH) for history in (_SHORT, _MIDDLE, _LONG)),
    *(Cell(sessions=64, history=history, rounds=3, streams=_BOTH) for history in (_SHORT, _MIDDLE)),
    Cell(sessions=64, history=_LONG, rounds=2),
    *(Cell(sessions=512, history=history, rounds=1) for history in (_SHORT, _MIDDLE, _LONG)),
)


@dataclass(slots=True)
class _Samples:
    """Latencies of one contender in one cell, in seconds."""

    rounds: list[list[float]] = field(default_factory=list)
    cpu_s: float = 0.0
    num_events: int = 1


@dataclass(frozen=True, slots=True)
class _Contender:
    name: str
    server: Server


def bench_proxy(
    cells: Sequence[Cell], *, litellm_environment: Path | None, report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure; without LiteLLM when no environment for it is given. Raises GyreError when a call fails.

    `report` gets each row of the table as a line when it is there.
    """
    if litellm_environment is not None:
        install_litellm(litellm_environment)
    started = time.monotonic()
    corpus = Corpus()
    reply = corpus.reply()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        engine = stack.enter_context(engine_server(folder, reply))
        slots = max(cell.sessions for cell in cells)
        model_path = corpus.save_model(folder / "model")
        gyre = stack.enter_context(gyre_server(folder, model_path, engine, slots=slots))
        contenders = [_Contender(DIRECT, engine), _Contender(GYRE, gyre)]
        if litellm_environment is not None:
            litellm = stack.enter_context(litellm_server(folder, litellm_environment, engine))
            contenders.append(_Contender(LITELLM_NAME, litellm))
        rows: list[dict[str, Any]] = []
        counters: Counter[str] = Counter()
        report(_HEADER)
        for group in _groups(cells):
            measurements = [_Measurement(cell, corpus, reply, contenders) for cell in group]
            uvloop.run(_measure(measurements, group[0].rounds))
            for measurement in measurements:
                counters.update(measurement.counters)
                rows += measurement.rows()
                for row in measurement.rows():
                    report(_line(row))
    raise_unless_continued(counters)
    result = headline(rows)
    result["gyre_counters"] = {name: count for name, count in counters.items() if name.startswith("substitution")}
    result["litellm"] = LITELLM if litellm_environment is not None else None
    result["wall_s"] = round(time.monotonic() - started, 1)
    return {**result, "table": rows}


def _groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one session and equal rounds together, the others alone."""
    groups: list[list[Cell]] = []
    for cell in cells:
        if groups and cell.sessions == groups[-1][0].sessions == 1 and cell.rounds == groups[-1][0].rounds:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers that goals are about, None where the table lacks a cell."""

    def of(contender: str, history: int, name: str, *, stream: bool = False) -> float | None:
        for row in rows:
            wanted = (contender, 1, history, stream)
            if (row["proxy"], row["sessions"], row["history_tokens"], row["stream"]) == wanted:
                return row[name]
        return None

    gyre, litellm = of(GYRE, _MIDDLE, "overhead_p50_ms"), of(LITELLM_NAME, _MIDDLE, "overhead_p50_ms")
    long, short = of(GYRE, _LONG, "overhead_p50_ms"), of(GYRE, _SHORT, "overhead_p50_ms")
    parse_long, parse_short = of(GYRE, _LONG, "body_parse_ms"), of(GYRE, _SHORT, "body_parse_ms")
    growth = None
    if long is not None and short is not None and parse_long is not None and parse_short is not None:
        growth = (long - parse_long) / (short - parse_short)
    return {
        "overhead_ratio_vs_litellm": _rounded(gyre / litellm if gyre is not None and litellm else None),
        "overhead_200k_over_2k": _rounded(growth),
        "body_parse_ms": parse_long,
        "stream_ms_per_event_p50": of(GYRE, _MIDDLE, "ms_per_event_p50", stream=True),
    }


class _Measurement:
    """One cell: its conversations with each contender, and what they took."""

    def __init__(self, cell: Cell, corpus: Corpus, reply: FixedReply, contenders: Sequence[_Contender]) -> None:
        self.counters: Counter[str] = Counter()  # of Gyre's sessions that are closed
        self._cell = cell
        self._corpus = corpus
        self._reply = reply
        self._contenders = contenders
        self._history = corpus.history(cell.history)
        self._talks: dict[str, list[Conversation]] = {}  # by contender
        self._samples: dict[tuple[str, bool], _Samples] = defaultdict(_Samples)
        self._parse_s: list[float] = []
        self._memory_mb: dict[str, float] = {}

    async def step(self, number: int) -> None:
        """One round: every conversation of each contender calls, in each way."""
        if number == 0 or (self._cell.sessions == 1 and number % (_TURNS_A_CONVERSATION // 2) == 0):
            await self._open()
        shift = number % len(self._contenders)
        for contender in (*self._contenders[shift:], *self._contenders[:shift]):
            for stream in self._cell.streams:
                await self._call(contender, stream=stream)
        self._parse_s.append(_parse_s(self._talks[DIRECT][0].body(stream=False)))
        self._memory_mb = {contender.name: contender.server.memory_mb() for contender in self._contenders}

    def rows(self) -> list[dict[str, Any]]:
        """The table's rows: each proxy, not streamed and streamed."""
        rows = []
        for contender in self._contenders[1:]:
            for stream in self._cell.streams:
                row = _row(self._cell, contender.name, self._samples, stream=stream)
                row["body_parse_ms"] = _ms(float(np.median(self._parse_s)))
                row["memory_mb"] = round(self._memory_mb[contender.name], 1)
                rows.append(row)
        return rows

    async def close(self) -> None:
        """End all conversations, and Gyre's sessions with them."""
        for contender in self._contenders:
            talks = self._talks.pop(contender.name, [])
            for talk in talks:
                talk.close()
            if contender.name == GYRE and talks:
                async with _admin_client(contender.server) as client:
                    for talk in talks:
                        session_id = talk.key.split("-")[1]
                        sealed = await client.post(f"/admin/sessions/{session_id}/seal")
                        sealed.raise_for_status()
                        self.counters.update(trajectory_from_ipc(sealed.content).counters)
                        (await client.delete(f"/admin/sessions/{session_id}")).raise_for_status()

    async def _call(self, contender: _Contender, *, stream: bool) -> None:
        """One call of every conversation of a contender, all at once."""
        talks, samples = self._talks[contender.name], self._samples[contender.name, stream]
        await asyncio.gather(*(talk.connect() for talk in talks))
        gc.collect()
        gc.disable()  # a collection in the middle of a call would be measured
        try:
            cpu_s = contender.server.cpu_s()
            answers = await asyncio.gather(*(talk.call(stream=stream) for talk in talks))
            samples.cpu_s += contender.server.cpu_s() - cpu_s
        finally:
            gc.enable()
        samples.rounds.append([answer.seconds for answer in answers])
        samples.num_events = answers[0].num_events

    async def _open(self) -> None:
        """New conversations, the same for all contenders; each has been answered once."""
        await self.close()
        for contender in self._contenders:
            server = contender.server
            keys = [server.secret or "none"] * self._cell.sessions
            if contender.name == GYRE:
                keys = await _create_sessions(server, self._cell.sessions)
            talks = [Conversation(server.port, key, self._history, self._corpus, self._reply) for key in keys]
            self._talks[contender.name] = talks
            if contender.name == GYRE:
                gate = asyncio.Semaphore(_OPENING_AT_ONCE)
                await asyncio.gather(*(_first_call(talk, gate) for talk in talks))
            else:  # keeps nothing of a conversation: its first call needs not be made
                for talk in talks:
                    talk.skip_call()
            await _first_call(talks[0], asyncio.Semaphore())  # nothing is cold


async def _measure(group: Sequence[_Measurement], num_rounds: int) -> None:
    """Rounds of several cells, one after another: cells that are compared meet the same noise."""
    try:
        for number in range(num_rounds):
            for measurement in group:
                await measurement.step(number)
    finally:
        for measurement in group:
            await measurement.close()


async def _create_sessions(server: Server, count: int) -> list[str]:
    """New sessions of Gyre's proxy: their keys."""
    keys = []
    async with _admin_client(server) as client:
        for number in range(count):
            body = {"rollout_id": f"bench-{number}", "sampling": {"temperature": 1.0}}
            response = await client.post("/admin/sessions", json=body)
            response.raise_for_status()
            keys.append(response.json()["api_key"])
    return keys


async def _first_call(talk: Conversation, gate: asyncio.Semaphore) -> None:
    async with gate:
        await talk.connect()
        await talk.call(stream=False)


def _admin_client(server: Server) -> httpx.AsyncClient:
    url = f"http://127.0.0.1:{server.port}"
    return httpx.AsyncClient(trust_env=False, timeout=60, base_url=url, headers=admin_headers(server))


def _row(cell: Cell, name: str, samples: dict[tuple[str, bool], _Samples], *, stream: bool) -> dict[str, Any]:
    own, direct = samples[name, stream], samples[DIRECT, stream]
    plain = samples[name, False]
    baselines = [float(np.median(latencies)) for latencies in direct.rounds]
    medians = [
        float(np.median(latencies)) - baseline for latencies, baseline in zip(own.rounds, baselines, strict=True)
    ]
    overheads = [
        seconds - baseline for latencies, baseline in zip(own.rounds, baselines, strict=True) for seconds in latencies
    ]
    added = [
        (float(np.median(streamed)) - float(np.median(whole))) / own.num_events
        for streamed, whole in zip(own.rounds, plain.rounds, strict=True)
    ]
    num_calls = sum(len(latencies) for latencies in own.rounds)
    return {
        "proxy": name,
        "sessions": cell.sessions,
        "history_tokens": cell.history,
        "stream": stream,
        "calls": num_calls,
        "overhead_p50_ms": _ms(float(np.median(medians))),
        "overhead_p99_ms": _ms(float(np.percentile(overheads, 99))),
        "direct_p50_ms": _ms(float(np.median(baselines))),
        "cpu_ms_a_call": _ms(own.cpu_s / num_calls),
        "events": own.num_events,
        "ms_per_event_p50": _ms(float(np.median(added))) if stream else None,
    }


def _parse_s(body: bytes) -> float:
    """Seconds to parse a body that was just made, as a proxy does: once, from memory that no cache holds."""
    started = time.perf_counter()
    parsed = orjson.loads(body)
    seconds = time.perf_counter() - started
    assert parsed
    return seconds


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


_HEADER = "sessions  history  stream  proxy     overhead p50   p99 (ms)  direct p50   CPU a call  memory (MB)"


def proxy_lines(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    yield _HEADER
    yield from map(_line, result["table"])
    for name, value in result.items():
        if name != "table":
            yield f"{name:28s} {value}"


def _line(row: dict[str, Any]) -> str:
    stream = "yes" if row["stream"] else "no"
    return (
        f"{row['sessions']:8d}  {row['history_tokens']:7d}  {stream:6s}  {row['proxy']:8s}  "
        f"{row['overhead_p50_ms']:12.2f}  {row['overhead_p99_ms']:9.2f}  {row['direct_p50_ms']:10.2f}  "
        f"{row['cpu_ms_a_call']:11.2f}  {row['memory_mb']:11.0f}"
    )


def raise_unless_continued(counters: Mapping[str, int]) -> None:
    """Raise GyreError when sessions were not continued token by token: the numbers would be of something else.

    A session's first call holds replies that nobody sampled (`synthetic`): its history. Of the others all are `clean`.
    """
    if not counters.get("substitution_clean", 0) or counters.get("substitution_forked", 0):
        raise GyreError(f"the proxy did not continue the conversations: {counters}")
