"""Cells of Parquet files, read where they are packed: the row group that was read last stays open in each process.

A row group is decoded from its start, so rows in their order cost one pass over the file. In another order, as after a
shuffle, each row may cost a row group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from wdskit.errors import PackError
from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.packing.arrow_cells import Cells, image_parts

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BATCH_BYTES = 16 << 20  # of a larger row group so much is decoded at a time
_HELD_BYTES = 64 << 20  # a smaller one is held whole, for rows in any order
_READ_BYTES = 1 << 20


def open_parquet(path: str) -> pq.ParquetFile:
    """A Parquet file, whose columns of bytes and text are read through dictionaries.

    A page can say in a few bytes that a million rows hold the same megabyte, and then it is there once.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
        columns = [file.schema.column(number) for number in range(len(file.schema))]
    texts = [
        column.path
        for column in columns
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"
    ]
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES, read_dictionary=texts)


def check_group(file: pq.ParquetFile, group: int, path: str) -> None:
    """Refuse a row group that unpacks as only bombs do.

    Raises:
        PackError: It is one.
    """
    about = file.metadata.row_group(group)
    columns = [about.column(number) for number in range(about.num_columns)]
    for column in columns:
        packed_bytes, num_bytes = column.total_compressed_size, column.total_uncompressed_size
        if num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * packed_bytes):
            msg = f"{path}: row group {group}, column {column.path_in_schema!r} claims to unpack {packed_bytes} bytes"
            raise PackError(f"{msg} to {num_bytes}, as bombs do.\n  Write it again, if it is right.")


def batch_rows(file: pq.ParquetFile, group: int, *, most: int) -> int:
    """How many rows of a row group to decode at a time."""
    about = file.metadata.row_group(group)
    bytes_a_row: int = max(1, about.total_byte_size // max(1, about.num_rows))
    return max(1, min(most, _BATCH_BYTES // bytes_a_row))


class _OpenGroup:
    """A column of a row group, decoded from its start to where it was read last."""

    def __init__(self, path: str, file_bytes: int, group: int, column: str) -> None:
        self.name = path, file_bytes, group, column
        self._file = open_parquet(path)
        about = self._file.metadata.row_group(group)
        held = about.num_rows if about.total_byte_size <= _HELD_BYTES else 1
        self._batch_rows = max(1, held, batch_rows(self._file, group, most=about.num_rows))
        self._begin()

    def _begin(self) -> None:
        _, _, group, column = self.name
        self._batches: Iterator[pa.RecordBatch] = self._file.iter_batches(
            self._batch_rows, row_groups=[group], columns=[column], use_threads=False
        )
        self._first = self._stop = 0

    def read(self, row: int) -> bytes:
        """The bytes of a cell, by its row in the group.

        Raises:
            ValueError: There are none.
        """
        if row < self._first:
            self._begin()
        while row >= self._stop:
            self._cells: Cells | None = None  # make room
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError(f"it has no row {row} in row group {self.name[2]}")
            self._first, self._stop = self._stop, self._stop + batch.num_rows
            self._cells = image_parts(batch.column(0))[1]
        if self._cells is None or self._cells.size(row - self._first) is None:
            raise ValueError(f"row {row} of row group {self.name[2]} has no bytes")
        return self._cells.read(row - self._first)

    def close(self) -> None:
        """Close the file."""
        self._cells = None
        self._file.close()


_lock = threading.Lock()
_last: list[_OpenGroup] = []


def read_cell(path: str, file_bytes: int, group: int, row: int, column: str) -> bytes:
    """The bytes of one cell.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not the file that it was, or is damaged.
    """
    now = os.stat(path).st_size
    if now != file_bytes:
        raise ValueError(f"the file has {now} bytes now and had {file_bytes} when packing began")
    with _lock:
        if not _last or _last[0].name != (path, file_bytes, group, column):
            while _last:
                _last.pop().close()
            _last.append(_OpenGroup(path, file_bytes, group, column))
        return _last[0].read(row)
