"""Installs a harness on demand: `python examples/harnesses/install.py claude-code` puts it below .harnesses/.

Enters: the [install] section of a harness's TOML file beside this one. Leaves: the folder
`.harnesses/<name>-<version>-<platform>`, made under another name and renamed when complete, and its path on standard
output. Nothing of a harness is part of this repository: it comes from its own registry, on the user's command, and each
archive must have the SHA-512 that is pinned here. npm archives are fetched by `npm pack` where there is npm (so that
its registry, proxy and credentials hold), else straight from the registry that npm would use. Licences are the
harness's own: see docs/harnesses.md, above all for Claude Code, which is proprietary.
"""

import argparse
import base64
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / ".harnesses"
DEFAULT_REGISTRY = "https://registry.npmjs.org"
FETCH_LIMIT_S = 600  # of one archive (the largest has 172 MB), or of one pip run
# What npm and pip say when a registry does not answer, or has no such package.
_NO_REGISTRY = re.compile(
    r"E40[134]|E50\d|ENOTFOUND|ECONN|EAI_AGAIN|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ETARGET|network|connection|timed out|"
    r"no matching distribution|HTTP error",
    re.IGNORECASE,
)
_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}  # in npm's words


class InstallError(Exception):
    """A harness cannot be installed; the message says why and what to do."""


class UnavailableError(InstallError):
    """Not a fault of the installation: no network, no Node, no build for this platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One npm archive, the hash it must have and the folder it is unpacked to.

    Example: Archive(package="@openai/codex", version="0.171.0-linux-x64", integrity="sha512-...")
    """

    package: str
    version: str
    integrity: str  # sha512-<base64>, as package-lock.json has it
    into: str = "."  # below the installation

    @property
    def path(self) -> str:
        """Its address below a registry."""
        return f"{self.package}/-/{self.package.rpartition('/')[2]}-{self.version}.tgz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An installed harness.

    Example: Installed(name="codex", version="0.171.0", path=Path(".harnesses/codex-0.171.0-linux-x64"), node=None)
    """

    name: str
    version: str
    path: Path
    node: Path | None  # the Node that runs it, for harnesses that need one


def harness_names() -> list[str]:
    """The harnesses there are: the TOML files beside this one."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def read_harness(name: str) -> dict[str, Any]:
    """A harness's TOML file; raises InstallError when there is none."""
    if name not in harness_names():
        raise InstallError(f"no harness {name!r} in {HERE}; there are {', '.join(harness_names())}")
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))


def install(name: str, folder: Path = DEFAULT_FOLDER) -> Installed:
    """The installed harness, installing it if it is not there yet. Raises InstallError."""
    config = read_harness(name)
    section, version = config["install"], config["harness"]["version"]
    node = _find_node(name, section["node"]) if "node" in section else None
    target = folder / f"{name}-{version}-{_platform()}"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{target.name}.lock"):
            if not target.is_dir():
                _make(section, target)
    return Installed(name=name, version=version, path=target, node=node)


