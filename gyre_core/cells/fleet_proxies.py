"""The fleet's hold on the proxies: which engines take calls, and calls that leave one.

Enters: the cells' records. Leaves: the proxies' engine list, always computed from the records and told in order, so
that the last list told is the newest belief. Calls of an engine that is drained go on elsewhere with what they have.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gyre_core.engine.speed import TokenSpeed, fit_speed
from gyre_core.errors import ProxyError
from gyre_core.proxy.drains import DrainReport
from gyre_core.proxy.pool import ProxyPool, Shards
from gyre_core.proxy.settings import EngineEntry

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 10.0  # for a status, which policies wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What engines serve, by URL.

    Example: EngineLoad(residents={url: 8}, busy={url: 3}, speed=TokenSpeed(start_s=0.1, token_s=0.02, load_s=0.001))
    """

    residents: Mapping[str, int] = field(default_factory=dict)  # open sessions that it served last
    busy: Mapping[str, int] = field(default_factory=dict)  # calls that run on it, and slots held for some
    speed: TokenSpeed | None = None  # on the wall's clock; None: too few calls so far


class EngineBoard:
    """Tells the proxies, over one pool on an event loop of its own. Thread-safe; close it at the end.

    Example: board = EngineBoard(shards, entries=lambda: [entry], version=lambda: 3); board.open()
    """

    def __init__(
        self, shards: Shards, *, entries: Callable[[], Sequence[EngineEntry]], version: Callable[[], int]
    ) -> None:
        self._shards = shards
        self._entries = entries
        self._version = version
        self._lock = threading.Lock()  # held while the list is made and told: the last told is the newest
        self._open = False
        self._load = EngineLoad()
        self._pool: ProxyPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._life = threading.Lock()
        self._closed = False

    def open(self) -> None:
        """From now on the list is told; before, cells may come and go unheard. Raises ProxyError."""
        with self._lock:
            self._open = True
            self._tell()

    def tell(self) -> None:
        """Tell the proxies the list as it is now.

        A process that does not answer is being started again, and told the last list then (proxy/supervisor.py).
        """
        with self._lock:
            if self._open:
                try:
                    self._tell()
                except ProxyError as error:
                    logger.warning("not every proxy was told which engines take calls: %s", error)

    def drain(self, url: str, *, timeout_s: float) -> DrainReport:
        """No new calls for this engine; those in flight are moved. Returns when none is left or time is over.

        Raises ProxyError.
        """
        return self._run(lambda pool: pool.drain(url, timeout_s=timeout_s))

    @property
    def load(self) -> EngineLoad:
        """As last looked at."""
        return self._load

    def look(self) -> EngineLoad:
        """Ask the proxies; as last known when one does not answer."""
        try:
            status = self._run(lambda pool: asyncio.wait_for(pool.status(), _LOOK_S))
            self._load = EngineLoad(
                residents={engine["url"]: int(engine["residents"]) for engine in status["engines"]},
                busy={engine["url"]: int(engine["busy"]) for engine in status["engines"]},
                speed=fit_speed(status["speed"], processes=len(self._shards.addresses)),
            )
        except (ProxyError, TimeoutError) as error:
            logger.info("the proxies do not say where sessions are: %r", error)
        return self._load

    def close(self) -> None:
        """Close the connections. May be repeated."""
        with self._life:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._aclose(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _tell(self) -> None:
        self._run(lambda pool: pool.set_engines(self._entries(), self._version()))

    def _run(self, work: Callable[[ProxyPool], Coroutine[Any, Any, T]]) -> T:
        """Raises ProxyError."""

        async def on_loop() -> T:
            if self._pool is None:
                self._pool = ProxyPool(self._shards)
            return await work(self._pool)

        try:
            return asyncio.run_coroutine_threadsafe(on_loop(), self._running_loop()).result()
        except CancelledError as error:
            raise ProxyError("the fleet is closed") from error

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._life:
            if self._closed:
                raise ProxyError("the fleet is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="fleet-proxies", daemon=True)
                self._thread.start()
            return self._loop

    async def _aclose(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._pool is not None:
            await self._pool.aclose()
