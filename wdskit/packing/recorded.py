"""Rows as they stand in a plan on disk."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from wdskit.packing.references import KINDS, FieldBytes, Reference
from wdskit.packing.row import Row

Ints = NDArray[np.int64]

_HEAD = struct.Struct("<IQ")  # bytes of a record's JSON, and of the fields that it holds itself
_READ_BYTES = 1 << 18

_KIND_OF: dict[type[Reference], str] = {kind: name for name, kind in KINDS.items()}
_PARTS_OF: dict[type[Reference], Callable[[Reference], Iterable[Any]]] = {
    kind: attrgetter("num_bytes", *(part.name for part in dataclasses.fields(kind))) for kind in KINDS.values()
}  # num_bytes twice, so that there are always several


def encode_row(row: Row) -> bytes:
    """One record: lengths, JSON of texts and references, then the bytes of fields that are none."""
    told: list[Any] = [0, row.key, row.where]
    own = []
    for name, data in row.fields:
        if isinstance(data, bytes):
            told.append((name, len(data)))
            own.append(data)
        else:
            told.append((name, _KIND_OF[type(data)], *_PARTS_OF[type(data)](data)))
    try:
        text = orjson.dumps(told)
    except TypeError:  # the name of a file is no UTF-8
        _, key, where, *fields = told
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
        is_odd, key, where, *told = orjson.loads(data[at - text_bytes : at])
        if is_odd:
            where, told = _as_text(where), [[*map(_as_text, field)] for field in told]
        fields: list[tuple[str, FieldBytes]] = []
        end = at + own_bytes
        for name, kind, *parts in told:
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


Rows = Sequence[Row] | RecordedRows
"""Rows with a length, to go through as often as one likes."""
