"""The artifact that names the pages of rollouts, in a real Prefect database."""

from pathlib import Path

from prefect import flow
from prefect.artifacts import Artifact

from tasks.reporting import RunReporter


def test_artifact_of_rollout_pages_names_paths_and_the_command() -> None:
    row = {"which": "best", "rollout": "s0000-a-01", "reward": "1", "page": "runs/r_1/rollouts/a|b.html"}

    @flow(name="show")
    def show() -> None:
        RunReporter("r_1", num_steps=1).rollout_pages([row], folder=Path("runs/r_1/rollouts"))

    show()
    artifact = Artifact.get("r-1-rollouts")
    assert artifact is not None and artifact.type == "markdown"
    text = str(artifact.data)
    assert "| best | s0000-a-01 | 1 | `runs/r_1/rollouts/a\\|b.html` |" in text
    assert "`gyre inspect r_1 ROLLOUT --html FILE --runs-dir runs`" in text
