"""A rollout that looks like a coding agent's, of any length: conversations, compactions, sub-agents, forks."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre_core.selection.batch import selection_rng, training_branches
from gyre_core.selection.branches import select_branches
from gyre_core.store.tables import StoredRollout
from gyre_core.trajectory.builder import LiveNode, TokenTree
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import (
    CallRecord,
    FinishReason,
    Grade,
    HarnessResult,
    Outcome,
    Role,
    RolloutSpec,
    Substitution,
    TrainingBranch,
    VersionSpan,
)
from gyre_core.viewer.vocabulary import Vocabulary

_SPECIAL = re.compile(r"(<\|[a-z_]+\|>)")
_PIECE = re.compile(r"<\|[a-z_]+\|>| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s+")
_NAMES = [
    "parse",
    "load",
    "store",
    "index",
    "tree",
    "queue",
    "batch",
    "cache",
    "token",
    "branch",
    "merge",
    "split",
    "check",
]
_FILES = [f"src/{first}_{second}.py" for first in _NAMES for second in _NAMES]


class Words:
    """A vocabulary that grows with the texts it reads: about a word a token.

    Example: words.encode("fix the parser<|im_end|>")
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text."""
        ids = []
        for piece in _PIECE.findall(text):
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(self._ids[piece])
        return np.array(ids, np.int32)

    def vocabulary(self) -> Vocabulary:
        """The vocabulary of all that was read."""
        special = frozenset(index for index, piece in enumerate(self._pieces) if _SPECIAL.fullmatch(piece))
        return Vocabulary(piece=lambda token_id: self._pieces[token_id].encode(), special=special)


@dataclass(frozen=True, kw_only=True)
class Viewed:
    """What a page is made of."""

    rollout: StoredRollout
    branches: list[TrainingBranch]
    vocabulary: Vocabulary


@dataclass
class _Writer:
    rng: np.random.Generator
    words: Words = field(default_factory=Words)
    tree: TokenTree = field(default_factory=TokenTree)
    calls: list[dict[str, Any]] = field(default_factory=list)
    now_s: float = 1_790_000_000.0

    def prompt(self, below: LiveNode, text: str, role: Role) -> LiveNode:
        return self.tree.attach(below, self.words.encode(text), role)

    def sample(self, below: LiveNode, text: str, role: Role, **fields: Any) -> LiveNode:
        ids = self.words.encode(text)
        index = len(self.calls)
        cut = len(ids) // 2 if index % 11 == 7 else len(ids)
        version = 12 + index // 200
        spans = [VersionSpan(version=version, start=0, end=cut)]
        if cut < len(ids):
            spans.append(VersionSpan(version=version + 1, start=cut, end=len(ids)))
        logprobs = -self.rng.exponential(0.35, len(ids)).astype(np.float32) * self.rng.choice([0.1, 1, 4], len(ids))
        call_id = f"s0012-fix-parser-03-c{index}"
        node = self.tree.add_output(below, ids, logprobs.astype(np.float32), spans, call_id=call_id, role=role)
        took_s = 0.4 + len(ids) / 60
        start_s = fields.pop("start_s", self.now_s)
        self.now_s = max(self.now_s, start_s + took_s + float(self.rng.exponential(1.5)))
        self.calls.append(
            {
                "call_id": call_id,
                "node": node,
                "role": role,
                "prompt_tokens": below.end,
                "output_tokens": len(ids),
                "cached_tokens": max(0, below.end - 400),
                "started_s": start_s,
                "finished_s": start_s + took_s,
                "substitution": Substitution.CLEAN,
                "finish_reason": FinishReason.STOP,
                **fields,
            }
        )
        return node

    def listing(self, num_lines: int) -> str:
        def pick(values: list[str]) -> str:
            return values[int(self.rng.integers(len(values)))]

        lines = []
        for number in range(1, num_lines + 1):
            one, two, three = pick(_NAMES), pick(_NAMES), int(self.rng.integers(10_000))
            lines.append(f"{number:5d}  {one}_{two}{three} = {pick(_NAMES)}({two}, limit={three}, name='{one}')")
        return "\n".join(lines)

    def turn(self, at: LiveNode, role: Role, size: int, **fields: Any) -> LiveNode:
        """One more call: a tool's result and what the policy makes of it."""
        path = _FILES[int(self.rng.integers(len(_FILES)))]
        result = f"<|im_start|>user\n<|tool_result|>\n{path}\n{self.listing(max(2, size // 31))}<|im_end|>\n"
        at = self.prompt(at, result + "<|im_start|>assistant\n", role)
        name = path.rpartition("/")[2]
        reply = (
            f"The failing case goes through {name}: the limit is read before it is set.\n"
            f"I change the order and run the tests again.\n```python\n{self.listing(max(1, size // 100))}\n```\n"
            f"<|tool_call|>bash: python -m pytest tests/test_{name} -q<|im_end|>"
        )
        return self.sample(at, reply, role, **fields)


