"""Configuration: what is accepted, and that a refusal names the key and what to change."""

from pathlib import Path

import pytest

from gyre_core.config import load_run_config
from gyre_core.errors import ConfigError

MINIMAL = """
name = "t"
[model]
path = "policy"
[data]
train = "problems"
[rollout.harness]
command = ["{python}", "{config_dir}/agent.py"]
read_only = ["{config_dir}/lib"]
"""


def write_config(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_load_relative_paths_are_resolved_against_the_file(tmp_path: Path) -> None:
    config = load_run_config(write_config(tmp_path, MINIMAL))
    assert config.model.path == tmp_path / "policy"
    assert config.data.train == tmp_path / "problems"
    assert config.rollout.harness.command == ("{python}", f"{tmp_path}/agent.py")
    assert config.rollout.harness.read_only == (tmp_path / "lib",)


def test_load_paths_lose_their_dots_but_not_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "away")
    text = MINIMAL.replace('"policy"', '"../policy"').replace('"problems"', '"link/../problems"')
    config = load_run_config(write_config(tmp_path / "here", text))
    assert config.model.path == tmp_path / "policy"
    assert config.data.train.resolve() == tmp_path / "far" / "problems"


def test_load_overrides_take_toml_values_and_bare_words(tmp_path: Path) -> None:
    path = write_config(tmp_path, MINIMAL)
    config = load_run_config(path, ["train.steps=3", "name=other", "train.learning_rate=0.0", "selection.min_group=4"])
    assert (config.train.steps, config.name, config.train.learning_rate) == (3, "other", 0.0)
    assert config.selection.min_group == 4


@pytest.mark.parametrize(
    ("override", "telling"),
    [
        ("train.stepz=3", "train.stepz: unknown key"),
        ("train.steps=-1", "train.steps: Input should be greater than or equal to 0"),
        ("train.steps='many'", "train.steps: Input should be a valid integer"),
        ("rollout.top_p=0.95", "rollout.top_p and rollout.top_k must stay"),
        ("selection.min_group=17", "selection.min_group (17) exceeds rollout.group_size (16)"),
        ("rollout.max_new_tokens=16384", "leaves no room for a prompt"),
        ("train.micro_step_tokens=100", "train.micro_step_tokens (100) is below model.context_length (16384)"),
        ("engine.max_total_tokens=100", "engine.max_total_tokens (100) is below"),
        ("rollout.time_limit_s=8000", "rollout.overall_limit_s (7200) must exceed rollout.time_limit_s (8000)"),
        ("train.context_parallel=2", "train.context_parallel must be 1: tree packing needs all ancestors"),
        ("train.clip_high=0.0", "train.clip_high: Input should be greater than 0"),
        ("proxy.processes=0", "proxy.processes: Input should be greater than or equal to 1"),
        ("proxy.processes=65", "proxy.processes: Input should be less than or equal to 64"),
        ("proxy.processes=9", "proxy.processes (9) exceeds rollout.slots (8): each process needs a slot of its own"),
        ("proxy.keepalive_s=21.0", "proxy.keepalive_s: Input should be less than or equal to 20"),
        ("proxy.journal_sync='never'", "proxy.journal_sync: Input should be 'call' or 'session'"),
        ("selection.role_order=['aux']", "must not hold 'aux'"),
        ("scheduler.policy='magic'", "scheduler.policy: Input should be 'elastic'"),
        ("name='Not A Slug'", "name: String should match pattern"),
    ],
)
def test_load_bad_value_is_refused_with_what_to_change(tmp_path: Path, override: str, telling: str) -> None:
    path = write_config(tmp_path, MINIMAL)
    with pytest.raises(ConfigError) as refusal:
        load_run_config(path, [override])
    assert telling in str(refusal.value)


def test_load_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config .*absent\.toml"):
        load_run_config(tmp_path / "absent.toml")


def test_load_broken_toml_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.toml is not valid TOML"):
        load_run_config(write_config(tmp_path, "name = "))


def test_load_split_trainers_are_for_several_cells_too(tmp_path: Path) -> None:
    config = load_run_config(write_config(tmp_path, MINIMAL), ["train.tensor_parallel=2", "scheduler.cells=2"])
    assert (config.train.tensor_parallel, config.scheduler.cells) == (2, 2)


def test_load_nodes_share_a_trainers_processes_evenly(tmp_path: Path) -> None:
    path = write_config(tmp_path, MINIMAL)
    both = ["train.tensor_parallel=2", "scheduler.nodes_per_cell=2"]
    assert load_run_config(path, both).scheduler.nodes_per_cell == 2
    with pytest.raises(ConfigError, match=r"not shared evenly by scheduler\.nodes_per_cell = 2"):
        load_run_config(path, ["scheduler.nodes_per_cell=2"])
    engine = ["engine.nodes=2", "engine.tensor_parallel=4"]
    assert load_run_config(path, [*both, *engine]).engine.nodes == 2
    with pytest.raises(ConfigError, match=r"engine\.nodes \(2\) must be 1 or scheduler\.nodes_per_cell \(1\)"):
        load_run_config(path, engine)


def test_load_several_errors_are_all_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_run_config(write_config(tmp_path, MINIMAL), ["train.steps=-1", "seed=-5", "bogus=1"])
    assert "3 thing(s) to change" in str(refusal.value)


def test_config_package_imports_without_torch_or_prefect() -> None:
    import subprocess
    import sys

    program = "import sys, gyre_core.config; print(sorted({'torch', 'prefect', 'megatron'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_gyre_command_starts_without_the_libraries_of_its_subcommands() -> None:
    import subprocess
    import sys

    heavy = {"torch", "prefect", "megatron", "numpy", "pyarrow", "pydantic", "fastapi"}
    program = f"import sys, gyre_core.cli.main; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_learning_rate_linear_decay_falls_to_zero_after_the_last_step(tmp_path: Path) -> None:
    overrides = ["train.steps=4", "train.learning_rate=0.8", "train.learning_rate_decay='linear'"]
    train = load_run_config(write_config(tmp_path, MINIMAL), overrides).train
    assert [round(train.learning_rate_at(step), 6) for step in range(5)] == [0.8, 0.6, 0.4, 0.2, 0.0]


def test_learning_rate_without_decay_is_constant(tmp_path: Path) -> None:
    train = load_run_config(write_config(tmp_path, MINIMAL), ["train.steps=4", "train.learning_rate=0.8"]).train
    assert {train.learning_rate_at(step) for step in range(9)} == {0.8}
