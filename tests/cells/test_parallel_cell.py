"""A cell host whose trainer is two processes with split weights: the same steps as one process, through its API."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from gyre_core.cells.app import create_app
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.process import free_port
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.megatron.replica import ParallelReplica
from gyre_core.train.packing import pack_for_training
from gyre_core.transfer.branches import branches_to_ipc
from tests.support.members import until
from tests.support.satellites import TRAIN, groups_of_step, num_rollouts, relative_difference, weights_of
from tests.support.training import write_tiny_qwen3

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def settings(folder: Path, **changes: Any) -> CellSettings:
    defaults: dict[str, Any] = {
        "cell_id": "cell-0",
        "port": 1,
        "secret": "control",
        "model_path": folder / "model",
        "context_length": 512,
        "slots": 1,
        "seed": 0,
        "work_dir": folder,
        "engine": None,
        "train": TRAIN.model_copy(update={"tensor_parallel": 2, "micro_step_tokens": 256}),
    }
    return CellSettings(**{**defaults, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = torch.get_num_threads()
    write_tiny_qwen3(tmp_path / "model")
    yield tmp_path
    torch.set_num_threads(before)


def post(client: TestClient, path: str, **arguments: Any) -> dict[str, Any]:
    reply = client.post(path, **arguments)
    assert reply.status_code < 300, reply.text
    return reply.json()


def test_parallel_cell_trains_a_run_and_a_lost_rank_is_told(folder: Path) -> None:
    groups = [groups_of_step(step) for step in range(2)]
    with TestClient(create_app(settings(folder)), headers={"authorization": "Bearer control"}) as client:
        post(client, "/role", json={"to": "train", "epoch": 0})
        post(client, "/train/open", json={"step": 0, "policy_version": 0})
        for name, branches in groups[0].items():
            post(client, "/train/group", params={"group_id": name}, content=branches_to_ipc(branches))
        post(client, "/train/seal", json={"num_rollouts": num_rollouts(groups[0])})
        while (first := post(client, "/train/finish", json={"wait_s": 20.0})).get("running"):
            pass
        assert first["account"]["stats"]["weight_sum"] == pytest.approx(num_rollouts(groups[0]))
        body = branches_to_ipc([branch for branches in groups[1].values() for branch in branches])
        post(client, "/train/micro_step", content=body)
        rollouts = num_rollouts(groups[1])
        post(client, "/train/optimizer_step", json={"num_rollouts": rollouts, "policy_version": 2})
        post(client, "/checkpoint/save", json={"path": str(folder / "checkpoint"), "extra": {}})
        assert post(client, "/checkpoint/finish", json={})["bytes"] > 0
        back_end = post(client, "/train/weights", json={})["back_end"]
        assert (back_end["tensor_parallel"], back_end["world_size"]) == (2, 2)

        pid = next(pid for pid in children_of(os.getpid()) if "megatron.rank" in command_of(pid))
        os.kill(pid, signal.SIGKILL)
        refused = client.post("/train/micro_step", content=body)
        assert refused.status_code == 500 and "a rank of it is gone" in refused.text
        until(lambda: client.get("/status").json()["state"] == "dead")

    one = MegatronTrainer(folder / "model", TRAIN, seed=0)
    try:
        for step, branches in enumerate(groups):
            for packed in pack_for_training([b for part in branches.values() for b in part], TRAIN):
                one.micro_step(packed)
            one.optimizer_step(num_rollouts(branches), TRAIN.learning_rate_at(step))
        mine = weights_of(one)
        one.load_checkpoint(folder / "checkpoint")
        assert relative_difference(weights_of(one), mine) <= 1e-5
    finally:
        one.close()


def test_parallel_cells_share_a_step(folder: Path) -> None:
    """A core and a satellite of two processes each: the step that one process takes, every group once."""
    groups = groups_of_step(0, num_groups=8)
    port = free_port()
    core = settings(folder, members=MembersSettings(port=port, secret="members"))
    (folder / "one").mkdir()
    satellite = settings(
        folder,
        cell_id="cell-1",
        work_dir=folder / "one",
        core_url=f"http://127.0.0.1:{port}",
        core_secret="members",
    )
    headers = {"authorization": "Bearer control"}
    with (
        TestClient(create_app(core), headers=headers) as first,
        TestClient(create_app(satellite), headers=headers) as second,
    ):
        post(second, "/role", json={"to": "train", "epoch": 0})
        post(first, "/train/open", json={"step": 0, "policy_version": 0})
        for name, branches in groups.items():
            post(first, "/train/group", params={"group_id": name}, content=branches_to_ipc(branches))
        until(lambda: second.get("/status").json()["member"]["micro_steps"] >= 1, timeout_s=60.0)
        post(first, "/role", json={"to": "train", "epoch": 0})
        post(first, "/train/seal", json={"num_rollouts": num_rollouts(groups)})
        while (result := post(first, "/train/finish", json={"wait_s": 20.0})).get("running"):
            pass
        post(first, "/checkpoint/save", json={"path": str(folder / "checkpoint"), "extra": {}})
        post(first, "/checkpoint/finish", json={})
        account = result["account"]
        assert sorted(account["groups"]) == sorted(groups)
        trainers = {session.rpartition("/")[2].partition("#")[0] for session in account["taken"].values()}
        assert "cell-1" in trainers
        assert account["stats"]["weight_sum"] == pytest.approx(num_rollouts(groups))
        post(second, "/role", json={"to": "rollout", "epoch": 1, "policy_version": 1})
        digests = [post(client, "/train/weights", json={})["weights_digest"] for client in (first, second)]
        assert digests[0] == digests[1], "the satellite holds the new weights"

    one = MegatronTrainer(folder / "model", TRAIN, seed=0)
    try:
        for packed in pack_for_training([branch for part in groups.values() for branch in part], TRAIN):
            one.micro_step(packed)
        one.optimizer_step(num_rollouts(groups), TRAIN.learning_rate_at(0))
        mine = weights_of(one)
        one.load_checkpoint(folder / "checkpoint")
        assert relative_difference(weights_of(one), mine) <= 1e-5
    finally:
        one.close()


def test_parallel_replica_deals_a_micro_step_out_to_all_copies() -> None:
    branches = [branch for part in groups_of_step(0).values() for branch in part]
    for copies in (1, 2, 3):
        trainer: Any = SimpleNamespace(config=TRAIN.model_copy(update={"data_parallel": copies}))
        trainer.layouts = lambda: []
        parts = ParallelReplica(trainer)._packed(branches)
        assert len(parts) >= copies
        dealt = sorted((key.rollout_id, key.branch) for part in parts for key in part.branches)
        assert dealt == sorted((branch.rollout_id, branch.branch) for branch in branches)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
