"""Which interpreter and flags a server gets, and what a failed start says."""

import json
import sys
from pathlib import Path

import pytest

from gyre_core.config.models import EngineConfig
from gyre_core.engine import launch
from gyre_core.engine.launch import (
    EngineInstall,
    check_install,
    find_engine_python,
    inspect_python,
    launch_command,
    launch_environment,
    read_vocab_size,
)
from gyre_core.engine.sglang import explain_log
from gyre_core.errors import EngineError, SetupError
from tests.support.tiny_model import VOCAB_SIZE, save_tiny_model

CPU = EngineInstall(
    python=Path("/env/bin/python"),
    sglang="0.5.23",
    plugin="0.1.0",
    torch="2.13.0+cpu",
    mooncake=True,
    mooncake_error="",
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EngineInstall:
    monkeypatch.setattr(launch, "nvidia_gpu_present", lambda: True)
    return EngineInstall(
        python=Path("/env/bin/python"), sglang="0.5.23", plugin=None, torch="2.13.0", mooncake=True, mooncake_error=""
    )


def command(install: EngineInstall, *, memory_port: int | None = None, **config: object) -> list[str]:
    return launch_command(
        install,
        EngineConfig(**config),  # type: ignore[arg-type]
        model_path=Path("/m"),
        context_length=4096,
        slots=12,
        seed=7,
        policy_version=3,
        port=30001,
        memory_port=memory_port,
    )


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_launch_command_on_cpu_holds_limits_seed_and_version() -> None:
    argv = command(CPU, max_total_tokens=16384)
    assert argv[:3] == ["/env/bin/python", "-P", str(launch.SERVE)]
    assert value(argv, "--device") == "cpu"
    assert value(argv, "--attention-backend") == "torch_native"
    assert value(argv, "--max-running-requests") == "12"
    assert value(argv, "--max-total-tokens") == "16384"
    assert value(argv, "--context-length") == "4096"
    assert value(argv, "--random-seed") == "7"
    assert value(argv, "--weight-version") == "3"
    assert "--sleep-on-idle" in argv
    assert "--disable-radix-cache" not in argv
    assert not any("remote-instance" in word for word in argv)


def test_launch_command_with_remote_weights_opens_the_memory() -> None:
    argv = command(CPU, memory_port=30002)
    assert "--remote-instance-weight-loader-start-seed-via-transfer-engine" in argv
    assert value(argv, "--engine-info-bootstrap-port") == "30002"


def test_launch_command_extra_args_come_last_so_that_they_win() -> None:
    assert command(CPU, extra_args=("--mem-fraction-static", "0.3"))[-2:] == ["--mem-fraction-static", "0.3"]


def test_launch_command_on_gpu_takes_the_gpu_back_ends(gpu: EngineInstall) -> None:
    argv = command(gpu, dtype="bfloat16")
    assert gpu.device == "cuda"
    assert value(argv, "--device") == "cuda"
    assert value(argv, "--dtype") == "bfloat16"
    assert "torch_native" not in argv
    assert "--disable-cuda-graph" not in argv
    assert "SGLANG_PLATFORM" not in launch_environment(gpu, EngineConfig(), api_key="k")


def test_launch_environment_on_cpu_selects_the_plugin_and_bounds_threads() -> None:
    environment = launch_environment(CPU, EngineConfig(threads=2), api_key="k")
    assert environment["SGLANG_PLATFORM"] == "gyre_cpu"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["MC_TRANSFER_TIMEOUT"] == "30"


def test_cpu_build_of_torch_stays_on_the_cpu_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "nvidia_gpu_present", lambda: True)
    assert CPU.device == "cpu"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sglang": None}, "has no sglang"),
        ({"sglang": "0.5.24"}, "0.5.24; the CPU platform plugin works with 0.5.23 only"),
        ({"plugin": None}, "lacks the CPU platform plugin"),
    ],
)
def test_check_install_says_what_is_missing_and_the_command(changes: dict[str, str | None], words: str) -> None:
    install = EngineInstall(
        **{"python": CPU.python, "sglang": "0.5.23", "plugin": "0.1.0", "torch": "2.13.0+cpu", **changes},  # type: ignore[arg-type]
        mooncake=False,
        mooncake_error="",
    )
    with pytest.raises(SetupError, match=words) as caught:
        check_install(install)
    assert "make engine" in str(caught.value)


def test_find_engine_python_prefers_config_then_the_venv_beside_the_package(tmp_path: Path) -> None:
    venv = tmp_path / ".venv-engine" / "bin" / "python"
    venv.parent.mkdir(parents=True)
    venv.touch()
    assert find_engine_python(EngineConfig(), root=tmp_path) == venv
    own = Path(sys.executable)
    assert find_engine_python(EngineConfig(python=own), root=tmp_path) == own


def test_find_engine_python_without_any_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="make engine"):
        find_engine_python(EngineConfig(), root=tmp_path)
    with pytest.raises(SetupError, match="does not exist"):
        find_engine_python(EngineConfig(python=tmp_path / "none"), root=tmp_path)


def test_inspect_python_that_does_not_run_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="make engine"):
        inspect_python(tmp_path / "none")


def test_read_vocab_size_is_the_embeddings(tmp_path: Path) -> None:
    assert read_vocab_size(save_tiny_model(tmp_path)) == VOCAB_SIZE


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"vocab_size": "many"}), json.dumps({"vocab_size": 0})])
def test_read_vocab_size_of_a_broken_config_is_an_engine_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"model\.path"):
        read_vocab_size(tmp_path)


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        ("gyre-sglang-cpu: sglang 0.5.24 is installed, but", "make engine"),
        ("Traceback\n  File x\nModuleNotFoundError: No module named 'zmq'\nlater", "make engine"),
        ("OSError: [Errno 98] error while attempting to bind: address already in use", "a new one is chosen"),
        ("launch_server.py: error: unrecognized arguments: --bogus", "engine.extra_args"),
        ("RuntimeError: Not enough memory. Please try", "engine.max_total_tokens"),
        ("OSError: Can't load the configuration of '/m'", "model.path"),
    ],
)
def test_explain_log_gives_the_telling_line_and_a_hint(log: str, hint: str) -> None:
    text = explain_log(f"server_args={{'error: no'}}\n{log}\nSIGQUIT received", Path("e.log"))
    assert hint in text
    assert "e.log" in text
    assert "server_args" not in text


def test_explain_log_of_an_empty_log_says_so() -> None:
    assert explain_log("", Path("e.log")) == "Log e.log:\n(empty)"
