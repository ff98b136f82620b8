"""The durable record of a session: what a restarted proxy needs to go on as if nothing had happened.

One append-only file a session. Each record is framed by its length and CRC-32; a torn tail (a process or machine that
died while writing) is cut off when the file is opened again. Records: `session` (once), `call` (a finished call with
its exact tokens, its reply and the place it hangs), `delivered` (the harness has read that reply), `sealed`.

Durability: a record is in the kernel before `append` returns, so killing the process loses nothing that was answered.
With sync="call" the answer waits for fsync too, so a machine that loses power loses nothing either; with sync="session"
only the first record and the seal are synced. `delivered` is never synced: without it a retry replays a reply.
"""

import asyncio
import fcntl
import io
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from gyre_core.errors import ProxyError, SetupError
from gyre_core.proxy.conversation import Reply, ToolCall
from gyre_core.trajectory.recorder import FinishedCall, MessageKey
from gyre_core.types import FinishReason, Json, Role, Substitution, VersionSpan

logger = logging.getLogger(__name__)

_MAGIC = b"GYREJ1\n"
_FRAME = struct.Struct("<II")  # payload length, CRC-32 of the payload
_SUFFIX = ".journal"
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")


class JournalFolder:
    """The journals of one proxy process. Two processes must not share a folder: it is locked."""

    def __init__(self, folder: Path, *, sync: Literal["call", "session"] = "call") -> None:
        """Create and lock the folder; raises SetupError when another proxy has it or it cannot be written."""
        self._folder = folder
        self._sync = sync
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SetupError(f"another proxy process uses the journal folder {folder}: give each its own") from error
        except OSError as error:
            raise SetupError(f"the journal folder {folder} cannot be used: {error}") from error

    def create(self, session_id: str, record: Json) -> "Journal":
        """A new session's journal with its first record; raises ProxyError when it cannot be written."""
        path = self._path(session_id)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise ProxyError(f"no journal can be made for a session in {self._folder}: {error}") from error
        journal = Journal(path, handle, end=0, sync_calls=self._sync == "call")
        try:
            journal.write_magic()
            journal.append({"kind": "session", **record})
            journal.sync()
        except ProxyError:
            journal.remove()
            raise
        return journal

    def restore(self) -> Iterator[tuple[str, "Journal", list[tuple[Json, bytes]]]]:
        """All journals of the folder: session id, the journal open for more, its records (header, arrays)."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            session_id = path.name.removesuffix(_SUFFIX)
            if not _SESSION_ID.fullmatch(session_id):
                continue
            handle = os.open(path, os.O_RDWR | os.O_APPEND)
            with os.fdopen(os.dup(handle), "rb") as file:
                data = file.read()
            records, end = read_records(data)
            if not records or records[0][0].get("kind") != "session":
                logger.warning("journal %s holds no session and is ignored", path.name)
                os.close(handle)
                continue
            if end < len(data):
                logger.warning("journal %s: cutting a torn tail of %d bytes", path.name, len(data) - end)
                os.ftruncate(handle, end)
            yield session_id, Journal(path, handle, end=end, sync_calls=self._sync == "call"), records

    def close(self) -> None:
        """Give the folder free."""
        self._lock.close()

    def _path(self, session_id: str) -> Path:
        assert _SESSION_ID.fullmatch(session_id)
        return self._folder / f"{session_id}{_SUFFIX}"


class Journal:
    """One session's open file."""

    def __init__(self, path: Path, handle: int, *, end: int, sync_calls: bool) -> None:
        self._path = path
        self._handle = handle
        self._end = end
        self._sync_calls = sync_calls

    def write_magic(self) -> None:
        """Begin a new file."""
        self._write(_MAGIC)

    def append(self, header: Json, arrays: bytes = b"") -> None:
        """Add a record; the kernel has it on return. Raises ProxyError and leaves the file as it was otherwise."""
        text = orjson.dumps(header)
        payload = struct.pack("<I", len(text)) + text + arrays
        self._write(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)

    def sync(self) -> None:
        """Wait until the disk has all records; raises ProxyError."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise ProxyError(f"the journal {self._path.name} cannot be synced: {error}") from error

    async def settle_call(self) -> None:
        """Wait until a finished call is as durable as the settings ask, without blocking the event loop."""
        if self._sync_calls:
            await asyncio.get_running_loop().run_in_executor(None, self.sync)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        """Close and delete the file."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        if self._handle < 0:
            raise ProxyError(f"the journal {self._path.name} is closed")
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError as error:
            # A partial frame must not stay: what is written after it would be lost with it.
            os.ftruncate(self._handle, self._end)
            raise ProxyError(f"the journal {self._path.name} cannot be written: {error}") from error
        self._end += len(data)


