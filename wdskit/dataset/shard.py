"""Random access to the samples of one shard, by the offsets in the `.idx` next to it.

`<shard>.idx` has the offset of each sample's first header block, extension headers included, then the end of the last
member: N+1 little-endian uint64 (Megatron-Energon's layout). The folder's index has the sha256 of the `.idx`.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from wdskit.dataset.keys import field_problem
from wdskit.errors import FolderIndexError, ShardError, StorageError
from wdskit.files import DISK, Disk, publish_bytes
from wdskit.limits import BLOCK_BYTES, MAX_IDX_BYTES
from wdskit.storage.urls import ByteStream, LocalFile, RangeFile, read_bytes
from wdskit.tar.header import padded
from wdskit.tar.names import split_name
from wdskit.tar.reader import TarReader, locate_members, plain_member
from wdskit.tar.walk import TarWalk
from wdskit.tar.writer import END_BYTES

IDX_SUFFIX = ".idx"
_BYTES_AT_ONCE = 1 << 20
SMALL_BYTES = 32 << 10  # a sample up to this size is read whole even if only its headers are needed


class IndexedShard:
    """The samples of a shard by number. Each read of a sample checks the sample.

    A sample takes one read of the file. The samples before and after it may be read too, until their keys are known to
    differ (`edges`). All headers of the sample are checked. Its members must have one key, and the members before and
    after the sample must have other keys. So damaged offsets, or offsets of another shard, give an error, and never a
    part of a sample or fields of another sample.

    Safe to share between threads, as long as no thread closes the shard while others read.

    Args:
        path: Path or URL, for messages.
        file: The open shard. `close` closes the file, and so does the deletion of this object.
        offsets: Offset of the start of each sample, then of the end of the last one, int64 (num_samples + 1,).
        is_trusted: Whether the offsets are known to belong to this shard. If True, the samples before and after a
            sample are not read.

    Attributes:
        edges: For each offset: 1 if the samples before and after it are known to have different keys, otherwise 0.
        handle: Descriptor, offsets and edges, for the C code. The descriptor is -1 for a remote shard, and after
            `close`.
    """

    def __init__(self, path: str, file: RangeFile, offsets: NDArray[np.int64], *, is_trusted: bool = False) -> None:
        self.path = path
        self.file = file
        self._closing = weakref.finalize(self, file.close)
        self.offsets: memoryview[int] = memoryview(offsets.data)
        self.edges = bytearray(bytes([is_trusted]) * len(offsets))
        self.edges[0] = self.edges[-1] = 1
        self.handle: tuple[int, memoryview[int], bytearray] = (file.fd, self.offsets, self.edges)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> dict[str, memoryview]:
        """Return the fields of sample `index`, in the order of their members; negative numbers count from the end.

        The views share one buffer that lives as long as any of them.

        Raises:
            IndexError: `index` is out of range.
            ShardError: The bytes are not one whole sample.
            StorageError: The shard is closed, or the disk or the store fails.
        """
        return self.read(index)[1]

    def key(self, index: int) -> str:
        """Return the key of sample `index`; negative numbers count from the end. The errors are those of `read`."""
        return self.read(index)[0]

    def read(self, index: int) -> tuple[str, dict[str, memoryview]]:
        """Return the key and the fields of sample `index`, in the order of their members; negative numbers count from
        the end.

        Raises:
            IndexError: `index` is out of range.
            ShardError: The bytes are not one whole sample.
            StorageError: The shard is closed or cannot be read.
        """
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path}: sample {index} is out of range: there are {len(self)}")
        key, fields = self._parse(number)
        if not self.edges[number]:
            self._check_edge(number, self._end_keys(number - 1)[1], key)
        if not self.edges[number + 1]:
            self._check_edge(number + 1, key, self._end_keys(number + 1)[0])
        return key, fields

    def read_at(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`. Raises ShardError if the file is too short, and StorageError if
        the shard is closed or cannot be read.
        """
        if not self._closing.alive:
            raise StorageError(f"{self.path}: it has been closed.", url=self.path)
        data = self.file.read_at(offset, size)
        if len(data) < size:
            raise self._error(offset + len(data), "the shard ends before its last offset")
        return data

    def close(self) -> None:
        """Close the file. Fields that were returned stay valid."""
        self.handle = (-1, self.offsets, self.edges)
        self._closing()

    def __enter__(self) -> Self:
        """Return this shard. The end of the `with` block closes its file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _check_edge(self, edge: int, before: str, after: str) -> None:
        """Set `edges[edge]` to 1. Raises ShardError if `before` and `after`, the keys on both sides of the edge, are
        equal; `edges` then does not change.
        """
        if before == after:
            raise self._error(self.offsets[edge], f"samples {edge - 1} and {edge} have the same key, {before!r}")
        self.edges[edge] = 1

    def _end_keys(self, number: int) -> tuple[str, str]:
        """Return the keys of the first and the last member of sample `number`; members without a key do not count.

        Raises:
            ShardError: The bytes are not one whole sample.
            StorageError: The shard is closed or cannot be read.
        """
        at, stop = self.offsets[number], self.offsets[number + 1]
        keys: list[str] = []
        try:
            members = TarWalk(self.file.read_at, self.file.num_bytes, shard=self.path, start=at)
            for name, _, span in members if stop - at > SMALL_BYTES else ():
                at = span.offset + padded(span.size)
                split = split_name(name)
                keys += [split[0]] if split else []
                if at >= stop:
                    break
        except ShardError:
            keys = []
        if not keys or at != stop or len(set(keys)) > 1:
            keys = [self._parse(number)[0]]  # raises if the sample is invalid
        return keys[0], keys[-1]

    def _parse(self, number: int) -> tuple[str, dict[str, memoryview]]:
        """Return the key and the fields of sample `number`. If a plain header follows the sample, compare its key too,
        and set `edges[number + 1]` to 1; otherwise do not change `edges`.

        Raises:
            ShardError: The bytes are not whole members of one key, or the key of the plain header is the same.
            StorageError: The shard is closed or cannot be read.
        """
        start, stop = self.offsets[number], self.offsets[number + 1]
        data = self.read_at(start, stop - start + BLOCK_BYTES)
        key, fields = self._parse_members(data, number, start, stop)
        next_key = _plain_key(data[stop - start :])
        if next_key is not None:
            self._check_edge(number + 1, key, next_key)
        return key, fields

    def _parse_members(self, data: bytes, number: int, start: int, stop: int) -> tuple[str, dict[str, memoryview]]:
        """Return the key and the fields of sample `number`, whose headers may have any form. `data` are the shard's
        bytes from offset `start`, where the sample starts, to at least offset `stop`, where the sample ends.

        Raises:
            ShardError: The bytes are not one sample, or a field is repeated or reserved.
        """
        key = ""
        fields: dict[str, memoryview] = {}
        view = memoryview(data)
        for name, first, last in locate_members(data, shard=self.path, offset=start, stop=stop - start):
            split = split_name(name)
            if split is None:
                continue
            key = key or split[0]
            if split[0] != key:
                raise self._error(start + first - BLOCK_BYTES, f"sample {number} holds {name!r} beside the key {key!r}")
            if problem := field_problem(split[1], fields):
                raise self._error(start + first - BLOCK_BYTES, f"key {key!r} has the field {split[1]!r}: {problem}")
            fields[split[1]] = view[first:last]
        if not key:
            raise self._error(start, f"sample {number} has no member")
        return key, fields

    def _error(self, offset: int, problem: str) -> ShardError:
        remedy = f"The shard or its .idx changed. {_make_index(self.path)} if the shard is right."
        return ShardError(shard=self.path, offset=offset, problem=problem, remedy=remedy)


class LocalShard(IndexedShard):
    """A local shard. A pickle has only the arguments: unpickling opens the shard again.

    Args:
        path: Path of the shard. Its `.idx` is next to it.
        idx_sha256: Hex digest that the `.idx` must have, from the folder's index; None accepts any.
        num_bytes: Size that the shard must have, from the folder's index; None accepts any.

    Raises:
        StorageError: The shard cannot be opened or read.
        ShardError: The shard has another size, or the bytes before the first sample are damaged.
        FolderIndexError: The `.idx` is missing, has another digest or cannot belong to this shard.
    """

    file: LocalFile

    def __init__(
        self, path: str | os.PathLike[str], *, idx_sha256: str | None = None, num_bytes: int | None = None
    ) -> None:
        self._idx_sha256 = idx_sha256
        self._num_bytes = num_bytes
        path = os.fspath(path)
        file = LocalFile(path)
        try:
            if num_bytes not in (None, file.num_bytes):
                raise changed_size(path, file.num_bytes, num_bytes)  # noqa: TRY301
            super().__init__(path, file, read_offsets(path, num_bytes=file.num_bytes, sha256=idx_sha256))
            self._check_ends()
        except BaseException:
            file.close()
            raise

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Return a function that opens the shard again, and the arguments of this function: the path."""
        return functools.partial(LocalShard, idx_sha256=self._idx_sha256, num_bytes=self._num_bytes), (self.path,)

    def _check_ends(self) -> None:
        """Raise FolderIndexError if the first or last offset is wrong, as in a truncated `.idx`. Raise ShardError if
        the bytes before the first sample are damaged, and StorageError if the shard cannot be read.
        """
        first, stop = self.offsets[0], self.offsets[-1]
        if any(self.read_at(stop, END_BYTES)):
            raise foreign_offsets(self.path, f"its last offset {stop} is not where the members end")
        if first:
            reader = TarReader(self.file.read, shard=self.path)
            found = next((start for name, start, _ in reader if split_name(name) is not None), reader.stop)
            if first != found:
                raise foreign_offsets(self.path, f"its first offset {first} is not that of the first sample")


