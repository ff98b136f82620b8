"""Write the quickstart's problems: Harbor task directories under problems/train and problems/heldout.

Enters: nothing but the seeds below. Leaves: 64 training and 32 held-out problems, byte for byte the same on every
run. The held-out ones use words, file names and folders that no training problem uses. Points are partial: each
sentence of an instruction is worth the same, a half-done one (a copy that lost its source) half of it.

Run: python examples/quickstart/make_problems.py [FOLDER]      (about a second)
"""

import shutil
import sys
from pathlib import Path
from random import Random

from world import HELDOUT_NAMES, SIMPLE_KINDS, TRAIN_NAMES, Job, Names, files_of, instruction_of, make

HERE = Path(__file__).resolve().parent

TASK = """\
version = "1.0"

[metadata]
family = "{family}"
difficulty = "{difficulty}"

[verifier]
timeout_sec = 10.0

[agent]
timeout_sec = 60.0

[environment]
build_timeout_sec = 300.0
"""

# For back ends that build images; Gyre's local sandbox copies environment/files into the workspace instead.
DOCKERFILE = "FROM debian:stable-slim\nWORKDIR /app\n"

# Jobs are equal parts of the problem, the conditions of a job equal parts of the job.
TEST = """\
#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${{APP_DIR:-/app}}" || exit 1
points=0
is() {{ [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }}

{checks}

mkdir -p "${{REWARD_DIR:-/logs/verifier}}"
thousandths=$((points * 1000 / {total}))
printf '%d.%03d\\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${{REWARD_DIR:-/logs/verifier}}/reward.txt"
"""

SOLUTION = """\
#!/bin/sh
# One right way to do it.
cd "${{APP_DIR:-/app}}" || exit 1
{commands}
"""


def plan(kinds: list[str], per_split: dict[str, int], rng: Random) -> list[tuple[str, list[str]]]:
    """(family, kinds of its jobs) for each problem; every kind gets its turn before one comes again."""
    deck: list[str] = []

    def deal(count: int) -> list[str]:
        dealt: list[str] = []
        while len(dealt) < count:
            if not deck:
                deck.extend(rng.sample(kinds, len(kinds)))
            card = next((kind for kind in deck if kind not in dealt), None)
            if card is None:
                deck.clear()
                continue
            deck.remove(card)
            dealt.append(card)
        return dealt

    problems: list[tuple[str, list[str]]] = []
    for family, count in per_split.items():
        for index in range(count):
            if family == "single":
                problems.append((family, deal(1)))
            elif family == "double":
                problems.append((family, deal(2)))
            elif family == "triple":
                problems.append((family, deal(3)))
            elif family == "folder":
                problems.append((family, [["folder"], ["folder", *deal(1)], [*deal(1), "folder"]][index % 3]))
            elif family == "delegate":
                problems.append((family, ["delegate", *deal(1)] if index % 3 < 2 else [*deal(1), "delegate"]))
            else:
                problems.append((family, ["lookup"]))
    return problems


SPLITS = {
    "train": (TRAIN_NAMES, 1, {"single": 10, "double": 24, "triple": 12, "folder": 6, "delegate": 6, "lookup": 6}),
    "heldout": (HELDOUT_NAMES, 2, {"single": 5, "double": 12, "triple": 6, "folder": 3, "delegate": 3, "lookup": 3}),
}


def test_script(jobs: list[Job]) -> str:
    """The verifier: 6 points a job (a number that one, two or three conditions divide)."""
    judged = [job for job in jobs if job.checks]
    lines = []
    for job in judged:
        lines.append(f"# {job.sentence}")
        lines += [f"{check} && points=$((points + {6 // len(job.checks)}))" for check in job.checks]
    return TEST.format(checks="\n".join(lines), total=6 * len(judged))


def solution(jobs: list[Job]) -> str:
    """The right command of each job; a sub-agent's job is done directly."""
    return SOLUTION.format(commands="\n".join((job.inner or job).options[0].command for job in jobs))


def write_problem(folder: Path, family: str, jobs: list[Job]) -> None:
    """One task directory."""
    texts = {
        "task.toml": TASK.format(family=family, difficulty={1: "easy", 2: "medium"}.get(len(jobs), "hard")),
        "instruction.md": instruction_of(jobs) + "\n",
        "environment/Dockerfile": DOCKERFILE + ("COPY files/ /app/\n" if files_of(jobs) else ""),
        "tests/test.sh": test_script(jobs),
        "solution/solve.sh": solution(jobs),
        **{f"environment/files/{path}": text for path, text in files_of(jobs).items()},
    }
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if target.suffix == ".sh":
            target.chmod(0o755)


def main(out: Path) -> None:
    for split, (lists, seed, per_split) in SPLITS.items():
        rng = Random(seed)
        shutil.rmtree(out / split, ignore_errors=True)
        for index, (family, kinds) in enumerate(plan(list(SIMPLE_KINDS), per_split, rng)):
            names = Names.draw(rng, *lists)
            jobs = [job for kind in kinds for job in make(kind, names, rng)]
            write_problem(out / split / f"{split[0]}{index:02d}-{'-'.join(kinds)}", family, jobs)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "problems")
