"""What a rollout's page shows: numbers by hand, packing, vocabularies, sizes."""

import base64
import gzip
import json
import re
import time

import numpy as np
import pytest
from hypothesis import given
from tokenizers import Tokenizer

from gyre_core.bench.tree_rollout import VOCAB_SIZE, synthetic_calls
from gyre_core.store.tables import StoredRollout
from gyre_core.trajectory.builder import TokenTree
from gyre_core.trajectory.tree import Trajectory, TrajectoryTree
from gyre_core.viewer.model import byte_planes, rollout_model, trained_runs
from gyre_core.viewer.page import rollout_page
from gyre_core.viewer.vocabulary import Vocabulary, vocabulary_of
from tests.support.random_trees import trees
from tests.support.rollouts import branch_of, finished, trajectories, two_turns
from tests.support.tokenizer import byte_tokenizer, encode
from tests.support.trees import trajectory_of
from tests.support.viewed import viewed_rollout

NUMBERS = Vocabulary(piece=lambda token_id: f"<{token_id}>".encode(), special=frozenset({4}))


def stored(trajectory: Trajectory | None = None, reward: float | None = 0.5) -> StoredRollout:
    made = finished("r1", reward=reward, trajectory=trajectory)
    return StoredRollout(spec=made.spec, trajectory=made.trajectory, grade=made.grade, harness=made.harness)


def numbers(data: bytes, width: int) -> list[int]:
    planes = np.frombuffer(data, np.uint8).reshape(width, -1).astype(np.int64)
    return sum(planes[plane] << (8 * plane) for plane in range(width)).tolist()


def test_model_of_two_turns_has_the_numbers_counted_by_hand() -> None:
    trajectory = two_turns("r1")  # 1 2 3 [10 11] 4 [12]   and   1 2 3 [20]
    long = branch_of(trajectory, 3, num_targets=2)  # trains 11 and 12
    other = branch_of(trajectory, 4, branch=1)  # trains 20
    head = rollout_model(stored(), [long, other], NUMBERS, run_id="run", group_rewards={"r1": 0.5, "r2": None}).head
    totals = head["totals"]
    assert (totals["unique_tokens"], totals["sampled_tokens"], totals["trained_tokens"]) == (8, 4, 3)
    assert (totals["branches"], totals["branch_tokens"], totals["calls"]) == (2, 7 + 4, 3)
    assert totals["versions"] == {"0": 4} and totals["roles"] == {"main": 3} and totals["substitutions"] == {"clean": 3}
    assert head["nodes"]["parent"] == [-1, 0, 1, 2, 0]
    assert head["nodes"]["size"] == [3, 2, 1, 1, 1]
    assert head["nodes"]["call"] == [-1, 0, -1, 1, 2]
    assert head["nodes"]["spans"] == [[], [[0, 0, 2]], [], [[0, 0, 1]], [[0, 0, 1]]]
    assert head["nodes"]["trained"] == [[], [[1, 2, 0]], [], [[0, 1, 0]], [[0, 1, 1]]]
    assert [(one["leaf"], one["tokens"], one["targets"]) for one in head["branches"]] == [(3, 7, 2), (4, 4, 1)]
    assert head["outline"]["rows"] == [0, 1, 2, 3, 4]  # a shared prompt: two conversations
    assert [thread["level"] for thread in head["outline"]["threads"]] == [0, 1, 1]
    assert head["grade"] == {
        "outcome": "finished",
        "reward": 0.5,
        "reason": "verifier wrote 0.5",
        "attempts": 1,
        "seconds": 0.25,
        "metrics": {"files": 2.0},
    }
    assert head["group_rewards"] == {"r1": 0.5, "r2": None}


def test_model_times_count_from_the_first_call() -> None:
    head = rollout_model(stored(), [], NUMBERS).head
    assert head["zero_s"] == 100.0
    assert [(call["start"], call["seconds"]) for call in head["calls"]] == [(0.0, 0.5), (1.0, 0.5), (2.0, 0.5)]
    assert head["harness"]["started_s"] == 0.0 and head["harness"]["seconds"] == 1.5


def test_model_holds_each_token_once_as_an_index_of_the_pieces() -> None:
    model = rollout_model(stored(), [], NUMBERS)
    ids = numbers(model.sections["piece_ids"], 4)
    assert sorted(ids) == [1, 2, 3, 4, 10, 11, 12, 20]
    assert [ids[index] for index in numbers(model.sections["tokens"], 3)] == [1, 2, 3, 10, 11, 4, 12, 20]
    assert model.sections["pieces"] == b"".join(f"<{token_id}>".encode() for token_id in ids)
    assert [ids[index] for index in model.head["special"]] == [4]
    assert numbers(model.sections["logprobs"], 2) == [100, 200, 300, 400]  # thousandths of a nat, without the sign


