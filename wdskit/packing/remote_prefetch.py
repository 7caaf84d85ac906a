"""Download fields of remote objects ahead, while the rows before them are packed."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby

from wdskit.packing.references import ObjectBytes
from wdskit.packing.row import Row, size_of
from wdskit.storage.urls import RangeFile

BATCH_BYTES = 8 << 20
BATCH_ROWS = 512


def read_ahead(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield `rows` in their order, with the bytes of remote objects in place of the references to them.

    The next remote rows are downloaded ahead. At most two batches of them are in memory.

    Raises:
        StorageError: An object cannot be read, or was replaced.
    """
    for is_remote, group in groupby(rows, _is_remote):
        if not is_remote:
            yield from group
            continue
        ready: Iterable[Row] = ()
        for batch in _batches(group):
            following = _with_bytes(batch, _start_reading(batch))
            yield from ready
            ready = following
        yield from ready


def _is_remote(row: Row) -> bool:
    return ObjectBytes in [type(data) for _, data in row.fields]


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Divide rows into lists, in order. A list ends when its fields have at least `BATCH_BYTES` bytes, when it has
    `BATCH_ROWS` rows, or at the last row.
    """
    batch, num_bytes = [], 0
    for row in rows:
        batch.append(row)
        num_bytes += sum([size_of(data) for _, data in row.fields])
        if num_bytes >= BATCH_BYTES or len(batch) == BATCH_ROWS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _start_reading(rows: Iterable[Row]) -> dict[ObjectBytes, RangeFile]:
    """Start to download the remote fields of `rows`. Return, for each reference to such a field, the file that has its
    bytes.

    StorageError: A download cannot start.
    """
    by_object: dict[tuple[str, int, str, str], list[ObjectBytes]] = defaultdict(list)
    for row in rows:
        for _, data in row.fields:
            if isinstance(data, ObjectBytes):
                by_object[data.path, data.object_bytes, data.etag, data.modified].append(data)
    files: dict[ObjectBytes, RangeFile] = {}
    for references in by_object.values():
        ranges = sorted((each.offset, each.offset + each.num_bytes) for each in references)
        files |= dict.fromkeys(references, references[0].open().ahead(ranges))
    return files


def _with_bytes(rows: Iterable[Row], files: dict[ObjectBytes, RangeFile]) -> Iterator[Row]:
    for row in rows:
        fields = tuple(
            (name, files[data].read_at(data.offset, data.num_bytes) if isinstance(data, ObjectBytes) else data)
            for name, data in row.fields
        )
        yield dataclasses.replace(row, fields=fields)
