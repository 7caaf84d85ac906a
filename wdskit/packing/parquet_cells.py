"""Row groups of Parquet files, some rows at a time however large a group is, and cells of them in the order of rows."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wdskit.errors import PackError
from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.storage.identity import FileChanged, FileIdentity

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_READ_BYTES = 1 << 20
_MOST_ROWS = 1024
_FEW_ROWS = 8
"""Rows at a time where a page may say in a few bytes that all of them hold the same megabytes."""
_BATCH_BYTES = 4 << 20  # also what the pool may keep of batches that are gone
_HELD_BYTES = 64 << 20  # of cells that were passed over
_MOST_OPEN = 4  # row groups: threads may ask for the last rows of one behind the first of the next


def open_parquet(path: str) -> pq.ParquetFile:
    """A Parquet file that is read in small pieces."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)


def check_group(file: pq.ParquetFile, group: int, path: str) -> None:
    """Refuse a row group that unpacks as only bombs do.

    Raises:
        PackError: It is one.
    """
    about = file.metadata.row_group(group)
    for column in (about.column(number) for number in range(about.num_columns)):
        packed_bytes, num_bytes = column.total_compressed_size, column.total_uncompressed_size
        if num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * packed_bytes):
            msg = f"{path}: row group {group}, column {column.path_in_schema!r} claims to unpack {packed_bytes} bytes"
            raise PackError(f"{msg} to {num_bytes}, as bombs do.\n  Write it again, if it is right.")


def read_group(file: pq.ParquetFile, group: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a row group in batches of some 4 MB. Besides, memory holds a page of each column, which is 1 MB or
    1,024 values where pyarrow has written it.

    Raises:
        OSError, pyarrow.ArrowException: The file cannot be read.
    """
    import pyarrow as pa

    about = file.metadata.row_group(group)
    parts = [about.column(number) for number in range(about.num_columns)]
    if columns is not None:
        parts = [part for part in parts if part.path_in_schema.split(".")[0] in columns]
    bytes_a_row = sum(part.total_uncompressed_size for part in parts) // max(1, about.num_rows)
    # No value is longer than all of its column, and a dictionary gives it to each row.
    longest = max((part.total_uncompressed_size for part in parts if part.physical_type == "BYTE_ARRAY"), default=0)
    num_rows = min(_MOST_ROWS, max(_FEW_ROWS, _BATCH_BYTES // max(1, longest)), _BATCH_BYTES // max(1, bytes_a_row))
    num_bytes = 0
    for batch in file.iter_batches(max(1, num_rows), row_groups=[group], columns=columns, use_threads=False):
        num_bytes += batch.nbytes
        yield batch
        if num_bytes >= _BATCH_BYTES:  # what pages took is else kept for others of their size
            pa.default_memory_pool().release_unused()
            num_bytes = 0


def bytes_of(cell: Any) -> bytes | None:
    """The bytes in a cell of images: itself, or those of a struct; None where there are none."""
    data: bytes | None = cell.get("bytes") if isinstance(cell, dict) else cell
    return data


class _Column(NamedTuple):
    """A column of a row group. What is held of it is not taken for that of another file at its path."""

    path: str
    identity: FileIdentity
    group: int
    name: str


class _ForwardReader:
    """The cells of a column, decoded from the row group's start on. Each is given once: then it is read again."""

    def __init__(self, column: _Column) -> None:
        self._column = column
        self._begin()

    def _begin(self) -> None:
        self._batches = self._read_batches()
        self._held: dict[int, bytes | None] = {}
        self._held_bytes = self._stop = 0
        self._num_rows = -1

    @property
    def is_done(self) -> bool:
        """Whether all cells were given."""
        return self._stop == self._num_rows and not self._held_bytes

    def _read_batches(self) -> Generator[pa.RecordBatch, None, None]:
        with open_parquet(self._column.path) as file:
            self._num_rows = file.metadata.row_group(self._column.group).num_rows
            yield from read_group(file, self._column.group, [self._column.name])

    def read(self, row: int) -> bytes:
        """The bytes of a cell, by its row in the group.

        Raises:
            ValueError: There are none.
        """
        if row < self._stop and row not in self._held:
            self._begin()
        while row >= self._stop:
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError(f"it has no row {row} in row group {self._column.group}")
            for cell in batch.column(0).to_pylist():
                self._held[self._stop] = data = bytes_of(cell)
                self._held_bytes += len(data or b"")
                self._stop += 1
            if self._stop == self._num_rows:
                self._batches.close()  # with its page
            while self._held_bytes > _HELD_BYTES and (oldest := next(iter(self._held))) < row:
                self._take(oldest)
        data = self._take(row)
        if data is None:
            raise ValueError(f"row {row} of row group {self._column.group} has no bytes")
        return data

    def _take(self, row: int) -> bytes | None:
        data = self._held.pop(row)
        self._held_bytes -= len(data or b"")
        return data


_lock = threading.Lock()
_open: dict[_Column, _ForwardReader] = {}


def read_cell(path: str, identity: FileIdentity, group: int, row: int, column: str) -> bytes:
    """The bytes of one cell. Rows in their order cost one pass over the row group, any other order one a row.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not the file that it was, or is damaged.
    """
    import pyarrow as pa

    name = _Column(path, identity, group, column)
    with _lock:
        try:
            identity.check(path)
            reader = _open.pop(name, None) or _ForwardReader(name)
            data = reader.read(row)
            identity.check(path)  # pyarrow opens it by its path
        except FileChanged:
            close_all()
            raise
        except pa.ArrowException as err:
            raise ValueError(f"it cannot be read as Parquet: {str(err).splitlines()[0]}") from err
        if not reader.is_done:
            _open[name] = reader
        if len(_open) > _MOST_OPEN:
            del _open[next(iter(_open))]
    return data


def close_all() -> None:
    """Close the row groups that are open."""
    _open.clear()
