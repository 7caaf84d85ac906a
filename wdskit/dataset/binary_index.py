"""The binary index of a folder, `index.bin`, and the identities of the indexed files, `.wdskit.files`.

`index.bin` has all values of `index.json` except the names of the fields. All numbers are little-endian:

- Header, 128 bytes: magic `WDSKIDX2`; number of shards, and number of bytes of all names together (uint64 each); sha256
  of the `index.json`, of the columns and names, and of the digests at the end (32 bytes each); 8 zero bytes.
- Columns, each with one value per shard: number of samples (uint64), size in bytes (uint64), sha256 (32 bytes), end of
  the shard's name in the names (uint64).
- Names, UTF-8 without separators.
- Digests: sha256 of each shard's `.idx` (32 bytes, zeros if unknown).

10**6 shards take 108 MB. `BinaryIndex` maps the file, so only the pages in use are in memory. Version 1 had no digests
of `.idx` and cannot be read: `wdskit index` writes the index again.

`.wdskit.files` identifies the files from which the index was made, by inode and modification time. A different identity
shows that a shard was rewritten in place, or replaced by a file of the same size. Little-endian: magic `WDSKFIL1`,
sha256 of the rest; then inode (uint64) and mtime_ns (int64) of `index.bin` and of each shard in the order of the index,
zeros if unknown. In a copy that kept the times (`cp -a`, `rsync -a`), only the times are compared. In any other copy,
the identities are unknown.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import FolderIndexError, ShardError
from wdskit.files import Disk, publish_bytes
from wdskit.limits import BLOCK_BYTES
from wdskit.storage.file_identity import FileIdentity
from wdskit.storage.urls import LocalFile

BINARY_NAME = "index.bin"
IDENTITIES_NAME = ".wdskit.files"

_log = logging.getLogger(__name__)

_MAGIC = b"WDSKIDX2"
_HEADER = struct.Struct("<8sQQ32s32s32s8s")
_SHARD_BYTES = 8 + 8 + 32 + 8
_DIGEST_BYTES = 32
_IDENTITIES_MAGIC = b"WDSKFIL1"
_IDENTITY = np.dtype([("inode", "<u8"), ("mtime_ns", "<i8")])
_NAMES_AT_ONCE = 1 << 14
_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the index of its folder.

    Attributes:
        name: File name of the shard.
        num_samples: Number of samples.
        num_bytes: Size of the file in bytes.
        sha256: Hex digest of the file.
        fields: Names of all fields of the samples, sorted; empty in an entry from `index.bin`.
        idx_sha256: Hex digest of the shard's `.idx`; None if an older version wrote the index.
        identity: Size, mtime_ns and inode of the indexed file; time and inode are 0 if unknown. None for a remote
            shard, and for a local shard whose identity `write_identities` must read from the disk. Stored in
            `.wdskit.files`, not in the index.
        unused: Only for a shard that was just filled: the parts of its images that decoding ignores, as (name, number
            of images, source of the first image). Not stored in the index.
    """

    name: str
    num_samples: int
    num_bytes: int
    sha256: str
    fields: tuple[str, ...]
    idx_sha256: str | None = None
    identity: FileIdentity | None = field(default=None, compare=False)
    unused: tuple[tuple[str, int, str], ...] = field(default=(), compare=False, repr=False)


def _body(entries: Sequence[ShardEntry]) -> bytes:
    """Return a part of an `index.bin` as bytes: the columns (counts, sizes, digests, ends of the names), then the
    names.
    """
    names = [entry.name.encode() for entry in entries]
    return b"".join(
        (
            np.array([entry.num_samples for entry in entries], dtype="<u8").tobytes(),
            np.array([entry.num_bytes for entry in entries], dtype="<u8").tobytes(),
            b"".join(bytes.fromhex(entry.sha256) for entry in entries),
            np.cumsum([len(name) for name in names], dtype="<u8").tobytes(),
            *names,
        )
    )


def digest_of_entries(entries: Sequence[ShardEntry]) -> bytes:
    """Return the `BinaryIndex.digest` of an index with these entries: sha256, 32 bytes, of all counts, sizes, digests
    and names.
    """
    return hashlib.sha256(_body(entries)).digest()


