"""A store in an S3 bucket: written through s3fs, read through pyarrow.

An object is one conditional PUT (If-None-Match: *) of bytes serialised in memory; nothing is ever streamed to a final
key. Time-outs are short and the clients' own retries are off: failures are retried here, a bounded number of times, and
a conflict on a retry whose object holds our bytes is the earlier attempt's success (its reply was lost).
"""

import errno
import io
import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from gyre_core.errors import StoreConflictError, StoreError
from gyre_core.store.storage import Data, ObjectMissingError, StoredObject, check_key

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0  # s3fs alone waits more than 150 s for a frozen server
_READ_TIMEOUT_S = 5.0
_SLOWEST_BYTES_S = 2**20  # a PUT below this speed is given up: the client has no time-out of its own for sending
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.2  # doubled each time: 3 s of pauses in all
_SINGLE_PUT_BYTES = 5 * 2**30  # S3's limit of one PUT; below it no multipart upload is used


class S3Storage:
    """Objects below `bucket/prefix`.

    Example: S3Storage.from_url("s3://gyre/runs/r1?endpoint=http://127.0.0.1:8333&region=us-east-1")
    """

    def __init__(
        self,
        root: str,
        *,
        writer: Any,
        reader: pafs.FileSystem,
        read_timeout_s: float = _READ_TIMEOUT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`root` is bucket/prefix; `writer` an s3fs.S3FileSystem; `reader` a pyarrow file system of the same bucket."""
        self._root = root.strip("/")
        self._writer = writer
        self._reader = reader
        self._silence_s = _CONNECT_TIMEOUT_S + 2 * read_timeout_s
        self._sleep = sleep

    @classmethod
    def from_url(
        cls, url: str, *, read_timeout_s: float = _READ_TIMEOUT_S, sleep: Callable[[float], None] = time.sleep
    ) -> "S3Storage":
        """Credentials come from the environment or the usual AWS files, never from the URL.

        `read_timeout_s` bounds each wait for a silent server, not a whole transfer.
        """
        import s3fs
        from aiobotocore.session import get_session

        root, endpoint, region = _parsed(url)
        session = get_session()
        session.get_component("event_emitter").register_last("before-call.s3", _send_at_once)
        writer = s3fs.S3FileSystem(
            session=session,
            endpoint_url=endpoint,
            client_kwargs={"region_name": region} if region else {},
            config_kwargs={
                "connect_timeout": _CONNECT_TIMEOUT_S,
                "read_timeout": read_timeout_s,
                "retries": {"total_max_attempts": 1},
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        writer.retries = 1
        reader = pyarrow_filesystem(url, read_timeout_s=read_timeout_s)
        return cls(root, writer=writer, reader=reader, read_timeout_s=read_timeout_s, sleep=sleep)

    @property
    def url(self) -> str:
        return f"s3://{self._root}"

    def put_new(self, key: str, data: Data) -> None:
        path = self._path(key)
        if len(data) > _SINGLE_PUT_BYTES:
            raise StoreError(
                f"{key} has {len(data)} bytes, more than one PUT holds; put the rollouts as several tables"
            )

        body = bytes(data)  # botocore takes no memoryview
        timeout_s = self._silence_s + len(data) / _SLOWEST_BYTES_S

        def put(attempt: int) -> None:
            try:
                self._writer.pipe_file(path, body, mode="create", chunksize=_SINGLE_PUT_BYTES, timeout=timeout_s)
            except OSError as error:
                if not _is_conflict(error):
                    raise
                if attempt == 0 or self.get(key) != body:
                    raise StoreConflictError(f"{key} exists already in {self.url}") from error

        self._retried(f"cannot write {key} ({len(data)} bytes)", put)

    def get(self, key: str) -> bytes:
        def read(_attempt: int) -> bytes:
            # Its size (HEAD), then one GET: a stream's read() asks for piece after piece.
            with self._reader.open_input_file(self._path(key)) as file:
                return file.read_at(file.size(), 0)

        return self._retried(f"cannot read {key}", read, missing=key)

    def open_input(self, key: str) -> pa.NativeFile:
        path, what = self._path(key), f"cannot read {key}"
        file = self._retried(what, lambda _attempt: self._reader.open_input_file(path), missing=key)

        def read_at(size: int, start: int) -> bytes:
            return self._retried(what, lambda _attempt: file.read_at(size, start), missing=key)

        return pa.PythonFile(_RetriedReads(file.size(), read_at), mode="r")

    def size(self, key: str) -> int | None:
        path = self._path(key)
        info = self._retried(f"cannot look up {key}", lambda _attempt: self._reader.get_file_info(path))
        return info.size if info.type == pafs.FileType.File else None

    def list_objects(self, prefix: str) -> list[StoredObject]:
        selector = pafs.FileSelector(self._path(prefix), allow_not_found=True, recursive=True)
        infos = self._retried(f"cannot list {prefix}", lambda _attempt: self._reader.get_file_info(selector))
        start = len(self._root) + 1
        found = [
            StoredObject(key=info.path[start:], size_bytes=info.size, modified_s=(info.mtime_ns or 0) / 1e9)
            for info in infos
            if info.type == pafs.FileType.File
        ]
        return sorted(found, key=lambda item: item.key)

    def delete(self, key: str) -> None:
        path = self._path(key)

        def remove(_attempt: int) -> None:
            try:
                self._writer.rm_file(path, timeout=self._silence_s)
            except FileNotFoundError:
                return

        self._retried(f"cannot delete {key}", remove)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _retried(self, what: str, call: Callable[[int], Any], *, missing: str = "") -> Any:
        """Call until it works, at most _ATTEMPTS times; refusals and missing objects are not retried."""
        from botocore.exceptions import BotoCoreError, ClientError

        for attempt in range(_ATTEMPTS):
            try:
                return call(attempt)
            except FileNotFoundError as error:
                if missing:
                    raise ObjectMissingError(f"{missing} is missing in {self.url}") from error
                raise StoreError(f"{what} in {self.url}: no such bucket or object") from error
            except (OSError, BotoCoreError, ClientError) as error:
                if isinstance(error, PermissionError) or "ACCESS_DENIED" in str(error):  # s3fs, pyarrow
                    raise StoreError(f"{what} in {self.url}: access denied; check the AWS credentials") from error
                reason = str(error) or type(error).__name__
                if attempt + 1 == _ATTEMPTS:
                    raise StoreError(f"{what} in {self.url} after {_ATTEMPTS} attempts: {reason}") from error
                logger.warning("%s in %s (attempt %d of %d): %s", what, self.url, attempt + 1, _ATTEMPTS, reason)
                self._sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")


def pyarrow_filesystem(url: str, *, read_timeout_s: float = _READ_TIMEOUT_S) -> pafs.S3FileSystem:
    """pyarrow's own file system for a store URL's endpoint; without retries."""
    _, endpoint, region = _parsed(url)
    scheme, _, host = (endpoint or "").rpartition("://")
    return pafs.S3FileSystem(
        endpoint_override=host or None,
        scheme=scheme or None,
        region=region,
        connect_timeout=_CONNECT_TIMEOUT_S,
        request_timeout=read_timeout_s,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=1),
    )


def _parsed(url: str) -> tuple[str, str | None, str | None]:
    """bucket/prefix, endpoint and region of a store URL; StoreError, without showing credentials, for other URLs."""
    parts = urlsplit(url)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = set(options) - {"endpoint", "region"}
    if unknown or not parts.netloc or "@" in parts.netloc:
        raise StoreError(
            f"store url s3://{parts.netloc.rpartition('@')[2]}{parts.path}: use "
            "s3://bucket/prefix[?endpoint=http://host:port&region=name], credentials come from the environment"
        )
    return f"{parts.netloc}{parts.path}", options.get("endpoint"), options.get("region")


class _RetriedReads(io.RawIOBase):
    """An object as a file whose every read is retried; what a read raises reaches the caller as it is."""

    def __init__(self, size_bytes: int, read_at: Callable[[int, int], bytes]) -> None:
        self._size_bytes = size_bytes
        self._read_at = read_at
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._size_bytes - self._position, 0)
        data = self._read_at(left if size < 0 else min(size, left), self._position) if left else b""
        self._position += len(data)
        return data


def _send_at_once(params: dict[str, Any], **_: Any) -> None:
    """Take away `Expect: 100-continue`: aiohttp waits for its answer without a limit, so a frozen server hangs it."""
    params["headers"].pop("Expect", None)


def _is_conflict(error: OSError) -> bool:
    """A 412 shows as FileExistsError (AWS, moto) or as EINVAL with the condition in its text (SeaweedFS)."""
    return isinstance(error, FileExistsError) or (error.errno == errno.EINVAL and "condition" in str(error).lower())
