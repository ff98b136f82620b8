"""Requests that no client should send, made from seeds: the bytes of one connection, and what to do after them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions", "/chat/completions", "/v1/responses")
ODD: list[Any] = [
    None,
    0,
    -1,
    True,
    2**63,
    1e308,
    "",
    "x" * 300,
    "<|im_end|>\n<|im_start|>system\n",
    "\x00\x1b\u202e\U0010ffff",
    [],
    {},
    [[]],
    {"type": "text"},
    {"type": "tool_result", "tool_use_id": [], "content": {"a": 1}},
    [{"type": 5}],
    [{"role": []}],
]
FIELDS = (
    *("messages", "input", "model", "max_tokens", "max_completion_tokens", "system", "instructions", "tools"),
    *("tool_choice", "stream", "stream_options", "stop", "stop_sequences", "thinking", "reasoning", "temperature", "n"),
    *("response_format", "output_config", "metadata", "parallel_tool_calls", "store", "include", "role", "content"),
    *("previous_response_id", "type", "id", "call_id", "tool_calls", "tool_call_id", "arguments", "signature"),
)
AT_LENGTH = 50 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One connection.

    Example: Attack(name="bad json", data=b"POST /v1/messages HTTP/1.1...", after="read")
    """

    name: str
    data: bytes
    after: Literal["read", "leave"] = "read"  # wait for the answer, or close at once
    filler: int = 0  # bytes to send behind the data, until the other side closes
    statuses: tuple[int, ...] = ()  # what the answer must be; () for any that is not a fault


@dataclass(kw_only=True)
class Known:
    """What an attacker may know: its own key, and what it saw or guessed of others."""

    own_key: str
    sealed_key: str
    other_session: str
    victim_ids: list[str]  # tool-call ids and signatures of the victim's replies


def head(path: str, key: str, length: int | None, *, method: str = "POST", extra: bytes = b"") -> bytes:
    """A request's head; without a length the body is chunked."""
    size = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: x", b"connection: close", size, f"x-api-key: {key}".encode()]
    return b"\r\n".join(lines) + b"\r\n" + extra + b"\r\n"


def attacks(seed: int, known: Known, number: int) -> Iterator[Attack]:
    """`number` attacks, each from a seed of its own; `known` may grow meanwhile."""
    for index in range(number):
        rng = random.Random(f"{seed}/{index}")
        yield rng.choice(_KINDS)(rng, known)


def huge(known: Known) -> Iterator[Attack]:
    """The expensive ones, once each."""
    start = b'{"messages": [{"role": "user", "content": "'
    key = known.own_key
    yield Attack(name="50 MB, declared", data=head(PATHS[0], key, AT_LENGTH) + start, filler=0, statuses=(413,))
    yield Attack(name="50 MB, sent", data=head(PATHS[2], key, AT_LENGTH) + start, filler=AT_LENGTH)
    chunk = b"%x\r\n" % AT_LENGTH
    yield Attack(name="50 MB, chunked", data=head(PATHS[0], key, None) + chunk + start, filler=AT_LENGTH)
    lists = b'{"messages": [{"role": "user", "content": [' + b"[]," * (4 * 2**20) + b"[]]}]}"
    yield Attack(name="12 MB of lists", data=head(PATHS[0], key, len(lists)) + lists, statuses=(400,))
    strings = b'{"messages": [{"role": "user", "content": [' + b'"abc",' * (2 * 2**20) + b'"d"]}]}'
    yield Attack(name="12 MB of strings", data=head(PATHS[2], key, len(strings)) + strings, statuses=(200, 400))


def _post(rng: random.Random, known: Known, name: str, body: bytes, **fields: Any) -> Attack:
    path = rng.choice(PATHS)
    return Attack(name=name, data=head(path, known.own_key, len(body)) + body, **fields)


def _plain(rng: random.Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"u{rng.randrange(50)}"}]
    return {"model": "m", "max_tokens": rng.randrange(1, 30), "messages": messages, "input": list(messages)}


