"""A publication's promises, on an engine made of a dictionary that can fail at every step."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from gyre_core.config.models import TransferConfig
from gyre_core.errors import EngineError, SetupError, TransferError
from gyre_core.transfer.layout import WHOLE, EngineRanks, engine_tensors, host_checksum
from gyre_core.transfer.weights import WeightPublisher, choose_backend

NAMES = ("a.weight", "b.weight")
LOCAL = TransferConfig(backend="local")


def values(number: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((3,), number) for name in NAMES}


class DictEngine:
    """Engine and its client in one. `fail_at` raises in that verb; `half` loads only the first parameter and fails."""

    dtype = "float32"
    device = "cpu"
    remote_weights = False
    ranks = WHOLE

    def __init__(self) -> None:
        self.held = values(0.0)
        self.version = 0
        self.paused = False
        self.stopped = False
        self.fail_at = ""
        self.half = False
        self.refuse_flush = 0
        self.log: list[str] = []
        self.hold: asyncio.Event | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator["DictEngine"]:
        yield self

    def stop(self) -> None:
        self.stopped = True

    def _verb(self, name: str) -> None:
        self.log.append(name)
        if self.fail_at == name:
            raise EngineError(f"{name} failed")

    async def pause(self, mode: Literal["retract"] = "retract") -> None:
        self._verb("pause")
        self.paused = True

    async def continue_generation(self) -> None:
        self._verb("continue")
        self.paused = False

    async def flush_cache(self) -> None:
        self._verb("flush")
        if self.refuse_flush:
            self.refuse_flush -= 1
            raise EngineError("calls are running", retryable=True)

    async def update_weights_from_disk(self, path: str) -> None:
        assert self.paused
        if self.hold is not None:
            await self.hold.wait()
        loaded = load_file(Path(path) / "model.safetensors")
        if self.half:
            self.held = self.held | {NAMES[0]: loaded[NAMES[0]]}
            raise EngineError("broke off")
        self._verb("load")
        self.held = loaded

    async def weight_version(self) -> int:
        self._verb("version?")
        return self.version

    async def update_weight_version(self, version: int) -> None:
        assert self.paused or version == self.version
        self._verb("name")
        self.version = version

    async def checksums(self) -> list[dict[str, str]]:
        self._verb("checksums")
        return [{name: host_checksum(tensor) for name, tensor in self.held.items()}]

    async def weight_memory(self, rank: int = 0) -> tuple[str, dict[str, tuple[int, int, int]]]:
        raise EngineError("no memory")

    @property
    def serves(self) -> tuple[int, float] | None:
        """(version, value) that a call meets; None when it meets nothing."""
        held = {float(tensor[0]) for tensor in self.held.values()}
        if self.paused or self.stopped:
            return None
        assert len(held) == 1, "half-new weights are served"
        return self.version, held.pop()


async def publish(engine: DictEngine, number: float, version: int, tmp_path: Path) -> WeightPublisher:
    publisher = WeightPublisher(engine, LOCAL, tmp_path)
    await publisher.publish(values(number).items(), version)
    return publisher


async def test_publish_changes_weights_and_version_while_paused(tmp_path: Path) -> None:
    engine = DictEngine()
    publisher = WeightPublisher(engine, LOCAL, tmp_path)
    report = await publisher.publish(values(2.0).items(), 5)
    assert engine.serves == (5, 2.0)
    assert engine.log == ["version?", "checksums", "pause", "flush", "load", "checksums", "name", "continue"]
    assert (report.version, report.backend, report.size_bytes) == (5, "local", 24)
    assert set(report.phases_s) == {"prepare", "stage", "pause", "write", "verify", "name"}
    assert report.paused_s <= report.seconds


async def test_publish_same_weights_again_only_raises_the_version(tmp_path: Path) -> None:
    engine = DictEngine()
    publisher = await publish(engine, 2.0, 1, tmp_path)
    await publisher.publish(values(2.0).items(), 2)
    assert engine.serves == (2, 2.0)


async def test_publish_waits_for_the_pause_to_take_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_core.transfer.weights.FLUSH_WAIT_S", 0.0)
    engine = DictEngine()
    engine.refuse_flush = 3
    await publish(engine, 2.0, 1, tmp_path)
    assert engine.log.count("flush") == 4
    assert engine.serves == (1, 2.0)


@pytest.mark.parametrize("verb", ["pause", "flush", "load"])
async def test_publish_fails_before_anything_changed_old_version_is_served(verb: str, tmp_path: Path) -> None:
    engine = DictEngine()
    engine.fail_at = verb
    with pytest.raises(TransferError, match="serves them on"):
        await publish(engine, 2.0, 1, tmp_path)
    assert engine.serves == (0, 0.0)


async def test_publish_half_written_engine_is_stopped(tmp_path: Path) -> None:
    engine = DictEngine()
    engine.half = True
    with pytest.raises(TransferError, match="it was stopped"):
        await publish(engine, 2.0, 1, tmp_path)
    assert engine.stopped
    assert engine.paused  # and never went on


@pytest.mark.parametrize("verb", ["name", "continue"])
async def test_publish_fails_after_the_write_engine_is_stopped(verb: str, tmp_path: Path) -> None:
    engine = DictEngine()
    engine.fail_at = verb
    with pytest.raises(TransferError, match="it was stopped"):
        await publish(engine, 2.0, 1, tmp_path)
    assert engine.stopped


async def test_publish_engine_that_arrived_changed_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DictEngine()
    monkeypatch.setattr("gyre_core.transfer.weights.host_checksum", lambda tensor: "0" * 16)
    with pytest.raises(TransferError, match=r"2 of 2 parameters arrived changed, a\.weight first"):
        await publish(engine, 2.0, 1, tmp_path)
    assert engine.stopped


@pytest.mark.parametrize("verb", ["version?", "checksums"])
async def test_publish_engine_that_does_not_answer_is_left_alone(verb: str, tmp_path: Path) -> None:
    engine = DictEngine()
    engine.fail_at = verb
    with pytest.raises(TransferError, match="nothing was changed"):
        await publish(engine, 2.0, 1, tmp_path)
    assert "pause" not in engine.log
    assert engine.serves == (0, 0.0)


async def test_publish_weights_that_are_not_finite_never_reach_the_engine(tmp_path: Path) -> None:
    engine = DictEngine()
    with pytest.raises(TransferError, match="not finite"):
        await publish(engine, float("nan"), 1, tmp_path)
    assert engine.log == []


async def test_publish_weights_of_another_model_never_pause_the_engine(tmp_path: Path) -> None:
    engine = DictEngine()
    publisher = WeightPublisher(engine, LOCAL, tmp_path)
    with pytest.raises(TransferError, match="which the published weights lack"):
        await publisher.publish({NAMES[0]: torch.ones(3)}.items(), 1)
    assert engine.serves == (0, 0.0)


async def test_publish_cancelled_runs_to_its_end_first(tmp_path: Path) -> None:
    engine = DictEngine()
    engine.hold = asyncio.Event()
    publisher = WeightPublisher(engine, LOCAL, tmp_path)
    task = asyncio.create_task(publisher.publish(values(2.0).items(), 1))
    while not engine.paused:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert engine.paused
    engine.hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.serves == (1, 2.0)


def test_choose_backend_auto_takes_mooncake_when_both_sides_have_it() -> None:
    assert choose_backend("auto", remote_weights=True, mooncake_error="")[0] == "mooncake"
    assert choose_backend("mooncake", remote_weights=True, mooncake_error="")[0] == "mooncake"


@pytest.mark.parametrize(
    ("remote", "error", "words"), [(True, "no libibverbs", "no libibverbs"), (False, "", "without remote weights")]
)
def test_choose_backend_without_mooncake_says_why(remote: bool, error: str, words: str) -> None:
    backend, reason = choose_backend("auto", remote_weights=remote, mooncake_error=error)
    assert backend == "local"
    assert words in reason
    with pytest.raises(SetupError, match=words):
        choose_backend("mooncake", remote_weights=remote, mooncake_error=error)


def test_choose_backend_local_does_not_ask_for_mooncake() -> None:
    assert choose_backend("local", remote_weights=True, mooncake_error="")[0] == "local"


class SplitEngine(DictEngine):
    """Two ranks with halves of a layer's weights."""

    ranks = EngineRanks(count=2, kv_heads=2)
    names = ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.o_proj.weight")

    def __init__(self) -> None:
        super().__init__()
        self.held = layer(0.0)
        self.broken_rank: int | None = None

    async def checksums(self) -> list[dict[str, str]]:
        self._verb("checksums")
        parts = [engine_tensors(self.held, self.names, ranks=self.ranks, rank=rank) for rank in range(2)]
        sums = [{name: host_checksum(tensor) for name, tensor in part.items()} for part in parts]
        if self.broken_rank is not None and float(self.held[self.names[1]].max()) > 0:
            sums[self.broken_rank][self.names[1]] = "0" * 16
        return sums


