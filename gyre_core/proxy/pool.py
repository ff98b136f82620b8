"""Several proxy processes as one: sessions are sharded by rollout, the engines' slots are split between the processes.

Enters: the admin verbs of a `ProxyAdmin`, and the processes' addresses. Leaves: the same verbs over all of them; who
uses a `ProxyPool` need not know how many there are. `Shards` is what all pools of a run share, in any thread: which
process has which session, and which engines each was told last.

Rules: a session goes to the first process in its rollout's rendezvous order that has not yet its part of the open
sessions (a part as large as its part of the slots), and stays there. Each engine's slots are split as evenly as whole
numbers go, so that all processes together never call an engine more often than its slots allow. A process that was
restarted knows no engines: `repeat_engines` tells it again, without those that were drained since they were listed.
Verbs that met a process while it was down are tried again.
"""

import asyncio
import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import xxhash

from gyre_core.engine.speed import add_sums
from gyre_core.errors import ProxyError
from gyre_core.proxy.admin_client import CreatedSession, ProxyAdmin
from gyre_core.proxy.drains import DrainReport
from gyre_core.proxy.settings import EngineEntry, EnginesUpdate, HarnessName, LimitSettings, SamplingSettings
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import Json

T = TypeVar("T")

ATTEMPTS = 4  # of a verb whose proxy does not answer; while one is restarted its connections wait, they do not fail
RETRY_S = 0.25  # between two of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyAddress:
    """Where one proxy process is.

    Example: ProxyAddress(url="http://127.0.0.1:8080", secret="...")
    """

    url: str
    secret: str = field(repr=False)  # of its admin API


def rendezvous_order(rollout_id: str, num_processes: int) -> list[int]:
    """The processes in the order in which this rollout prefers them.

    Another number of processes keeps their order among themselves: of n + 1, one rollout in n + 1 moves to the new one.
    """
    return sorted(range(num_processes), key=lambda i: xxhash.xxh3_64_digest(f"{i}\n{rollout_id}".encode()))


def split_slots(slots: Sequence[int], num_processes: int) -> list[list[int]]:
    """Split each engine's slots between the processes: one row a process, one column an engine.

    A column sums to its engine's slots. The parts of one engine differ by at most one, and so do the processes' sums.
    Raises ValueError when some process would get no slot at all: its sessions could never be served.
    """
    if slots and sum(slots) < num_processes:
        raise ValueError(
            f"{len(slots)} engine(s) with {sum(slots)} slots cannot serve {num_processes} proxy processes; "
            "lower proxy.processes or raise rollout.slots"
        )
    rows: list[list[int]] = [[] for _ in range(num_processes)]
    for number in slots:
        part, rest = divmod(number, num_processes)
        poorest = sorted(range(num_processes), key=lambda i: sum(rows[i]))[:rest]
        for i, row in enumerate(rows):
            row.append(part + (i in poorest))
    return rows


def split_engines(engines: Sequence[EngineEntry], policy_version: int, num_processes: int) -> list[EnginesUpdate]:
    """What each process is told; an engine that a process has no slot of is not in its list. Raises ValueError."""
    rows = split_slots([engine.slots for engine in engines], num_processes)
    return [
        EnginesUpdate(
            engines=tuple(
                engine.model_copy(update={"slots": part}) for engine, part in zip(engines, row, strict=True) if part
            ),
            policy_version=policy_version,
        )
        for row in rows
    ]


def whole_engines(updates: Iterable[EnginesUpdate]) -> list[EngineEntry]:
    """The engines whose slots were split, whole again."""
    whole: dict[str, EngineEntry] = {}
    for update in updates:
        for engine in update.engines:
            slots = engine.slots + (whole[engine.url].slots if engine.url in whole else 0)
            whole[engine.url] = engine.model_copy(update={"slots": slots})
    return list(whole.values())


