"""An emulated core and satellite behind the cell host's own verbs: roles, steps, publications and their times."""

import asyncio
import json
from pathlib import Path

import pytest

from gyre_core.bench.elastic_inputs import save_emulated_model
from gyre_core.cells.emulated import EmulatedCellHost
from gyre_core.cells.settings import CellSettings, MembersSettings
from gyre_core.config.emulation import EmulationConfig, SwitchCosts, TrainCosts, account_path
from gyre_core.config.models import TrainConfig
from gyre_core.scheduler.cell import StaleEpochError
from gyre_core.transfer.branches import branches_to_ipc
from tests.support.members import SECRET, group

EMULATION = EmulationConfig(
    compression=1000.0,
    train=TrainCosts(token_s=0.1, optimizer_s=10.0),
    switch=SwitchCosts(to_train_s=100.0, to_rollout_s=50.0, publish_s=20.0),
)


def settings(folder: Path, cell_id: str, **changes: object) -> CellSettings:
    fields = {
        "cell_id": cell_id,
        "port": 1,
        "secret": "s",
        "model_path": folder / "model",
        "context_length": 1024,
        "slots": 4,
        "seed": 0,
        "work_dir": folder,
        "train": TrainConfig(micro_step_tokens=64),
        "emulate": EMULATION,
    }
    return CellSettings(**{**fields, **changes})


async def test_core_and_satellite_share_a_step_and_serve_its_weights(tmp_path: Path):
    save_emulated_model(tmp_path / "model")
    core = EmulatedCellHost(settings(tmp_path, "cell-0", members=MembersSettings(secret=SECRET)))
    await core.start()
    url = core.describe()["members_url"]
    satellite = EmulatedCellHost(settings(tmp_path, "cell-1", core_url=url, core_secret=SECRET))
    try:
        await satellite.start()
        for cell in (core, satellite):
            await cell.role("drain", epoch=0)
            moved = await cell.role("train", epoch=1)
            assert moved["state"] == "training"
            assert moved["phases"]["switch"] >= 0.1  # 100 s of the cluster
        with pytest.raises(StaleEpochError):
            await core.role("rollout", epoch=0)
        groups = [group(f"g{number}", rollouts=4, length=20, token=number) for number in range(4)]
        await core.train_open(step=0, policy_version=0)
        for branches in groups:
            await core.train_group(branches[0].group_id, branches_to_ipc(branches))
        await core.train_seal(num_rollouts=16)
        async with asyncio.timeout(30):
            while (result := await core.train_finish(wait_s=1.0)) is None:
                pass
        assert result["grad_norm"] == 4 * 4 * 20  # every target once, whoever trained it
        assert result["policy_version"] == 1
        for cell in (satellite, core):
            back = await cell.role("rollout", epoch=1, policy_version=1)
            assert (back["state"], back["served_version"]) == ("rollout", 1)
            assert back["phases"]["publish"] >= 0.02
    finally:
        await satellite.stop()
        await core.stop()
    accounts = [json.loads(account_path(tmp_path, name).read_text()) for name in ("cell-0", "cell-1")]
    # 336 tokens at 0.1 s by both, ten seconds of the optimizer by the core
    assert sum(account["training_s"] for account in accounts) == pytest.approx(4 * 84 * 0.1 + 10.0)
    assert all(account["switch_s"] == 150.0 for account in accounts)
    assert all(account["training_role_s"] > account["training_s"] for account in accounts)
