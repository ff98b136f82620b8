"""A cell host whose steps satellites may share: through its control API, with a real trainer and a real satellite."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from gyre_core.cells.app import create_app
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.packing import pack_for_training
from gyre_core.transfer.branches import branches_to_ipc
from tests.support.members import until
from tests.support.satellites import SECRET, TRAIN, SatelliteProcess, groups_of_step, num_rollouts, relative_difference
from tests.support.training import write_tiny_qwen3

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[tuple[TestClient, Path]]:
    """A cell that is a trainer alone, in training."""
    before = torch.get_num_threads()
    write_tiny_qwen3(tmp_path / "model")
    settings = CellSettings(
        cell_id="cell-0",
        port=1,
        secret="control",
        model_path=tmp_path / "model",
        context_length=512,
        slots=1,
        seed=0,
        work_dir=tmp_path,
        engine=None,
        train=TRAIN,
        members=MembersSettings(secret=SECRET),
    )
    with TestClient(create_app(settings), headers={"authorization": "Bearer control"}) as client:
        client.post("/role", json={"to": "train", "epoch": 0}).raise_for_status()
        yield client, tmp_path
    torch.set_num_threads(before)


def post(client: TestClient, path: str, **arguments: Any) -> dict[str, Any]:
    reply = client.post(path, **arguments)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_host_shares_a_step_and_accounts_for_it(cell: tuple[TestClient, Path]) -> None:
    client, folder = cell
    url = client.get("/status").json()["members_url"]
    with SatelliteProcess("cell-1", url, folder / "model", folder) as satellite:
        for step in range(2):
            groups = groups_of_step(step)
            body = branches_to_ipc([branch for branches in groups.values() for branch in branches])
            query = {"num_rollouts": num_rollouts(groups), "policy_version": step + 1}
            reply = post(client, "/train/step", params=query, content=body)
            assert set(reply["account"]["groups"]) == set(groups)
            assert reply["policy_version"] == step + 1
            assert reply["grad_norm"] > 0
            assert {name.rsplit("/")[-1].split("#")[0] for name in reply["account"]["taken"].values()} <= {
                "cell-0",
                "cell-1",
            }
        until(lambda: "is ready" in satellite.log, 60.0)
    assert client.get("/status").json()["policy_version"] == 2
    query = {"num_rollouts": 1, "policy_version": 9}
    assert client.post("/train/step", params=query, content=branches_to_ipc([])).status_code == 400


def test_host_step_with_members_equals_micro_step_and_optimizer_step(cell: tuple[TestClient, Path]) -> None:
    client, folder = cell
    groups = groups_of_step(0)
    body = branches_to_ipc([branch for branches in groups.values() for branch in branches])
    rollouts = num_rollouts(groups)
    post(client, "/train/step", params={"num_rollouts": rollouts, "policy_version": 1}, content=body)
    path = folder / "checkpoint"
    post(client, "/checkpoint/save", json={"path": str(path), "extra": {}})

    trainer = MegatronTrainer(folder / "model", TRAIN, seed=0)
    try:
        branches = [branch for part in groups.values() for branch in part]
        for packed in pack_for_training(branches, TRAIN):
            trainer.micro_step(packed)
        trainer.optimizer_step(rollouts, TRAIN.learning_rate_at(0))
        mine = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        difference = asdict(trainer.compare_checkpoint(path))
        shared = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    finally:
        trainer.close()
    assert difference["num_weights"] == len(mine)
    assert relative_difference(mine, shared) <= 1e-5
