"""One real SGLang server for all tests that want one. It serves tests.support.tiny_model (seed 0) as version 0."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gyre_core.config.models import EngineConfig
from gyre_core.engine.sglang import SGLangServer
from tests.support.tiny_model import CONTEXT_LENGTH, save_tiny_model

SLOTS = 16


@dataclass(frozen=True)
class RunningEngine:
    """The server and the model folder that it was started with."""

    server: SGLangServer
    model_path: Path

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def vocab_size(self) -> int:
        return self.server.vocab_size


def make_server(model_path: Path, log_path: Path) -> SGLangServer:
    """A small server of a tiny model, not started."""
    return SGLangServer(
        EngineConfig(max_total_tokens=16384),
        model_path,
        context_length=CONTEXT_LENGTH,
        slots=SLOTS,
        log_path=log_path,
        policy_version=0,
    )


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """A ready server, shared by the whole session: leave weights and version as you found them.

    Without an engine environment this is an error that names the command; `-m "not integration"` goes without.
    """
    folder = tmp_path_factory.mktemp("sglang")
    model_path = save_tiny_model(folder / "model")
    with make_server(model_path, folder / "engine.log") as server:
        yield RunningEngine(server, model_path)
