"""Reading ranges of source shards into memory that is there already."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from typing_extensions import Self

from wdskit.errors import ShardError, StorageError
from wdskit.limits import BLOCK_BYTES, MAX_READ_BYTES
from wdskit.packing.samples.headers import BlocksAt, Bytes, Ints
from wdskit.storage.identity import FileChanged, FileIdentity, ObjectVersion
from wdskit.storage.urls import LocalFile, RangeFile, is_local

MAX_OPEN = 128  # files, of the 1024 that a process usually may have open


def open_path(path: str) -> RangeFile:
    """A file by its path, whatever it looks like; or an object by its URL, of the version that was looked at."""
    if path.lower().startswith("file:") or is_local(path):
        return LocalFile(f"./{path}" if path.lower().startswith("file:") else path)
    from wdskit.storage.objects import ObjectFile

    if isinstance(path, SourcePath) and isinstance(path.identity, ObjectVersion):
        return ObjectFile(str(path), num_bytes=path.identity.num_bytes, etag=path.identity.etag)
    return ObjectFile(path)


def identity_of(file: RangeFile) -> FileIdentity | ObjectVersion:
    """Which file it is, or which version of an object."""
    if isinstance(file, LocalFile):
        return FileIdentity.of(file.fd)
    from wdskit.storage.objects import ObjectFile

    assert isinstance(file, ObjectFile)
    return ObjectVersion(file.num_bytes, file.etag)


def read_into(file: RangeFile, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes from `offset`.

    Raises:
        ShardError: The file ends before.
        StorageError: It cannot be read.
    """
    if not isinstance(file, LocalFile):
        data = file.read_whole(offset, len(view))
        if len(data) < len(view):
            raise _cut_short(file, offset + len(data))
        view[:] = data
        return
    at = 0
    while at < len(view):  # network disks may give less than was asked for
        try:
            count = os.preadv(file.fd, [view[at : at + MAX_READ_BYTES]], offset + at)
        except OSError as err:
            raise StorageError(f"{file.url}: reading failed: {err.strerror}.", url=file.url) from err
        if not count:
            raise _cut_short(file, offset + at)
        at += count


def _cut_short(file: RangeFile, offset: int) -> ShardError:
    problem = "the shard ends before its last offset"
    return ShardError(shard=file.url, offset=offset, problem=problem, remedy="It changed. Index it again.")


def blocks_in(data: Bytes) -> BlocksAt:
    """The blocks of bytes in memory, by their place there."""
    blocks = data.reshape(-1, BLOCK_BYTES)
    return lambda places: blocks[places // BLOCK_BYTES]


def blocks_of(file: RangeFile) -> BlocksAt:
    """The blocks of a file, each read for itself: for samples so large that what lies between is not worth it."""

    def read(places: Ints) -> Bytes:
        blocks = np.empty((len(places), BLOCK_BYTES), dtype=np.uint8)
        for block, place in zip(blocks, places.tolist(), strict=True):
            read_into(file, block.data, place)
        return blocks

    return read


class SourcePath(str):
    """Path or URL of a shard, with the identity of the file that was looked at."""

    __slots__ = ("identity",)
    identity: FileIdentity | ObjectVersion

    @classmethod
    def of(cls, path: str, identity: FileIdentity | ObjectVersion) -> Self:
        """Both as one."""
        made = cls(path)
        made.identity = identity
        return made


def check_unchanged(file: RangeFile, identity: FileIdentity | ObjectVersion) -> None:
    """Refuse a shard that was written again, or replaced. Of an object each reply is compared.

    Raises:
        ShardError: It was.
    """
    if not isinstance(file, LocalFile) or not isinstance(identity, FileIdentity):
        return
    try:
        identity.check(file.fd)
    except FileChanged as err:
        remedy = "Start again when no other program writes there."
        raise ShardError(shard=file.url, offset=0, problem=str(err), remedy=remedy) from err


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (start, stop), rising, neighbours as one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


class Sources:
    """Shards by number, each opened when it is first asked for, the longest unused closed when there are too many."""

    def __init__(self, paths: Sequence[SourcePath]) -> None:
        self._paths = paths
        self._files: OrderedDict[int, RangeFile] = OrderedDict()
        self._ahead: dict[int, RangeFile] = {}

    def read_ahead(self, numbers: Ints, starts: Ints, spans: Ints) -> None:
        """Begin to read samples of remote shards: the number of the shard of each, where it starts, and its bytes. What
        was begun before is given up.
        """
        from wdskit.storage.objects import ObjectFile

        self._ahead.clear()
        for number in np.unique(numbers).tolist():
            file = self[number]
            if isinstance(file, ObjectFile):
                chosen = numbers == number
                each = sorted(zip(starts[chosen].tolist(), (starts + spans)[chosen].tolist(), strict=True))
                self._ahead[number] = file.ahead(joined(each))

    def __getitem__(self, number: int) -> RangeFile:
        """An open shard, which is compared with the one that was looked at each time.

        Raises:
            ShardError: It is another one.
            StorageError: It cannot be opened.
        """
        if number in self._ahead:
            return self._ahead[number]
        file = self._files.get(number)
        if file is None:
            if len(self._files) >= MAX_OPEN:
                self._files.popitem(last=False)[1].close()
            file = self._files[number] = open_path(self._paths[number])
        else:
            self._files.move_to_end(number)
        check_unchanged(file, self._paths[number].identity)
        return file

    def close(self) -> None:
        """Close them all."""
        for file in self._files.values():
            file.close()
        self._files.clear()
