"""A rollout whose every text tries to leave its place on a page."""

from dataclasses import replace

from gyre_core.store.tables import StoredRollout
from gyre_core.trajectory.builder import TokenTree
from gyre_core.trajectory.tree import Trajectory
from gyre_core.types import Role, VersionSpan
from gyre_core.viewer.vocabulary import vocabulary_of
from tests.support.rollouts import branch_of, finished
from tests.support.tokenizer import byte_tokenizer, encode
from tests.support.trees import call_record
from tests.support.viewed import Viewed

PAYLOADS = (
    "<script>window.pwned = 1; alert(1)</script>",
    "</script><script>window.pwned = 2</script>",
    "<!--<script>",
    "--></style><style>body { display: none }</style>",
    "<img src=x onerror='window.pwned = 3'><svg onload='window.pwned = 4'>",
    "javascript:window.pwned=5",
    "\u202egnp.exe\u202c \u2066left\u2069 שלום عربى",
    "\x00\x07\x08\x1b[31mred\x1b[0m\r\x7f\x9b",
    "]]>{{payload}}&lt;b&gt;\ufeff\u200b",
    "日本 🙂 é",
)


def hostile_rollout() -> Viewed:
    """Prompts and outputs of all payloads; ids, names, reasons, hints and logs too."""
    tree = TokenTree()
    at = tree.root
    calls = []
    for index, payload in enumerate(PAYLOADS):
        at = tree.attach(at, encode(f"<|im_start|>user\n{payload}<|im_end|>\n"), Role.MAIN)
        ids = encode(f"{payload} {index}<|im_end|>")
        span = VersionSpan(version=1, start=0, end=len(ids))
        call_id = f"{payload}-c{index}"
        at = tree.add_output(at, ids, [-0.5] * len(ids), [span], call_id=call_id, role=Role.MAIN)
        calls.append((call_id, at, payload))
    rollout_id = "<b>r1</b>"
    frozen, ids_of = tree.freeze(rollout_id)
    records = tuple(
        call_record(
            call_id,
            ids_of[node.serial],
            index,
            rollout_id=rollout_id,
            started_s=100.0 + index,
            finished_s=100.5 + index,
            model_name=payload,
            hints={payload: payload},
        )
        for index, (call_id, node, payload) in enumerate(calls)
    )
    trajectory = Trajectory(rollout_id=rollout_id, tree=frozen, calls=records, counters={PAYLOADS[0]: 3})
    made = finished(rollout_id, trajectory=trajectory)
    everything = "".join(PAYLOADS)
    rollout = StoredRollout(
        spec=replace(made.spec, problem_id=PAYLOADS[1], group_id=PAYLOADS[2]),
        trajectory=trajectory,
        grade=replace(made.grade, reason=everything, metrics={PAYLOADS[0]: 1.0}),
        harness=replace(made.harness, log_tail=everything, error=PAYLOADS[4]),
        workspace_ref=PAYLOADS[5],
    )
    branches = [branch_of(trajectory, frozen.leaves()[0])]
    vocabulary = vocabulary_of(byte_tokenizer().backend_tokenizer)
    return Viewed(rollout=rollout, branches=branches, vocabulary=vocabulary)
