"""Sandboxes for tests: each back end that works on this machine, and a search for processes that were left behind."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_core.rollout.sandbox import Sandbox, SandboxLimits, probe_backend

BACKENDS = ("bubblewrap", "namespaces")


def make_sandbox(backend: str, **limits: int) -> Sandbox:
    reason = probe_backend(backend)  # type: ignore[arg-type]
    if reason:
        pytest.skip(f"{backend}: {reason}")
    return Sandbox(backend, limits=SandboxLimits(**limits))  # type: ignore[arg-type]


@pytest.fixture(params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return make_sandbox(request.param)


@pytest.fixture(params=BACKENDS)
def new_sandbox(request: pytest.FixtureRequest) -> Callable[..., Sandbox]:
    """A maker of sandboxes with limits of the test's own."""
    return lambda **limits: make_sandbox(request.param, **limits)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "workspace"
    folder.mkdir(parents=True)
    return folder


def new_marker() -> str:
    """A word that occurs in the command lines of one test's processes and nowhere else."""
    return f"marker-{uuid.uuid4().hex}"


def processes_with(marker: str) -> list[int]:
    """Ids of all processes of the machine whose command line holds `marker`, in whatever namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path("/proc", name, "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in command:
                found.append(int(name))
    return found
