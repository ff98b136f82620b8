from pathlib import Path

import pytest

from gyre_core.errors import ProblemError
from gyre_core.grading.manifest import load_problems
from gyre_core.grading.problems import check_component, load_problem
from tests.support.problems import TASK_TOML, write_problem


def test_problem_of_the_published_form_is_loaded(tmp_path: Path):
    folder = write_problem(
        tmp_path / "p1", files={"a/b.txt": "x"}, task_toml=TASK_TOML + '[verifier.env]\nMODE = "fast"\n'
    )
    problem = load_problem(folder)
    assert problem.problem_id == "p1" and problem.instruction == "Do it.\n"
    assert (problem.verifier_timeout_s, problem.agent_timeout_s) == (30.0, 20.0)
    assert problem.metadata == {"difficulty": "easy", "tags": ["files"]}
    assert problem.verifier_env == {"MODE": "fast"}
    assert problem.files_dir == folder.resolve() / "environment/files"
    assert problem.tests_dir == folder.resolve() / "tests"


def test_problem_newer_keys_and_no_limits_are_accepted(tmp_path: Path):
    toml = 'schema_version = "1.4"\n[task]\nname = "org/x"\n[verifier]\nuser = "root"\nenvironment_mode = "shared"\n'
    folder = write_problem(tmp_path / "p1", task_toml=toml)
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    problem = load_problem(folder)
    assert (problem.verifier_timeout_s, problem.agent_timeout_s, problem.files_dir) == (None, None, None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"task_toml": "version = "}, "task.toml is not valid TOML"),
        ({"task_toml": "verifier = 3"}, "verifier must be a table"),
        ({"task_toml": "[verifier]\ntimeout_sec = 0"}, "verifier.timeout_sec must be a positive number"),
        ({"task_toml": "[agent]\ntimeout_sec = true"}, "agent.timeout_sec must be a positive number"),
        ({"task_toml": "[agent]\ntimeout_sec = inf"}, "agent.timeout_sec must be a positive number"),
        ({"task_toml": '[[steps]]\nname = "a"'}, "steps"),
        ({"task_toml": '[verifier.env]\nKEY = "${KEY}"'}, "refers to the host's environment"),
        ({"task_toml": "[verifier.env]\nKEY = 3"}, "verifier.env.KEY must be a string"),
        ({"instruction": " \n"}, "instruction.md must hold text"),
        ({"instruction": "a\0b"}, "instruction.md must hold text"),
    ],
)
def test_problem_with_bad_content_is_refused(tmp_path: Path, parts: dict, message: str):
    with pytest.raises(ProblemError, match=message):
        load_problem(write_problem(tmp_path / "p1", **parts))


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_problem_that_lacks_a_file_is_named(tmp_path: Path, missing: str):
    folder = write_problem(tmp_path / "p1")
    (folder / missing).unlink()
    with pytest.raises(ProblemError, match=f"p1 lacks {missing}"):
        load_problem(folder)


@pytest.mark.parametrize("name", ["instruction.md", "tests", "tests/test.sh", "environment", "environment/files"])
def test_problem_symlink_out_is_refused(tmp_path: Path, name: str):
    outside = write_problem(tmp_path / "outside", files={"f": ""})
    folder = write_problem(tmp_path / "in" / "p1", files={"f": ""})
    path = folder / name
    path.rename(tmp_path / "moved")
    path.symlink_to(outside / name)
    with pytest.raises(ProblemError, match="symlink out of the problem"):
        load_problem(folder)


def test_problem_symlink_out_below_tests_is_refused(tmp_path: Path):
    folder = write_problem(tmp_path / "p1")
    (folder / "tests" / "data").mkdir()
    (folder / "tests" / "data" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ProblemError, match="data/passwd is a symlink out"):
        load_problem(folder)


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "-x", ".hidden", "a b", "a\n", "ü", "x" * 129])
def test_component_that_is_unsafe_is_refused(name: str):
    with pytest.raises(ProblemError, match="not usable as a name"):
        check_component(name, "the problem id")


def test_problems_are_sorted_and_stray_files_passed_over(tmp_path: Path):
    for name in ("b", "a", "C_1.x"):
        write_problem(tmp_path / name)
    (tmp_path / "README.md").write_text("")
    (tmp_path / ".cache").mkdir()
    assert [problem.problem_id for problem in load_problems(tmp_path)] == ["C_1.x", "a", "b"]


def test_problems_all_that_are_bad_are_listed(tmp_path: Path):
    write_problem(tmp_path / "good")
    (write_problem(tmp_path / "no-tests") / "tests/test.sh").unlink()
    write_problem(tmp_path / "bad toml")
    outside = write_problem(tmp_path.parent / "outside-of-it")
    (tmp_path / "linked").symlink_to(outside)
    with pytest.raises(ProblemError) as error:
        load_problems(tmp_path)
    text = str(error.value)
    assert text.startswith("3 problem(s)")
    assert "no-tests lacks tests/test.sh" in text and "'bad toml'" in text and "linked is a symlink out" in text


def test_problems_of_an_empty_or_missing_folder_are_refused(tmp_path: Path):
    with pytest.raises(ProblemError, match="holds no problem"):
        load_problems(tmp_path)
    with pytest.raises(ProblemError, match="no folder of problems"):
        load_problems(tmp_path / "missing")


def test_problem_solution_and_its_environment_are_found(tmp_path: Path):
    toml = TASK_TOML + '[solution.env]\nHOW = "well"\n'
    folder = write_problem(tmp_path / "p1", task_toml=toml)
    assert load_problem(folder).solution_dir is None
    (folder / "solution").mkdir()
    (folder / "solution" / "answer.md").write_text("Do it.\n")
    assert load_problem(folder).solution_dir is None, "an answer for people"
    (folder / "solution" / "solve.sh").write_text("true\n")
    problem = load_problem(folder)
    assert problem.solution_dir == folder.resolve() / "solution" and problem.solution_env == {"HOW": "well"}
    (folder / "solution" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ProblemError, match="symlink out"):
        load_problem(folder)


def test_problem_instruction_leading_canary_lines_are_dropped(tmp_path: Path):
    text = "<!-- benchmark canary GUID 1 -->\n# CANARY 2\n# Task\nDo it. # canary\n"
    assert load_problem(write_problem(tmp_path / "p1", instruction=text)).instruction == "# Task\nDo it. # canary\n"
    with pytest.raises(ProblemError, match="must hold text"):
        load_problem(write_problem(tmp_path / "p2", instruction="# canary\n"))


def test_problem_notes_name_what_is_not_done(tmp_path: Path):
    toml = """
        [verifier]
        environment_mode = "separate"
        [environment]
        docker_image = "debian:stable"
        workdir = "/work"
        mcp_servers = [{ name = "x" }]
    """
    folder = write_problem(tmp_path / "p1", task_toml=toml)
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM x\nRUN make\nCOPY a /app/\n")
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    notes = "\n".join(load_problem(folder).notes)
    for word in ("RUN steps", "copies files", "docker-compose", "debian:stable", "/work", "separate", "mcp_servers"):
        assert word in notes, word
    assert load_problem(write_problem(tmp_path / "p2", files={"a": ""})).notes == ()