def test_model_of_no_calls_and_no_reward_is_a_page() -> None:
    empty = Trajectory(rollout_id="r1", tree=TrajectoryTree(rollout_id="r1", nodes=()), calls=())
    model = rollout_model(stored(empty, reward=None), [], NUMBERS)
    assert model.head["totals"]["calls"] == 0 and model.head["grade"]["reward"] is None
    assert b"reward none, 0 calls" in rollout_page(model)


@given(trajectories("r1"))
def test_model_of_any_trajectory_gives_back_its_tokens(trajectory: Trajectory) -> None:
    model = rollout_model(stored(trajectory), [], NUMBERS)
    ids = numbers(model.sections["piece_ids"], 4)
    told = [ids[index] for index in numbers(model.sections["tokens"], 3)]
    assert told == [token for node in trajectory.tree.nodes for token in node.token_ids.tolist()]
    json.dumps(model.head)
    rollout_page(model)


@given(trees())
def test_trained_runs_of_any_selection_mark_exactly_its_targets(tree: TrajectoryTree) -> None:
    trajectory = trajectory_of(tree)
    branches = [branch_of(trajectory, leaf, branch=order) for order, leaf in enumerate(tree.leaves())]
    for branch, leaf in zip(branches, tree.leaves(), strict=True):
        runs = trained_runs(tree, [branch])
        marked = [
            np.isin(np.arange(len(tree.nodes[node].token_ids)), [i for a, b, _ in runs[node] for i in range(a, b)])
            for node in tree.path(leaf)
        ]
        np.testing.assert_array_equal(np.concatenate(marked), branch.target)


def test_byte_planes_put_the_lowest_bytes_first() -> None:
    assert byte_planes(np.array([1, 0x020304]), 3) == bytes([1, 4, 0, 3, 0, 2])
    assert byte_planes(np.zeros(0, np.uint32), 2) == b""


@pytest.mark.parametrize("text", ["plain text\n", "naïve 日本 🙂", "\x00\x1b[31m‮", "<|im_start|>user\n</tool_call>"])
def test_vocabulary_pieces_of_a_byte_level_tokenizer_join_to_the_text(text: str) -> None:
    vocabulary = vocabulary_of(byte_tokenizer().backend_tokenizer)
    assert b"".join(vocabulary.pieces(encode(text))).decode() == text


def test_vocabulary_knows_control_tokens_and_names_ids_beyond_the_tokenizer() -> None:
    backend: Tokenizer = byte_tokenizer().backend_tokenizer
    vocabulary = vocabulary_of(backend)
    assert backend.token_to_id("<|im_end|>") in vocabulary.special
    assert vocabulary.piece(10**6).decode() == "⟨1000000⟩"


def test_page_of_500_calls_and_700k_tokens_is_small_and_quick() -> None:
    viewed = viewed_rollout(num_calls=500, num_tokens=700_000)
    started = time.process_time()
    page = rollout_page(rollout_model(viewed.rollout, viewed.branches, viewed.vocabulary))
    seconds = time.process_time() - started
    assert len(viewed.rollout.trajectory.calls) >= 500
    assert viewed.rollout.trajectory.tree.unique_tokens > 650_000
    assert len(page) < 1_500_000  # measured: 0.85 MB
    assert seconds < 10  # measured: 0.15 s


def test_page_of_700k_random_tokens_of_a_whole_vocabulary_stays_under_six_megabytes() -> None:
    """The worst case: every id is as likely as any other, so that nothing of the text can be compressed."""
    tree = TokenTree()
    at = tree.root
    for call in synthetic_calls(num_calls=500, num_tokens=700_000, seed=0):
        at = tree.add_output(
            tree.attach(at, call.added, call.role),
            call.output_ids,
            call.logprobs,
            [],
            call_id=call.reply.call_id,
            role=call.role,
        )
    trajectory = Trajectory(rollout_id="r1", tree=tree.freeze("r1")[0], calls=())
    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, (VOCAB_SIZE, 6), dtype=np.uint8)
    vocabulary = Vocabulary(piece=lambda token_id: letters[token_id].tobytes(), special=frozenset())
    page = rollout_page(rollout_model(stored(trajectory), [], vocabulary))
    assert len(page) < 6_000_000


def test_page_payload_is_the_model_again() -> None:
    model = rollout_model(stored(), [], NUMBERS)
    found = re.search(rb'id="payload">([^<]*)</script>', rollout_page(model))
    assert found is not None
    data = gzip.decompress(base64.b64decode(found[1]))
    size = int(data[:8])
    head = json.loads(data[8 : 8 + size])
    offset, length = head.pop("sections")["pieces"]
    assert data[8 + size + offset :][:length] == model.sections["pieces"]
    assert head == json.loads(json.dumps(model.head))
