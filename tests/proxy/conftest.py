"""One model folder for all proxy tests."""

from pathlib import Path

import pytest

from tests.support.tokenizer import save_model_folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))
