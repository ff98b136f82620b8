"""What an emulated engine's prefix cache holds, and a store of it that the engines of one machine share.

Enters: token ids of calls that ran. Leaves: how many leading tokens of a new prompt some cache holds: this engine's,
or another's through the store. A prefix is known by a chain of hashes, one a token, salted with the policy version, so
prefixes of other weights never match. The store is one file a version, of 8-byte hashes, only ever appended to.
"""

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import xxhash

_HASH_BYTES = 8
_CAPACITY = 500_000  # tokens that one engine keeps; the oldest go first


class SharedPages:
    """The store. Engines of other processes append to the same files.

    Example: SharedPages(Path("work/kv")).add("3", [17, 42])
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, set[int]] = {}
        self._read_bytes: dict[str, int] = {}

    def add(self, salt: str, hashes: list[int]) -> None:
        """Append what an engine has computed; one write, so that writers do not mix."""
        data = np.array(hashes, np.uint64).tobytes()
        descriptor = os.open(self._path(salt), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def known(self, salt: str) -> set[int]:
        """All hashes of a version, those of other processes included."""
        known = self._known.setdefault(salt, set())
        start = self._read_bytes.get(salt, 0)
        try:
            with self._path(salt).open("rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return known
        whole = len(data) - len(data) % _HASH_BYTES
        known.update(np.frombuffer(data[:whole], np.uint64).tolist())
        self._read_bytes[salt] = start + whole
        return known

    def forget(self, salt: str) -> None:
        """Drop a version."""
        self._known.pop(salt, None)
        self._read_bytes.pop(salt, None)
        self._path(salt).unlink(missing_ok=True)

    def _path(self, salt: str) -> Path:
        return self._folder / f"pages-{salt or 'none'}"


class PrefixCache:
    """One engine's cache.

    Example: cache = PrefixCache(); cache.add(ids, "3"); cache.known(longer_ids, "3") == (len(ids), 0)
    """

    def __init__(self, shared: SharedPages | None = None) -> None:
        self._shared = shared
        self._own: OrderedDict[tuple[str, int], None] = OrderedDict()

    def known(self, ids: np.ndarray, salt: str) -> tuple[int, int]:
        """Leading tokens that this engine holds, and further ones that the store holds. The last token never counts."""
        hashes = _chain(ids[:-1], salt)
        local = 0
        for value in hashes:
            if (salt, value) not in self._own:
                break
            local += 1
        if self._shared is None or local == len(hashes):
            return local, 0
        elsewhere = self._shared.known(salt)
        remote = 0
        for value in hashes[local:]:
            if value not in elsewhere:
                break
            remote += 1
        return local, remote

    def add(self, ids: np.ndarray, salt: str) -> None:
        """Tokens whose keys and values were computed here."""
        fresh = []
        for value in _chain(ids, salt):
            key = (salt, value)
            if key in self._own:
                self._own.move_to_end(key)
            else:
                self._own[key] = None
                fresh.append(value)
        while len(self._own) > _CAPACITY:
            self._own.popitem(last=False)
        if self._shared is not None and fresh:
            self._shared.add(salt, fresh)

    def forget_before(self, version: int) -> None:
        """Drop what older weights computed."""
        old = {salt for salt, _ in self._own if salt.isdigit() and int(salt) < version}
        if old:
            self._own = OrderedDict((key, None) for key in self._own if key[0] not in old)
        if self._shared is not None:
            for salt in old:
                self._shared.forget(salt)


def _chain(ids: np.ndarray, salt: str) -> list[int]:
    """A hash of each prefix."""
    data = np.ascontiguousarray(ids, np.int32).tobytes()
    state = xxhash.xxh3_64(salt.encode())
    values = []
    for at in range(0, len(data), 4):
        state.update(data[at : at + 4])
        values.append(state.intdigest())
    return values
