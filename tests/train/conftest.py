from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gyre_core.config.models import TrainConfig
from gyre_core.train.megatron.backend import MegatronTrainer
from tests.support.training import write_tiny_qwen3


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The machine's cores are shared; tiny tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A random Qwen3 with untied embeddings: its folder and the transformers model."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    return folder, write_tiny_qwen3(folder)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """The same with tied embeddings and other proportions."""
    folder = tmp_path_factory.mktemp("tied-qwen3")
    return folder, write_tiny_qwen3(folder, seed=1, tied=True, vocab=50, heads=6, kv_heads=2, head_dim=8, layers=3)


@pytest.fixture
def make_trainer(tiny):
    """Trainers on the tiny model, closed at the end of the test."""
    made = []

    def make(folder: Path = tiny[0], seed: int = 0, **config) -> MegatronTrainer:
        trainer = MegatronTrainer(folder, TrainConfig(threads=1, **config), seed)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()
