"""The quickstart's run with its store in a bucket, over a connection that loses acknowledgements.

Its learning rate is 0, so that one run shows two things: every commit is whole and once, and no weight changes.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from gyre_core.store import Store
from gyre_core.store.verify import verify
from tests.integration.test_train_command import QUICKSTART, gyre, heldout, settings
from tests.support.faulting_proxy import Fault, FaultingProxy
from tests.support.seaweedfs import SeaweedFS

__all__ = ["heldout"]

pytestmark = pytest.mark.integration


def test_train_with_its_store_on_s3_and_rate_0_ends_with_every_commit_whole_and_weights_unchanged(
    seaweedfs: SeaweedFS, tmp_path: Path, heldout: Path
) -> None:
    bucket = seaweedfs.make_bucket()
    lost: set[str] = set()

    def lose_the_first_reply(method: str, path: str) -> Fault | None:
        if method != "PUT" or "/probe/" in path or path in lost:
            return None
        lost.add(path)
        return Fault.LOST_REPLY

    runs = tmp_path / "runs"
    with FaultingProxy(seaweedfs.port).running() as proxy:
        proxy.plan = lose_the_first_reply
        url = seaweedfs.store_url(bucket, "runs/r1", port=proxy.port)
        overrides = {"store.url": f"'{url}'", "train.learning_rate": "0.0", "scheduler.cells": "1"}
        done = gyre("train", str(QUICKSTART / "run.toml"), "--run", "r1", *settings(runs, heldout, **overrides))
        assert done.returncode == 0, done.stderr[-3000:]
        checked = gyre("store", "verify", "r1", "--runs-dir", str(runs), "--json")
        shown = gyre("inspect", "r1", "--runs-dir", str(runs), "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["groups_trained"] + summary["groups_dropped"]) == (2, 4)
    assert len(lost) > 20
    assert not (runs / "r1" / "store").exists()

    assert checked.returncode == 0, checked.stdout
    assert len(json.loads(shown.stdout)["steps"]) == 2
    store = Store.open(seaweedfs.store_url(bucket, "runs/r1"), read_only=True)
    report = verify(store)
    assert report.problems == () and report.unreferenced == ()
    kinds = Counter(commit.kind for commit in store.commits())
    assert (kinds["group"], kinds["step"], kinds["evaluation"]) == (4, 2, 2)
    assert report.num_rollouts == sum(summary["rollouts"].values()) == 2 * 2 * 3 + 2 * 3
    records = store.read_steps()
    trained = [group for record in records for group in record.groups_trained]
    assert len(trained) == len(set(trained)) and set(trained) <= {commit.token for commit in store.commits("group")}
    digests = {record.extra["replay"][name] for record in records for name in ("weights_before", "weights_after")}
    assert len(digests) == 1 and "" not in digests, "learning rate 0 changes no weight"
