"""Cell hosts that share steps, with faults: the parameters are those of one cell, and a step can be trained again."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gyre_core.cells.client import CellClient
from gyre_core.errors import TrainError
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.queue_records import StepAccount
from gyre_core.types import TrainingBranch
from tests.support.cell_processes import CellProcess, core_members, satellite_fields
from tests.support.members import until
from tests.support.satellites import TRAIN, groups_of_step, num_rollouts, relative_difference, weights_of
from tests.support.training import make_branch, write_tiny_qwen3

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

SMALL = TRAIN.model_copy(update={"micro_step_tokens": 128, "keep_checkpoints": 1})
Groups = Mapping[str, Sequence[TrainingBranch]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_qwen3(folder)
    yield folder
    torch.set_num_threads(before)


def feed(core: CellClient, step: int, groups: Groups) -> None:
    core.train_open(step=step, policy_version=step)
    for name, branches in groups.items():
        core.train_group(name, branches)


def finish(core: CellClient) -> tuple[StepAccount, dict[str, Any]]:
    while (result := core.train_finish(wait_s=10.0)) is None:
        pass
    return StepAccount.from_json(result["account"]), result


def cell_of(session: str) -> str:
    return session.rsplit("/", 1)[1].split("#")[0]


class Run:
    """A core with satellites, and what its steps left."""

    def __init__(self, core: CellProcess, folder: Path) -> None:
        self.core, self.folder = core, folder
        self.accounts: list[StepAccount] = []

    @property
    def step(self) -> int:
        return len(self.accounts)

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"version-{self.step}"

    def counts(self) -> dict[str, Any]:
        found = self.core.client.status()["step"]
        assert found is not None
        return found

    def feed(self) -> Groups:
        groups = groups_of_step(self.step)
        feed(self.core.client, self.step, groups)
        return groups

    def end(self, groups: Groups) -> StepAccount:
        """Seal, wait, check that every group counts once, save."""
        self.core.client.train_seal(num_rollouts=num_rollouts(groups))
        account, result = finish(self.core.client)
        assert set(account.groups) == set(groups)
        trained = sorted(name for part in account.micro_steps for name in part)
        assert trained == sorted((b.rollout_id, b.branch) for branches in groups.values() for b in branches)
        assert result["policy_version"] == self.step + 1
        self.accounts.append(account)
        self.core.client.save_checkpoint(str(self.checkpoint), {})
        self.core.client.finish_checkpoint()
        return account


def held_by(run: Run, cell: CellProcess) -> None:
    """Wait until this satellite's gradient holds something, while the core does not train."""
    cell.role("train")
    until(lambda: run.counts()["completed"] >= 1, 120.0)


def train_again(cell: CellProcess, account: StepAccount, groups: Groups, version: int) -> str:
    """The step's sums told to a cell that trains alone; its weights' digest afterwards."""
    branches = {(b.rollout_id, b.branch): b for part in groups.values() for b in part}
    cell.client.reset_gradients()
    for part in account.sums:
        if not part.owner:
            cell.client.sum_begin()
        for name in part.micro_steps:
            cell.client.micro_step([branches[key] for key in account.branches[name]])
        if not part.owner:
            cell.client.sum_end()
    cell.client.optimizer_step(num_rollouts=num_rollouts(groups), policy_version=version)
    return cell.client.weights()["weights_digest"]


def test_core_and_satellite_step_equals_one_cells_and_is_trained_again_bit_for_bit(model: Path, tmp_path: Path) -> None:
    members = core_members()
    with ExitStack() as stack:
        core = stack.enter_context(CellProcess("cell-0", model, tmp_path, members=members, train=SMALL))
        cell = CellProcess("cell-1", model, tmp_path, **satellite_fields(members), train=SMALL)
        satellite = stack.enter_context(cell)
        alone = stack.enter_context(CellProcess("alone", model, tmp_path, train=SMALL))
        for process in (core, satellite, alone):
            process.wait_ready()
        run = Run(core, tmp_path)
        groups = run.feed()
        held_by(run, satellite)
        core.role("train")
        account = run.end(groups)
        assert {cell_of(session) for session in account.taken.values()} == {"cell-0", "cell-1"}
        alone.role("train")
        digest = core.client.weights()["weights_digest"]
        assert train_again(alone, account, groups, 1) == digest
        core.role("rollout", policy_version=1)
        satellite.role("rollout", policy_version=1)
        assert satellite.client.weights()["weights_digest"] == digest


