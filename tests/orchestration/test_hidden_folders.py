"""What a run hides from its agents, in a real sandbox."""

import sys
from pathlib import Path

from gyre_core.rollout.sandbox import Sandbox
from gyre_core.run_folder import RunFolder
from tasks.runs import hidden_folders
from tests.support.runs import small_config


async def test_harness_that_sees_the_whole_project_sees_no_answers_runs_or_weights(tmp_path: Path) -> None:
    project = tmp_path / "project"
    files = ["problems/p1/solution.sh", "heldout/h1/solution.sh", "policy/weights", "agent/agent.py", "problems/README"]
    files += [
        "store/rollouts.parquet",
        "runs/old/store/rollouts.parquet",
        "runs/old/run.json",
        "runs/prefect/prefect.db",
    ]
    for name in files:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("secret")
    config = small_config(project, data__heldout="heldout", store__url=str(project / "store"))
    folder = RunFolder.create(config, "r1")
    workspace = folder.work / "r1" / "workspace"
    workspace.mkdir(parents=True)
    sandbox = Sandbox(config.rollout.sandbox, hidden=hidden_folders(config, folder))
    # The harness's folder is named itself as well, inside one that is hidden from its neighbours.
    readable = [project, project / "agent", project / "problems" / "README"]
    script = f"cd {project}; find . -mindepth 1 | sort; touch /app/x && {sys.executable} -I -S -c 'print(1)'"
    result = await sandbox.run(
        ["bash", "-c", script],
        workspace=workspace,
        timeout_s=60,
        read_only=[(path, str(path)) for path in readable],
    )
    assert result.log_tail.split() == [
        "./agent",
        "./agent/agent.py",
        "./heldout",
        "./policy",
        "./problems",
        "./problems/README",
        "./runs",
        "./runs/old",
        "./runs/prefect",
        "./runs/r1",
        "./store",
        "1",
    ]
