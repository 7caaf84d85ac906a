"""Cells of Parquet files, read where they are packed: each costs its page, and pages that were read last are held.

Where a page is of a kind that only pyarrow decodes, its row group is decoded from its start, and the one that was read
last stays open. Then rows in their order cost one pass over the file; in another order each may cost a row group.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections import OrderedDict
from typing import NamedTuple

from wdskit.packing.arrow_cells import START_BYTES, Cells, image_parts
from wdskit.packing.parquet_batches import READ_BYTES, Batches, open_parquet
from wdskit.packing.parquet_headers import DICTIONARY_PAGE, Chunk, Page, UnknownPages, find_chunk, list_pages
from wdskit.packing.parquet_pages import Values, are_known, read_dictionary, read_page
from wdskit.storage.identity import FileChanged, FileIdentity

_HELD_BYTES = 16 << 20  # of pages, besides the one that was read last
_GROUP_BYTES = 64 << 20  # a row group that is smaller is held whole, for rows in any order
_MOST_FILES = 1000  # whose row groups are known, of each some 200 bytes
_MOST_PAGES = 50_000  # whose place is known, of each some 400 bytes


class _OpenGroup:
    """A column of a row group, decoded from its start to where it was read last."""

    def __init__(self, path: str, identity: FileIdentity, group: int, column: str) -> None:
        self.name = path, identity, group, column
        self._file = open_parquet(path)
        self._about = self._file.metadata.row_group(group)
        self._begin()

    def _begin(self) -> None:
        path, _, group, column = self.name
        most = {"most_bytes": _GROUP_BYTES} if self._about.total_byte_size <= _GROUP_BYTES else {}
        self._batches = Batches(self._file, path).read(group, [column], most=self._about.num_rows, **most)
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


class Pages:
    """Pages of columns of Parquet files: where they stand, and the values of those that were read last.

    Args:
        most_bytes: Of values that are held.
    """

    def __init__(self, most_bytes: int = _HELD_BYTES) -> None:
        self._most_bytes = most_bytes
        self._chunks: dict[Column, list[Chunk | None]] = {}
        self._tables: dict[tuple[Column, int], _Table] = {}
        self._values: OrderedDict[tuple[Column, int, int], Values] = OrderedDict()
        self._num_pages = self._held_bytes = 0

    def read(self, column: Column, group: int, row: int) -> bytes:
        """The bytes of a cell, by its row in the group.

        Raises:
            UnknownPages: Its page cannot be read here.
            OSError: The file cannot be read.
            ValueError: There are none.
        """
        data, span = self.find(column, group, row)
        if span is None:
            raise ValueError(f"row {row} of row group {group} has no bytes")
        return data[span[0] : span[1]]

    def find(self, column: Column, group: int, row: int) -> tuple[bytes, tuple[int, int] | None]:
        """Some bytes, and where in them the cell begins and ends; None where it is null.

        Raises:
            UnknownPages: Its page cannot be read here.
            OSError: The file cannot be read.
        """
        chunk = self._chunk(column, group)
        if row >= chunk.num_rows:
            return b"", None
        table = self._tables.get((column, group))
        number = -1 if table is None else bisect.bisect_right(table.firsts, row) - 1
        values = self._values.get((column, group, number))
        if table is not None and values is not None and number >= 0:
            self._values.move_to_end((column, group, number))
            return values.data, values.spans[row - table.firsts[number]]
        try:
            with column.identity.opened(column.path) as fd:
                table = self._table(fd, column, group, chunk)
                number = bisect.bisect_right(table.firsts, row) - 1
                values = self._page(fd, column, group, chunk, table, number)
        except UnknownPages:
            self._chunks[column][group] = None  # not tried again
            raise
        return values.data, values.spans[row - table.firsts[number]]

    def are_known(self, column: Column, group: int) -> bool:
        """Whether the cells of a row group can be read here, unless they are damaged.

        Raises:
            OSError: The file cannot be read.
        """
        try:
            with column.identity.opened(column.path) as fd:
                self._table(fd, column, group, self._chunk(column, group))
        except UnknownPages:
            return False
        return True

    def _chunk(self, column: Column, group: int) -> Chunk:
        if column not in self._chunks:
            if len(self._chunks) >= _MOST_FILES:
                self._chunks.clear()
            self._chunks[column] = _find_chunks(column)
        chunks = self._chunks[column]
        chunk = chunks[group] if group < len(chunks) else None
        if chunk is None:
            raise UnknownPages
        return chunk

    def _table(self, fd: int, column: Column, group: int, chunk: Chunk) -> _Table:
        table = self._tables.get((column, group))
        if table is None:
            pages = list_pages(fd, chunk)
            if not are_known(chunk, pages):
                raise UnknownPages
            dictionary = pages.pop(0) if pages and pages[0].kind == DICTIONARY_PAGE else None
            firsts = [*itertools.accumulate((page.num_values for page in pages[:-1]), initial=0)]
            if self._num_pages > _MOST_PAGES:
                self._tables.clear()
                self._num_pages = 0
            self._num_pages += len(pages)
            table = self._tables[column, group] = _Table(dictionary, pages, firsts)
        return table

    def _page(self, fd: int, column: Column, group: int, chunk: Chunk, table: _Table, number: int) -> Values:
        """The values of a page; of the dictionary where the number is -1."""
        name = column, group, number
        values = self._values.get(name)
        if values is not None:
            self._values.move_to_end(name)
            return values
        page, dictionary = table.dictionary if number == -1 else table.pages[number], None
        assert page is not None
        if number >= 0 and page.has_indices and table.dictionary is not None:
            dictionary = self._page(fd, column, group, chunk, table, -1)
        while self._values and self._held_bytes + page.num_bytes > self._most_bytes:  # before there are more
            self._held_bytes -= self._values.popitem(last=False)[1].held_bytes
        values = read_dictionary(fd, chunk, page) if number == -1 else read_page(fd, chunk, page, dictionary)
        self._values[name] = values
        self._held_bytes += values.held_bytes
        return values


class PageCells:
    """The cells of a row group, from row `first` on: as `arrow_cells.Cells`."""

    def __init__(self, pages: Pages, column: Column, group: int, first: int) -> None:
        self._pages = pages
        self._column = column
        self._group = group
        self._first = first

    def size(self, number: int) -> int | None:
        """Bytes of a cell, None where it is null."""
        span = self._find(number)[1]
        return None if span is None else span[1] - span[0]

    def start(self, number: int) -> bytes:
        """The first bytes of a cell that is not null."""
        data, span = self._find(number)
        assert span is not None
        return data[span[0] : min(span[1], span[0] + START_BYTES)]

    def _find(self, number: int) -> tuple[bytes, tuple[int, int] | None]:
        return self._pages.find(self._column, self._group, self._first + number)


class Column(NamedTuple):
    """A column of a file. What is held of it is not taken for that of another file at its path."""

    path: str
    identity: FileIdentity
    name: str


class _Table(NamedTuple):
    """The pages of a chunk, and the number of the first row of each."""

    dictionary: Page | None
    pages: list[Page]
    firsts: list[int]


def _find_chunks(column: Column) -> list[Chunk | None]:
    """The chunk of each row group; None where its pages cannot be read here."""
    import pyarrow.parquet as pq

    with (
        column.identity.opened(column.path) as fd,
        open(fd, "rb", closefd=False) as opened,
        pq.ParquetFile(opened, pre_buffer=False, buffer_size=READ_BYTES) as file,
    ):
        names = {column.name, f"{column.name}.bytes"}
        numbers = [number for number in range(len(file.schema)) if file.schema.column(number).path in names]
        if len(numbers) != 1:
            return []
        chunks: list[Chunk | None] = []
        for group in range(file.num_row_groups):
            try:
                chunks.append(find_chunk(file, group, numbers[0]))
            except UnknownPages:
                chunks.append(None)
    return chunks


_lock = threading.Lock()
_pages = Pages()
ahead: dict[tuple[str, FileIdentity, int, int, str], bytes] = {}
"""Cells that were read before they are asked for, by the arguments of `read_cell`; each is given once."""
_last: list[_OpenGroup] = []


def read_cell(path: str, identity: FileIdentity, group: int, row: int, column: str) -> bytes:
    """The bytes of one cell.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not the file that it was, or is damaged.
    """
    with _lock:
        try:
            identity.check(path)
            data = _read_cell(path, identity, group, row, column)
            identity.check(path)  # pyarrow opens it by its path
        except FileChanged:
            close_all()
            raise
    return data


def _read_cell(path: str, identity: FileIdentity, group: int, row: int, column: str) -> bytes:
    data = ahead.pop((path, identity, group, row, column), None)
    if data is not None:
        return data
    with contextlib.suppress(UnknownPages):
        return _pages.read(Column(path, identity, column), group, row)
    if not _last or _last[0].name != (path, identity, group, column):
        close_all()
        _last.append(_OpenGroup(path, identity, group, column))
    return _last[0].read(row)


def close_all() -> None:
    """Close the row group that is open."""
    while _last:
        _last.pop().close()
