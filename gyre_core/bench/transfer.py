"""`gyre bench transfer`: buffers of the size of weights and gradients between two processes, three ways in one run.

Enters: sizes and a number of rounds. Leaves, for each size: GB/s of a one-sided read over Mooncake, of a plain TCP
socket and of shared memory, the checksums compared each time. The three take turns, in the other order every second
round, so that other programs of the machine slow all of them alike; the median counts, the best is shown beside it, and
the ratio to the socket is the median over rounds of the two times of one round. On a machine that is busy with other
programs the ratio of times says little; the processor seconds of both processes for each GB stay what they are.

A peer process owns the source: it fills the buffer, offers it over Mooncake and shared memory, and sends it on a socket
when asked. The timed part is the copy into a destination that exists (as a receiver's staging does); the checksum is
timed apart. The socket is read as Mooncake reads, on a thread that does nothing else: the thread that has just cleared
and checked the destination would get the processor later than one that was idle.
"""

import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import torch

from gyre_core.errors import GyreError, SetupError, TransferError
from gyre_core.transfer.gradients import BufferOffer, BufferReader, buffer_checksum
from gyre_core.transfer.mooncake import load_mooncake, transport_protocol
from gyre_core.transfer.shared_memory import SharedMemoryBuffer, SharedMemoryReader

MIB = 2**20
GOAL = 0.9  # of the socket's speed
WEIGHTS_AND_GRADIENTS_MIB = (256, 512)  # bf16 weights and fp32 gradients of a model of 134 million parameters
_ASK = struct.Struct("<Q")


def bench_transfer(sizes_mib: list[int], *, rounds: int, with_mooncake: bool = True) -> dict[str, Any]:
    """Measure; raises ValueError for bad sizes, SetupError without Mooncake, TransferError when bytes differ."""
    if not sizes_mib or min(sizes_mib) < 1 or rounds < 1:
        raise ValueError("sizes are at least 1 MiB, and there is at least one round")
    if with_mooncake:
        load_mooncake()
    rows = [_measure(size * MIB, rounds, with_mooncake) for size in sizes_mib]
    result: dict[str, Any] = {
        "rounds": rounds,
        "protocol": transport_protocol(),
        "cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),  # programs that want a processor, these two among them
        "table": rows,
        "checksums_equal": True,  # otherwise there is no result
    }
    if with_mooncake:
        worst = min(row["mooncake_vs_socket"] for row in rows)
        cpu = max(row["mooncake_cpu_vs_socket"] for row in rows)
        result |= {"mooncake_ratio_vs_socket": worst, "goal": GOAL, "goal_met": worst >= GOAL}
        result["mooncake_cpu_vs_socket"] = cpu
    return result


def transfer_lines(result: dict[str, Any]) -> list[str]:
    """The result as a table."""
    lines = [f"{'MiB':>6s} {'way':14s} {'median GB/s':>12s} {'best GB/s':>10s} {'CPU s/GB':>9s}"]
    for row in result["table"]:
        for way, values in row["ways"].items():
            lines.append(
                f"{row['mib']:6d} {way:14s} {values['median_gb_s']:12.2f} {values['best_gb_s']:10.2f} "
                f"{values['cpu_s_per_gb']:9.2f}"
            )
        lines.append(f"{row['mib']:6d} {'checksum':14s} {row['checksum_gb_s']:12.2f}")
    if "mooncake_ratio_vs_socket" in result:
        lines.append(f"Mooncake over the socket, worst size: {result['mooncake_ratio_vs_socket']:.2f} (goal {GOAL})")
        lines.append(f"processor seconds, Mooncake over the socket, worst size: {result['mooncake_cpu_vs_socket']:.2f}")
        lines.append(f"load of the machine: {result['load_1min']} on {result['cpus']} processors")
    return lines


