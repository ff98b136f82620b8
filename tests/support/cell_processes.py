"""Cell hosts in processes of their own on a tiny real model, without engines: to be killed, stopped, started anew."""

import os
import signal
from pathlib import Path
from typing import Any

from gyre_core.cells.client import CellClient
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.errors import GyreError
from gyre_core.process import ChildProcess, free_port, log_tail, python_command
from tests.support.satellites import SECRET, THREADS, TRAIN


class CellProcess:
    """One cell host. Example: with CellProcess("cell-0", model, folder, members=members) as cell: cell.role("train")"""

    def __init__(self, name: str, model: Path, folder: Path, **changes: Any) -> None:
        self.name = name
        self.folder = folder
        self.settings = CellSettings(
            **{
                "cell_id": name,
                "port": free_port(),
                "secret": "control",
                "model_path": model,
                "context_length": 512,
                "slots": 1,
                "seed": 0,
                "work_dir": folder / name,
                "engine": None,
                "train": TRAIN,
                **changes,
            }
        )
        self.client = CellClient(f"http://127.0.0.1:{self.settings.port}", "control", timeout_s=120.0)
        self.child = self._launch()

    def wait_ready(self) -> None:
        """Until it answers."""
        self.child.wait_until(self._answers, timeout_s=240.0, error=GyreError)

    def role(self, to: str, **more: Any) -> dict[str, Any]:
        """With the current epoch."""
        return self.client.role(to, epoch=self.client.status()["epoch"], **more)

    def signal(self, number: int) -> None:
        os.kill(self.child.pid, number)

    def kill(self) -> None:
        """As `kill -9` does it."""
        self.signal(signal.SIGKILL)
        self.child.wait()

    def restart(self, **changes: Any) -> None:
        """A new process at the same address."""
        self.settings = self.settings.model_copy(update=changes)
        self.child = self._launch()
        self.wait_ready()

    @property
    def log(self) -> str:
        return log_tail(self.child.log_path, num_lines=60)

    def __enter__(self) -> "CellProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop(grace_s=5.0)
        self.client.close()

    def _answers(self) -> bool:
        try:
            self.client.status()
        except GyreError:
            return False
        return True

    def _launch(self) -> ChildProcess:
        self.settings.work_dir.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{self.name}.json"
        file.write_text(self.settings.model_dump_json(), encoding="utf-8")
        return ChildProcess(
            self.name,
            python_command("gyre_core.cells", "--settings", str(file)),
            log_path=self.folder / f"{self.name}.log",
            env=THREADS,
        )


def core_members() -> MembersSettings:
    """Of a core whose queue keeps its address when it is started anew."""
    return MembersSettings(port=free_port(), secret=SECRET)


def satellite_fields(members: MembersSettings) -> dict[str, Any]:
    """What a satellite of this core is told."""
    return {"core_url": f"http://127.0.0.1:{members.port}", "core_secret": members.secret}
