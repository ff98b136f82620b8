"""TOML in, RunConfig out; every error names the file, the key and what to change.

Relative paths count from the TOML file's own folder, so a config works from any working directory; so does the place
holder `{config_dir}` in the harness's command, environment and read-only paths. `overrides` are `key.path=value`
strings with TOML values, as given on the command line.
"""

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gyre_core.config.models import RunConfig
from gyre_core.errors import ConfigError

_PATH_KEYS = (
    ("model", "path"),
    ("data", "train"),
    ("data", "heldout"),
    ("engine", "python"),
    ("runs_dir",),
)


def load_run_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read and check a run's configuration; raises ConfigError with one line for each thing to change."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror or error}") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return parse_run_config(tree, base_dir=path.resolve().parent, source=str(path), overrides=overrides)


def parse_run_config(
    tree: dict[str, Any], *, base_dir: Path, source: str = "config", overrides: Iterable[str] = ()
) -> RunConfig:
    """Check a configuration given as nested dicts; relative paths are resolved against `base_dir`."""
    for override in overrides:
        _apply_override(tree, override)
    for keys in _PATH_KEYS:
        _resolve_path(tree, keys, base_dir)
    _fill_config_dir(tree, base_dir)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [f"{source}: {len(error.errors())} thing(s) to change"]
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"]) or "(whole config)"
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                message = "unknown key; remove it or correct its spelling"
            lines.append(f"  {where}: {message}")
        raise ConfigError("\n".join(lines)) from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form key.path=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a bare word is a string: --set name=my-run
    *parents, last = key.strip().split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a section")
    node[last] = parsed


def _resolve_path(tree: dict[str, Any], keys: tuple[str, ...], base_dir: Path) -> None:
    node: Any = tree
    for key in keys[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict) or not isinstance(node.get(keys[-1]), str):
        return
    path = Path(node[keys[-1]]).expanduser()
    node[keys[-1]] = path if path.is_absolute() else _without_dots(base_dir / path)


def _without_dots(path: Path) -> Path:
    """No `..` in what users see, where the way without them leads to the same place: not behind a symbolic link."""
    short = os.path.normpath(path)
    return Path(short) if os.path.realpath(short) == os.path.realpath(path) else path


def _fill_config_dir(tree: dict[str, Any], base_dir: Path) -> None:
    rollout = tree.get("rollout")
    harness = rollout.get("harness") if isinstance(rollout, dict) else None
    if not isinstance(harness, dict):
        return

    def fill(value: Any) -> Any:
        return value.replace("{config_dir}", str(base_dir)) if isinstance(value, str) else value

    for key in ("command", "read_only"):
        if isinstance(harness.get(key), list):
            harness[key] = [fill(part) for part in harness[key]]
    if isinstance(harness.get("env"), dict):
        harness["env"] = {name: fill(value) for name, value in harness["env"].items()}
