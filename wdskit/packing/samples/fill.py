"""Putting samples of other shards into one that is filled.

Samples that have our form already are copied as they are, many at a time. What is written is looked at as if somebody
else had made it: each sample must stand where it was planned, under the key that it was planned with, in headers that
are ours to the byte. So a source that changed since is noticed, and so is a mistake here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from wdskit.dataset.samples import read_span
from wdskit.errors import ShardError
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.row import Row
from wdskit.packing.samples.changes import find_fields
from wdskit.packing.samples.headers import Bools, Bytes, Ints, Look, hash_keys, look_at
from wdskit.packing.samples.read import Sources, blocks_in, read_into
from wdskit.packing.samples.store import SampleRows, batches_of
from wdskit.storage.identity import ObjectVersion
from wdskit.tar.header import build_header
from wdskit.tar.walk import Span
from wdskit.tar.writer import END_BYTES, member_bytes

BATCH_BYTES = 4 << 20
ROWS_AHEAD = 32  # samples that are read at once from remote shards, where each becomes a row
# For each number of bytes that data leave in their last block, a mask over the others.
_BEHIND = ((np.arange(BLOCK_BYTES) >= np.arange(BLOCK_BYTES)[:, None]) * np.uint8(255)).view(np.uint64)

HandOver = Callable[[bytearray, int], bytearray | None]


class SampleFiller:
    """Writes the samples of one shard. `close` ends it.

    Args:
        rows: The samples.
        shard: Path of the shard that is filled, for messages.

    Attributes:
        fields: Names of all fields so far.
        offsets: Where each sample starts so far, and where the last one ends.
    """

    def __init__(self, rows: SampleRows, shard: str) -> None:
        self._rows = rows
        self._shard = shard
        self._sources = Sources(rows.sources)
        self._is_remote = any(isinstance(path.identity, ObjectVersion) for path in rows.sources)
        self.fields: set[str] = set()
        self.offsets = [0]

    def close(self) -> None:
        """Close the sources."""
        self._sources.close()

    def copy(self, hand_over: HandOver) -> Iterator[tuple[int, int]]:
        """Write the whole shard, copying what can be copied.

        Args:
            hand_over: Takes a buffer and how many of its bytes are written, and gives another one that is free.

        Yields:
            How many samples, and bytes of them, were written since.

        Raises:
            ShardError, StorageError: A source is not what it was when the run was planned.
        """
        memory = bytearray(BATCH_BYTES)
        for first, stop, num_bytes in batches_of(self._rows, BATCH_BYTES):
            if num_bytes > len(memory):
                memory = bytearray(num_bytes)
            data = np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
            self._fill(data, first, stop)
            ends = np.cumsum(self._rows.size[first:stop], dtype=np.int64) * BLOCK_BYTES + self.offsets[-1]
            self.offsets += ends.tolist()
            del data
            memory = hand_over(memory, num_bytes) or bytearray(BATCH_BYTES)
            yield stop - first, num_bytes
        hand_over(bytearray(END_BYTES), END_BYTES)

    def rows(self) -> Iterator[Row]:
        """The samples as rows, read one by one, with the errors of `copy`."""
        for row in range(len(self._rows)):
            if row % ROWS_AHEAD == 0:
                self._read_ahead(row, min(row + ROWS_AHEAD, len(self._rows)))
            key, fields = self._read(row)
            yield Row(key, tuple((name, bytes(data)) for name, data in fields), f"{self._place(row)} ({key!r})")

    def _read_ahead(self, first: int, stop: int) -> None:
        """Have samples `first` to `stop` on their way, where their shards are remote."""
        rows = slice(first, stop)
        starts, spans = (column[rows].astype(np.int64) * BLOCK_BYTES for column in (self._rows.start, self._rows.span))
        if self._is_remote:
            self._sources.read_ahead(self._rows.source[rows].astype(np.int64), starts, spans)

    def _fill(self, data: Bytes, first: int, stop: int) -> None:
        """Put samples `first` to `stop` into `data`, which has as many bytes as they."""
        rows = slice(first, stop)
        ends = np.cumsum(self._rows.size[rows], dtype=np.int64) * BLOCK_BYTES
        places = ends - self._rows.size[rows].astype(np.int64) * BLOCK_BYTES
        copied = self._rows.copied[rows]
        self._read_ahead(first, stop)
        self._copy(data, places, first + np.flatnonzero(copied), first)
        others = self._by_place(first + np.flatnonzero(~copied)).tolist()
        keys = {row: self._put(data, row, int(places[row - first])) for row in others}
        look = look_at(places, ends, blocks_in(data))
        self._check(first, copied, look, keys)
        _clear_padding(data, look)
        self.fields |= {look.members.names[field] for field in np.unique(look.members.fields).tolist()}

    def _by_place(self, rows: Ints) -> Ints:
        """Samples as their sources have them."""
        order: Ints = rows[np.lexsort((self._rows.start[rows], self._rows.source[rows]))]
        return order

    def _copy(self, data: Bytes, places: Ints, rows: Ints, first: int) -> None:
        """Read samples to their places; those that are neighbours here and there at once."""
        if not len(rows):
            return
        samples, rows = self._rows, self._by_place(rows)
        source, start = samples.source[rows], samples.start[rows].astype(np.int64)
        span, place = samples.span[rows].astype(np.int64), places[rows - first] // BLOCK_BYTES
        apart = (source[1:] != source[:-1]) | (start[1:] != start[:-1] + span[:-1])
        apart |= place[1:] != place[:-1] + span[:-1]
        runs = np.concatenate([[0], np.flatnonzero(apart) + 1])
        lengths = np.add.reduceat(span, runs) * BLOCK_BYTES
        view = data.data
        columns = source[runs], start[runs] * BLOCK_BYTES, place[runs] * BLOCK_BYTES, lengths
        for number, offset, at, length in zip(*(column.tolist() for column in columns), strict=True):
            read_into(self._sources[number], view[at : at + length], offset)

    def _read(self, row: int) -> tuple[str, list[tuple[str, memoryview | bytes]]]:
        """Key and fields of a sample as they become."""
        samples = self._rows
        file = self._sources[int(samples.source[row])]
        start, span = int(samples.start[row]) * BLOCK_BYTES, int(samples.span[row]) * BLOCK_BYTES
        raw = read_span(file, Span(start, span))
        try:
            return samples.changes.rewrite(find_fields(raw, shard=file.url, offset=start), memoryview(raw))
        except ValueError as err:
            raise self._changed(row, str(err)) from err

    def _put(self, data: Bytes, row: int, place: int) -> bytes:
        """Put a sample to its place with headers that are made anew, and return its key."""
        key, members = self._read(row)
        size = int(self._rows.size[row]) * BLOCK_BYTES
        if sum(member_bytes(len(field)) for _, field in members) != size:
            raise self._changed(row, f"it would not have {size} bytes any more")
        view = data.data
        data[place : place + size] = 0
        for name, field in members:
            view[place : place + BLOCK_BYTES] = build_header(f"{key}.{name}".encode(), len(field))
            view[place + BLOCK_BYTES : place + BLOCK_BYTES + len(field)] = field
            place += member_bytes(len(field))
            self.fields.add(name)
        return key.encode()

    def _check(self, first: int, copied: Bools, look: Look, keys: dict[int, bytes]) -> None:
        """Compare what is going to be written with the plan."""
        check = self._rows.check[first : first + len(copied)]
        right = look.exact & ((look.hashes & np.uint64(0xFFFFFFFF)) == check)
        if keys:  # made by our writer; what `look_at` does not take for plain may be right, as a key that is no ASCII
            rows = np.array([*keys]) - first
            right[rows] = (hash_keys([*keys.values()]) & np.uint64(0xFFFFFFFF)) == check[rows]
        if not right.all():
            row = first + int(np.flatnonzero(~right)[0])
            raise self._changed(row, "a different sample, or none, is there now")

    def _place(self, row: int) -> str:
        return f"{self._rows.sources[self._rows.source[row]]} (byte {int(self._rows.start[row]) * BLOCK_BYTES})"

    def _changed(self, row: int, problem: str) -> ShardError:
        problem = f"the shard changed since the run was planned: {problem}"
        shard, offset = self._rows.sources[self._rows.source[row]], int(self._rows.start[row]) * BLOCK_BYTES
        return ShardError(
            shard=shard, offset=offset, problem=problem, remedy="Start again when no other program writes there."
        )


def _clear_padding(data: Bytes, look: Look) -> None:
    """Behind a member's data up to the next block are zeros in our shards, whatever stood there."""
    members = look.members
    used = members.sizes % BLOCK_BYTES
    places, used = (members.starts + BLOCK_BYTES + members.sizes - used)[used > 0], used[used > 0]
    blocks = data.reshape(-1, BLOCK_BYTES)
    dirty = blocks[places // BLOCK_BYTES].view(np.uint64) & _BEHIND[used]
    for member in np.flatnonzero(dirty.any(axis=1)).tolist():
        blocks[places[member] // BLOCK_BYTES, used[member] :] = 0
