"""`index.bin`: the binary twin of `index.json`, made to be mapped.

Little-endian. Header of 128 bytes: magic `WDSKIDX1`, uint64 number of shards, uint64 bytes of names, 32 bytes sha256 of
the `index.json` it belongs to, 32 bytes sha256 of all that follows the header, zeros. Then, each as long as the number
of shards: samples (uint64), bytes (uint64), digests (32 bytes each), ends of the names (uint64), and last the names
themselves, UTF-8 without separators. 10**6 shards take 76 MB, of which a reader touches what it asks for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import FolderIndexError

if TYPE_CHECKING:
    from wdskit.dataset.index import ShardEntry

BINARY_NAME = "index.bin"

_MAGIC = b"WDSKIDX1"
_HEADER = struct.Struct("<8sQQ32s32s40x")
_SHARD_BYTES = 8 + 8 + 32 + 8


def build_binary(entries: Sequence[ShardEntry], json_digest: bytes) -> bytes:
    """The bytes of an `index.bin`.

    Args:
        entries: The shards, in order.
        json_digest: sha256 of the `index.json` that holds the same entries.
    """
    names = [entry.name.encode() for entry in entries]
    body = b"".join(
        (
            np.array([entry.num_samples for entry in entries], dtype="<u8").tobytes(),
            np.array([entry.num_bytes for entry in entries], dtype="<u8").tobytes(),
            b"".join(bytes.fromhex(entry.sha256) for entry in entries),
            np.cumsum([len(name) for name in names], dtype="<u8").tobytes() if names else b"",
            *names,
        )
    )
    num_name_bytes = sum(map(len, names))
    return _HEADER.pack(_MAGIC, len(entries), num_name_bytes, json_digest, hashlib.sha256(body).digest()) + body


class BinaryIndex:
    """A mapped `index.bin`.

    Args:
        folder: Local folder that holds it and its `index.json`.

    Attributes:
        counts: Samples of each shard, (num_shards,), read-only.
        sizes: Bytes of each shard, (num_shards,), read-only.
        digests: sha256 of each shard, (num_shards, 32) uint8, read-only.

    Raises:
        FolderIndexError: It is missing, damaged in its layout, or belongs to another `index.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            mapped = np.memmap(folder / BINARY_NAME, dtype=np.uint8, mode="r")
            digest = _sha256_of(folder / "index.json")
        except (OSError, ValueError) as err:
            raise self._error(f"cannot be read: {err}") from err
        if len(mapped) < _HEADER.size:
            raise self._error(f"it has {len(mapped)} bytes, less than its header")
        magic, num_shards, num_name_bytes, json_digest, self._body_digest = _HEADER.unpack(
            bytes(mapped[: _HEADER.size])
        )
        if magic != _MAGIC or len(mapped) != _HEADER.size + num_shards * _SHARD_BYTES + num_name_bytes:
            raise self._error("it is damaged, or of another version")
        if json_digest != digest:
            raise self._error("it does not belong to the index.json beside it")
        self._body: NDArray[np.uint8] = mapped[_HEADER.size :]
        ends = num_shards * np.array([8, 16, 48, 56])
        self.counts = self._body[: ends[0]].view("<u8")
        self.sizes = self._body[ends[0] : ends[1]].view("<u8")
        self.digests = self._body[ends[1] : ends[2]].reshape(num_shards, 32)
        self._name_ends = self._body[ends[2] : ends[3]].view("<u8")
        self._names = self._body[ends[3] :]

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.counts)

    def name(self, shard: int) -> str:
        """File name of a shard, 0 <= shard < len(self)."""
        start = int(self._name_ends[shard - 1]) if shard else 0
        return bytes(self._names[start : int(self._name_ends[shard])]).decode()

    def check(self) -> None:
        """Read it all and compare it with its own digest.

        Raises:
            FolderIndexError: It is damaged.
        """
        if hashlib.sha256(self._body.data).digest() != self._body_digest:
            raise self._error("it is damaged: its digest does not match")

    def _error(self, problem: str) -> FolderIndexError:
        msg = f"{self.folder / BINARY_NAME}: {problem}.\n  Run `wdskit index {self.folder}`."
        return FolderIndexError(msg, folder=str(self.folder))


def _sha256_of(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.digest()
