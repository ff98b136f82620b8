"""The installer of examples/harnesses, against a registry of the test's own."""

import base64
import hashlib
import importlib.util
import io
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "harnesses"


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, told that there is no npm and that its harnesses lie in tmp_path/harnesses."""
    spec = importlib.util.spec_from_file_location("harness_install", EXAMPLES / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "harness_install", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    (tmp_path / "harnesses").mkdir()
    monkeypatch.setattr(module, "HERE", tmp_path / "harnesses")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return module


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is served as the npm registry."""
    folder = tmp_path / "registry"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_address[1]}/")
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def publish(registry: Path, name: str, version: str, files: dict[str, bytes]) -> str:
    """Put a package into the registry; returns its integrity."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(f"package/{path}")
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    folder = registry / "@made" / name / "-"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-{version}.tgz").write_bytes(buffer.getvalue())
    return "sha512-" + base64.b64encode(hashlib.sha512(buffer.getvalue()).digest()).decode()


def write_harness(installer: ModuleType, integrity: str, *, version: str = "1.2.3", platform: str = "") -> None:
    """A harness `made-up` of two archives, the second one unpacked into a folder of its own."""
    archive = f'version = "{version}"\nintegrity = "{integrity}"\npackage = "@made/tool"\n'
    build = platform or installer._platform()
    (installer.HERE / "made-up.toml").write_text(
        f'[harness]\nname = "made-up"\nversion = "{version}"\n'
        '[install]\nkind = "npm"\nfiles = ["bin/tool", "sub/bin/tool"]\n'
        f'[[install.archives.{build}]]\n{archive}[[install.archives.{build}]]\n{archive}into = "sub"\n'
    )


def test_install_unpacks_the_pinned_archives_once(installer: ModuleType, registry: Path, tmp_path: Path) -> None:
    write_harness(installer, publish(registry, "tool", "1.2.3", {"bin/tool": b"#!/bin/sh\n", "LICENSE": b"theirs"}))
    folder = tmp_path / "installed"
    installed = installer.install("made-up", folder)
    assert installed.path == folder / f"made-up-1.2.3-{installer._platform()}"
    assert (installed.path / "bin/tool").stat().st_mode & 0o755 == 0o755  # a sandbox's user runs it
    assert installed.path.stat().st_mode & 0o755 == 0o755
    assert (installed.path / "sub/LICENSE").read_bytes() == b"theirs"
    (registry / "@made/tool/-/tool-1.2.3.tgz").unlink()
    assert installer.install("made-up", folder).path == installed.path
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [installed.path.name]


def test_install_archive_with_another_hash_is_refused_and_leaves_nothing(
    installer: ModuleType, registry: Path, tmp_path: Path
) -> None:
    integrity = publish(registry, "tool", "1.2.3", {"bin/tool": b"good"})
    write_harness(installer, integrity)
    publish(registry, "tool", "1.2.3", {"bin/tool": b"evil"})
    with pytest.raises(installer.InstallError, match="do not use this archive") as caught:
        installer.install("made-up", tmp_path / "installed")
    assert not isinstance(caught.value, installer.UnavailableError)
    assert not [path for path in (tmp_path / "installed").iterdir() if path.is_dir()]


def test_install_archive_without_the_program_is_refused(installer: ModuleType, registry: Path, tmp_path: Path) -> None:
    write_harness(installer, publish(registry, "tool", "1.2.3", {"README": b"moved"}))
    with pytest.raises(installer.InstallError, match="holds no bin/tool"):
        installer.install("made-up", tmp_path / "installed")


def test_install_registry_that_lacks_the_package_is_said_to_be_unavailable(
    installer: ModuleType, registry: Path, tmp_path: Path
) -> None:
    write_harness(installer, "sha512-any")
    with pytest.raises(installer.UnavailableError, match="cannot be fetched"):
        installer.install("made-up", tmp_path / "installed")


def test_install_other_platform_is_said_to_be_unavailable(installer: ModuleType, tmp_path: Path) -> None:
    write_harness(installer, "sha512-any", platform="plan9-mips")
    with pytest.raises(installer.UnavailableError, match="plan9-mips"):
        installer.install("made-up", tmp_path / "installed")


def test_install_without_node_says_which_node_is_needed(installer: ModuleType, tmp_path: Path) -> None:
    write_harness(installer, "sha512-any")
    path = installer.HERE / "made-up.toml"
    path.write_text(path.read_text().replace("[install]\n", "[install]\nnode = 20\n"))
    with pytest.raises(installer.UnavailableError, match=r"needs Node >= 20"):
        installer.install("made-up", tmp_path / "installed")


def test_install_unknown_harness_names_those_there_are(installer: ModuleType) -> None:
    write_harness(installer, "sha512-any")
    with pytest.raises(installer.InstallError, match="there are made-up"):
        installer.install("other")


def test_registry_is_the_one_npm_would_use(
    installer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("npm_config_registry", raising=False)
    monkeypatch.setenv("NPM_CONFIG_USERCONFIG", str(tmp_path / "user.npmrc"))
    monkeypatch.chdir(tmp_path)
    assert installer.npm_registry() == "https://registry.npmjs.org"
    (tmp_path / "user.npmrc").write_text("fund=false\nregistry = https://npm.example/mirror/\n")
    assert installer.npm_registry() == "https://npm.example/mirror"
    monkeypatch.setenv("npm_config_registry", "https://other.example/")
    assert installer.npm_registry() == "https://other.example"
