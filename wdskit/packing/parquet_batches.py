"""Batches of a row group of a Parquet file, each in little memory, however large the group is.

A column of bytes or text is read as it is written, a value a row, or through a dictionary: then a page that says in a
few bytes that a million rows hold the same megabyte has it once, but all values of a group are held to its end, twice.
So that is done only where the column's pages say that a batch may be so large.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from wdskit.errors import PackError
from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.packing.parquet_headers import DELTA_BYTE_ARRAY, DICTIONARY_PAGE, UnknownPages, find_chunk, list_pages
from wdskit.packing.parquet_pages import read_dictionary

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

READ_BYTES = 1 << 20
_BATCH_ROWS = 1024
_BATCH_BYTES = 16 << 20
_MOST_BATCH_BYTES = 64 << 20  # where only the number of rows keeps it small


def open_parquet(path: str) -> pq.ParquetFile:
    """A Parquet file, whose columns of bytes and text would be read through dictionaries."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
        texts = [file.schema.column(number).path for number in _texts_of(file)]
        return pq.ParquetFile(
            path, pre_buffer=False, buffer_size=READ_BYTES, metadata=file.metadata, read_dictionary=texts
        )


def _texts_of(file: pq.ParquetFile) -> list[int]:
    """The columns of bytes and text, by their numbers."""
    columns = [file.schema.column(number) for number in range(len(file.schema))]
    return [
        number
        for number, column in enumerate(columns)
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL"
    ]


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


class Batches:
    """Row groups of a Parquet file, some rows at a time.

    Args:
        file: As `open_parquet` gives it.
        path: Of the file.
    """

    def __init__(self, file: pq.ParquetFile, path: str) -> None:
        self._file = file
        self._path = path
        with self._open([]) as plain:
            self._has_views = any("_view" in str(field.type) for field in plain.schema_arrow)

    def _open(self, texts: list[int]) -> pq.ParquetFile:
        """The file; these columns are read through a dictionary."""
        import pyarrow.parquet as pq

        names = [self._file.schema.column(number).path for number in texts]
        how = {"pre_buffer": False, "buffer_size": READ_BYTES, "metadata": self._file.metadata}
        return pq.ParquetFile(self._path, read_dictionary=names, **how)

    def read(
        self,
        group: int,
        columns: Sequence[str] | None = None,
        *,
        most: int = _BATCH_ROWS,
        most_bytes: int = _BATCH_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a row group.

        Args:
            group: Its number.
            columns: Some columns; None for all.
            most: Most rows at a time.
            most_bytes: Most bytes at a time, as far as they are known.

        Raises:
            OSError, pyarrow.ArrowException: The file cannot be read.
        """
        if columns is not None and not columns:
            yield from _rows_of_nothing(self._file.metadata.row_group(group).num_rows, most)
            return
        num_rows, texts = self._plan(group, columns, most, most_bytes)
        with self._open(texts) as opened:
            how = {"row_groups": [group], "columns": columns, "use_threads": False}
            yield from opened.iter_batches(num_rows, **how)

    def _plan(self, group: int, columns: Sequence[str] | None, most: int, most_bytes: int) -> tuple[int, list[int]]:
        """How many rows to decode at a time, and the columns to read through a dictionary: those whose values a batch
        may repeat to more than it should have, and those of which that cannot be told.
        """
        about = self._file.metadata.row_group(group)
        bytes_a_row = max(1, about.total_byte_size // max(1, about.num_rows))
        num_rows = max(1, min(most, most_bytes // bytes_a_row))
        texts = [number for number in _texts_of(self._file) if columns is None or self._is_in(number, columns)]
        if self._has_views:  # plain, they have other buffers than those that `Cells` knows
            return num_rows, texts
        found = []
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for number in texts:
                try:
                    longest, by_dictionary = _longest(self._file, fd, group, number, num_rows)
                except UnknownPages:
                    found.append(number)
                    continue
                if longest * num_rows > _BATCH_BYTES and by_dictionary:
                    found.append(number)
                elif longest * num_rows > _MOST_BATCH_BYTES:
                    num_rows = max(1, _MOST_BATCH_BYTES // longest)
        finally:
            os.close(fd)
        return num_rows, found

    def _is_in(self, number: int, columns: Sequence[str]) -> bool:
        path: str = self._file.schema.column(number).path
        return any(path == column or path.startswith(f"{column}.") for column in columns)


def _longest(file: pq.ParquetFile, fd: int, group: int, column: int, num_rows: int) -> tuple[int, bool]:
    """How long values may be that several rows share, and whether pyarrow can read them through a dictionary."""
    chunk = find_chunk(file, group, column)
    pages = list_pages(fd, chunk)
    dictionary = pages.pop(0) if pages and pages[0].kind == DICTIONARY_PAGE else None
    if any(page.encoding == DELTA_BYTE_ARRAY for page in pages):  # values share what they begin with
        return max(page.num_bytes for page in (*pages, *([dictionary] if dictionary else []))), False
    if not all(page.is_plain or (page.has_indices and dictionary) for page in pages):
        raise UnknownPages
    if dictionary is None:
        return 0, True
    if num_rows * dictionary.num_bytes <= _BATCH_BYTES:
        return dictionary.num_bytes, True
    spans = read_dictionary(fd, chunk, dictionary).spans
    return max((span[1] - span[0] for span in spans if span), default=0), True


def _rows_of_nothing(num_rows: int, most: int) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for first in range(0, num_rows, most):
        yield pa.RecordBatch.from_arrays([pa.nulls(min(most, num_rows - first))], [""])
