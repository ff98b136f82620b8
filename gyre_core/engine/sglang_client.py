"""The client of an SGLang 0.5.23 server, over its native HTTP API.

Calls as gyre_core.engine.client.EngineClient describes them, and the control verbs that publishing weights and role
changes use. What leaves `generate` has been checked (engine/replies.py): ids inside the vocabulary, one finite log-prob
an id, version spans that cover the output without gaps.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Literal

import httpx
import numpy as np
import orjson

from gyre_core.engine.replies import error_message, parse_generation
from gyre_core.engine.transport import AiohttpTransport
from gyre_core.errors import EngineError
from gyre_core.tracing.spans import current_headers
from gyre_core.types import Generation, Json, SamplingParams, TokenIds

CONNECT_TIMEOUT_S = 5.0  # one machine or one cluster network: an engine that lives accepts at once
# Idle connections are given up well before the server closes them (after 5 s): a request on a connection that closes
# at this moment fails without an answer.
KEEPALIVE_S = 2.0
CONTROL_TIMEOUT_S = 60.0  # control verbs; measured in milliseconds
WEIGHTS_TIMEOUT_S = 1800.0  # reading or hashing all weights: proportional to their size, minutes for the largest models
ABORT_TIMEOUT_S = 2.0  # of the courtesy abort after a cancelled or timed-out call; measured 3 ms
BUSY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})  # the engine's trouble, not the call's

_CALL_TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
_JSON_HEADERS = {"content-type": "application/json"}

PauseMode = Literal["in_place", "retract", "abort"]


class SGLangClient:
    """An SGLang 0.5.23 server.

    Connections belong to the event loop that first used them: make one client a loop, and close it (or use
    `async with`).

    Example: async with SGLangClient("http://127.0.0.1:30000", vocab_size=512) as engine: await engine.generate(...)
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`vocab_size`: rows of the embedding. `timeout_s` bounds one whole call. `transport` is for tests.

        `api_key` goes with every request, for a server that asks for one (those of SGLangServer do).
        """
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, not {vocab_size}")
        self.url = url.rstrip("/")
        self.vocab_size = vocab_size
        self.timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"} if api_key is not None else None,
            timeout=httpx.Timeout(CONTROL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            # Calls last minutes and the router bounds how many there are: never queue inside the client.
            transport=transport or AiohttpTransport(keepalive_s=KEEPALIVE_S),
            trust_env=False,  # engines are reached directly; a proxy from the environment would break long calls
        )

    async def __aenter__(self) -> "SGLangClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def generate(
        self, input_ids: Sequence[int] | TokenIds, params: SamplingParams, *, rid: str, cache_salt: str = ""
    ) -> Generation:
        """See `EngineClient.generate`. Output ids end with the stop token when one was sampled.

        Stop strings need a server with a tokenizer (`SGLangServer(..., tokenizer=True)`, the default).
        """
        body: Json = {"rid": rid, "input_ids": self._check_ids(input_ids), "return_logprob": True}
        body["sampling_params"] = sampling_body(params)
        if cache_salt:
            body["cache_salt"] = cache_salt
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await self._http.post(
                    "/generate",
                    content=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),  # 20 times quicker than from a list
                    headers=_JSON_HEADERS | current_headers(),
                    timeout=_CALL_TIMEOUT,
                )
        except asyncio.CancelledError:
            await self._abort_quietly(rid)
            raise
        except TimeoutError as error:
            await self._abort_quietly(rid)
            raise EngineError(
                f"call {rid} took longer than {self.timeout_s:g} s on {self.url}", retryable=True
            ) from error
        except httpx.HTTPError as error:
            raise EngineError(f"engine {self.url} failed call {rid}: {error!r}", retryable=True) from error
        data = self._read(reply, f"call {rid}")
        return parse_generation(data, num_prompt=len(input_ids), vocab_size=self.vocab_size, rid=rid)

    async def abort(self, rid: str) -> None:
        """See `EngineClient.abort`."""
        if not rid:
            raise ValueError("abort needs the rid of one call; use abort_all for all of them")
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """End every running and waiting call; each `generate` returns what was sampled."""
        await self._post("/abort_request", {"abort_all": True})

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling. New calls wait until `continue_generation`.

        `retract` puts running calls back into the queue: their keys and values are computed anew afterwards, so they
        never mix weights. `in_place` freezes them with their old keys and values. `abort` ends them with what they
        have.
        """
        await self._post("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Undo `pause`; harmless when not paused."""
        await self._post("/continue_generation", {})

    async def release_kv_memory(self) -> None:
        """Give the device memory of the KV pool back, cached prefixes with it. No call may run.

        On a device whose allocator cannot (a CPU) only the cache is dropped. Weights stay where they are: their memory
        is what one-sided writes go to.
        """
        await self._switch_memory("release")

    async def resume_kv_memory(self) -> None:
        """Take the KV pool's memory again, empty. Harmful without `release_kv_memory` before."""
        await self._switch_memory("resume")

    async def _switch_memory(self, verb: str) -> None:
        path = f"/{verb}_memory_occupation"
        reply = await self._request("POST", path, {"tags": ["kv_cache"]})
        if reply.status_code != 200:  # its body is `null`
            raise self._refusal(reply, path)

    async def flush_cache(self) -> None:
        """Drop all cached prefixes. Refused (EngineError, retryable) while calls run that are not retracted."""
        reply = await self._request("POST", "/flush_cache")
        if reply.status_code != 200:
            raise EngineError(
                f"engine {self.url} did not flush its cache: {error_message(reply.text)} (calls are running; pause "
                "with mode 'retract' first)",
                retryable=True,
            )

    async def update_weights_from_disk(self, path: str, *, version: int | None = None) -> None:
        """Load the safetensors of folder `path` (on the engine's machine) and flush the cache.

        `version` names the new weights; None leaves the old name, until `update_weight_version`.
        """
        body: Json = {"model_path": path, "flush_cache": True, "abort_all_requests": False}
        if version is not None:
            body["weight_version"] = str(version)
        data = await self._post("/update_weights_from_disk", body, timeout_s=WEIGHTS_TIMEOUT_S)
        if data.get("success") is not True:
            raise EngineError(f"engine {self.url} did not load {path}: {data.get('message', data)}")

    async def update_weight_version(self, version: int) -> None:
        """Name the weights that the engine holds now; running calls get a new span from here on."""
        data = await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        if data.get("success") is not True:
            raise EngineError(f"engine {self.url} did not take version {version}: {data.get('message', data)}")

    async def checksums(self) -> list[dict[str, str]]:
        """For each rank the hash of every parameter by the engine's own name, 16 hex digits."""
        data = await self._post("/weights_checker", {"action": "checksum"}, timeout_s=WEIGHTS_TIMEOUT_S)
        ranks = data.get("ranks")
        if data.get("success") is not True or not isinstance(ranks, list) or not ranks:
            raise EngineError(f"engine {self.url} gave no checksums: {data.get('message', data)}")
        return [{str(name): str(value) for name, value in rank["checksums"].items()} for rank in ranks]

    async def model_info(self) -> Json:
        """The engine's description of itself: model_path, weight_version, ..."""
        return self._read(await self._request("GET", "/model_info"), "/model_info")

    async def weight_version(self) -> int:
        """Policy version of the weights that the engine serves."""
        value = (await self.model_info()).get("weight_version")
        try:
            return int(str(value))
        except ValueError as error:
            raise EngineError(f"engine {self.url} has weight version {value!r}, which Gyre did not give it") from error

    async def weight_memory(self, rank: int = 0) -> tuple[str, dict[str, tuple[int, int, int]]]:
        """Where one-sided writes to a rank go: Mooncake session and name -> (address, elements, bytes an element).

        EngineError when the server was started without remote weights (or without Mooncake).
        """
        reply = await self._request("GET", "/remote_instance_transfer_engine_info", params={"rank": rank})
        data = self._read(reply, "/remote_instance_transfer_engine_info")
        try:
            session, memory = data["remote_instance_transfer_engine_info"]
            return str(session), {str(name): (int(a), int(n), int(size)) for name, (a, n, size) in memory.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"engine {self.url} described its weight memory in an unknown form: {error!r}") from error

    async def is_ready(self) -> bool:
        """Whether the server answers. Cheaper than its own health check, which samples a token (1 s)."""
        try:
            reply = await self._http.get("/model_info", timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return reply.status_code == 200

    def _check_ids(self, input_ids: Sequence[int] | TokenIds) -> np.ndarray:
        """An array for orjson. One id outside the embedding kills the whole server, so none is ever sent."""
        try:
            ids = np.ascontiguousarray(input_ids)
        except OverflowError as error:
            raise ValueError("an input id has more than 64 bits") from error
        if not ids.size:
            raise ValueError("a call needs at least one input id")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"input ids must be integers, one after another, not an array of {ids.dtype}")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"input id {low if low < 0 else high} is outside the engine's vocabulary of {self.vocab_size} ids"
            )
        return ids

    async def _abort_quietly(self, rid: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await self._http.post("/abort_request", json={"rid": rid}, timeout=ABORT_TIMEOUT_S)

    async def _request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        params: Mapping[str, int] | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            return await self._http.request(method, path, json=body, params=params, timeout=timeout)
        except httpx.HTTPError as error:
            raise EngineError(f"engine {self.url} did not answer {path}: {error!r}", retryable=True) from error

    async def _post(self, path: str, body: Json, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Json:
        reply = await self._request("POST", path, body, timeout_s=timeout_s)
        return self._read(reply, path) if reply.content.strip() else self._read_empty(reply, path)

    def _read_empty(self, reply: httpx.Response, what: str) -> Json:
        if reply.status_code != 200:
            raise self._refusal(reply, what)
        return {}

    def _read(self, reply: httpx.Response, what: str) -> Json:
        if reply.status_code != 200:
            raise self._refusal(reply, what)
        try:
            data = _parsed(reply)
        except ValueError as error:
            raise EngineError(f"engine {self.url} answered {what} with no JSON: {reply.text[:200]!r}") from error
        if not isinstance(data, dict):
            raise EngineError(f"engine {self.url} answered {what} with {type(data).__name__}, not an object")
        return data

    def _refusal(self, reply: httpx.Response, what: str) -> EngineError:
        return EngineError(
            f"engine {self.url} refused {what} with status {reply.status_code}: {error_message(reply.text)}",
            retryable=reply.status_code in BUSY_STATUS,
        )


def _parsed(reply: httpx.Response) -> object:
    try:
        return orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return reply.json()  # NaN, which is not JSON and which some servers write


def sampling_body(params: SamplingParams) -> Json:
    """The `sampling_params` of a /generate request. Raises ValueError for values that the engine would misread."""
    if params.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be positive, not {params.max_new_tokens}")
    body: Json = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    if params.stop:
        body["stop"] = list(params.stop)
    if params.seed is not None:
        # The server mixes the seed with the token position in 32-bit arithmetic.
        body["sampling_seed"] = params.seed % 2**31
    return body
