"""Cells of Parquet files that are packed in another order than theirs: some thousand rows ahead each page is read once.

A cell costs its page, of some megabytes. After a shuffle the next row is in another page, and by the time one comes
again that is long forgotten.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from wdskit.packing.parquet_cells import ahead
from wdskit.packing.recorded import RecordedRows, Rows
from wdskit.packing.references import CellBytes
from wdskit.packing.rows import Row

_AHEAD_BYTES = 128 << 20
_ROW_BYTES = 2000  # that a row takes itself
_LOOKED_AT = 100  # rows; the first ones may have no image


def read_ahead(rows: Rows | Iterable[Row]) -> Iterable[Row]:
    """The rows of a shard. Where they hold cells in another order than that of their files, those to come next are read
    before they are asked for, in the order of the files.
    """
    if not isinstance(rows, (RecordedRows, tuple)):  # they come once, in their order
        return rows
    if not any(_cells(row) for row in itertools.islice(rows, _LOOKED_AT)):
        return rows
    if isinstance(rows, RecordedRows):
        is_sorted = bool((np.diff(rows.starts) > 0).all())
    else:
        cells = [_place(cell) for row in rows for cell in _cells(row)]
        is_sorted = cells == sorted(cells)
    return rows if is_sorted else _ahead(rows)


def _cells(row: Row) -> list[CellBytes]:
    return [data for _, data in row.fields if isinstance(data, CellBytes)]


def _place(cell: CellBytes) -> tuple[str, int, int]:
    return cell.path, cell.group, cell.row


def _ahead(rows: Iterable[Row]) -> Iterator[Row]:
    window: list[Row] = []
    num_bytes = 0
    try:
        for row in rows:
            window.append(row)
            num_bytes += _ROW_BYTES + sum(cell.num_bytes for cell in _cells(row))
            if num_bytes >= _AHEAD_BYTES:
                yield from _read(window)
                window, num_bytes = [], 0
        yield from _read(window)
    finally:
        ahead.clear()


def _read(window: list[Row]) -> list[Row]:
    """The same rows, their cells read."""
    for cell in sorted((cell for row in window for cell in _cells(row)), key=_place):
        with contextlib.suppress(OSError, ValueError):  # it is told when its row comes
            ahead[cell.path, cell.identity, cell.group, cell.row, cell.column] = cell.read()
    return window
