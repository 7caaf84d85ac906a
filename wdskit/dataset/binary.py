"""`index.bin`: the binary twin of `index.json`, made to be mapped.

Little-endian. Header of 128 bytes: magic `WDSKIDX2`, uint64 number of shards, uint64 bytes of names, 32 bytes sha256 of
the `index.json` it belongs to, 32 bytes sha256 of the columns, 32 bytes sha256 of what follows the columns, zeros. The
columns are, each as long as the number of shards: samples (uint64), bytes (uint64), digests (32 bytes each), ends of
the names (uint64), and last the names themselves, UTF-8 without separators. Behind them sha256 of each shard's `.idx`
(32 bytes each, zeros where the index does not say). 10**6 shards take 108 MB, of which a reader touches what it asks
for.

Version 1 had no digests of `.idx` and is not read any more: `wdskit index` makes the index again. Selections are bound
to the columns only, which are the same in both.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.identities import read_identities
from wdskit.errors import FolderIndexError

if TYPE_CHECKING:
    from wdskit.dataset.index import ShardEntry

BINARY_NAME = "index.bin"

_MAGIC = b"WDSKIDX2"
_HEADER = struct.Struct("<8sQQ32s32s32s8s")
_SHARD_BYTES = 8 + 8 + 32 + 8
_DIGEST_BYTES = 32
_NAMES_AT_ONCE = 1 << 14
_BYTES_AT_ONCE = 1 << 20


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
    known = (entry.idx_sha256 for entry in entries)
    idx = b"".join(bytes.fromhex(one) if one else bytes(_DIGEST_BYTES) for one in known)
    digests = hashlib.sha256(body).digest(), hashlib.sha256(idx).digest()
    head = _HEADER.pack(_MAGIC, len(entries), sum(map(len, names)), json_digest, *digests, b"")
    return head + body + idx


class BinaryIndex:
    """A mapped `index.bin`, compared with its digests when it is opened.

    Args:
        folder: Local folder that holds it and its `index.json`.

    Attributes:
        counts: Samples of each shard, (num_shards,), read-only.
        sizes: Bytes of each shard, (num_shards,), read-only.
        digests: sha256 of each shard, (num_shards, 32) uint8, read-only.
        idx_digests: sha256 of each shard's `.idx`, as `digests`; zeros where it is not known.
        identities: Inode and mtime_ns of the file of each shard, (num_shards, 2), None where they are not known.
        digest: 32 bytes that say which shards these are: sha256 over all their counts, sizes, digests and names.

    Raises:
        FolderIndexError: It is missing, damaged, of another version, or belongs to another `index.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / "index.json").open("rb") as file:
                json_digest = _digest(file)
            with (folder / BINARY_NAME).open("rb") as file:
                header = file.read(_HEADER.size)
                num_shards, num_name_bytes = self._check_head(header)
                body_digest = _digest(file, num_shards * _SHARD_BYTES + num_name_bytes)
                idx_digest = _digest(file)
                self._check_header(header, file.tell(), body_digest, idx_digest, json_digest)
                body: NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="r")[_HEADER.size :]
        except OSError as err:
            raise self._error(f"cannot be read: {err.strerror}") from err
        self.digest = body_digest
        ends = num_shards * np.array([8, 16, 48, 56])
        self.counts = body[: ends[0]].view("<u8")
        self.sizes = body[ends[0] : ends[1]].view("<u8")
        self.digests = body[ends[1] : ends[2]].reshape(num_shards, 32)
        self._name_ends = body[ends[2] : ends[3]].view("<u8")
        self._names = body[ends[3] : ends[3] + num_name_bytes]
        self.identities = read_identities(folder / BINARY_NAME, num_shards)
        self.idx_digests = body[ends[3] + num_name_bytes :].reshape(num_shards, _DIGEST_BYTES)
        self._check_names(num_name_bytes)

    def __reduce__(self) -> tuple[object, tuple[Path, bytes]]:
        """Its place, and which index it is: a million shards are not copied into every worker."""
        return _reopen, (self.folder, self.digest)

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.counts)

    def name(self, shard: int) -> str:
        """File name of a shard, 0 <= shard < len(self)."""
        try:
            return bytes(self._names[self._name_start(shard) : int(self._name_ends[shard])]).decode()
        except UnicodeDecodeError as err:
            raise self._error("its names are not file names") from err

    def idx_sha256(self, shard: int) -> str | None:
        """Hex digest of a shard's `.idx`, None where the index does not say it."""
        digest = self.idx_digests[shard].tobytes()
        return digest.hex() if any(digest) else None

    def names(self) -> Iterator[list[str]]:
        """File names of all shards in order, some thousand at a time: a tenth of the time of `name` for each."""
        for first in range(0, len(self), _NAMES_AT_ONCE):
            data, ends = self._names_of(first, min(first + _NAMES_AT_ONCE, len(self)))
            try:
                text = data.decode()
                slices = zip([0, *ends[:-1]], ends, strict=True)
                yield [text[a:b] for a, b in slices] if text.isascii() else [data[a:b].decode() for a, b in slices]
            except UnicodeDecodeError as err:
                raise self._error("its names are not file names") from err

    def hash_names(self, digest: hashlib._Hash, shards: NDArray[np.int64]) -> None:
        """Feed the names of `shards` to a digest, with their lengths, so that no other names give the same."""
        for run in np.split(shards, np.flatnonzero(np.diff(shards) != 1) + 1) if len(shards) else []:
            digest.update(self._names[self._name_start(run[0]) : int(self._name_ends[run[-1]])].tobytes())
        for at in range(0, len(shards), _NAMES_AT_ONCE):
            part = shards[at : at + _NAMES_AT_ONCE]
            starts = np.where(part > 0, self._name_ends[part - 1], 0)
            digest.update((self._name_ends[part] - starts).astype("<i8").tobytes())

    def _name_start(self, shard: int) -> int:
        return int(self._name_ends[shard - 1]) if shard else 0

    def _names_of(self, first: int, stop: int) -> tuple[bytes, list[int]]:
        """The bytes of the names of shards `first` to `stop`, and where in them each name ends."""
        start = self._name_start(first)
        ends = self._name_ends[first:stop].astype(np.int64) - start
        return self._names[start : start + int(ends[-1])].tobytes(), ends.tolist()

    def _check_head(self, header: bytes) -> tuple[int, int]:
        """Number of shards and bytes of names, by a header of this version."""
        if len(header) < _HEADER.size:
            raise self._error(f"it has {len(header)} bytes, less than its header")
        magic, num_shards, num_name_bytes, *_ = _HEADER.unpack(header)
        if magic != _MAGIC and magic.startswith(_MAGIC[:-1]):
            version = magic[-1:].decode("latin-1")
            raise self._error(f"it has format version {version!r}, this wdskit reads version '2'")
        if magic != _MAGIC:
            raise self._error("it is damaged")
        return num_shards, num_name_bytes

    def _check_header(
        self, header: bytes, num_bytes: int, body_digest: bytes, idx_digest: bytes, json_digest: bytes
    ) -> None:
        """Compare what the header says with what was read."""
        _, num_shards, num_name_bytes, json_expected, body_expected, idx_expected, rest = _HEADER.unpack(header)
        if (
            any(rest)
            or num_bytes != _HEADER.size + num_shards * (_SHARD_BYTES + _DIGEST_BYTES) + num_name_bytes
            or body_digest != body_expected
            or idx_digest != idx_expected
        ):
            raise self._error("it is damaged")
        if json_digest != json_expected:
            raise self._error("it does not belong to the index.json beside it")

    def _check_names(self, num_name_bytes: int) -> None:
        """Refuse names that are not those of files in the folder, which only a forged index has."""
        ends, names = self._name_ends, self._names
        last = int(ends[-1]) if len(ends) else 0
        parts = (names[at : at + _BYTES_AT_ONCE] for at in range(0, len(names), _BYTES_AT_ONCE))
        if (
            last != num_name_bytes
            or np.any(ends[1:] <= ends[:-1])
            or any(np.any((part < 0x20) | (part == ord("/"))) for part in parts)
        ):
            raise self._error("its names are not file names")

    def _error(self, problem: str) -> FolderIndexError:
        msg = f"{self.folder / BINARY_NAME}: {problem}.\n  Run `wdskit index {self.folder}`."
        return FolderIndexError(msg, folder=str(self.folder))


def _reopen(folder: Path, digest: bytes) -> BinaryIndex:
    index = BinaryIndex(folder)
    if index.digest != digest:
        msg = f"{folder / BINARY_NAME}: it was replaced while it was in use. Start again."
        raise FolderIndexError(msg, folder=str(folder))
    return index


def _digest(file: IO[bytes], num_bytes: int | None = None) -> bytes:
    """sha256 of so many bytes of a file, or of what is left of it, read in pieces: pages that are mapped would count as
    this process's memory.
    """
    digest = hashlib.sha256()
    left = -1 if num_bytes is None else num_bytes
    while left and (part := file.read(_BYTES_AT_ONCE if left < 0 else min(left, _BYTES_AT_ONCE))):
        digest.update(part)
        left -= len(part) if left > 0 else 0
    return digest.digest()
