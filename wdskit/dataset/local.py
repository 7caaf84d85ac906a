"""Random access to the samples of one local shard."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from wdskit.dataset.keys import split_name
from wdskit.dataset.offsets import read_offsets
from wdskit.errors import ShardError
from wdskit.limits import BLOCK_BYTES
from wdskit.storage.urls import LocalFile
from wdskit.tar.reader import locate_members


class LocalShard:
    """The samples of a shard by number, one pread each, checked on the way.

    Offsets come from `<shard>.idx`. Every header of a sample is checked when it is read, and so is that all its members
    have one key, so offsets of another shard give an error, never another sample's fields. Safe to share between
    threads.

    Args:
        path: A local shard with its `.idx` beside it.

    Raises:
        StorageError: The shard cannot be opened.
        FolderIndexError: The offsets are missing or cannot be those of this shard.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = LocalFile(self.path)
        try:
            self._offsets = read_offsets(Path(self.path), num_bytes=self._file.num_bytes)
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, memoryview]:
        """The fields of sample `index`, in the order of their members; negative numbers count from the end.

        The views share one buffer that lives as long as any of them.

        Raises:
            IndexError: There is no such sample.
            ShardError: The bytes there are not one whole sample.
        """
        return self._read(index)[1]

    def key(self, index: int) -> str:
        """The key of sample `index`. Raises as indexing does."""
        return self._read(index)[0]

    def close(self) -> None:
        """Close the file. Views stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        """Use as a context manager that closes the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def _read(self, index: int) -> tuple[str, dict[str, memoryview]]:
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            msg = f"{self.path}: sample {index} is out of range: there are {len(self)}"
            raise IndexError(msg)
        start, stop = int(self._offsets[number]), int(self._offsets[number + 1])
        data = self._file.read_at(start, stop - start + BLOCK_BYTES)
        if len(data) < stop - start + BLOCK_BYTES:
            raise self._error(start + len(data), f"the shard stops inside sample {number}")
        key = None
        fields: dict[str, memoryview] = {}
        view = memoryview(data)
        for name, first, last in locate_members(data, shard=self.path, offset=start, stop=stop - start):
            split = split_name(name)
            if split is None:
                continue
            if key is None:
                key = split[0]
            if split[0] != key or split[1] in fields:
                raise self._error(start + first, f"sample {number} holds {name!r} beside the key {key!r}")
            fields[split[1]] = view[first:last]
        if key is None:
            raise self._error(start, f"sample {number} has no member")
        if _plain_key(data[stop - start :]) == key:
            raise self._error(stop, f"sample {number} goes on where the offsets end it")
        return key, fields

    def _error(self, offset: int, problem: str) -> ShardError:
        remedy = f"The shard or its .idx changed. Run `wdskit index {Path(self.path).parent}` if the shard is right."
        return ShardError(shard=self.path, offset=offset, problem=problem, remedy=remedy)


def _plain_key(block: bytes) -> str | None:
    """The key that a header block names, where it is a plain member's."""
    split = split_name(block[:100].partition(b"\x00")[0].decode("utf-8", "replace"))
    return split[0] if split else None
