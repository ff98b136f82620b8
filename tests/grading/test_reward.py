import json
import os
from pathlib import Path

import pytest

from gyre_core.grading.verifier import BadRewardError, read_reward


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), ("0\n", 0.0), (" 0.25 \n", 0.25), ("1e-3", 0.001), ("-0.0", 0.0)]
)
def test_reward_txt_holds_one_number(tmp_path: Path, text: str, value: float):
    (tmp_path / "reward.txt").write_text(text)
    assert read_reward(tmp_path).value == value


@pytest.mark.parametrize("text", ["", "nan", "inf", "-inf", "1.01", "-0.1", "0_1", "yes", "0.5 0.5", "0.5/1", "\0"])
def test_reward_txt_with_anything_else_is_bad(tmp_path: Path, text: str):
    (tmp_path / "reward.txt").write_text(text)
    with pytest.raises(BadRewardError):
        read_reward(tmp_path)


@pytest.mark.parametrize(
    ("tree", "value", "metrics"),
    [
        ({"reward": 0.5}, 0.5, {}),
        ({"reward": 1, "passed": 3, "note": "x", "flag": True}, 1.0, {"passed": 3.0}),
        ({"accuracy": 0.75, "note": "x"}, 0.75, {"accuracy": 0.75}),
    ],
)
def test_reward_json_holds_a_reward_or_one_number(tmp_path: Path, tree: dict, value: float, metrics: dict):
    (tmp_path / "reward.json").write_text(json.dumps(tree))
    reward = read_reward(tmp_path)
    assert (reward.value, reward.metrics) == (value, metrics)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.5",
        "[0.5]",
        "{}",
        '{"a": 0.1, "b": 0.2}',
        '{"reward": "1"}',
        '{"reward": true}',
        '{"reward": null, "a": 1}',
        '{"reward": NaN}',
        '{"reward": 1.5}',
        '{"reward": 1' + "0" * 400 + "}",
        "[" * 50_000,
    ],
)
def test_reward_json_with_anything_else_is_bad(tmp_path: Path, text: str):
    (tmp_path / "reward.json").write_text(text)
    with pytest.raises(BadRewardError):
        read_reward(tmp_path)


def test_reward_txt_wins_over_json_which_gives_the_metrics(tmp_path: Path):
    (tmp_path / "reward.txt").write_text("0.25")
    (tmp_path / "reward.json").write_text('{"reward": 1.0, "passed": 2}')
    reward = read_reward(tmp_path)
    assert (reward.value, reward.metrics) == (0.25, {"passed": 2.0})
    (tmp_path / "reward.json").write_text("broken")
    assert read_reward(tmp_path).metrics == {}


def test_reward_is_never_read_through_a_symlink(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "reward.txt").write_text("1")
    folder = tmp_path / "verifier"
    folder.mkdir()
    (folder / "reward.txt").symlink_to(tmp_path / "elsewhere" / "reward.txt")
    with pytest.raises(BadRewardError, match="not a readable plain file"):
        read_reward(folder)
    folder.joinpath("reward.txt").unlink()
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRewardError, match="no folder"):
        read_reward(folder)


def test_reward_pipe_folder_and_huge_file_are_bad_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "reward.txt")
    with pytest.raises(BadRewardError, match="not a plain file"):
        read_reward(tmp_path)
    (tmp_path / "reward.txt").unlink()
    (tmp_path / "reward.txt").mkdir()
    with pytest.raises(BadRewardError, match="not a plain file"):
        read_reward(tmp_path)
    (tmp_path / "reward.txt").rmdir()
    with open(tmp_path / "reward.txt", "wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(BadRewardError, match="larger than"):
        read_reward(tmp_path)
