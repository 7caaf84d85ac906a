"""The rows of a plan: some in memory, many on disk.

A plan holds all rows before the first is packed. Ten million of them would take gigabytes as objects, so beyond some
thousand they are written to a temporary file, from which whoever packs a shard reads its own. In memory stay three
numbers a row: where its record ends, the blocks that it takes in a shard, and a hash of its key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from typing_extensions import Self

from wdskit.dataset.keys import find_repeated, is_among
from wdskit.files import DISK, Disk, TempFile, scratch, temp_path
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.labels import CLASS_FIELD
from wdskit.packing.plan import row_bytes
from wdskit.packing.references import KINDS, FieldBytes, Reference
from wdskit.packing.row import Row, key_taken

ROWS_IN_MEMORY = 50_000
"""Rows from which on a plan is on disk: some 15 MB. As objects they would take 50, and Python's garbage collector would
look at them again and again; at records, which are bytes, it does not look.
"""

_FLUSH_BYTES = 1 << 20
_MOST_BLOCKS = 1024
_HELD_BYTES = 4 << 20
"""Bytes of fields in rows from which on these are on disk: images of a table that is shuffled stand in its rows."""


class Spool:
    """The rows of a plan in the order of their source. Filled by `add`; `close` ends it.

    Args:
        room: Gives the folder for the rows on disk, when there are so many.
        name: What it is called there.
        disk: Performs the file operations; tests replace it.
        most: Rows that are kept in memory; None for any number, where whoever gave them has them in memory anyway.
        on_key: Called with the key of each row.

    Attributes:
        blocks: Blocks of 512 bytes that each row takes in its shard.
        hashes: A hash of each row's key, of this process.
        num_fields: Rows by the names of their fields.
    """

    @property
    def has_labels(self) -> bool:
        """Whether a row has the field `cls`."""
        return any(count and CLASS_FIELD in names for names, count in self.num_fields.items())

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
        self._temp: TempFile | None = None
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
        if self._most is None:
            self._rows.append(row)
            return
        self._record(row)
        if self._temp is None:
            self._held_bytes += sum([len(data) for _, data in row.fields if isinstance(data, bytes)])
            if len(self) > self._most or self._held_bytes > _HELD_BYTES:
                self._to_disk()

    def finish(self) -> None:
        """Let all rows be there for others to read; nothing is added behind.

        Raises:
            OSError: The disk does not take them.
        """
        if self._temp is not None:
            self._flush(self._temp)
            self._temp.wait()

    def take(self, numbers: Ints) -> Rows:
        """The rows of these numbers, in their order, for this process or another. `finish` comes first."""
        if self._most is None:
            return tuple([self._rows[number] for number in numbers.tolist()])
        if self._temp is None:
            return HeldRows([self._pending[number] for number in numbers.tolist()])
        stops = np.frombuffer(self._stops, dtype=np.int64)
        return RecordedRows(self._path, stops[numbers], stops[numbers + 1])

    def digest(self, start: int, stop: int) -> str:
        """A digest of the records of rows `start` to `stop`, 16 hex digits."""
        digest = hashlib.sha256()
        if self._temp is None:
            for record in (
                self._pending[start:stop] if self._most is not None else map(encode_row, self._rows[start:stop])
            ):
                digest.update(record)
        else:
            at, end = self._stops[start], self._stops[stop]
            with open(self._path, "rb", buffering=0) as file:
                for first in range(at, end, _FLUSH_BYTES):
                    digest.update(read_exactly(file.fileno(), first, min(first + _FLUSH_BYTES, end)))
        return digest.hexdigest()[:16]

    def forget_hashes(self) -> None:
        """Give their memory back."""
        self.hashes = array("q")

    def hash_keys(self, keys: Iterable[str]) -> Ints:
        """A hash of each key, as in `hashes`."""
        return hash_keys(keys)

    def where(self, number: int) -> str:
        """Where a row comes from."""
        return self[number].where

    def __getitem__(self, number: int) -> Row:
        """One row."""
        (row,) = self.take(np.array([number]))
        return row

    def _to_disk(self) -> None:
        path = self._room() / self._name
        self._temp = self._stack.enter_context(scratch(path, disk=self._disk))
        self._path = os.fspath(temp_path(path))
        self._flush(self._temp)

    def _record(self, row: Row) -> None:
        data = encode_row(row)
        self._stops.append(self._stops[-1] + len(data))
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= _FLUSH_BYTES and self._temp is not None:
            self._flush(self._temp)

    def _flush(self, temp: TempFile) -> None:
        temp.write(b"".join(self._pending))
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


def hash_keys(keys: Iterable[str]) -> Ints:
    """A hash of each key, of this process: int64 (num_keys,)."""
    return np.frombuffer(array("q", map(hash, keys)), dtype=np.int64)


def suspects(hashes: NDArray[Any], kept: Ints | None, values: NDArray[Any]) -> Ints:
    """Numbers of the rows, of which `kept` count, whose key has one of these hashes, which are sorted."""
    found = is_among(hashes, values)
    if kept is None:
        return np.flatnonzero(found)
    rows: Ints = kept[found[kept]]
    return rows


def check_unique(spool: Spool, kept: Ints | None) -> None:
    """Refuse two rows of one key, found by their hashes, and by the keys themselves where hashes are equal.

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
    for row in spool.take(suspects(hashes, kept, twice)):
        if row.key in places:
            raise key_taken(row, places[row.key])
        places[row.key] = row.where


