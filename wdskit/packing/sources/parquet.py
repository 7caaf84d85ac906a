"""Read Parquet files: rows in small batches, even of large row groups, and single cells."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from wdskit.storage.file_identity import FileChanged, FileIdentity

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_READ_BYTES = 1 << 20
_MAX_ROWS = 1024
_FEW_ROWS = 8
"""Rows of a batch if a dictionary may repeat a value of megabytes in each row."""
_BATCH_BYTES = 4 << 20  # also the most memory of freed batches that pyarrow's pool keeps
_HELD_BYTES = 64 << 20  # most bytes of skipped cells in memory


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a Parquet file to read it in small pieces. The caller closes the result.
    OSError, pyarrow.ArrowException: The file cannot be read.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)


def read_group(file: pq.ParquetFile, group: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the row group with the number `group`, in batches of at most 1,024 rows and about 4 MB.

    `columns` are the columns to read; None reads all columns.

    Raises:
        OSError, pyarrow.ArrowException: The file cannot be read.
    """
    import pyarrow as pa

    about = file.metadata.row_group(group)
    parts = [about.column(number) for number in range(about.num_columns)]
    if columns is not None:
        paths = tuple(f"{name}." for name in columns)  # also of members; the name of a column may have a dot
        parts = [part for part in parts if f"{part.path_in_schema}.".startswith(paths)]
    bytes_per_row = sum(part.total_uncompressed_size for part in parts) // max(1, about.num_rows)
    # A value is at most as long as its column, and a dictionary can repeat the value in each row.
    longest = max((part.total_uncompressed_size for part in parts if part.physical_type == "BYTE_ARRAY"), default=0)
    num_rows = min(_MAX_ROWS, max(_FEW_ROWS, _BATCH_BYTES // max(1, longest)), _BATCH_BYTES // max(1, bytes_per_row))
    num_bytes = 0
    for batch in file.iter_batches(max(1, num_rows), row_groups=[group], columns=columns, use_threads=False):
        num_bytes += batch.nbytes
        yield batch
        if num_bytes >= _BATCH_BYTES:  # otherwise the pool keeps the memory of freed pages
            pa.default_memory_pool().release_unused()
            num_bytes = 0


def bytes_of(cell: Any) -> bytes | None:
    """Return the bytes of an image: the cell, or the member `bytes` of a struct; None for an image without bytes."""
    data: bytes | None = cell.get("bytes") if isinstance(cell, dict) else cell
    return data


class _Column:
    """The cells of a column in one row group. Rows are best read in order: a read of an earlier row may decode the
    column again from its start. Not thread-safe.
    """

    def __init__(self, path: str, group: int, name: str) -> None:
        self._place = path, group, name
        self._begin()

    def _begin(self) -> None:
        self._num_rows = self._next = 0
        self._cells = self._decode(*self._place)
        self._held: dict[int, bytes] = {}  # skipped cells that were not read yet, by row
        self._held_bytes = 0

    def _decode(self, path: str, group: int, name: str) -> Generator[bytes | None, None, None]:
        with open_parquet(path) as file:
            self._num_rows = file.metadata.row_group(group).num_rows
            for batch in read_group(file, group, [name]):
                yield from map(bytes_of, batch.column(0).to_pylist())

    def read(self, row: int) -> bytes:
        """Return the bytes of a cell. `row` is the number of its row in the row group, from 0.

        Raises:
            ValueError: The row does not exist, or its cell has no bytes.
            OSError, pyarrow.ArrowException: The file cannot be read.
        """
        if row < self._next and row not in self._held:
            self._begin()
        for data in self._cells if row >= self._next else ():
            if data is not None:
                self._held[self._next] = data
                self._held_bytes += len(data)
            self._next += 1
            while self._held_bytes > _HELD_BYTES and (oldest := next(iter(self._held))) < row:
                self._held_bytes -= len(self._held.pop(oldest))
            if row < self._next:
                break
        if self._next == self._num_rows:
            self._cells.close()  # frees the last page
        if row >= self._next:
            raise ValueError(f"it has no row {row} in row group {self._place[1]}")
        if row not in self._held:
            raise ValueError(f"row {row} of row group {self._place[1]} has no bytes")
        data = self._held.pop(row)
        self._held_bytes -= len(data)
        return data


_lock = threading.Lock()


@functools.lru_cache(maxsize=4)  # row groups: one thread may read the end of a group while another reads the next group
def _open_column(path: str, _: FileIdentity, group: int, name: str) -> _Column:
    """Return the cached column `name` of a row group. A file with a new identity is opened again."""
    return _Column(path, group, name)


def read_cell(path: str, identity: FileIdentity, group: int, row: int, column: str) -> bytes:
    """Return the bytes of one cell. `row` counts from 0 in the row group `group`. Several threads may call this.

    Reads in the order of rows are fast; another order may decode the row group again for each read. `identity` is the
    identity that the file must have.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file was changed or is damaged, the row does not exist, or the cell has no bytes.
    """
    import pyarrow as pa

    with _lock:
        try:
            identity.check(path)
            data = _open_column(path, identity, group, column).read(row)
            identity.check(path)  # again, because pyarrow opens the file by its path
        except FileChanged:
            close_all()
            raise
        except pa.ArrowException as err:
            raise ValueError(f"it cannot be read as Parquet: {str(err).splitlines()[0]}") from err
    return data


def close_all() -> None:
    """Empty the cache of `read_cell`."""
    _open_column.cache_clear()
