"""The rows of a plan: some in memory, many on disk.

A plan holds all rows before the first is packed. Ten million of them would take gigabytes as objects, so beyond some
thousand they are written to a draft, from which whoever packs a shard reads its own. In memory stay three numbers a
row: where its record ends, the blocks that it takes in a shard, and a hash of its key.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from wdskit.dataset.keys import find_repeated, is_among
from wdskit.files import DISK, Disk, Draft, draft_path, scratch
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.plan import row_bytes
from wdskit.packing.recorded import Ints, RecordedRows, Rows, encode_row, read_exactly
from wdskit.packing.rows import Row, key_taken

ROWS_IN_MEMORY = 50_000
"""Rows from which on a plan is on disk: some 50 MB as objects."""

_FLUSH_BYTES = 1 << 20
_MOST_BLOCKS = 1024
_HELD_BYTES = 16 << 20
"""Bytes of fields in rows from which on these are on disk: images of a table that is shuffled stand in its rows."""


class Spool:
    """The rows of a plan in the order of their source. Filled by `add`; `close` ends it.

    Args:
        room: Gives the folder for the rows on disk, when there are so many.
        name: What it is called there.
        disk: What writes.
        most: Rows that are kept in memory; None for any number, where whoever gave them has them in memory anyway.
        on_key: Told the key of each row.

    Attributes:
        blocks: Blocks of 512 bytes that each row takes in its shard.
        hashes: A hash of each row's key, of this process.
        num_fields: Rows by the names of their fields.
    """

    def __init__(
        self,
        room: Callable[[], Path],
        *,
        name: str = "wdskit-plan",
        disk: Disk = DISK,
        most: int | None = ROWS_IN_MEMORY,
        on_key: Callable[[str], None] | None = None,
    ) -> None:
        self.blocks = array("I")
        self.hashes = array("q")
        self.num_fields: Counter[tuple[str, ...]] = Counter()
        self._rows: list[Row] = []
        self._most = most
        self._held_bytes = 0
        self._on_key = on_key
        self._room = room
        self._name = name
        self._disk = disk
        self._stack = contextlib.ExitStack()
        self._draft: Draft | None = None
        self._path = ""
        self._stops = array("q", [0])
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.blocks)

    def __enter__(self) -> Self:
        """Itself; it is closed when the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """Remove what is on disk."""
        self._stack.close()

    def add(self, row: Row) -> None:
        """Append a row.

        Raises:
            OSError: The disk does not take it.
        """
        self.blocks.append(row_bytes(row) // BLOCK_BYTES)
        self.hashes.append(hash(row.key))
        self.num_fields[tuple([name for name, _ in row.fields])] += 1
        if self._on_key is not None:
            self._on_key(row.key)
        if self._draft is None:
            self._rows.append(row)
            self._held_bytes += sum(len(data) for _, data in row.fields if isinstance(data, bytes))
            if self._most is not None and (len(self._rows) > self._most or self._held_bytes > _HELD_BYTES):
                self._to_disk()
        else:
            self._record(row)

    def finish(self) -> None:
        """Let all rows be there for others to read; nothing is added behind.

        Raises:
            OSError: The disk does not take them.
        """
        if self._draft is not None:
            self._flush(self._draft)
            self._draft.wait()

    def take(self, numbers: Ints) -> Rows:
        """The rows of these numbers, in their order, for this process or another. `finish` comes first."""
        if self._draft is None:
            return tuple([self._rows[number] for number in numbers.tolist()])
        stops = np.frombuffer(self._stops, dtype=np.int64)
        return RecordedRows(self._path, stops[numbers], stops[numbers + 1])

    def digest(self, start: int, stop: int) -> str:
        """A digest of the records of rows `start` to `stop`, 16 hex digits."""
        digest = hashlib.sha256()
        if self._draft is None:
            for row in self._rows[start:stop]:
                digest.update(encode_row(row))
        else:
            at, end = self._stops[start], self._stops[stop]
            with open(self._path, "rb", buffering=0) as file:
                for first in range(at, end, _FLUSH_BYTES):
                    digest.update(read_exactly(file.fileno(), first, min(first + _FLUSH_BYTES, end)))
        return digest.hexdigest()[:16]

    def forget_hashes(self) -> None:
        """Give their memory back."""
        self.hashes = array("q")

    def __getitem__(self, number: int) -> Row:
        """One row."""
        (row,) = self.take(np.array([number]))
        return row

    def _to_disk(self) -> None:
        path = self._room() / self._name
        self._draft = self._stack.enter_context(scratch(path, disk=self._disk))
        self._path = os.fspath(draft_path(path))
        for row in self._rows:
            self._record(row)
        self._rows = []

    def _record(self, row: Row) -> None:
        data = encode_row(row)
        self._stops.append(self._stops[-1] + len(data))
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= _FLUSH_BYTES and self._draft is not None:
            self._flush(self._draft)

    def _flush(self, draft: Draft) -> None:
        draft.write(b"".join(self._pending))
        self._pending, self._pending_bytes = [], 0


def digest_blocks(spool: Spool) -> tuple[int, tuple[str, ...]]:
    """Digests of all rows in their order, of 16 hex digits, and the number of rows that each is over."""
    block_rows, blocks = blocks_of(len(spool))
    return block_rows, tuple(spool.digest(start, stop) for start, stop in blocks)


def blocks_of(count: int) -> tuple[int, list[tuple[int, int]]]:
    """So many of these each that there are at most a thousand blocks or so, and where each starts and stops."""
    each = 1
    while each * _MOST_BLOCKS < count:
        each *= 2
    return each, [(start, min(start + each, count)) for start in range(0, count, each)]


def suspects(spool: Spool, kept: Ints | None, values: NDArray[np.int64]) -> Ints:
    """Numbers of the rows whose key has one of these hashes, which are sorted."""
    found = is_among(np.frombuffer(spool.hashes, dtype=np.int64), values)
    if kept is None:
        return np.flatnonzero(found)
    rows: Ints = kept[found[kept]]
    return rows


def check_unique(spool: Spool, kept: Ints | None) -> None:
    """Refuse two rows of one key, told by their hashes, and by the keys themselves where hashes are equal.

    Args:
        spool: All rows.
        kept: Numbers of those that count, None for all.

    Raises:
        RowError: Names the first row whose key an earlier one has.
    """
    hashes = np.frombuffer(spool.hashes, dtype=np.int64)
    twice = find_repeated(hashes if kept is None else hashes[kept])
    if not len(twice):
        return
    places: dict[str, str] = {}
    for row in spool.take(suspects(spool, kept, twice)):
        if row.key in places:
            raise key_taken(row, places[row.key])
        places[row.key] = row.where