def _measure(size_bytes: int, rounds: int, with_mooncake: bool) -> dict[str, Any]:
    listener = socket.create_server(("127.0.0.1", 0))
    argv = [sys.executable, "-m", "gyre_core.bench.transfer", str(size_bytes), str(listener.getsockname()[1])]
    peer = subprocess.Popen([*argv, "mooncake" if with_mooncake else ""], stdin=subprocess.PIPE)
    reader: BufferReader | None = None
    thread = ThreadPoolExecutor(1, "socket")
    try:
        listener.settimeout(60.0)
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        (length,) = _ASK.unpack(_receive(connection, bytearray(_ASK.size)))
        offers = [BufferOffer.from_json(item) for item in orjson.loads(_receive(connection, bytearray(length)))]
        into = torch.zeros(size_bytes, dtype=torch.uint8)
        ways: dict[str, Callable[[], object]] = {}
        if with_mooncake:
            from gyre_core.transfer.mooncake_buffers import MooncakeReader

            reader = MooncakeReader()
            ways["mooncake"] = lambda: reader.read(offers[1], into)
        ways["socket"] = lambda: thread.submit(_ask_and_receive, connection, into.numpy().data).result()
        shared = SharedMemoryReader()
        ways["shared_memory"] = lambda: shared.read(offers[0], into)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, float] = dict.fromkeys(ways, 0.0)
        checksum_s = []
        for turn in range(rounds + 1):
            for way, copy in sorted(ways.items(), reverse=turn % 2 == 1):
                into.zero_()
                before, started = _cpu_s(peer.pid), time.perf_counter()
                copy()
                taken = time.perf_counter() - started
                spent = _cpu_s(peer.pid) - before
                started = time.perf_counter()
                if buffer_checksum(into) != offers[0].checksum:
                    raise TransferError(f"{size_bytes} bytes over {way} arrived with another checksum")
                if turn:  # the first makes connections and touches pages
                    checksum_s.append(time.perf_counter() - started)
                    seconds[way].append(taken)
                    cpu[way] += spent
        connection.close()
    except OSError as error:
        raise GyreError(f"the peer of the transfer benchmark does not answer: {error}") from error
    finally:
        listener.close()
        thread.shutdown()
        if reader is not None:
            reader.close()
        if peer.stdin is not None:
            peer.stdin.close()
        try:
            peer.wait(10.0)
        except subprocess.TimeoutExpired:
            peer.kill()
            peer.wait()
    gigabytes = size_bytes / 1e9
    row: dict[str, Any] = {
        "mib": size_bytes // MIB,
        "ways": {
            way: {
                "median_gb_s": round(gigabytes / statistics.median(times), 3),
                "best_gb_s": round(gigabytes / min(times), 3),
                "cpu_s_per_gb": round(cpu[way] / (gigabytes * rounds), 3),
            }
            for way, times in seconds.items()
        },
        "checksum_gb_s": round(gigabytes / statistics.median(checksum_s), 3),
    }
    if with_mooncake:
        pairs = zip(seconds["socket"], seconds["mooncake"], strict=True)
        row["mooncake_vs_socket"] = round(statistics.median(plain / ours for plain, ours in pairs), 3)
        row["mooncake_cpu_vs_socket"] = round(cpu["mooncake"] / max(cpu["socket"], 0.01), 3)
    return row


def _ask_and_receive(connection: socket.socket, into: memoryview) -> None:
    connection.sendall(b"x")
    _receive(connection, into)


def _receive(connection: socket.socket, into: bytearray | memoryview) -> bytearray | memoryview:
    view, got = memoryview(into), 0
    while got < len(view):
        count = connection.recv_into(view[got:])
        if count == 0:
            raise OSError("the connection was closed")
        got += count
    return into


def _cpu_s(other: int) -> float:
    """Processor seconds of this process and the other."""
    total = 0
    for pid in (os.getpid(), other):
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _peer(size_bytes: int, port: int, with_mooncake: bool) -> None:
    """The other process: offers the same bytes three ways until its standard input or the connection ends."""
    source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
    with SharedMemoryBuffer(size_bytes) as shared:
        shared.memory.copy_(source)
        offers = [shared.offer("bench").to_json()]
        registered = None
        if with_mooncake:
            from gyre_core.transfer.mooncake_buffers import MooncakeBuffer

            registered = MooncakeBuffer(size_bytes)
            registered.memory.copy_(source)
            offers.append(registered.offer("bench").to_json())
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            text = orjson.dumps(offers)
            connection.sendall(_ASK.pack(len(text)) + text)
            while connection.recv(1):
                connection.sendall(source.numpy().data)
        if registered is not None:
            registered.close()


if __name__ == "__main__":
    try:
        _peer(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "mooncake")
    except SetupError as error:
        sys.exit(str(error))
