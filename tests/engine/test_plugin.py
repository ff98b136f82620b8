"""The parts of the engine's CPU plugin that run without SGLang (the rest is met by the tests of a real server)."""

import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

PLUGIN = Path(__file__).parents[2] / "infra" / "engine" / "plugin" / "gyre_sglang_cpu"


def load(name: str) -> ModuleType:
    """A module of the plugin, which is not installed in this environment, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"plugin_under_test_{name}", PLUGIN / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed_sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The version that importlib.metadata tells; change item 0."""
    version = ["0.5.23"]
    monkeypatch.setattr(metadata, "version", lambda name: version[0] if name == "sglang" else "1")
    yield version


def test_activate_on_the_supported_version_names_the_platform(
    installed_sglang: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))  # nothing to declare for it
    assert load("__init__").activate() == "gyre_sglang_cpu.platform.GyreCpuPlatform"


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23.post1", "0.6.0"])
@pytest.mark.parametrize("half", ["activate", "install_hooks"])
def test_another_sglang_stops_the_process_with_the_command(
    installed_sglang: list[str], version: str, half: str
) -> None:
    installed_sglang[0] = version
    # SystemExit: SGLang logs and swallows every Exception that a plugin raises.
    with pytest.raises(SystemExit, match=f"^gyre-sglang-cpu: sglang {version} is installed.*make engine"):
        getattr(load("__init__"), half)()


def test_murmur_hash_is_the_gpu_kernels() -> None:
    """Values of sglang.kernels.ops.sampling.murmur_hash (0.5.23), run by Triton's interpreter."""
    seeds = torch.tensor([0, 7, 2**40 + 3])
    positions = torch.tensor([0, 12, 100_000])
    hashes = load("sampling").murmur_hash32(seeds.to(torch.uint64), positions, torch.arange(4))
    assert hashes.tolist() == [
        [2167721464, 10027521, 2423355346, 1368026766],
        [403230713, 2083681129, 1410622644, 2389117767],
        [3518298174, 3568117554, 381521209, 300831235],
    ]


def test_murmur_hash_of_consecutive_positions_is_uniform() -> None:
    hashes = load("sampling").murmur_hash32(torch.full((500,), 3), torch.arange(500), torch.arange(64))
    uniform = hashes.double() / 2**32
    assert abs(float(uniform.mean()) - 0.5) < 0.01  # 32,000 draws: the standard error is 0.0016
    assert abs(float(uniform.var()) - 1 / 12) < 0.005


def test_kv_copies_take_rows_to_pages_and_back() -> None:
    """Two layers, pages of two tokens, one head of one number: token t of layer l holds 10 l + t, values 100 more."""
    kv = load("kv_copies")
    keys = [torch.tensor([10.0 * layer + token for token in range(6)]).reshape(6, 1, 1) for layer in range(2)]
    values = [layer + 100 for layer in keys]
    hosts = [torch.zeros(3, 2, 2, 1, 1) for _ in range(2)]  # [page, layer, slot, head, dim]
    rows, slots = torch.tensor([4, 5, 0, 1]), torch.tensor([2, 3, 4, 5])  # two pages into host pages 1 and 2
    kv.store_layers_to_pages(
        src_ptrs=[*keys, *values], dst_ptrs=hosts, src_indices=rows, dst_indices=slots, page_size=2
    )
    assert hosts[0].flatten(2).tolist() == [[[0, 0], [0, 0]], [[4, 5], [14, 15]], [[0, 1], [10, 11]]]
    assert hosts[1].flatten(2).tolist() == [[[0, 0], [0, 0]], [[104, 105], [114, 115]], [[100, 101], [110, 111]]]
    back = [torch.zeros(6, 1, 1) for _ in range(2)]
    kv.load_layer_from_pages(
        src_ptrs=hosts, dst_ptrs=back, src_indices=slots, dst_indices=rows, layer_id=1, page_size=2
    )
    assert back[0].flatten().tolist() == [10, 11, 0, 0, 14, 15]
    assert back[1].flatten().tolist() == [110, 111, 0, 0, 114, 115]


def test_kv_copies_layer_first_take_rows_to_rows() -> None:
    source, target = torch.arange(4.0).reshape(4, 1, 1), torch.zeros(4, 1, 1)
    load("kv_copies").copy_layer_first(
        src_layers=[source],
        dst_layers=[target],
        src_indices=torch.tensor([3, 1]),
        dst_indices=torch.tensor([0, 2]),
        page_size=1,
    )
    assert target.flatten().tolist() == [3, 0, 1, 0]
