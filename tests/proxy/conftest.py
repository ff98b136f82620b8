"""One model folder for all proxy tests, and a served proxy with SDK clients."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.clients import Stage, served_stage
from tests.support.tokenizer import save_model_folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stage(model_path: Path) -> AsyncIterator[Stage]:
    async with served_stage(model_path) as stage:
        yield stage