def _make(section: dict[str, Any], target: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    try:
        scratch.chmod(0o755)  # a sandbox's user must be able to read it
        product = scratch / "product"
        product.mkdir(mode=0o755)
        if section["kind"] == "npm":
            for archive in _archives(section):
                _unpack(_fetch(archive, scratch), product / archive.into)
        else:
            _make_venv(HERE / section["lock"], product)
        needed = [name.replace("{machine}", machine()) for name in section["files"]]
        missing = [name for name in needed if not (product / name).exists()]
        if missing:
            raise InstallError(f"the package holds no {', '.join(missing)}: was it repackaged?")
        product.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _archives(section: dict[str, Any]) -> list[Archive]:
    builds = section["archives"]
    if _platform() not in builds:
        raise UnavailableError(f"no build for {_platform()} is pinned here; there are {', '.join(builds)}")
    return [Archive(**fields) for fields in builds[_platform()]]


def machine() -> str:
    """This machine's architecture, as compilers name it: x86_64, aarch64."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def _platform() -> str:
    return f"{sys.platform}-{_MACHINES.get(machine(), machine())}"


def _find_node(name: str, lowest: int) -> Path:
    found = shutil.which("node")
    if found is None:
        raise UnavailableError(f"{name} needs Node >= {lowest}, and there is no `node` on the path")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    major = re.match(r"v(\d+)", done.stdout)
    if major is None or int(major[1]) < lowest:
        raise UnavailableError(f"{name} needs Node >= {lowest}; {found} is {done.stdout.strip() or 'not usable'}")
    return Path(found).resolve()


# npm


def _fetch(archive: Archive, scratch: Path) -> Path:
    path = _fetch_by_npm(archive, scratch) if shutil.which("npm") else _fetch_by_http(archive, scratch)
    with path.open("rb") as file:
        digest = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if f"sha512-{digest}" != archive.integrity:
        raise InstallError(
            f"{archive.package}@{archive.version} has the hash sha512-{digest}, pinned is {archive.integrity}: "
            "do not use this archive"
        )
    return path


def _fetch_by_npm(archive: Archive, scratch: Path) -> Path:
    command = ["npm", "pack", "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    command += ["--pack-destination", str(scratch), f"{archive.package}@{archive.version}"]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"`{' '.join(command)}` did not end within {FETCH_LIMIT_S} s") from None
    if done.returncode != 0:
        text = (done.stderr + done.stdout).strip()[-800:]
        kind = UnavailableError if _NO_REGISTRY.search(text) else InstallError
        raise kind(f"`{' '.join(command)}` failed: {text}")
    found = list(scratch.glob("*.tgz"))
    if len(found) != 1:
        raise InstallError(f"`{' '.join(command)}` left {len(found)} archives")
    return found[0]


def _fetch_by_http(archive: Archive, scratch: Path) -> Path:
    url = f"{npm_registry()}/{urllib.parse.quote(archive.path, safe='@/')}"
    target = scratch / "package.tgz"
    try:
        with urllib.request.urlopen(url, timeout=60) as reply, target.open("wb") as file:
            shutil.copyfileobj(reply, file, 2**20)
    except (OSError, urllib.error.URLError) as error:
        raise UnavailableError(f"{url} cannot be fetched: {error}") from error
    return target


def npm_registry() -> str:
    """The registry that npm would use: the environment's, a .npmrc's, else npm's default."""
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if os.environ.get(name):
            return os.environ[name].rstrip("/")
    for path in (Path.cwd() / ".npmrc", Path(os.environ.get("NPM_CONFIG_USERCONFIG", "~/.npmrc")).expanduser()):
        try:
            found = re.search(r"^\s*registry\s*=\s*(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        except OSError:
            continue
        if found:
            return found[1].strip("\"'").rstrip("/")
    return DEFAULT_REGISTRY


def _unpack(archive: Path, folder: Path) -> None:
    """The files below the archive's one top folder (npm calls it `package`)."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            member.name = member.name.partition("/")[2]
            if member.name:
                tar.extract(member, folder, filter="data")
    archive.unlink()


# pip


def _make_venv(lock: Path, product: Path) -> None:
    """A virtual environment of the harness's own. Its interpreter survives the renaming; its scripts would not."""
    python = str(product / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    pip += ["--timeout", "60", "--requirement", str(lock)]
    for command in ([sys.executable, "-m", "venv", str(product)], pip):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"`{' '.join(command)}` did not end within {FETCH_LIMIT_S} s") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
            text = "\n".join(lines)[-800:]
            away = re.search(
                r"connection|timed? ?out|resolve|No matching distribution|403|404|50\d", text, re.IGNORECASE
            )
            kind = UnavailableError if away else InstallError
            raise kind(f"`{' '.join(command)}` failed: {text}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One installer at a time; the kernel drops the lock when its holder ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(argv: list[str] | None = None) -> int:
    """Install what is named; one JSON line each. The exit code is 1 when one cannot be installed."""
    parser = argparse.ArgumentParser(description="Install harnesses below .harnesses/.")
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(harness_names()))
    parser.add_argument("--dir", type=Path, default=DEFAULT_FOLDER, help=f"instead of {DEFAULT_FOLDER}")
    arguments = parser.parse_args(argv)
    for name in arguments.names:
        try:
            installed = install(name, arguments.dir)
        except InstallError as error:
            print(f"{name} cannot be installed: {error}", file=sys.stderr)
            return 1
        print(json.dumps({"harness": installed.name, "version": installed.version, "path": str(installed.path)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
