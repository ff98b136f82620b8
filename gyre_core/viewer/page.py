"""Models as one HTML file each that needs nothing else: no network, no font, no other file.

Enters: a model. Leaves: bytes of a page. Data travels compressed in an element that is no script; texts reach the
document as text only. A content security policy allows this page's one script and one style by their hashes and nothing
else, so that no text of an agent can run, load or send anything.

A payload is the length of the JSON in 8 decimal digits, the JSON, the sections one after the other; gzip; base64.
"""

import base64
import gzip
import hashlib
import html
from functools import cache
from importlib.resources import files

import orjson

from gyre_core.types import Json
from gyre_core.viewer.model import RolloutModel


def rollout_page(model: RolloutModel) -> bytes:
    """The page of one rollout."""
    spec, grade, totals = model.head["spec"], model.head["grade"], model.head["totals"]
    reward = "none" if grade["reward"] is None else f"{grade['reward']:g}"
    summary = (
        f"{spec['rollout']}: {grade['outcome']}, reward {reward}, {totals['calls']} calls, "
        f"{totals['unique_tokens']} tokens ({totals['sampled_tokens']} sampled, {totals['trained_tokens']} trained)"
    )
    return _page("rollout", title=f"{spec['rollout']} · Gyre", summary=summary, head=model.head, parts=model.sections)


def run_page(model: Json) -> bytes:
    """The page of a run."""
    count = sum(len(group["rollouts"]) for group in model["groups"])
    summary = f"{model['run']}: {len(model['steps'])} steps, {len(model['groups'])} groups, {count} rollouts"
    return _page("run", title=f"{model['run']} · Gyre", summary=summary, head=model, parts={})


def pack(head: Json, parts: dict[str, bytes]) -> bytes:
    """The payload before base64; `head` gains the places of the parts."""
    places: dict[str, list[int]] = {}
    offset = 0
    for name, data in parts.items():
        places[name] = [offset, len(data)]
        offset += len(data)
    text = orjson.dumps({**head, "sections": places})
    # mtime 0: the same rollout gives the same bytes
    return gzip.compress(b"".join([f"{len(text):08d}".encode(), text, *parts.values()]), compresslevel=6, mtime=0)


def _page(kind: str, *, title: str, summary: str, head: Json, parts: dict[str, bytes]) -> bytes:
    style = _asset("style.css")
    script = '"use strict";\n' + _asset("common.js") + _asset(f"{kind}.js")
    values = {
        "policy": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "title": _text(title),
        "summary": _text(summary),
        "style": style,
        "payload": base64.b64encode(pack(head, parts)).decode(),
        "script": script,
    }
    page = _asset("page.html")
    parts_of_page = page.split("{{")  # one pass: a value that holds braces is never read as a place
    made = [parts_of_page[0]]
    for part in parts_of_page[1:]:
        name, _, rest = part.partition("}}")
        made += [values[name], rest]
    return "".join(made).encode("utf-8", "replace")


def _text(value: str) -> str:
    """Text for the document, without control characters and marks that turn the direction of what follows."""
    return html.escape("".join(char if char.isprintable() else "�" for char in value))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (files("gyre_core.viewer") / "assets" / name).read_text(encoding="utf-8")