def read_records(data: bytes) -> tuple[list[tuple[Json, bytes]], int]:
    """All whole records of a journal's bytes and the offset where they end."""
    records: list[tuple[Json, bytes]] = []
    if not data.startswith(_MAGIC):
        return records, 0
    end = len(_MAGIC)
    while end + _FRAME.size <= len(data):
        size, checksum = _FRAME.unpack_from(data, end)
        payload = data[end + _FRAME.size : end + _FRAME.size + size]
        if len(payload) < max(size, 4) or zlib.crc32(payload) != checksum:
            break
        (header_size,) = struct.unpack_from("<I", payload)
        records.append((orjson.loads(payload[4 : 4 + header_size]), payload[4 + header_size :]))
        end += _FRAME.size + size
    return records, end


def call_record(call: FinishedCall, reply: Reply, digest: bytes) -> tuple[Json, bytes]:
    """A finished call as a journal record; `digest` is of the request's body."""
    header: Json = {
        "kind": "call",
        "digest": digest.hex(),
        "call_id": call.call_id,
        "index": call.index,
        "role": call.role.value,
        "dialect": call.dialect,
        "model_name": call.model_name,
        "substitution": call.substitution.value,
        "finish_reason": call.finish_reason.value,
        "anchor_call": call.anchor_call,
        "num_prompt_ids": len(call.prompt_ids),
        "num_output_ids": len(call.output_ids),
        "spans": [[span.version, span.start, span.end] for span in call.spans],
        "prompt_tokens": call.prompt_tokens,
        "cached_tokens": call.cached_tokens,
        "prompt_state": call.prompt_state.hex(),
        "seen": [mark.hex() for mark in call.seen],
        "resumes": [state.hex() for state in call.resumes],
        "started_s": call.started_s,
        "finished_s": call.finished_s,
        "hints": dict(call.hints),
        "reply": {
            "text": reply.text,
            "reasoning": reply.reasoning,
            "signature": reply.signature,
            "tool_calls": [[tool.call_id, tool.name, tool.arguments] for tool in reply.tool_calls],
            "stop_sequence": reply.stop_sequence,
            "reasoning_tokens": reply.reasoning_tokens,
            "created_s": reply.created_s,
        },
    }
    buffer = io.BytesIO()
    for values, dtype in ((call.prompt_ids, "<i4"), (call.output_ids, "<i4"), (call.logprobs, "<f4")):
        buffer.write(np.asarray(values).astype(dtype, copy=False).tobytes())
    return header, buffer.getvalue()


def read_call(header: Json, arrays: bytes) -> tuple[FinishedCall, Reply, bytes]:
    """What `call_record` wrote."""
    num_prompt, num_output = header["num_prompt_ids"], header["num_output_ids"]
    ids = np.frombuffer(arrays, "<i4", num_prompt + num_output)
    logprobs = np.frombuffer(arrays, "<f4", num_output, offset=4 * (num_prompt + num_output))
    written: dict[str, Any] = header["reply"]
    reply = Reply(
        call_id=header["call_id"],
        text=written["text"],
        reasoning=written["reasoning"],
        signature=written["signature"],
        tool_calls=tuple(
            ToolCall(call_id=call_id, name=name, arguments=arguments)
            for call_id, name, arguments in written["tool_calls"]
        ),
        finish_reason=FinishReason(header["finish_reason"]),
        stop_sequence=written["stop_sequence"],
        prompt_tokens=header["prompt_tokens"],
        output_tokens=num_output,
        cached_tokens=header["cached_tokens"],
        reasoning_tokens=written["reasoning_tokens"],
        created_s=written["created_s"],
    )
    key: MessageKey = reply.message().key()
    call = FinishedCall(
        call_id=header["call_id"],
        index=header["index"],
        role=Role(header["role"]),
        dialect=header["dialect"],
        model_name=header["model_name"],
        substitution=Substitution(header["substitution"]),
        finish_reason=FinishReason(header["finish_reason"]),
        anchor_call=header["anchor_call"],
        prompt_ids=ids[:num_prompt],
        output_ids=ids[num_prompt:],
        logprobs=logprobs,
        spans=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in header["spans"]),
        prompt_tokens=header["prompt_tokens"],
        cached_tokens=header["cached_tokens"],
        prompt_state=bytes.fromhex(header["prompt_state"]),
        seen=tuple(bytes.fromhex(mark) for mark in header["seen"]),
        resumes=tuple(bytes.fromhex(state) for state in header.get("resumes", ())),
        reply=key,
        started_s=header["started_s"],
        finished_s=header["finished_s"],
        hints=header["hints"],
    )
    return call, reply, bytes.fromhex(header["digest"])


def journal_rollout(path: Path) -> str:
    """The rollout whose session a journal file holds; empty when the file cannot tell."""
    try:
        with path.open("rb") as file:
            records, _ = read_records(file.read(2**16))  # the first record is small
        return str(records[0][0]["settings"]["rollout_id"])
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        return ""
