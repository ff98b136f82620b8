"""The quickstart world: words, file names and kinds of job. Problems and the warm start are both made from it.

Enters: a random generator and the names a job may use. Leaves: `Job` records that know their sentence, the files that
must exist before, what the scripted demonstrator types (right and wrong commands with their output) and how the
verifier judges the final workspace. Invariants: jobs of one problem use disjoint files (a folder and the move into it
excepted), so each job's points do not depend on the others; no point is given for an untouched or an empty workspace;
the names of held-out problems occur in no training problem.
"""

from dataclasses import dataclass, field
from random import Random


def words_of(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


# Every word and file stem is one token of the tokenizer (tests/quickstart checks it): a tiny model can copy them.
TRAIN_WORDS = words_of(
    "apple bread chair cloud daisy eagle field grape honey ivory jelly knife lemon metal night ocean paint queen river "
    "stone table uncle voice water yacht zebra amber beach candy dream earth flame giant horse image juice koala light "
    "mango north olive pearl radio sugar tiger urban video wheel"
)
HELDOUT_WORDS = words_of(
    "actor bacon cabin dance elbow fruit green hotel laser magic nurse onion piano robot salad tulip"
)
TRAIN_STEMS = words_of(
    "notes list draft report names items story plan menu diary score recipe letter quote index sketch"
)
HELDOUT_STEMS = words_of("memo text poem guide chart paper agenda essay")
TRAIN_FOLDERS = words_of("docs backup archive work")
HELDOUT_FOLDERS = words_of("store safe")
KEYS = words_of("key code name port")
LONG_LOG_LINES = 104  # about 320 tokens: enough to bring a conversation over the agent's compaction threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way the demonstrator does a job: how likely, what it types, what it sees.

    Example: Option(weight=0.6, command="cp notes.txt list.txt", output="")
    """

    weight: float  # relative to the job's other options; the first option is the right one
    command: str  # shell text, or the prompt for a sub-agent
    output: str = ""  # without the last newline; empty: the agent shows "(no output)"
    tool: str = "bash"  # bash | agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sentence of an instruction.

    Example: jobs.make("copy", names, rng).sentence == "Copy notes.txt to list.txt."
    """

    kind: str
    sentence: str
    options: tuple[Option, ...]
    checks: tuple[str, ...]  # shell conditions, equal points; empty: the job only prepares the next one
    files: dict[str, str] = field(default_factory=dict)  # workspace before, path -> text
    found: str = ""  # what the summary must keep, e.g. "key pear"
    inner: "Job | None" = None  # what a sub-agent is asked to do


@dataclass(slots=True, kw_only=True)
class Names:
    """Words, file names and folders one problem may use; each is named at most once in its instruction."""

    all_words: list[str]
    words: list[str]
    stems: list[str]
    folders: list[str]

    @classmethod
    def draw(cls, rng: Random, words: list[str], stems: list[str], folders: list[str]) -> "Names":
        shuffled_words, shuffled_stems = rng.sample(words, len(words)), rng.sample(stems, len(stems))
        return cls(all_words=words, words=shuffled_words, stems=shuffled_stems, folders=list(folders))

    def word(self, beside: str = "") -> str:
        """A word that the text `beside` does not hold."""
        return self.words.pop(next(i for i in range(-1, -1 - len(self.words), -1) if self.words[i] not in beside))

    def file(self) -> str:
        return self.stems.pop() + ".txt"

    def folder(self, rng: Random) -> str:
        return self.folders.pop(rng.randrange(len(self.folders)))


TRAIN_NAMES = (TRAIN_WORDS, TRAIN_STEMS, TRAIN_FOLDERS)
HELDOUT_NAMES = (HELDOUT_WORDS, HELDOUT_STEMS, HELDOUT_FOLDERS)
ALL_NAMES = (TRAIN_WORDS + HELDOUT_WORDS, TRAIN_STEMS + HELDOUT_STEMS, TRAIN_FOLDERS + HELDOUT_FOLDERS)

# How often the demonstrator follows its bad habits. They set the reward before training (about 0.4) and leave every
# right behaviour likely enough that a group of eight rollouts nearly always holds good and bad ones.
FORGET_REDIRECT = 0.35  # types `sort a.txt` where `sort a.txt > b.txt` was asked: one habit over many kinds
WRONG_COMMAND = 0.4  # types mv for cp, > for >>, ...


def choose(right: str, wrong: str, rate: float, output: str = "") -> tuple[Option, Option]:
    """The right command, silent, and the wrong one with what it prints."""
    return Option(weight=1 - rate, command=right), Option(weight=rate, command=wrong, output=output)


def redirect(command: str, target: str, printed: str) -> tuple[Option, Option]:
    """A command whose output belongs in a file, and the same without the redirection."""
    return choose(f"{command} > {target}", command, FORGET_REDIRECT, printed)


def lines_of(names: Names, rng: Random, count: int) -> list[str]:
    """Lines of one or two words, no word twice in a file (so that the order of sorted lines needs no locale)."""
    words = rng.sample(names.all_words, 2 * count)
    return [" ".join(words[2 * i : 2 * i + rng.choice((1, 1, 2))]) for i in range(count)]


def is_text(path: str, text: str) -> str:
    """Shell condition: the file holds exactly this text (last newlines do not matter)."""
    return f"is {path} '{text.rstrip(chr(10))}'"


def make(kind: str, names: Names, rng: Random) -> list[Job]:
    """The job or jobs (folder + move, read + look up) of a kind, with names drawn from `names`."""
    return _MAKERS[kind](names, rng)


def _write(names: Names, rng: Random) -> list[Job]:
    word, target = names.word(), names.file()
    return [
        Job(
            kind="write",
            sentence=f"Write {word} to {target}.",
            options=redirect(f"echo {word}", target, word),
            checks=(is_text(target, word),),
        )
    ]


def _append(names: Names, rng: Random) -> list[Job]:
    target, text = names.file(), "\n".join(lines_of(names, rng, 2))
    word = names.word(beside=text)
    return [
        Job(
            kind="append",
            sentence=f"Append {word} to {target}.",
            options=choose(f"echo {word} >> {target}", f"echo {word} > {target}", WRONG_COMMAND),
            checks=(f'[ "$(tail -n 1 {target} 2> /dev/null)" = {word} ]', is_text(target, f"{text}\n{word}")),
            files={target: text + "\n"},
        )
    ]


def _copy(names: Names, rng: Random) -> list[Job]:
    source, target = names.file(), names.file()
    text = "\n".join(lines_of(names, rng, 2))
    return [
        Job(
            kind="copy",
            sentence=f"Copy {source} to {target}.",
            options=choose(f"cp {source} {target}", f"mv {source} {target}", WRONG_COMMAND),
            checks=(is_text(target, text), f"{is_text(target, text)} && {is_text(source, text)}"),
            files={source: text + "\n"},
        )
    ]


def _rename(names: Names, rng: Random) -> list[Job]:
    source, target = names.file(), names.file()
    text = "\n".join(lines_of(names, rng, 2))
    return [
        Job(
            kind="rename",
            sentence=f"Rename {source} to {target}.",
            options=choose(f"mv {source} {target}", f"cp {source} {target}", WRONG_COMMAND),
            checks=(is_text(target, text), f"{is_text(target, text)} && [ ! -e {source} ]"),
            files={source: text + "\n"},
        )
    ]


def _delete(names: Names, rng: Random) -> list[Job]:
    target, kept = names.file(), names.file()
    text, kept_text = "\n".join(lines_of(names, rng, 2)), names.word()
    return [
        Job(
            kind="delete",
            sentence=f"Delete {target}.",
            options=choose(f"rm {target}", f"cat {target}", WRONG_COMMAND, text),
            checks=(f"[ ! -e {target} ] && {is_text(kept, kept_text)}",),
            files={target: text + "\n", kept: kept_text + "\n"},
        )
    ]


def _count(names: Names, rng: Random) -> list[Job]:
    source, target = names.file(), names.file()
    count = rng.randint(3, 6)
    return [
        Job(
            kind="count",
            sentence=f"Count the lines of {source} into {target}.",
            options=redirect(f"wc -l < {source}", target, str(count)),
            checks=(is_text(target, str(count)),),
            files={source: "\n".join(lines_of(names, rng, count)) + "\n"},
        )
    ]


def _sort(names: Names, rng: Random) -> list[Job]:
    source, target = names.file(), names.file()
    lines = lines_of(names, rng, 3)
    if lines == sorted(lines):
        lines.reverse()
    ordered = "\n".join(sorted(lines))
    return [
        Job(
            kind="sort",
            sentence=f"Sort {source} into {target}.",
            options=redirect(f"sort {source}", target, ordered),
            checks=(is_text(target, ordered),),
            files={source: "\n".join(lines) + "\n"},
        )
    ]


def _replace(names: Names, rng: Random) -> list[Job]:
    target, lines = names.file(), lines_of(names, rng, 3)
    old, text = rng.choice(lines).split()[0], "\n".join(lines)
    new = names.word(beside=text)
    replaced = text.replace(old, new)
    script = f"s/{old}/{new}/"
    return [
        Job(
            kind="replace",
            sentence=f"Replace {old} with {new} in {target}.",
            options=choose(f"sed -i {script} {target}", f"sed {script} {target}", WRONG_COMMAND, replaced),
            checks=(is_text(target, replaced),),
            files={target: text + "\n"},
        )
    ]


def _line(names: Names, rng: Random) -> list[Job]:
    source, target = names.file(), names.file()
    lines, number = lines_of(names, rng, 4), rng.randint(2, 3)
    return [
        Job(
            kind="line",
            sentence=f"Save line {number} of {source} to {target}.",
            options=redirect(f"sed -n {number}p {source}", target, lines[number - 1]),
            checks=(is_text(target, lines[number - 1]),),
            files={source: "\n".join(lines) + "\n"},
        )
    ]


def _last(names: Names, rng: Random) -> list[Job]:
    source, target = names.file(), names.file()
    lines = lines_of(names, rng, 3)
    return [
        Job(
            kind="last",
            sentence=f"Save the last line of {source} to {target}.",
            options=choose(f"tail -n 1 {source} > {target}", f"head -n 1 {source} > {target}", WRONG_COMMAND),
            checks=(is_text(target, lines[-1]),),
            files={source: "\n".join(lines) + "\n"},
        )
    ]


def _find(names: Names, rng: Random) -> list[Job]:
    source, target = names.file(), names.file()
    words = rng.sample(names.all_words, 6)
    lines = [f"{words[i]} {words[i + 3]}" for i in range(3)]
    line = rng.choice(lines)
    word = line.split()[0]
    return [
        Job(
            kind="find",
            sentence=f"Find the line with {word} in {source} for {target}.",
            options=redirect(f"grep {word} {source}", target, line),
            checks=(is_text(target, line),),
            files={source: "\n".join(lines) + "\n"},
        )
    ]


def _folder(names: Names, rng: Random) -> list[Job]:
    folder, source, text = names.folder(rng), names.file(), names.word()
    moved = is_text(f"{folder}/{source}", text)
    return [
        Job(
            kind="folder",
            sentence=f"Make the folder {folder}.",
            options=choose(f"mkdir {folder}", f"touch {folder}", 0.25),
            checks=(f"[ -d {folder} ]",),
            files={source: text + "\n"},
        ),
        Job(
            kind="move",
            sentence=f"Move {source} into {folder}.",
            options=choose(f"mv {source} {folder}", f"cp {source} {folder}", WRONG_COMMAND),
            checks=(moved, f"{moved} && [ ! -e {source} ]"),
        ),
    ]


def _lookup(names: Names, rng: Random) -> list[Job]:
    """Read a long file, do something else, then use one line of it: the agent compacts its context in between."""
    log, target, key, answer = "log.txt", names.file(), rng.choice(KEYS), names.word()
    lines = [f"{rng.choice(names.all_words)} {rng.choice(names.all_words)}" for _ in range(LONG_LOG_LINES)]
    lines[rng.randrange(10, LONG_LOG_LINES - 10)] = f"{key} {answer}"
    text = "\n".join(lines)
    other = _write(names, rng)[0]
    return [
        Job(
            kind="read",
            sentence=f"Read {log} for the {key}.",
            options=choose(f"cat {log}", f"head -n 1 {log}", 0.2, lines[0]),
            checks=(),
            files={log: text + "\n"},
            found=f"{key} {answer}",
        ),
        other,
        Job(
            kind="lookup",
            sentence=f"Write the {key} to {target}.",
            options=redirect(f"echo {answer}", target, answer),
            checks=(is_text(target, answer),),
        ),
    ]


def _delegate(names: Names, rng: Random) -> list[Job]:
    """A job for a sub-agent. Doing it oneself is as good: only the workspace counts."""
    inner = make(rng.choice(("write", "append", "copy", "delete")), names, rng)[0]
    prompt = f"1. {inner.sentence}"
    return [
        Job(
            kind="delegate",
            sentence=f"Let a sub-agent do this: {inner.sentence}",
            options=(Option(weight=1.0, command=prompt, output="Done.", tool="agent"),),
            checks=inner.checks,
            files=inner.files,
            inner=inner,
        )
    ]


_MAKERS = {
    "write": _write,
    "append": _append,
    "copy": _copy,
    "rename": _rename,
    "delete": _delete,
    "count": _count,
    "sort": _sort,
    "replace": _replace,
    "line": _line,
    "last": _last,
    "find": _find,
    "folder": _folder,
    "lookup": _lookup,
    "delegate": _delegate,
}
SIMPLE_KINDS = ("write", "append", "copy", "rename", "delete", "count", "sort", "replace", "line", "last", "find")


def instruction_of(jobs: list[Job]) -> str:
    """The numbered instruction."""
    return "\n".join(f"{number}. {job.sentence}" for number, job in enumerate(jobs, 1))


def files_of(jobs: list[Job]) -> dict[str, str]:
    """The workspace before the agent starts."""
    return {path: text for job in jobs for path, text in job.files.items()}