class Shards:
    """What the pools of one run share. Safe in threads.

    Example: shards = Shards([ProxyAddress(url="http://127.0.0.1:8080", secret="...")])
    """

    def __init__(self, addresses: Iterable[ProxyAddress]) -> None:
        self.addresses = tuple(addresses)
        if not self.addresses:
            raise ValueError("a run needs at least one proxy process")
        self._lock = threading.Lock()
        self._open = [0] * len(self.addresses)  # sessions, those being made included
        self._parts = [1] * len(self.addresses)  # slots of each process, all engines together
        self._sessions: dict[str, int] = {}
        self._restarts = [0] * len(self.addresses)
        self._lost: dict[int, str] = {}
        self._updates: list[EnginesUpdate] | None = None
        self._telling = threading.Lock()  # held while processes are told of engines: the last update is the last told

    @property
    def open_sessions(self) -> list[int]:
        """Sessions of each process that were made and not deleted."""
        with self._lock:
            return list(self._open)

    @property
    def restarts(self) -> list[int]:
        """How often each process was started again."""
        with self._lock:
            return list(self._restarts)

    def place(self, rollout_id: str) -> int:
        """Take a place for a session; `release` gives it back.

        By the hash alone the fullest of four processes has three or four of eight sessions; the bound keeps it to two,
        so that its part of the slots is enough for all.
        """
        with self._lock:
            sessions, slots = sum(self._open) + 1, sum(self._parts)
            order = rendezvous_order(rollout_id, len(self._open))
            index = next(i for i in order if self._open[i] < -(-sessions * self._parts[i] // slots))
            self._open[index] += 1
            return index

    def release(self, index: int) -> None:
        """Give a place back that no session took."""
        with self._lock:
            self._open[index] -= 1

    def opened(self, session_id: str, index: int) -> None:
        """The session for which a place was taken."""
        with self._lock:
            self._sessions[session_id] = index

    def closed(self, session_id: str) -> None:
        """A session is gone; one that is unknown is no error."""
        with self._lock:
            index = self._sessions.pop(session_id, None)
            if index is not None:
                self._open[index] -= 1

    def find(self, session_id: str) -> int | None:
        """The process that has a session."""
        with self._lock:
            return self._sessions.get(session_id)

    def restarted(self, index: int) -> None:
        """Count a restart."""
        with self._lock:
            self._restarts[index] += 1

    def lose(self, index: int, reason: str) -> None:
        """A process that will not come back."""
        with self._lock:
            self._lost[index] = reason

    def check(self, index: int | None = None) -> None:
        """Raise ProxyError when a process, or any, was lost."""
        with self._lock:
            for lost, reason in self._lost.items():
                if index is None or lost == index:
                    raise ProxyError(reason)

    @contextlib.asynccontextmanager
    async def telling(self) -> AsyncIterator[None]:
        """Only one at a time tells processes of engines."""
        while not self._telling.acquire(blocking=False):
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            self._telling.release()

    def record_engines(self, updates: list[EnginesUpdate]) -> None:
        """What the processes are to know; call it while `telling`."""
        self._updates = updates
        parts = [sum(engine.slots for engine in update.engines) for update in updates]
        if any(parts):
            with self._lock:
                self._parts = parts

    def record_drain(self, url: str) -> list[int]:
        """An engine that the processes are to know no longer; call it while `telling`.

        Returns the processes that must be told a new list, because one of them would be left without any slot.
        """
        if self._updates is None:
            return []
        rest = updates = [
            update.model_copy(update={"engines": tuple(engine for engine in update.engines if engine.url != url)})
            for update in self._updates
        ]
        if any(update.engines for update in updates) and not all(update.engines for update in updates):
            with contextlib.suppress(ValueError):  # fewer slots than processes: some wait until engines come back
                updates = split_engines(whole_engines(rest), rest[0].policy_version, len(rest))
        self.record_engines(updates)
        return [i for i, (kept, new) in enumerate(zip(rest, updates, strict=True)) if kept != new]

    def engines_of(self, index: int) -> EnginesUpdate | None:
        """What a process is to know, None before the first update; call it while `telling`."""
        return None if self._updates is None else self._updates[index]


class ProxyPool:
    """The admin verbs over all processes, for one event loop. Every failure is a ProxyError.

    Example: async with ProxyPool(shards) as proxy: session = await proxy.create_session(rollout_id="r1")
    """

    def __init__(self, shards: Shards, *, timeout_s: float = 60.0) -> None:
        self.shards = shards
        self._admins = [ProxyAdmin(address.url, address.secret, timeout_s=timeout_s) for address in shards.addresses]

    async def __aenter__(self) -> "ProxyPool":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        for admin in self._admins:
            await admin.aclose()

    async def create_session(
        self,
        *,
        rollout_id: str,
        policy_version: int = 0,
        sampling: SamplingSettings | None = None,
        limits: LimitSettings | None = None,
        harness: HarnessName | None = None,
    ) -> CreatedSession:
        """Open a session for a rollout.

        A process that died between making it and answering keeps an idle session that nobody uses.
        """
        index = self.shards.place(rollout_id)
        try:
            session = await self._ask(
                index,
                lambda admin: admin.create_session(
                    rollout_id=rollout_id,
                    policy_version=policy_version,
                    sampling=sampling,
                    limits=limits,
                    harness=harness,
                ),
            )
        except BaseException:
            self.shards.release(index)
            raise
        self.shards.opened(session.session_id, index)
        return session

    async def seal(self, session_id: str) -> Trajectory:
        """End a session (calls in flight are aborted) and fetch what it recorded; may be called again."""
        index = self.shards.find(session_id)
        if index is None:
            raise ProxyError(f"no proxy of this run has a session {session_id}")
        return await self._ask(index, lambda admin: admin.seal(session_id))

    async def delete(self, session_id: str) -> None:
        """Forget a session, its journal included; one that is unknown already is no error."""
        index = self.shards.find(session_id)
        if index is None:
            return
        try:
            await self._ask(index, lambda admin: admin.delete(session_id))
        finally:
            self.shards.closed(session_id)  # its rollout is over, whatever the proxy still keeps

    async def set_engines(self, engines: Iterable[EngineEntry], policy_version: int) -> None:
        """Say which engines take calls now, each process with its part of their slots. None: calls wait.

        When it returns every process has been told. One that fails does not keep the others from it.
        """
        try:
            updates = split_engines(tuple(engines), policy_version, len(self._admins))
        except ValueError as error:
            raise ProxyError(str(error)) from error
        async with self.shards.telling():
            self.shards.record_engines(updates)
            told = await asyncio.gather(*(self._tell(i) for i in range(len(updates))), return_exceptions=True)
        for error in told:
            if error is not None:
                raise error

    async def drain(self, url: str, *, timeout_s: float = 30.0) -> DrainReport:
        """Move all calls off an engine, on every process; it gets no new ones until `set_engines` lists it again.

        Returns when none is left on it or after `timeout_s`. May be called again. An engine that no process knows is
        drained already. A process that fails does not keep the others from it.
        """
        started_s = time.monotonic()
        async with self.shards.telling():  # a list that is told later is not undone by a drain that was begun before it
            changed = self.shards.record_drain(url)
            told = await asyncio.gather(*(self._tell(i) for i in changed), return_exceptions=True)
            begun = await self._ask_all(lambda admin: admin.drain(url, timeout_s=0.0))
        failures = [error for error in (*told, *begun) if isinstance(error, BaseException)]

        def wait(admin: ProxyAdmin) -> Awaitable[DrainReport]:
            left_s = max(0.0, timeout_s - (time.monotonic() - started_s))
            return admin.drain(url, timeout_s=left_s, begin=False)

        reports = list(begun)
        open_ones = [i for i, report in enumerate(begun) if isinstance(report, DrainReport) and report.left]
        waited = await asyncio.gather(*(self._ask(i, wait) for i in open_ones), return_exceptions=True)
        for i, report in zip(open_ones, waited, strict=True):
            reports[i] = report
        failures += [report for report in waited if isinstance(report, BaseException)]
        if failures:
            raise failures[0]
        return merge_reports([report for report in reports if isinstance(report, DrainReport)])

    async def repeat_engines(self, index: int) -> None:
        """Tell a process that was restarted what it has to know."""
        async with self.shards.telling():
            await self._tell(index)

    async def status(self) -> Json:
        """Counters of all processes: numbers are sums, `processes` has each one's own."""
        rows = await asyncio.gather(*(self._ask(i, lambda admin: admin.status()) for i in range(len(self._admins))))
        return merge_status(rows, self.shards.restarts)

    async def _tell(self, index: int) -> None:
        update = self.shards.engines_of(index)
        if update is not None:
            await self._ask(index, lambda admin: admin.set_engines(update.engines, update.policy_version))

    async def _ask_all(self, verb: Callable[[ProxyAdmin], Awaitable[T]]) -> list[T | BaseException]:
        return await asyncio.gather(*(self._ask(i, verb) for i in range(len(self._admins))), return_exceptions=True)

    async def _ask(self, index: int, verb: Callable[[ProxyAdmin], Awaitable[T]]) -> T:
        attempt = 1
        while True:
            self.shards.check(index)
            try:
                return await verb(self._admins[index])
            except ProxyError as error:
                if not error.retryable or attempt == ATTEMPTS:
                    self.shards.check(index)  # why it does not answer, when that is known
                    raise
            await asyncio.sleep(RETRY_S * attempt)
            attempt += 1


def merge_reports(reports: Sequence[DrainReport]) -> DrainReport:
    """One report of several processes' drains of one engine: it took as long as the slowest."""
    return DrainReport(
        moved=sum(report.moved for report in reports),
        partial_tokens=sum(report.partial_tokens for report in reports),
        left=sum(report.left for report in reports),
        given_up=sum(report.given_up for report in reports),
        seconds=max((report.seconds for report in reports), default=0.0),
    )


def merge_engines(rows: Iterable[Json]) -> list[Json]:
    """One row an engine of all processes' rows: numbers of calls and sessions are sums, `version` is the oldest."""
    engines: dict[str, Json] = {}
    for row in rows:
        known = engines.get(row["url"])
        if known is None:
            engines[row["url"]] = dict(row)
            continue
        for name in ("slots", "busy", "residents"):
            known[name] += row[name]
        known["version"] = min(known["version"], row["version"])
    return list(engines.values())


def merge_status(rows: Sequence[Json], restarts: Sequence[int]) -> Json:
    """One status of several processes'. `policy_version` is the oldest that any of them was told."""
    counters: Counter[str] = Counter()
    for row in rows:
        counters.update(row["counters"])
    names = [name for name, value in rows[0].items() if isinstance(value, int) and name != "policy_version"]
    return {
        **{name: sum(row[name] for row in rows) for name in names},
        "policy_version": min(row["policy_version"] for row in rows),
        "engines": merge_engines(engine for row in rows for engine in row["engines"]),
        "speed": functools.reduce(add_sums, (row["speed"] for row in rows)),
        "counters": dict(counters),
        "restarts": sum(restarts),
        "processes": [{**row, "restarts": number} for row, number in zip(rows, restarts, strict=True)],
    }
