"""docs/configuration.md from the pydantic models; `--check` compares.

Each section's keys, their types with bounds, defaults, and the comment that stands behind the key in the source.
"""

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from generated import write_or_check
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gyre_core.config import RunConfig

HEAD = """# Configuration

A run is one TOML file; `gyre train RUN.toml --set section.key=value` changes single keys. Unknown keys, values out of
their bounds and parts that do not fit are refused before anything starts, with what to change. This page is made from
the code: `python infra/docs/config_reference.py`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, model in sections(RunConfig, ""):
        parts.append(f"\n## {f'[{name}]' if name else 'The file itself'}\n")
        if model.__doc__:
            parts.append(inspect.cleandoc(model.__doc__).split("\n\n")[0] + "\n")
        parts.append("\n| key | type | default | what it is |\n|---|---|---|---|")
        comments = key_comments(model)
        for key, field in model.model_fields.items():
            if section_of(field.annotation) is None:
                texts = (type_text(field), default_text(field), comments.get(key, ""))
                parts.append(f"| `{key}` | {' | '.join(map(cell, texts))} |")
    return "\n".join(parts) + "\n"


def sections(model: type[BaseModel], name: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """A model and those below it, with their TOML names."""
    yield name, model
    for key, field in model.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            yield from sections(below, f"{name}.{key}" if name else key)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a key that is a section, None for a value."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    found = [one for one in options if inspect.isclass(one) and issubclass(one, BaseModel)]
    return found[0] if len(found) == 1 else None


def key_comments(model: type[BaseModel]) -> dict[str, str]:
    """The comment behind each key, or on the lines just above it."""
    lines = inspect.getsource(model).splitlines()
    tree = ast.parse("\n".join(lines))
    found = {}
    for node in tree.body[0].body:  # type: ignore[attr-defined]
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        behind = re.search(r"\s#\s(.*)$", lines[(node.end_lineno or node.lineno) - 1])
        above: list[str] = []
        row = node.lineno - 2
        while row >= 0 and lines[row].strip().startswith("# "):
            above.insert(0, lines[row].strip()[2:])
            row -= 1
        found[node.target.id] = behind[1] if behind else " ".join(above)
    return found


def type_text(field: FieldInfo) -> str:
    """The type with its bounds, as a reader says it."""
    bounds = [
        f"{sign} {getattr(one, name)}"
        for one in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(one, name, None) is not None
    ]
    return _type(field.annotation) + (f", {', '.join(bounds)}" if bounds else "")


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "not set"
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(one) for one in arguments)
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is not None:
        return "table"
    if inspect.isclass(annotation):
        if issubclass(annotation, Enum):
            return " or ".join(f"`{one.value}`" for one in annotation)
        if issubclass(annotation, BaseModel):
            return "table"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "Path": "path"}.get(
        getattr(annotation, "__name__", ""), getattr(annotation, "__name__", str(annotation))
    )


def default_text(field: FieldInfo) -> str:
    """The default as TOML writes it."""
    if field.default_factory is not None:
        return "empty"
    value = field.default
    if value is PydanticUndefined:
        return "**required**"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(_quoted(one) for one in value)}]`"
    return f"`{_quoted(value)}`"


def _quoted(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    return f'"{value}"' if isinstance(value, str | Path) else f"{value}"


def cell(text: str) -> str:
    """Text that does not end a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    raise SystemExit(write_or_check("configuration.md", page, "infra/docs/config_reference.py", __doc__))
