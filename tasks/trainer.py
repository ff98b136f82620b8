"""A trainer in a process of its own: a cell host without an engine. It ends with this process, whatever ends it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gyre_core.cells.client import CellClient
from gyre_core.cells.settings import CellSettings
from gyre_core.config import RunConfig, TrainConfig
from gyre_core.errors import GyreError, TrainError
from gyre_core.process import ChildProcess, free_port, new_secret, python_command, secret_file
from tasks.services import CHILD_ENVIRONMENT

_BOOT_LIMIT_S = 300.0


@contextlib.contextmanager
def running_trainer(
    config: RunConfig, train: TrainConfig, *, work_dir: Path, policy_version: int, checkpoint: Path | None
) -> Iterator[CellClient]:
    """Start it with the run's model, or a checkpoint of it; raises TrainError with its log's tail."""
    settings = CellSettings(
        cell_id="replay-trainer",
        port=free_port(),
        secret=new_secret(),
        model_path=config.model.path,
        context_length=config.model.context_length,
        slots=config.rollout.slots,
        seed=config.seed,
        work_dir=work_dir,
        engine=None,
        train=train,
        transfer=config.transfer,
        policy_version=policy_version,
        checkpoint=checkpoint,
    )
    with contextlib.ExitStack() as stack:
        cell = CellClient(f"http://{settings.host}:{settings.port}", settings.secret)
        stack.callback(cell.close)
        settings_file = stack.enter_context(secret_file(work_dir / "trainer.json", settings.model_dump_json()))
        host = ChildProcess(
            "trainer",
            python_command("gyre_core.cells", "--settings", str(settings_file)),
            log_path=work_dir / "trainer.log",
            env=CHILD_ENVIRONMENT,
        )
        stack.callback(host.stop, grace_s=20)
        host.wait_until(lambda: _answers(cell), timeout_s=_BOOT_LIMIT_S, error=TrainError)
        yield cell


def _answers(cell: CellClient) -> bool:
    try:
        cell.status()
    except GyreError:
        return False
    return True