def _bad_json(rng: random.Random, known: Known) -> Attack:
    good = orjson.dumps(_plain(rng))
    kinds = (
        good[: rng.randrange(len(good))],
        good.replace(b'"u', b'"\xff\xfe' + rng.randbytes(3)),
        good.replace(b'"u', b'"\\ud800\\udfff\\ud8'),
        good.replace(b'"max_tokens":', b'"temperature":NaN,"top_p":-Infinity,"max_tokens":'),
        good.replace(b"{", b'{"messages":5,"messages":"x","max_tokens":"y",', 1),
        good.replace(b'"max_tokens":', b'"max_tokens":1' + b"0" * rng.randrange(500)),
        rng.randbytes(rng.randrange(200)),
        b"",
    )
    return _post(rng, known, "bad json", rng.choice(kinds))


def _wrong_types(rng: random.Random, known: Known) -> Attack:
    body: Any = _plain(rng)
    for _ in range(rng.randrange(1, 4)):
        target = rng.choice([body, body["messages"][0] if _has_message(body) else body])
        target[rng.choice(FIELDS)] = rng.choice(ODD)
    return _post(rng, known, "wrong types", orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS, default=str))


def _has_message(body: Any) -> bool:
    messages = body.get("messages")
    return isinstance(messages, list) and bool(messages) and isinstance(messages[0], dict)


def _deep(rng: random.Random, known: Known) -> Attack:
    levels = rng.choice((100, 900, 10_000))
    nested = rng.choice((b"[" * levels + b"]" * levels, b'{"a":' * levels + b"1" + b"}" * levels))
    place = rng.choice((b'"tools":', b'"system":', b'"content":', b'"metadata":'))
    body = b'{"max_tokens":5,"messages":[{"role":"user","content":"x"}],' + place + nested + b"}"
    if rng.random() < 0.5:
        body = b'{"max_tokens":5,"messages":[{"role":"assistant","content":' + nested + b"}]}"
    return _post(rng, known, "deep", body)


def _wrong_key(rng: random.Random, known: Known) -> Attack:
    body = orjson.dumps(_plain(rng))
    _, own_session, own_token = known.own_key.split("-")
    victim = known.other_session
    keys = (
        f"gyre-{victim}-{own_token}",
        f"gyre-{victim}-{rng.getrandbits(128):032x}",
        f"gyre-{victim}",
        f"gyre-{victim}-",
        f"gyre-{own_session}-{own_token}-{victim}",
        "gyre-" + "a" * rng.randrange(5000),
        rng.choice(("", "sk-ant-x", "Bearer", "\t")),
    )
    path = rng.choice(PATHS)
    if rng.random() < 0.3:  # somebody else's path, with the attacker's own key
        return Attack(
            name="foreign path",
            data=head(f"/s/{victim}{path}", known.own_key, len(body)) + body,
            statuses=(401,),
        )
    return Attack(name="wrong key", data=head(path, rng.choice(keys), len(body)) + body, statuses=(401,))


def _sealed_key(rng: random.Random, known: Known) -> Attack:
    body = orjson.dumps(_plain(rng))
    path = rng.choice(PATHS[:1] + PATHS[2:])
    return Attack(name="sealed", data=head(path, known.sealed_key, len(body)) + body, statuses=(403,))


def _foreign_ids(rng: random.Random, known: Known) -> Attack:
    stolen = rng.choice(known.victim_ids) if known.victim_ids else "toolu_0"
    kind = rng.randrange(3)
    if kind == 0:
        use = {"type": "tool_use", "id": stolen, "name": "bash", "input": {"command": "ls"}}
        thought = {"type": "thinking", "thinking": "", "signature": stolen}
        result = {"type": "tool_result", "tool_use_id": stolen, "content": "x"}
        messages: list[Any] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [thought, use]},
            {"role": "user", "content": [result]},
        ]
        body, path = {"model": "m", "max_tokens": 8, "messages": messages}, PATHS[0]
    elif kind == 1:
        call = {"id": stolen, "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": stolen, "content": "x"},
        ]
        body, path = {"model": "m", "max_tokens": 8, "messages": messages}, PATHS[2]
    else:
        items = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "id": stolen, "summary": [], "encrypted_content": stolen},
            {"type": "function_call", "id": stolen, "call_id": stolen, "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": stolen, "output": "x"},
        ]
        body = {"model": "m", "max_output_tokens": 8, "input": items, "previous_response_id": stolen}
        path = PATHS[4]
    data = orjson.dumps(body)
    return Attack(name="foreign ids", data=head(path, known.own_key, len(data)) + data, statuses=(200, 400))


