"""What survives the owner of a step's queue: its micro-steps, and who holds which in an untaken gradient.

    <folder>/queue.jsonl    one line an event; the first names the step, its policy version and the weights' checksum
    <folder>/<hash>.arrow   the branches of one micro-step

The core's death loses the sum of gradients that it held, but not the satellites' buffers: these are kept until the step
is over. So after a restart (decision 12) what the owner had computed itself goes back into the queue, what satellites
completed still stands, and what was taken from them is taken again. A line is written before its effect is told to
anyone; a half-written last line is dropped. Lines survive the process, not the machine: a satellite whose buffer holds
something else than the queue believes is cut off at its take-over.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from gyre_core.errors import TrainError

EVENTS = "queue.jsonl"


class StepJournal:
    """One step's folder. Example: journal, events = StepJournal.open(Path("work/step-3"), {"step": 3, ...})"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = (folder / EVENTS).open("ab", buffering=0)

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any]) -> tuple["StepJournal", list[dict[str, Any]]]:
        """The step's journal and the events in it, oldest first; an empty one when the folder's is of another step."""
        events = list(_read(folder / EVENTS))
        if events and events[0] == {"event": "step", **identity}:
            whole = b"".join(_line(event) for event in events)
            if (folder / EVENTS).stat().st_size != len(whole):  # a half-written end
                _replace(folder / EVENTS, whole)
            return cls(folder), events[1:]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        journal = cls(folder)
        journal.append({"event": "step", **identity})
        return journal, []

    def append(self, event: dict[str, Any]) -> None:
        """Write one event; raises TrainError when the disk refuses."""
        line = _line(event)
        try:
            if self._file.write(line) != len(line):
                raise OSError("half a line was written")
        except OSError as error:
            raise TrainError(f"the journal of the step in {self.folder} cannot be written: {error}") from error

    def put(self, micro_step_id: str, body: bytes) -> None:
        """Keep a micro-step's branches; raises TrainError when the disk refuses."""
        try:
            _replace(self._body_path(micro_step_id), body)
        except OSError as error:
            raise TrainError(f"a micro-step cannot be kept in {self.folder}: {error}") from error

    def get(self, micro_step_id: str) -> bytes:
        """A micro-step's branches; raises TrainError when they are gone."""
        try:
            return self._body_path(micro_step_id).read_bytes()
        except OSError as error:
            raise TrainError(f"the branches of micro-step {micro_step_id} cannot be read: {error}") from error

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """The step is over: nothing of it is needed."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _body_path(self, micro_step_id: str) -> Path:
        return self.folder / f"{xxhash.xxh3_128_hexdigest(micro_step_id.encode())}.arrow"


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except ValueError:
            return
        yield event


def _replace(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