def _plain_key(block: bytes) -> str | None:
    """Return the key of the member whose header block is `block`; None if the block is not a plain header, or if the
    member belongs to no sample.
    """
    plain = plain_member(block)
    split = split_name(plain[0]) if plain else None
    return split[0] if split else None


def offsets_path(shard: str | Path) -> Path:
    """Return the path of a shard's `.idx`, which is next to the shard."""
    return Path(f"{shard}{IDX_SUFFIX}")


def write_offsets(shard: Path, offsets: Sequence[int], *, disk: Disk = DISK) -> None:
    """Write the `.idx` of a shard. `shard` is the path of the shard. `offsets` are the byte offset of the start of each
    sample, and last the offset of the end of the last member. Raises OSError if an operation of `disk` fails.
    """
    publish_bytes(offsets_path(shard), idx_bytes(offsets), disk=disk)


def digest_offsets(offsets: Sequence[int]) -> str:
    """Return hex sha256 of the `.idx` that has these offsets."""
    return hashlib.sha256(idx_bytes(offsets)).hexdigest()


def idx_bytes(offsets: Sequence[int]) -> bytes:
    """Return the bytes of the `.idx` that has these offsets: little-endian uint64."""
    return np.asarray(offsets, dtype="<u8").tobytes()


def read_offsets(shard: str | Path, *, num_bytes: int, sha256: str | None = None) -> NDArray[np.int64]:
    """Return the offsets in the `.idx` of a local shard, in bytes, int64 (num_samples + 1,).

    Args:
        shard: Path of the shard.
        num_bytes: Size of the shard, which the offsets must fit.
        sha256: Hex digest that the `.idx` must have; None accepts any.

    Raises:
        FolderIndexError: The `.idx` is missing or unreadable, cannot belong to this shard, or has another digest.
    """
    path = offsets_path(shard)
    most = min(8 * (num_bytes // BLOCK_BYTES + 1), MAX_IDX_BYTES)  # a sample takes at least one block
    try:
        data = read_bytes(str(path), limit=most)
    except StorageError as err:
        raise FolderIndexError(f"{err}\n  {_make_index(str(shard))}.", folder=str(path.parent)) from err
    return parse_offsets(data, str(shard), num_bytes=num_bytes, sha256=sha256)


def parse_offsets(data: bytes, shard: str, *, num_bytes: int, sha256: str | None = None) -> NDArray[np.int64]:
    """Return the offsets in an `.idx` as int64 (num_samples + 1,).

    Args:
        data: The bytes of the `.idx`.
        shard: Path or URL of the shard, for messages.
        num_bytes: Size of the shard, which the offsets must fit.
        sha256: Hex digest that the `.idx` must have; None accepts any.

    Raises:
        FolderIndexError: The offsets do not fit the shard, or the `.idx` has another digest.
    """
    problem = offsets_problem(data, num_bytes)
    if not problem and sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        problem = "it is not the file that the folder's index was made from"
    if problem:
        raise foreign_offsets(shard, problem)
    return np.frombuffer(data, dtype="<u8").astype(np.int64)


def offsets_problem(data: bytes, num_bytes: int) -> str:
    """Return why the bytes of an `.idx` cannot belong to a shard of `num_bytes` bytes; "" if they can belong to it."""
    if not data or len(data) % 8:
        return f"it has {len(data)} bytes, not 8 per sample plus 8"
    offsets = np.frombuffer(data, dtype="<u8")
    if np.any(offsets[1:] <= offsets[:-1]):
        return "its offsets do not increase"
    if np.any(offsets % np.uint64(BLOCK_BYTES)):
        return "its offsets are not multiples of 512"
    if int(offsets[-1]) + END_BYTES > num_bytes:
        return f"its last offset {offsets[-1]} leaves no room for an end marker in {num_bytes} bytes"
    return ""


def foreign_offsets(shard: str | Path, problem: str) -> FolderIndexError:
    """Return the FolderIndexError for an `.idx` that does not belong to its shard. `shard` is the shard, and `problem`
    says why.
    """
    folder, _, name = str(shard).rpartition("/")
    msg = f"{shard}{IDX_SUFFIX}: {problem}, so it does not belong to {name}.\n  {_make_index(str(shard))}."
    return FolderIndexError(msg, folder=folder or ".")


class DigestedFile:
    """Computes the digest of a file while the file is read in order.

    Args:
        file: The open file. The caller closes it.

    Attributes:
        num_bytes: Number of bytes read so far.
        sha256: The `hashlib` object with the digest of these bytes.
    """

    def __init__(self, file: ByteStream) -> None:
        self.file = file
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`; empty at the end."""
        part = self.file.read(size)
        self.sha256.update(part)
        self.num_bytes += len(part)
        return part


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


def changed_size(url: str, found: int | None, expected: int | None) -> ShardError:
    """Return the ShardError for the shard `url`, which has `found` bytes in place of the `expected` in the index."""
    problem = f"it has {found} bytes, but the folder's index says {expected}: it was truncated or replaced"
    return ShardError(shard=url, offset=0, problem=problem, remedy=f"{_make_index(url)} if the shard is right.")


def _make_index(shard: str) -> str:
    if "://" in shard:
        return "Run `wdskit index` where the shards are"
    return f"Run `wdskit index {Path(shard).parent}`"