def build_binary(entries: Sequence[ShardEntry], json_digest: bytes) -> bytes:
    """Return the bytes of an `index.bin`. `json_digest` is sha256 (32 bytes) of the `index.json` of these entries."""
    body = _body(entries)
    idx_digests = (entry.idx_sha256 for entry in entries)
    idx = b"".join(bytes.fromhex(digest) if digest else bytes(_DIGEST_BYTES) for digest in idx_digests)
    digests = hashlib.sha256(body).digest(), hashlib.sha256(idx).digest()
    num_name_bytes = len(body) - _SHARD_BYTES * len(entries)
    return _HEADER.pack(_MAGIC, len(entries), num_name_bytes, json_digest, *digests, b"") + body + idx


class BinaryIndex:
    """The index of a folder, mapped into memory from `index.bin`. The constructor reads the whole file and checks it.

    A pickle has only the folder, the digest and the URL. Unpickling opens the file again.

    Args:
        folder: Local folder with `index.bin` and `index.json`.
        expected: The `digest` that the index must have; None accepts any.
        url: URL of the remote folder if `folder` has a copy of its index; empty for a local folder.

    Attributes:
        counts: Number of samples of each shard, uint64 (num_shards,), read-only.
        sizes: Bytes of each shard, uint64 (num_shards,), read-only.
        digests: sha256 of each shard, (num_shards, 32) uint8, read-only.
        idx_digests: sha256 of each shard's `.idx`, (num_shards, 32) uint8, zeros if unknown.
        identities: Structured array (num_shards,) with `inode` and `mtime_ns` of each shard's file; None if unknown.
        digest: 32 bytes that identify the shards: sha256 of all counts, sizes, digests and names.

    Raises:
        FolderIndexError: The index is missing, cannot be read, is damaged, has another version, belongs to another
            `index.json`, or does not have the digest `expected`.
    """

    def __init__(self, folder: Path, expected: bytes | None = None, url: str = "") -> None:
        self.folder = folder
        self.url = url
        try:
            with (folder / "index.json").open("rb") as file:
                json_digest = _digest(file)
            with (folder / BINARY_NAME).open("rb") as file:
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    raise self._error(f"it has {len(header)} bytes, less than its header")
                magic, num_shards, num_name_bytes, json_expected, *digests, rest = _HEADER.unpack(header)
                if magic != _MAGIC and magic.startswith(_MAGIC[:-1]):
                    version = magic[-1:].decode("latin-1")
                    raise self._error(f"it has format version {version!r}, but this wdskit reads version '2'")
                self.digest = _digest(file, num_shards * _SHARD_BYTES + num_name_bytes)
                idx_digest = _digest(file)
                num_bytes = _HEADER.size + num_shards * (_SHARD_BYTES + _DIGEST_BYTES) + num_name_bytes
                if magic != _MAGIC or any(rest) or file.tell() != num_bytes or [self.digest, idx_digest] != digests:
                    raise self._error("it is damaged")
                if json_digest != json_expected:
                    raise self._error("it does not belong to the index.json beside it")
                body: NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="r")[_HEADER.size :]
        except OSError as err:
            raise self._error(f"cannot be read: {err.strerror}") from err
        ends = num_shards * np.array([8, 16, 48, 56])
        self.counts = body[: ends[0]].view("<u8")
        self.sizes = body[ends[0] : ends[1]].view("<u8")
        self.digests = body[ends[1] : ends[2]].reshape(num_shards, 32)
        self._name_ends = body[ends[2] : ends[3]].view("<u8")
        self._names = body[ends[3] : ends[3] + num_name_bytes]
        self.identities = read_identities(folder / BINARY_NAME, num_shards)
        self.idx_digests = body[ends[3] + num_name_bytes :].reshape(num_shards, _DIGEST_BYTES)
        self._check_names(num_name_bytes)
        if url and np.any(self.counts > self.sizes // BLOCK_BYTES):  # local shards are compared when they are opened
            shard = int(np.argmax(self.counts > self.sizes // BLOCK_BYTES))
            what = f"{self.counts[shard]} samples in {self.sizes[shard]} bytes"
            raise self._error(f"it says that {self.name(shard)} has {what}, and each takes {BLOCK_BYTES} bytes or more")
        if expected not in (None, self.digest):
            msg = f"{self.place}/{BINARY_NAME}: it was replaced while it was in use. Start again."
            raise FolderIndexError(msg, folder=self.place)

    def __reduce__(self) -> tuple[object, tuple[Path, bytes, str]]:
        """Return the arguments that open the index again: the folder, the digest and the URL."""
        return BinaryIndex, (self.folder, self.digest, self.url)

    @property
    def place(self) -> str:
        """Path or URL of the folder of the shards."""
        return self.url or str(self.folder)

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.counts)

    def name(self, shard: int) -> str:
        """Return the file name of shard number `shard`, from 0. Raises FolderIndexError if the name is not UTF-8."""
        return self._decode(self._names[self._name_start(shard) : int(self._name_ends[shard])].tobytes())

    def idx_sha256(self, shard: int) -> str | None:
        """Return the hex sha256 of the `.idx` of shard number `shard`; None if the index does not have this digest."""
        digest = self.idx_digests[shard].tobytes()
        return digest.hex() if any(digest) else None

    def entry(self, shard: int) -> ShardEntry:
        """Return the entry of shard number `shard`, without field names: `index.bin` has no field names. The time and
        inode of its identity are 0 if unknown. Raises FolderIndexError if the name of the shard is not UTF-8.
        """
        inode, mtime_ns = (0, 0) if self.identities is None else self.identities[shard].tolist()
        num_bytes = int(self.sizes[shard])
        return ShardEntry(
            name=self.name(shard),
            num_samples=int(self.counts[shard]),
            num_bytes=num_bytes,
            sha256=self.digests[shard].tobytes().hex(),
            fields=(),
            idx_sha256=self.idx_sha256(shard),
            identity=FileIdentity(num_bytes, mtime_ns, inode),
        )

    def names(self) -> Iterator[list[str]]:
        """Yield the file names of all shards in order, in lists of 16,384 names; the last list may be shorter. Raises
        FolderIndexError if a name is not UTF-8.
        """
        for first in range(0, len(self), _NAMES_AT_ONCE):
            start = self._name_start(first)
            ends = (self._name_ends[first : first + _NAMES_AT_ONCE].astype(np.int64) - start).tolist()
            data = self._names[start : start + ends[-1]].tobytes()
            yield [self._decode(data[begin:end]) for begin, end in itertools.pairwise((0, *ends))]

    def _decode(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError as err:
            raise self._error("its names are not file names") from err

    def hash_names(self, digest: hashlib._Hash, shards: NDArray[np.int64]) -> None:
        """Update the hash object `digest` with the names of the shards with the numbers `shards`, then with the lengths
        of these names.
        """
        for run in np.split(shards, np.flatnonzero(np.diff(shards) != 1) + 1) if len(shards) else []:
            digest.update(self._names[self._name_start(run[0]) : int(self._name_ends[run[-1]])].tobytes())
        for at in range(0, len(shards), _NAMES_AT_ONCE):
            part = shards[at : at + _NAMES_AT_ONCE]
            starts = np.where(part > 0, self._name_ends[part - 1], 0)
            digest.update((self._name_ends[part] - starts).astype("<i8").tobytes())

    def _name_start(self, shard: int) -> int:
        return int(self._name_ends[shard - 1]) if shard else 0

    def _check_names(self, num_name_bytes: int) -> None:
        """Raise FolderIndexError if a name in the index is not a plain file name, or if the names do not have
        `num_name_bytes` bytes in total.
        """
        ends, names = self._name_ends, self._names
        last = int(ends[-1]) if len(ends) else 0
        parts = (names[at : at + _BYTES_AT_ONCE] for at in range(0, len(names), _BYTES_AT_ONCE))
        if (
            last != num_name_bytes
            or np.any(ends[1:] <= ends[:-1])
            or not np.all(ends[:1])
            or any(np.any((part < 0x20) | (part == ord("/"))) for part in parts)
        ):
            raise self._error("its names are not file names")

    def _error(self, problem: str) -> FolderIndexError:
        remedy = "Run `wdskit index` where the shards are" if self.url else f"Run `wdskit index {self.folder}`"
        msg = f"{self.place}/{BINARY_NAME}: {problem}.\n  {remedy}."
        return FolderIndexError(msg, folder=self.place)


def _digest(file: IO[bytes], num_bytes: int | None = None) -> bytes:
    """Return sha256, 32 bytes, of the next `num_bytes` bytes of an open file, or of its rest if `num_bytes` is None."""
    digest = hashlib.sha256()  # of bytes that are read, because mapped pages would count as memory
    left = -1 if num_bytes is None else num_bytes
    while left and (part := file.read(_BYTES_AT_ONCE if left < 0 else min(left, _BYTES_AT_ONCE))):
        digest.update(part)
        left -= len(part) if left > 0 else 0
    return digest.digest()


def write_identities(index: Path, entries: Sequence[ShardEntry], *, disk: Disk) -> None:
    """Write the file `.wdskit.files` with the identities of `index.bin` and of each shard (`FileIdentity`).

    If an entry has no identity, the identity of the shard on the disk is stored. If `index.bin`, or a shard whose entry
    has no identity, is missing, nothing is written, and an old `.wdskit.files` is removed.

    Args:
        index: Path of `index.bin`. The new file is in the same folder.
        entries: Index entries of the shards.
        disk: Performs the file operations.

    Raises:
        OSError: An operation of `disk` fails.
    """
    try:
        files = [FileIdentity.of(index)]
        files += [entry.identity or FileIdentity.of(index.parent / entry.name) for entry in entries]
    except OSError:
        disk.remove(index.parent / IDENTITIES_NAME)  # a shard is missing, which is an error when it is read
        return
    rest = np.array([(file.inode, file.mtime_ns) for file in files], dtype=_IDENTITY).tobytes()
    publish_bytes(index.parent / IDENTITIES_NAME, _IDENTITIES_MAGIC + hashlib.sha256(rest).digest() + rest, disk=disk)


def read_identities(index: Path, num_shards: int) -> NDArray[np.void] | None:
    """Return the `inode` and `mtime_ns` of each shard from `.wdskit.files` as a structured array (num_shards,).

    `index` is the path of the `index.bin` next to `.wdskit.files`. If `index.bin` is a copy with its old modification
    time, all inodes are 0, which means unknown. Return None if `index.bin` has another modification time than
    `.wdskit.files` stores, or if `.wdskit.files` is missing, damaged or has another number of shards.
    """
    try:
        data = (index.parent / IDENTITIES_NAME).read_bytes()
        now = FileIdentity.of(index)
    except OSError:
        return None
    head_bytes = len(_IDENTITIES_MAGIC) + _DIGEST_BYTES
    rest = data[head_bytes:]
    if data[:head_bytes] != _IDENTITIES_MAGIC + hashlib.sha256(rest).digest() or len(rest) != 16 * (num_shards + 1):
        return None
    found = np.frombuffer(rest, dtype=_IDENTITY)
    inode, mtime_ns = found[0].tolist()
    if mtime_ns != now.mtime_ns:
        _log.info(
            "%s was copied or changed since it was made, so its shards are compared by size, headers and keys; "
            "`wdskit verify` compares all bytes, and `wdskit index` stores the identity of the files that are here",
            index,
        )
        return None
    if inode != now.inode:
        found = found.copy()
        found["inode"] = 0
    return found[1:]


def check_digest(file: LocalFile, sha256: str) -> None:
    """Read a whole shard, and raise ShardError if its sha256 is not `sha256`, the hex digest in the index. Raises
    StorageError if the shard cannot be read.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    while part := file.read_at(num_bytes, _BYTES_AT_ONCE):
        digest.update(part)
        num_bytes += len(part)
    if digest.hexdigest() != sha256:
        raise changed_bytes(file.url, num_bytes, digest.hexdigest(), sha256)


def changed_bytes(url: str, num_bytes: int, found: str, expected: str) -> ShardError:
    """Return the ShardError for a shard whose bytes differ from the index. `found` is the hex sha256 of the shard
    `url`, and `expected` the hex sha256 in the index. The offset of the error is the size of the shard, `num_bytes`.
    """
    problem = f"its sha256 is {found[:12]}..., but the index says {expected[:12]}..."
    remedy = "It was damaged or replaced. Fetch it again, or run `wdskit index` if the shard is right."
    return ShardError(shard=url, offset=num_bytes, problem=problem, remedy=remedy)


class IdentityChecker:
    """Checks that opened shards are the indexed files. Remembers each file whose sha256 was right, until it changes."""

    def __init__(self) -> None:
        self._known: dict[str, FileIdentity] = {}

    def check(self, file: LocalFile, identity: FileIdentity | None, sha256: str) -> None:
        """Raise ShardError if an opened shard is not the indexed file and has other bytes.

        Args:
            file: The opened shard.
            identity: Identity of the indexed file. If None, or if its time and inode are 0, nothing is checked.
            sha256: Hex digest of the shard in the index. Compared only if the file has another identity.

        Raises:
            ShardError: Identity and sha256 differ from the index.
            StorageError: The shard cannot be read.
        """
        if identity is None or not any(identity[1:]):
            return
        now = FileIdentity.of(file.fd)
        if identity in (now, now._replace(inode=0)) or now == self._known.get(file.url):
            return
        check_digest(file, sha256)
        self._known[file.url] = now
        _log.warning(
            "%s was replaced or touched since it was indexed; its sha256 still matches the index. Run `wdskit index` "
            "so that the next process need not compare it",
            file.url,
        )
