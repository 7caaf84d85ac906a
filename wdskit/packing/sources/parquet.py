"""Parquet files: their rows, some at a time however large a row group is, and cells of them in the order of rows."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from wdskit.errors import PackError
from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.packing.references import CellBytes
from wdskit.packing.sources.arrow_columns import START_BYTES, Image, features_of, parse_json
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


class ParquetFile:
    """A Parquet file, read in small pieces.

    Args:
        path: The file.
        in_order: The rows are packed as they come. Else the bytes of their images are read with them, once: each would
            cost a row group later.

    Attributes:
        identity: The file's when it was opened.
        schema: Of its table.
        features: What `datasets` says of its columns; empty where it says nothing.
    """

    def __init__(self, path: str, *, in_order: bool) -> None:
        self._path = path
        self._in_order = in_order
        self.identity = FileIdentity.of(path)
        self._file = open_parquet(path)
        self.schema: pa.Schema = self._file.schema_arrow
        self.features = features_of(parse_json((self.schema.metadata or {}).get(b"huggingface", b"{}"), path))

    def batches(self, column: str | None, image: str | None) -> Iterator[tuple[pa.RecordBatch, Iterator[Image] | None]]:
        """One column at least, or all, some rows at a time, with the images of the column `image`.

        Raises:
            PackError: A row group unpacks as only decompression bombs do.
        """
        for group in range(self._file.num_row_groups):
            about = self._file.metadata.row_group(group)
            for part in (about.column(number) for number in range(about.num_columns)):
                packed_bytes, num_bytes = part.total_compressed_size, part.total_uncompressed_size
                if num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * packed_bytes):
                    msg = f"{self._path}: row group {group}, column {part.path_in_schema!r} claims to unpack"
                    msg = f"{msg} {packed_bytes} bytes to {num_bytes}, like a decompression bomb."
                    raise PackError(f"{msg}\n  If it is right, write the file again.")
            first = 0
            for batch in read_group(self._file, group, None if column is None else [column]):
                yield batch, None if image is None else self._images(batch.column(image), image, group, first)
                first += batch.num_rows

    def _images(self, cells: pa.Array, column: str, group: int, first: int) -> Iterator[Image]:
        for row, cell in enumerate(cells.to_pylist(), start=first):
            path = cell.get("path") if isinstance(cell, dict) else None
            data = _bytes_of(cell)
            if data is None:
                yield Image(path)
            elif self._in_order:
                place = CellBytes(self._path, len(data), group, row, column, *self.identity)
                yield Image(path, data[:START_BYTES], place)
            else:
                yield Image(path, data[:START_BYTES], data)


def open_parquet(path: str) -> pq.ParquetFile:
    """A Parquet file that is read in small pieces."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)


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


def _bytes_of(cell: Any) -> bytes | None:
    """The bytes of an image: the cell, or those of a struct."""
    data: bytes | None = cell.get("bytes") if isinstance(cell, dict) else cell
    return data


class _Column:
    """The cells of a column of a row group, decoded from its start on. Each is given once: then it is read again."""

    def __init__(self, path: str, group: int, name: str) -> None:
        self._place = path, group, name
        self._begin()

    def _begin(self) -> None:
        self._num_rows = self._next = 0
        self._cells = self._decode(*self._place)
        self._held: dict[int, bytes] = {}  # passed over, and not given yet
        self._held_bytes = 0

    def _decode(self, path: str, group: int, name: str) -> Generator[bytes | None, None, None]:
        with open_parquet(path) as file:
            self._num_rows = file.metadata.row_group(group).num_rows
            for batch in read_group(file, group, [name]):
                yield from map(_bytes_of, batch.column(0).to_pylist())

    def read(self, row: int) -> bytes:
        """The bytes of a cell, by its row in the group.

        Raises:
            ValueError: There are none.
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
            self._cells.close()  # with its page
        if row >= self._next:
            raise ValueError(f"it has no row {row} in row group {self._place[1]}")
        if row not in self._held:
            raise ValueError(f"row {row} of row group {self._place[1]} has no bytes")
        data = self._held.pop(row)
        self._held_bytes -= len(data)
        return data


_lock = threading.Lock()


@functools.lru_cache(maxsize=4)  # row groups: threads may ask for the last rows of one behind the first of the next
def _open_column(path: str, _: FileIdentity, group: int, name: str) -> _Column:
    """The column. By its file's identity, what is held of it is not taken for that of another file at its path."""
    return _Column(path, group, name)


def read_cell(path: str, identity: FileIdentity, group: int, row: int, column: str) -> bytes:
    """The bytes of one cell. Rows in their order cost one pass over the row group, any other order one a row.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not the file that it was, or is damaged.
    """
    import pyarrow as pa

    with _lock:
        try:
            identity.check(path)
            data = _open_column(path, identity, group, column).read(row)
            identity.check(path)  # pyarrow opens it by its path
        except FileChanged:
            close_all()
            raise
        except pa.ArrowException as err:
            raise ValueError(f"it cannot be read as Parquet: {str(err).splitlines()[0]}") from err
    return data


def close_all() -> None:
    """Close the row groups that are open."""
    _open_column.cache_clear()