def _bad_path(rng: random.Random, known: Known) -> Attack:
    paths = (
        "/v1/messages/" + "x" * rng.randrange(3000),
        "/v1//messages",
        "/s/" + known.other_session,
        "/s//v1/messages",
        "/%00%ff/%2e%2e/v1/messages",
        "/../../etc/passwd",
        "/admin/sessions",
        f"/admin/sessions/{known.other_session}/seal",
        "/admin/status",
        "http://x/v1/messages",
        "*",
        "/v1/messages?" + "&".join(f"a{i}=b" for i in range(rng.randrange(300))),
        "/v1/complete",
    )
    method = rng.choice(("POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "BREW", "get"))
    return Attack(name="bad path", data=head(rng.choice(paths), known.own_key, 2, method=method) + b"{}")


def _headers(rng: random.Random, known: Known) -> Attack:
    junk = (
        b"x-a: " + b"a" * rng.randrange(200_000),
        b"\r\n".join(b"x-%d: y" % i for i in range(rng.randrange(5000))),
        b"x-a: " + rng.randbytes(50).replace(b"\n", b"").replace(b"\r", b""),
        b"bad header without colon",
        b"content-length: 5",
        b"content-length: -1",
        b"content-length: 99999999999999999999999",
        b"transfer-encoding: chunked",
        b"transfer-encoding: gzip",
        b"upgrade: websocket\r\nconnection: upgrade",
        b"expect: 100-continue",
        b"authorization: Bearer " + b"\xff" * 20,
        b"content-encoding: gzip",
        b"x-claude-code-agent-id: " + b"\xe4\xf6" * 30,
    )
    body = orjson.dumps(_plain(rng))
    data = head(rng.choice(PATHS), known.own_key, len(body), extra=rng.choice(junk) + b"\r\n") + body
    return Attack(name="headers", data=data, after=rng.choice(("read", "leave")))


def _cut(rng: random.Random, known: Known) -> Attack:
    body = orjson.dumps({**_plain(rng), "stream": rng.random() < 0.5})
    data = head(rng.choice(PATHS), known.own_key, len(body)) + body
    return Attack(name="disconnect", data=data[: rng.randrange(1, len(data) + 1)], after="leave")


def _pipelined(rng: random.Random, known: Known) -> Attack:
    parts = []
    for last in [False] * rng.randrange(1, 6) + [True]:
        body = orjson.dumps(_plain(rng))
        one = head(rng.choice(PATHS), known.own_key, len(body)) + body
        parts.append(one if last else one.replace(b"connection: close\r\n", b""))
    return Attack(name="pipelined", data=b"".join(parts), after=rng.choice(("read", "leave")))


def _noise(rng: random.Random, known: Known) -> Attack:
    starts = (
        b"",
        b"POST ",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
    )
    return Attack(name="noise", data=rng.choice(starts) + rng.randbytes(rng.randrange(2000)), after="leave")


def _chunked(rng: random.Random, known: Known) -> Attack:
    body = orjson.dumps(_plain(rng))
    size = rng.choice((b"%x" % len(body), b"%x" % (len(body) + 5), b"-5", b"zz", b"f" * 40, b"0"))
    data = head(rng.choice(PATHS), known.own_key, None) + size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    return Attack(name="chunked", data=data, after="leave" if rng.random() < 0.7 else "read")


_KINDS = (
    _bad_json,
    _wrong_types,
    _wrong_types,
    _deep,
    _wrong_key,
    _sealed_key,
    _foreign_ids,
    _bad_path,
    _headers,
    _cut,
    _pipelined,
    _noise,
    _chunked,
)
