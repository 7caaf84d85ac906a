"""Reading ranges of source shards into memory that is there already."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from typing_extensions import Self

from wdskit.errors import ShardError, StorageError
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.samples.headers import BlocksAt, Bytes, Ints
from wdskit.storage.identity import FileChanged, FileIdentity
from wdskit.storage.urls import LocalFile

MAX_OPEN = 128  # files, of the 1024 that a process usually may have open


def open_path(path: str) -> LocalFile:
    """A file by its path, whatever it looks like."""
    return LocalFile(f"./{path}" if path.lower().startswith("file:") else path)


def read_into(file: LocalFile, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes from `offset`.

    Raises:
        ShardError: The file ends before.
        StorageError: It cannot be read.
    """
    at = 0
    while at < len(view):  # one read gives 2 GiB at most, and network disks may give less than was asked for
        try:
            count = os.preadv(file.fd, [view[at:]], offset + at)
        except OSError as err:
            raise StorageError(f"{file.url}: reading failed: {err.strerror}.", url=file.url) from err
        if not count:
            problem = "the shard stops where its offsets go on"
            raise ShardError(shard=file.url, offset=offset + at, problem=problem, remedy="It changed. Index it again.")
        at += count


def blocks_in(data: Bytes) -> BlocksAt:
    """The blocks of bytes in memory, by their place there."""
    blocks = data.reshape(-1, BLOCK_BYTES)
    return lambda places: blocks[places // BLOCK_BYTES]


def blocks_of(file: LocalFile) -> BlocksAt:
    """The blocks of a file, each read for itself: for samples so large that what lies between is not worth it."""

    def read(places: Ints) -> Bytes:
        blocks = np.empty((len(places), BLOCK_BYTES), dtype=np.uint8)
        for block, place in zip(blocks, places.tolist(), strict=True):
            read_into(file, block.data, place)
        return blocks

    return read


class SourcePath(str):
    """Path of a shard, with the identity of the file that was looked at."""

    __slots__ = ("identity",)
    identity: FileIdentity

    @classmethod
    def of(cls, path: str, identity: FileIdentity) -> Self:
        """Both as one."""
        made = cls(path)
        made.identity = identity
        return made


def check_unchanged(file: LocalFile, identity: FileIdentity) -> None:
    """Refuse a shard that was written again, or replaced.

    Raises:
        ShardError: It was.
    """
    try:
        identity.check(file.fd)
    except FileChanged as err:
        remedy = "Start again when nobody writes there."
        raise ShardError(shard=file.url, offset=0, problem=str(err), remedy=remedy) from err


class Sources:
    """Shards by number, each opened when it is first asked for, the longest unused closed when there are too many."""

    def __init__(self, paths: Sequence[SourcePath]) -> None:
        self._paths = paths
        self._files: OrderedDict[int, LocalFile] = OrderedDict()

    def __getitem__(self, number: int) -> LocalFile:
        """An open shard, which is compared with the one that was looked at each time.

        Raises:
            ShardError: It is another one.
            StorageError: It cannot be opened.
        """
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
