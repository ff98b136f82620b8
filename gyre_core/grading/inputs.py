"""What a run needs to be there before anything starts: a model folder and problems that can be graded."""

from gyre_core.config import RunConfig
from gyre_core.errors import ConfigError
from gyre_core.grading.manifest import load_problems
from gyre_core.grading.problems import Problem


def check_inputs(config: RunConfig) -> tuple[dict[str, Problem], dict[str, Problem]]:
    """Training and held-out problems by id; raises ConfigError or ProblemError for what cannot be run."""
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path {config.model.path} holds no config.json: give a Hugging Face checkpoint folder")
    problems = {problem.problem_id: problem for problem in load_problems(config.data.train)}
    heldout: dict[str, Problem] = {}
    if config.data.heldout is not None:
        heldout = {problem.problem_id: problem for problem in load_problems(config.data.heldout)}
    shared = sorted(problems.keys() & heldout.keys())
    if shared:
        raise ConfigError(
            f"data.heldout shares {len(shared)} problem(s) with data.train ({', '.join(shared[:3])} ...): held-out "
            "reward would measure memory; move or rename them"
        )
    return problems, heldout
