"""The KV store's process, flags and errors. What it does for calls: tests/integration/test_kv_moves.py."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gyre_core.config.models import EngineConfig
from gyre_core.engine.kv_store import KvStore, KvStoreContents, master_program, parse_contents, restart_delay_s
from gyre_core.engine.launch import EngineInstall, launch_command
from gyre_core.errors import ConfigError, EngineError

CPU = EngineInstall(
    python=Path("/env/bin/python"),
    sglang="0.5.23",
    plugin="0.1.0",
    torch="2.13.0+cpu",
    mooncake=True,
    mooncake_error="",
)


def command(kv_store: str | None, **config: object) -> list[str]:
    return launch_command(
        CPU,
        EngineConfig(**config),  # type: ignore[arg-type]
        model_path=Path("/m"),
        context_length=4096,
        slots=12,
        seed=7,
        policy_version=3,
        port=30001,
        memory_port=None,
        kv_store=kv_store,
    )


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_launch_command_with_a_store_writes_through_and_reads_any_page() -> None:
    argv = command("127.0.0.1:5000", kv_page_tokens=8, kv_store_bytes=2**26, kv_host_ratio=3.0)
    assert value(argv, "--page-size") == "8"
    assert value(argv, "--hicache-ratio") == "3.0"
    assert value(argv, "--hicache-write-policy") == "write_through"
    assert value(argv, "--hicache-storage-backend") == "mooncake"
    assert value(argv, "--hicache-storage-prefetch-policy") == "wait_complete"
    assert value(argv, "--hicache-mem-layout") == "page_first_direct"
    store = json.loads(value(argv, "--hicache-storage-backend-extra-config"))
    assert store["master_server_address"] == "127.0.0.1:5000"
    assert store["local_hostname"] == "127.0.0.1"
    assert store["global_segment_size"] == 2**26
    assert store["prefetch_threshold"] == 8  # SGLang's own, 256, would compute short calls anew


def test_launch_command_without_a_store_has_no_hierarchical_cache() -> None:
    argv = command(None)
    assert "--page-size" not in argv
    assert not any("hicache" in word or "hierarchical" in word for word in argv)


def test_store_without_mooncake_is_a_config_error_with_the_command(tmp_path: Path) -> None:
    bare = replace(CPU, mooncake=False, mooncake_error="libibverbs.so.1: cannot open shared object file")
    with pytest.raises(
        ConfigError, match=r'engine\.kv_store = "mooncake" needs Mooncake.*libibverbs\.so\.1.*make engine'
    ):
        KvStore(EngineConfig(kv_store="mooncake"), log_path=tmp_path / "log", install=bare)


def test_store_without_the_master_program_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="mooncake_master, which is neither beside /env/bin/python nor in PATH"):
        master_program(CPU)
    (tmp_path / "mooncake_master").touch(mode=0o755)
    assert master_program(CPU) == tmp_path / "mooncake_master"


def test_restart_delay_is_nothing_once_and_then_doubles_up_to_a_bound() -> None:
    assert [restart_delay_s(n) for n in (0, 1, 2, 3, 4)] == [0.0, 0.0, 0.2, 0.4, 0.8]
    assert restart_delay_s(1000) == 30.0


def test_contents_are_read_from_the_metrics() -> None:
    text = (
        "# HELP master_key_count Total\n# TYPE master_key_count gauge\nmaster_key_count 28\n"
        "master_allocated_bytes 57344\nmaster_total_capacity_bytes 2147483648\nmaster_active_clients 2\n"
        'master_value_size_bytes_bucket{le="4096.000000"} 7\n'
    )
    assert parse_contents(text) == KvStoreContents(
        num_objects=28, size_bytes=57344, capacity_bytes=2147483648, num_engines=2
    )
    with pytest.raises(EngineError, match="master_active_clients"):
        parse_contents(text.replace("master_active_clients 2", ""))


@pytest.mark.integration
def test_master_listens_on_loopback_only_and_ends_with_the_store(tmp_path: Path) -> None:
    with KvStore(EngineConfig(kv_store="mooncake"), log_path=tmp_path / "log") as store:
        master = psutil.Process(store.pid).children()[0]
        listening = [c.laddr.ip for c in master.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) == {"127.0.0.1"}
        assert store.contents() == KvStoreContents(num_objects=0, size_bytes=0, capacity_bytes=0, num_engines=0)
    assert not master.is_running()
    assert not store.running()
    assert store.restarts == 0


@pytest.mark.integration
def test_master_killed_is_started_again_at_its_address(tmp_path: Path) -> None:
    with KvStore(EngineConfig(kv_store="mooncake"), log_path=tmp_path / "log") as store:
        address = store.address
        os.kill(psutil.Process(store.pid).children()[0].pid, signal.SIGKILL)
        wait_for(lambda: store.restarts == 1)
        host, port = address.split(":")

        def accepts() -> bool:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                return False
            return True

        wait_for(accepts)
        assert store.address == address
    assert not store.running()