def layer(value: float) -> dict[str, torch.Tensor]:
    prefix = "model.layers.0.self_attn."
    return {f"{prefix}{name}_proj.weight": torch.full((4, 4), value) for name in "qkvo"}


async def test_publish_compares_every_rank(tmp_path: Path) -> None:
    engine = SplitEngine()
    report = await WeightPublisher(engine, LOCAL, tmp_path).publish(layer(2.0).items(), 5)
    assert (engine.version, report.size_bytes) == (5, 4 * 16 * 4)
    engine.broken_rank = 1
    with pytest.raises(TransferError, match=r"1 of 4 parameters arrived changed, rank1\..*o_proj"):
        await WeightPublisher(engine, LOCAL, tmp_path).publish(layer(3.0).items(), 6)
    assert engine.stopped, "what it holds is not known"


async def test_publish_to_an_engine_with_other_ranks_than_configured_changes_nothing(tmp_path: Path) -> None:
    engine = SplitEngine()
    engine.ranks = EngineRanks(count=4, kv_heads=2)
    with pytest.raises(TransferError, match=r"2 ranks, engine\.tensor_parallel says 4"):
        await WeightPublisher(engine, LOCAL, tmp_path).publish(layer(2.0).items(), 5)
    assert engine.version == 0 and float(engine.held[engine.names[1]].max()) == 0.0