def viewed_rollout(*, num_calls: int = 24, num_tokens: int = 12_000, max_branches: int = 4, seed: int = 0) -> Viewed:
    """A rollout of about so many calls and unique tokens; the same arguments give the same one."""
    writer = _Writer(np.random.default_rng(seed))
    size = num_tokens // num_calls
    system = "<|im_start|>system\nYou are a coding agent. Work in /app, change as little as needed, run the tests.\n"
    system += writer.listing(max(4, size // 40)) + "<|im_end|>\n"
    task = (
        "<|im_start|>user\nparse_config drops the last section of a file without a final newline. Fix it.<|im_end|>\n"
    )
    base = writer.prompt(writer.tree.root, system, Role.MAIN)
    at = writer.prompt(base, task + "<|im_start|>assistant\n", Role.MAIN)
    at = writer.sample(at, "I look at the parser first.\n<|tool_call|>bash: ls src<|im_end|>", Role.MAIN)
    before = at
    compact_every = max(12, num_calls // 5)
    since = 0
    while len(writer.calls) < num_calls:
        index = len(writer.calls)
        since += 1
        if since >= compact_every and num_calls - index > 4:
            asked = "<|im_start|>user\nSummarise what was done and what is left.<|im_end|>\n<|im_start|>assistant\n"
            summary = "Done: found the cause in the loader.\nLeft: a test for a file without a final newline.<|im_end|>"
            writer.sample(writer.prompt(at, asked, Role.MAIN_SUMMARY), summary, Role.MAIN_SUMMARY)
            text = f"<|im_start|>user\nGo on from this summary:\n{summary}\n<|im_start|>assistant\n"
            at = writer.prompt(base, text, Role.MAIN)
            at = writer.sample(at, "I go on with the test.<|im_end|>", Role.MAIN, substitution=Substitution.SYNTHETIC)
            before, since = at, 0
        elif index % 17 == 9:
            _sub_agents(writer, size)
        elif index % 23 == 13:  # one turn back, another way on
            at = writer.turn(before, Role.MAIN, size, substitution=Substitution.FORKED)
        else:
            before = at
            fields: dict[str, Any] = {}
            if index % 19 == 5:
                fields["substitution"] = Substitution.RESPLICED
            if index % 29 == 20:
                fields["finish_reason"] = FinishReason.LENGTH
            at = writer.turn(at, Role.MAIN, size, **fields)
    title = writer.prompt(writer.tree.root, "<|im_start|>user\nA title of five words.<|im_end|>\n", Role.AUX)
    writer.sample(title, "Keep the last section<|im_end|>", Role.AUX)
    return _viewed(writer, max_branches)


def _sub_agents(writer: _Writer, size: int) -> None:
    """Two sub-agents at once, of two turns each."""
    text = "<|im_start|>system\nYou search a code base and answer briefly.<|im_end|>\n"
    base = writer.prompt(writer.tree.root, text, Role.SUB_AGENT)
    start_s = writer.now_s
    for number in range(2):
        question = (
            f"<|im_start|>user\nWho calls load_index{number}{len(writer.calls)}?<|im_end|>\n<|im_start|>assistant\n"
        )
        at = writer.prompt(base, question, Role.SUB_AGENT)
        answer = "I search for it.\n<|tool_call|>bash: grep -rn load_index src<|im_end|>"
        at = writer.sample(at, answer, Role.SUB_AGENT, start_s=start_s + 0.2 * number)
        writer.turn(at, Role.SUB_AGENT, size, start_s=start_s + 2.5 + 0.3 * number)


def _viewed(writer: _Writer, max_branches: int) -> Viewed:
    rollout_id = "s0012-fix-parser-03"
    tree, ids = writer.tree.freeze(rollout_id)
    calls = []
    for index, values in enumerate(writer.calls):
        node: LiveNode = values.pop("node")
        calls.append(
            CallRecord(
                rollout_id=rollout_id,
                index=index,
                node_id=ids[node.serial],
                dialect="messages",
                model_name="policy",
                hints={"x-agent-id": "worker-1"} if values["role"] is Role.SUB_AGENT else {},
                **values,
            )
        )
    spec = RolloutSpec(
        rollout_id=rollout_id,
        group_id="s0012-fix-parser",
        problem_id="fix-parser",
        step=12,
        member=3,
        dispatch_version=12,
        seed=7,
    )
    counters = {"substitution_clean": sum(call.substitution is Substitution.CLEAN for call in calls)}
    reason = "the harness finished; the verifier wrote 0.75"
    duration_s = writer.now_s - calls[0].started_s
    rollout = StoredRollout(
        spec=spec,
        trajectory=Trajectory(rollout_id=rollout_id, tree=tree, calls=tuple(calls), counters=counters),
        grade=Grade(
            outcome=Outcome.FINISHED,
            reward=0.75,
            reason=reason,
            verifier_attempts=1,
            verifier_s=4.2,
            metrics={"passed": 9.0, "failed": 3.0},
        ),
        harness=HarnessResult(
            exit_code=0,
            timed_out=False,
            duration_s=duration_s + 1.5,
            log_tail="9 passed, 3 failed\n",
            started_s=calls[0].started_s - 0.8,
            finished_s=writer.now_s + 0.7,
        ),
    )
    selected = select_branches(
        tree,
        max_branches=max_branches,
        role_order=[Role.MAIN, Role.SUB_AGENT],
        rng=selection_rng(0, spec.step, rollout_id),
    )
    branches = training_branches(spec, tree, selected, advantage=0.412, temperature=1.0)
    return Viewed(rollout=rollout, branches=branches, vocabulary=writer.words.vocabulary())