@pytest.mark.slow
def test_cells_that_join_leave_hang_and_die_give_the_parameters_of_one(model: Path, tmp_path: Path) -> None:
    members = core_members()
    with ExitStack() as stack:
        start = lambda name, **more: stack.enter_context(CellProcess(name, model, tmp_path, train=SMALL, **more))  # noqa: E731
        core = start("cell-0", members=members)
        first, second, third = (start(f"cell-{n}", **satellite_fields(members)) for n in (1, 2, 3))
        alone = start("alone")
        for process in (core, first, second, third, alone):
            process.wait_ready()
        run = Run(core, tmp_path)

        # 0: two satellites join before the core, one while it trains; one leaves early
        groups = run.feed()
        held_by(run, first)
        back = first.role("rollout", policy_version=0)
        assert back["member"]["left"] == 1
        second.role("train")
        core.role("train")
        third.role("train")
        account = run.end(groups)
        assert "cell-1" in {cell_of(session) for session in account.taken.values()}
        assert account.cut_off == () and account.requeued == 0
        for cell in (second, third, core):
            cell.role("rollout", policy_version=1)

        # 1: a satellite is killed with a gradient; the queue learns it long before a lease or silence (30 s) ends
        groups = run.feed()
        held_by(run, second)
        held = run.counts()["completed"]
        second.kill()
        until(lambda: run.counts()["requeued"] >= held, 20.0)
        second.restart()
        core.role("train")
        account = run.end(groups)
        assert [cell_of(session) for session in account.cut_off] == ["cell-2"]
        core.role("rollout", policy_version=2)

        # 2: the core is killed; what a satellite holds, and what another has left behind, still counts
        groups = run.feed()
        held_by(run, third)
        third.role("rollout", policy_version=2)
        done = run.counts()["completed"]
        first.role("train")
        until(lambda: run.counts()["completed"] > done, 120.0)
        core.kill()
        core.restart(checkpoint=tmp_path / "version-2", policy_version=2)
        known = [core.client.train_open(step=2, policy_version=2)]
        known += [core.client.train_group(name, branches) for name, branches in groups.items()]
        assert all(reply["known"] for reply in known[1:])
        core.role("train")
        account = run.end(groups)
        assert {"cell-1", "cell-3"} <= {cell_of(session) for session in account.taken.values()}
        assert {cell_of(session) for session in account.cut_off} <= {"cell-0"}
        core.role("rollout", policy_version=3)

        # 3: a satellite hangs with a gradient, and the fleet says so; the other joins after the last micro-step
        groups = run.feed()  # the first satellite trains on
        until(lambda: run.counts()["completed"] >= 1, 120.0)
        first.signal(signal.SIGSTOP)
        lost = core.client.cut_off("cell-1")["sessions"]
        assert [cell_of(session) for session in lost] == ["cell-1"]
        core.client.train_seal(num_rollouts=num_rollouts(groups))
        core.role("train")
        until(lambda: run.counts()["pending"] == 0, 120.0)
        third.role("train")
        account = run.end(groups)
        assert list(account.cut_off) == lost
        assert not set(lost) & set(account.taken.values())
        core.role("rollout", policy_version=4)

        # 4: the one that hung comes back with a stale step, and takes part in this one
        groups = run.feed()
        third.role("rollout", policy_version=4)
        first.signal(signal.SIGCONT)
        until(lambda: first.client.status()["policy_version"] == 4, 60.0)
        until(lambda: "cell-1" in run.counts()["trainers"], 60.0)
        core.role("train")
        account = run.end(groups)
        print("\nmembers by step", [sorted(map(cell_of, set(a.taken.values()))) for a in run.accounts])

        # 5: a gradient that is not finite refuses the step; the data stay, and without the bad group it goes on
        groups = groups_of_step(5)
        poisoned = make_branch(list(range(30)), range(1, 30), rollout_id="bad", group_id="bad", sampler=-1e30)
        feed(core.client, 5, {**groups, "bad": [poisoned]})
        core.client.train_seal(num_rollouts=num_rollouts(groups) + 1)
        before = core.client.weights()["weights_digest"]
        with pytest.raises(TrainError, match="refused"):
            finish(core.client)
        assert core.client.weights()["weights_digest"] == before
        run.feed()
        account = run.end(groups)
        assert core.client.status()["policy_version"] == 6

        alone.role("train")
        for step in range(run.step):
            feed(alone.client, step, groups_of_step(step))
            alone.client.train_seal(num_rollouts=num_rollouts(groups_of_step(step)))
            finish(alone.client)
        alone.client.save_checkpoint(str(tmp_path / "alone-6"), {})
        alone.client.finish_checkpoint()
    trainer = MegatronTrainer(model, SMALL, seed=0)
    try:
        weights = {}
        weights["first"] = weights_of(trainer)
        for name in ("version-6", "alone-6"):
            trainer.load_checkpoint(tmp_path / name)
            weights[name] = weights_of(trainer)
    finally:
        trainer.close()
    apart = relative_difference(weights["version-6"], weights["alone-6"])
    moved = relative_difference(weights["first"], weights["alone-6"])
    print(f"largest relative difference {apart:.2e}, the steps moved {moved:.2e}")
    assert apart <= 1e-5
    assert moved > 1e-4
