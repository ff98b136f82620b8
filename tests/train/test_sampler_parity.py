"""The trainer's log-probs against the sampler's."""

from dataclasses import replace

import numpy as np
import pytest

from gyre_core.train.parity import sampler_trainer_parity
from tests.support.trainers import on_policy
from tests.support.training import random_branches


def test_sampler_trainer_parity_finds_the_worst_target(make_trainer) -> None:
    trainer = make_trainer()
    branches = on_policy(trainer, random_branches(0))
    report = sampler_trainer_parity(trainer, branches)
    assert report["sampler_trainer_max_abs"] < 1e-6
    assert report["tokens"] == sum(int(branch.target.sum()) for branch in branches)
    position = int(np.flatnonzero(branches[3].target)[1])
    moved = branches[3].sampler_logprobs.copy()
    moved[position] += 0.25
    branches[3] = replace(branches[3], sampler_logprobs=moved)
    report = sampler_trainer_parity(trainer, branches)
    assert report["sampler_trainer_max_abs"] == pytest.approx(0.25, abs=1e-6)
    assert report["sampler_trainer_mean_abs"] == pytest.approx(0.25 / report["tokens"], rel=1e-2)
    assert report["worst"]["rollout_id"] == branches[3].rollout_id
    assert report["worst"]["position"] == position
    assert sampler_trainer_parity(trainer, [])["tokens"] == 0
