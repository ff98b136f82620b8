"""A cell host that trains: packing by the run's settings, checkpoints while it goes on, exports; over its API."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from gyre_core.cells.app import create_app
from gyre_core.cells.settings import CellSettings
from gyre_core.config.models import TrainConfig
from gyre_core.train.checkpoint_manifest import read_manifest
from gyre_core.transfer.branches import branches_to_ipc
from tests.support.training import random_branches, write_tiny_qwen3

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_qwen3(folder)
    return folder


@contextlib.asynccontextmanager
async def training_cell(model: Path, work_dir: Path, **train: Any) -> AsyncIterator[Call]:
    """A trainer alone, in its training role; what is given calls a verb and returns its answer."""
    settings = CellSettings(
        cell_id="c",
        port=1,
        secret="s",
        model_path=model,
        context_length=128,
        slots=1,
        seed=0,
        work_dir=work_dir,
        engine=None,
        train=TrainConfig(threads=1, learning_rate=1e-2, clip_low=0.9, clip_high=9.0, **train),
    )
    app = create_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://cell", headers={"authorization": "Bearer s"}
        ) as client,
    ):

        async def call(verb: str, body: Any = None, *, status: int = 200) -> Any:
            named: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
            reply = await client.post(verb, **named, timeout=60)
            assert reply.status_code == status, reply.text
            return reply.json()

        await call("/role", {"to": "train", "epoch": 0})
        yield call


async def test_cell_share_prefixes_off_computes_every_branch_token_and_trains_the_same(
    model_folder: Path, tmp_path: Path
) -> None:
    branches = random_branches(0)
    results = []
    for share in (True, False):
        async with training_cell(model_folder, tmp_path, share_prefixes=share) as call:
            step = await call("/train/micro_step", branches_to_ipc(branches))
            after = await call("/train/optimizer_step", {"num_rollouts": 6, "policy_version": 1})
            results.append((step["stats"], after))
            assert step["packing_s"] > 0
            assert after["seconds"] >= after["gradients_s"] > 0
    (shared, first), (chains, second) = results
    assert shared["num_branch_tokens"] == chains["num_branch_tokens"] == chains["num_tokens"] > shared["num_tokens"]
    assert shared["flops"] < chains["flops"]
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    assert shared["loss"] == pytest.approx(chains["loss"], rel=1e-5)


async def test_cell_checkpoint_is_begun_finished_and_continued_while_the_cell_trains(
    model_folder: Path, tmp_path: Path
) -> None:
    body = branches_to_ipc(random_branches(0))
    async with training_cell(model_folder, tmp_path) as call:
        await call("/train/micro_step", body)
        await call("/train/optimizer_step", {"num_rollouts": 6, "policy_version": 1})
        begun = await call("/checkpoint/save", {"path": str(tmp_path / "one"), "extra": {"groups_trained": ["g0"]}})
        await call("/train/micro_step", body)  # before the end of the writing was waited for
        saved = await call("/checkpoint/finish")
        manifest = read_manifest(tmp_path / "one")
        assert manifest.weights_digest == begun["weights_digest"]
        assert (manifest.policy_version, manifest.extra) == (1, {"groups_trained": ["g0"]})
        assert saved["bytes"] == manifest.size_bytes
        refused = await call("/checkpoint/finish", status=400)
        assert "writes no checkpoint" in refused["error"]
        await call("/train/reset")
        again = await call("/checkpoint/save", {"path": str(tmp_path / "one"), "extra": {}}, status=500)
        assert again["kind"] == "TrainError" and "exists already" in again["error"]


async def test_cell_export_is_loaded_by_transformers(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first = AutoModelForCausalLM.from_pretrained(model_folder)
    async with training_cell(model_folder, tmp_path) as call:
        await call("/checkpoint/export", {"path": str(tmp_path / "version-00000")})
        await call("/train/micro_step", branches_to_ipc(random_branches(0)))
        await call("/train/optimizer_step", {"num_rollouts": 6, "policy_version": 1})
        await call("/checkpoint/export", {"path": str(tmp_path / "version-00001")})
    tokens = torch.tensor(np.arange(12)[None])
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / f"version-0000{n}") for n in (0, 1))
    with torch.no_grad():
        assert torch.equal(before(tokens).logits, first(tokens).logits)
        assert not torch.allclose(after(tokens).logits, first(tokens).logits, atol=1e-3)
