import json
from pathlib import Path

import pytest

from gyre_core.config.load import parse_run_config
from gyre_core.errors import ConfigError, ProblemError
from gyre_core.grading.inputs import check_inputs
from gyre_core.grading.manifest import folders_of, load_problems, scan_source, split_of
from gyre_core.rollout.dispatch import problems_of_step
from tests.support.problems import write_problem


def manifest(folder: Path, text: str, name: str = "tasks.toml") -> Path:
    for problem in ("a", "b", "c"):
        write_problem(folder / "tasks" / problem)
    path = folder / name
    path.write_text(text)
    return path


LISTED = """
tasks = [
  "tasks/a",
  { path = "tasks/b", id = "second", split = "train", repeat = 2 },
  { path = "tasks/c", split = "heldout" },
]
"""


def test_manifest_gives_ids_repeats_and_order(tmp_path: Path):
    problems = load_problems(manifest(tmp_path, LISTED))
    assert [(problem.problem_id, problem.repeat) for problem in problems] == [("a", 1), ("second", 2), ("c", 1)]
    assert problems[1].dir == tmp_path.resolve() / "tasks/b"


def test_manifest_split_takes_its_own_and_those_without_one(tmp_path: Path):
    path = manifest(tmp_path, LISTED)
    assert [problem.problem_id for problem in load_problems(Path(f"{path}#train"))] == ["a", "second"]
    assert [problem.problem_id for problem in load_problems(Path(f"{path}#heldout"))] == ["a", "c"]
    with pytest.raises(ProblemError, match="no split 'test'; its splits are heldout, train"):
        load_problems(Path(f"{path}#test"))


def test_manifest_in_json_of_harbors_shape(tmp_path: Path):
    tree = {"name": "set", "version": "1.0", "tasks": [{"name": "first", "path": "tasks/a"}]}
    (problem,) = load_problems(manifest(tmp_path, json.dumps(tree), "registry.json"))
    assert problem.problem_id == "first"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"../outside"', "must be a path below"),
        ('"/etc"', "must be a path below"),
        ('"tasks/../../outside"', "must be a path below"),
        ('"tasks/linked"', "symlink out of"),
        ('"tasks/missing"', "is not a folder"),
        ('{ path = "tasks/a", id = "../a" }', "not usable as a name"),
        ('{ path = "tasks/a", id = 3 }', "id must be text"),
        ('{ path = "tasks/a", repeat = 0 }', "repeat must be a whole number"),
        ('{ path = "tasks/a", repeat = true }', "repeat must be a whole number"),
        ('{ path = "tasks/a", git_url = "https://host/x.git" }', "lies in https://host/x.git: fetch it"),
        ("3", "must be a path, or a table with a path"),
        ('{ id = "a" }', "must be a path, or a table with a path"),
    ],
)
def test_manifest_entry_that_is_not_usable_is_listed(tmp_path: Path, entry: str, message: str):
    write_problem(tmp_path / "outside")
    folder = tmp_path / "in"
    path = manifest(folder, f'tasks = ["tasks/b", {entry}]')
    (folder / "tasks" / "linked").symlink_to(tmp_path / "outside")
    problems, (reason,) = scan_source(path)
    assert [problem.problem_id for problem in problems] == ["b"]
    assert message in reason
    with pytest.raises(ProblemError, match="1 problem"):
        load_problems(path)


def test_manifest_with_an_id_twice_is_refused(tmp_path: Path):
    with pytest.raises(ProblemError, match="the id 'a' comes twice"):
        load_problems(manifest(tmp_path, 'tasks = ["tasks/a", "tasks/a"]'))


@pytest.mark.parametrize(
    ("text", "message"), [("tasks = ", "cannot read"), ("x = 1", "must list"), ("tasks = 3", "must list")]
)
def test_manifest_that_is_none_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ProblemError, match=message):
        load_problems(manifest(tmp_path, text))
    with pytest.raises(ProblemError, match="cannot read"):
        load_problems(tmp_path / "missing.toml")


def test_manifest_hides_the_folders_that_its_tasks_are_in(tmp_path: Path):
    path = manifest(tmp_path, LISTED)
    assert folders_of(path) == folders_of(Path(f"{path}#train")) == (tmp_path.resolve() / "tasks",)
    assert folders_of(tmp_path) == (tmp_path,)


def test_split_of_a_folder_whose_name_holds_a_hash_is_none(tmp_path: Path):
    (tmp_path / "set.toml#1").mkdir()
    assert split_of(tmp_path / "set.toml#1") == (tmp_path / "set.toml#1", None)
    assert split_of(tmp_path / "set.toml#2") == (tmp_path / "set.toml", "2")


def test_problem_that_repeats_comes_that_often_in_one_pass(tmp_path: Path):
    problems = load_problems(manifest(tmp_path, LISTED))
    ids = [problem.problem_id for problem in problems for _ in range(problem.repeat)]
    dispatched = [name for step in range(2) for name in problems_of_step(ids, seed=3, step=step, groups_per_step=2)]
    assert sorted(dispatched) == ["a", "c", "second", "second"]


def test_run_inputs_of_two_splits_of_one_manifest(tmp_path: Path):
    path = manifest(tmp_path, LISTED.replace('"tasks/a",', '{ path = "tasks/a", split = "train" },'))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    tree = {
        "name": "run",
        "model": {"path": "model"},
        "data": {"train": "tasks.toml#train", "heldout": "tasks.toml#heldout"},
        "rollout": {"harness": {"command": ["true"]}},
    }
    problems, heldout = check_inputs(parse_run_config(tree, base_dir=tmp_path))
    assert (sorted(problems), sorted(heldout)) == (["a", "second"], ["c"])
    path.write_text('tasks = ["tasks/a"]')
    tree["data"] = {"train": "tasks.toml", "heldout": "tasks"}
    with pytest.raises(ConfigError, match=r"shares 1 problem\(s\)"):
        check_inputs(parse_run_config(tree, base_dir=tmp_path))
