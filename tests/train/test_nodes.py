"""A cell's further nodes: programs started and stopped there, and a trainer whose processes are on two of them."""

import contextlib
import socket
from multiprocessing import AuthenticationError
from pathlib import Path

import psutil
import pytest
import torch

from gyre_core.config.models import TrainConfig
from gyre_core.errors import ConfigError, GyreError, TrainError
from gyre_core.nodes import NodeAgent, NodeHub, handshake
from gyre_core.train.megatron.backend import MegatronTrainer
from gyre_core.train.megatron.replica import MegatronReplica, ParallelReplica
from gyre_core.train.parallel import ParallelTrainer
from tests.support.members import until
from tests.support.nodes import running_agent
from tests.support.satellites import groups_of_step, num_rollouts
from tests.support.training import write_tiny_qwen3

KEY = "key-of-the-cell"
SLEEPER = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(60)"


def sleepers(marker: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(marker) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_nodes_run_what_the_first_one_says_once(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    command = ["{python}", "-c", SLEEPER, str(marker)]
    with NodeHub("127.0.0.1", 0, KEY, count=2) as hub:
        hub.run("sleeper", lambda node: command)  # before the node is there
        with running_agent(hub, tmp_path, key=KEY):
            hub.wait(10.0)
            until(lambda: marker.exists() and marker.read_text() == "x")
            hub.run("other", lambda node: ["{python}", "-c", "raise SystemExit(3)"])
            until(lambda: hub.ended.get("other-2") == "node 1: exit code 3")
            assert marker.read_text() == "x", "the first program was left alone"
            hub.run("sleeper", lambda node: command)
            until(lambda: marker.read_text() == "xx")
            assert len(sleepers(marker)) == 1, "the old one is gone"
            hub.stop("sleeper")
            until(lambda: not sleepers(marker))
            hub.run("sleeper", lambda node: command)
            until(lambda: len(sleepers(marker)) == 1)
            hub.close()
            until(lambda: not sleepers(marker))  # without a hub an agent runs nothing


def test_nodes_with_another_key_or_number_are_not_taken(tmp_path: Path) -> None:
    with NodeHub("127.0.0.1", 0, KEY, count=2) as hub:
        with pytest.raises(ConfigError, match="another GYRE_NODE_KEY"):
            NodeAgent(1, hub.host, hub.port, "another", tmp_path).run()
        with running_agent(hub, tmp_path, key=KEY, node=2), pytest.raises(GyreError, match=r"node\(s\) \[1\]"):
            hub.wait(1.5)
        with pytest.raises((AuthenticationError, OSError, EOFError)):
            client = socket.create_connection((hub.host, hub.port), timeout=5.0)
            handshake(client, b"another", deliver_first=False)


def test_nodes_stranger_who_says_nothing_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_core.nodes.HANDSHAKE_S", 0.3)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises((OSError, EOFError)):
        handshake(ours, KEY.encode(), deliver_first=True)


def test_nodes_tell_a_new_hub_of_an_end_with_the_old_ones_key(tmp_path: Path) -> None:
    with NodeHub("127.0.0.1", 0, KEY, count=2) as hub, running_agent(hub, tmp_path, key=KEY):
        hub.run("short", lambda node: ["{python}", "-c", "raise SystemExit(3)"])
        until(lambda: hub.ended.get("short-1") == "node 1: exit code 3")
        hub.close()
        with NodeHub("127.0.0.1", hub.port, KEY, count=2) as again:
            again.run("short", lambda node: ["{python}", "-c", "raise SystemExit(4)"])
            until(lambda: again.ended.get("short-1") == "node 1: exit code 4")


@pytest.mark.integration
@pytest.mark.timeout(280)
def test_trainer_on_two_nodes_is_one_trainer_and_a_lost_node_breaks_it(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path / "model")
    before = torch.get_num_threads()
    settings = {"loss": "grpo", "clip_low": 0.9, "clip_high": 9.0, "learning_rate": 1e-3, "threads": 1}
    groups = groups_of_step(0, num_groups=3)
    with NodeHub("127.0.0.1", 0, KEY, count=2) as hub, running_agent(hub, tmp_path, key=KEY):
        several = ParallelTrainer(tmp_path / "model", TrainConfig(**settings, tensor_parallel=2), nodes=hub)
        one = MegatronTrainer(tmp_path / "model", TrainConfig(**settings))
        replica = ParallelReplica(several)
        try:
            for branches in groups.values():
                replica.compute(branches)
            gradients = [tensor.clone() for tensor in replica.gradients()]
            replica.add_gradients(gradients, 3)  # through the wire and back: twice the sum
            single = MegatronReplica(one)
            for branches in [*groups.values(), *groups.values()]:
                single.compute(branches)
            whole, expected = several.gradients(), one.gradients()
            for name, gradient in expected.items():
                assert float((whole[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)) <= 1e-5, name
            several.optimizer_step(num_rollouts(groups))
            stepped = several.weights_digest()
            weights = [tensor.clone() for tensor in replica.weights()]
            for branches in groups.values():
                replica.compute(branches)
            several.optimizer_step(num_rollouts(groups))
            assert several.weights_digest() != stepped
            replica.load_weights(weights)
            assert several.weights_digest() == stepped

            remote = [
                process
                for process in psutil.Process().children(recursive=True)
                if "megatron.rank" in " ".join(process.cmdline()) and process.environ().get("RANK") == "1"
            ]
            remote[-1].kill()
            with pytest.raises(TrainError, match="a rank of it is gone"):
                for branches in groups.values():
                    replica.compute(branches)
            assert several.broken
        finally:
            replica.close()
            several.close()
            one.close()
            torch.set_num_threads(before)
    ranks = [p for p in psutil.Process().children(recursive=True) if "megatron.rank" in " ".join(p.cmdline())]
    assert not ranks, "no rank outlives its driver"


def test_trainer_that_nodes_cannot_share_evenly_is_refused(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path / "model")
    with NodeHub("127.0.0.1", 0, KEY, count=3) as hub, pytest.raises(ConfigError, match="not shared evenly by 3 nodes"):
        ParallelTrainer(tmp_path / "model", TrainConfig(tensor_parallel=2), nodes=hub)
