"""The fleet's hold on the proxies: which engines take calls, and calls that leave one.

Enters: the cells' records. Leaves: the proxies' engine list, always computed from the records and told in order, so
that the last list told is the newest belief. Calls of an engine that is drained go on elsewhere with what they have.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from gyre_core.errors import ProxyError
from gyre_core.proxy.pool import ProxyPool, Shards
from gyre_core.proxy.settings import EngineEntry
from gyre_core.types import Json

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What became of an engine's calls. Example: Drained(moved=3, partial_tokens=412, left=0)"""

    moved: int
    partial_tokens: int  # sampled before, kept
    left: int  # still on it when time was over


class EngineBoard:
    """Tells the proxies. Thread-safe.

    Example: board = EngineBoard(shards, entries=lambda: [entry], version=lambda: 3); board.tell()
    """

    def __init__(
        self, shards: Shards, *, entries: Callable[[], Sequence[EngineEntry]], version: Callable[[], int]
    ) -> None:
        self._shards = shards
        self._entries = entries
        self._version = version
        self._lock = threading.Lock()
        self._open = False

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

    def drain(self, url: str, *, timeout_s: float) -> Drained:
        """No new calls for this engine; those in flight are moved. Returns when none is left or time is over.

        Raises ProxyError.
        """
        result = self._run(lambda pool: pool.drain(url, timeout_s=timeout_s), timeout_s=timeout_s + 60.0)
        return Drained(moved=result.moved, partial_tokens=result.partial_tokens, left=result.left)

    def residents(self) -> dict[str, int]:
        """Open sessions by the engine that served them last; none known when a proxy does not answer."""
        try:
            status: Json = self._run(lambda pool: pool.status(), timeout_s=10.0)
        except ProxyError:
            return {}
        return {engine["url"]: int(engine.get("residents", engine["busy"])) for engine in status["engines"]}

    def _tell(self) -> None:
        self._run(lambda pool: pool.set_engines(self._entries(), self._version()))

    def _run(self, work: Callable[[Any], Coroutine[Any, Any, T]], *, timeout_s: float = 60.0) -> T:
        async def with_pool() -> T:
            async with ProxyPool(self._shards, timeout_s=timeout_s) as pool:
                return await work(pool)

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(with_pool())
        with ThreadPoolExecutor(max_workers=1) as thread:  # a flow may call from a thread that has a loop
            return thread.submit(lambda: asyncio.run(with_pool())).result()