Ints = NDArray[np.int64]

_HEAD = struct.Struct("<IQ")  # bytes of a record's JSON, and of the fields that it holds itself
_READ_BYTES = 1 << 18
_DECODED_ROWS = 64

_KIND_OF: dict[type[Reference], str] = {kind: name for name, kind in KINDS.items()}
_PARTS_OF: dict[type[Reference], Callable[[Reference], Iterable[Any]]] = {
    kind: attrgetter("num_bytes", *(part.name for part in dataclasses.fields(kind))) for kind in KINDS.values()
}  # num_bytes twice, so that there are always several


def encode_row(row: Row) -> bytes:
    """One record: lengths, JSON of texts and references, then the bytes of fields that are none."""
    texts: list[Any] = [0, row.key, row.where]
    own = []
    for name, data in row.fields:
        if isinstance(data, bytes):
            texts.append((name, len(data)))
            own.append(data)
        else:
            texts.append((name, _KIND_OF[type(data)], *_PARTS_OF[type(data)](data)))
    try:
        text = orjson.dumps(texts)
    except TypeError:  # the name of a file is no UTF-8
        _, key, where, *fields = texts
        text = orjson.dumps([1, key, _as_bytes(where), *([*map(_as_bytes, field)] for field in fields)])
    data = b"".join(own)
    return b"".join((_HEAD.pack(len(text), len(data)), text, data))


def _as_bytes(part: Any) -> Any:
    """Text with surrogates as one character a byte, which JSON can hold."""
    return part.encode("utf-8", "surrogatepass").decode("latin-1") if isinstance(part, str) else part


def _as_text(part: Any) -> Any:
    return part.encode("latin-1").decode("utf-8", "surrogatepass") if isinstance(part, str) else part


def decode_rows(data: bytes) -> Iterator[Row]:
    """The rows of so many whole records."""
    at = 0
    while at < len(data):
        text_bytes, own_bytes = _HEAD.unpack_from(data, at)
        at += _HEAD.size + text_bytes
        is_odd, key, where, *described = orjson.loads(data[at - text_bytes : at])
        if is_odd:
            where, described = _as_text(where), [[*map(_as_text, field)] for field in described]
        fields: list[tuple[str, FieldBytes]] = []
        end = at + own_bytes
        for name, kind, *parts in described:
            if parts:
                fields.append((name, KINDS[kind](*parts[1:])))
            else:
                fields.append((name, data[at : at + kind]))
                at += kind
        assert at == end
        yield Row(key, tuple(fields), where)


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedRows:
    """Some rows of a plan on disk, by their records' bytes: small enough to be sent to another process.

    Attributes:
        path: The plan's file.
        starts: Where each record begins.
        stops: Where it ends.
    """

    path: str
    starts: Ints
    stops: Ints

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.starts)

    def __iter__(self) -> Iterator[Row]:
        """The rows in their order. Those that stand one behind the other are read together."""
        if not len(self):
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for first, last in self._runs():
                yield from decode_rows(read_exactly(fd, int(self.starts[first]), int(self.stops[last])))
        finally:
            os.close(fd)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Numbers of the first and the last row of each piece that is read at once."""
        cuts = np.flatnonzero(self.starts[1:] != self.stops[:-1]).tolist()
        first = 0
        for last in [*cuts, len(self) - 1]:
            while first <= last:
                most = int(np.searchsorted(self.stops[first : last + 1], self.starts[first] + _READ_BYTES, "right"))
                stop = max(first, first + most - 1)
                yield first, stop
                first = stop + 1


def read_exactly(fd: int, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a file.

    Raises:
        OSError: It ends before.
    """
    parts = []
    while start < stop:
        part = os.pread(fd, stop - start, start)
        if not part:
            raise OSError(0, "the plan is cut short; something has changed it")
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class HeldRows:
    """Some rows by their records, which are made to rows a few at a time."""

    records: Sequence[bytes]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.records)

    def __iter__(self) -> Iterator[Row]:
        """The rows in their order."""
        for first in range(0, len(self.records), _DECODED_ROWS):
            yield from decode_rows(b"".join(self.records[first : first + _DECODED_ROWS]))


Rows = Sequence[Row] | RecordedRows | HeldRows
"""Rows with a length, to go through as often as one likes."""
