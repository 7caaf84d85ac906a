"""Where the pages of a Parquet column of bytes or text stand, and how they are encoded, by their headers.

pyarrow says nothing of pages. What stands where is told by parquet-format's README and parquet.thrift, and Thrift's
compact protocol.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_HEADER_BYTES = 512
_MOST_HEADER_BYTES = 1 << 16  # it may hold the least and the greatest value of its page

# PageType and Encoding of parquet.thrift.
DATA_PAGE, _INDEX_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = range(4)
PLAIN, PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8
_DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY = 6, 7
_DICTIONARY_ENCODINGS = (PLAIN_DICTIONARY, _RLE_DICTIONARY)

# Types of Thrift's compact protocol.
_TRUE, _FALSE, _INTS, _BINARY, _STRUCT = 1, 2, (3, 4, 5, 6), 8, 12
_MOST_DEPTH = 3


class UnknownPages(Exception):
    """Pages of a kind that is left to pyarrow; or damaged ones, of which it knows to tell more."""


class Chunk(NamedTuple):
    """The pages of one column in one row group.

    Attributes:
        start: Where the first one begins in the file.
        stop: Where the last one ends.
        codec: How they are compressed.
        num_rows: Of the row group.
        level: The definition level of a value that is not null.
    """

    start: int
    stop: int
    codec: str
    num_rows: int
    level: int


class Page(NamedTuple):
    """A page, as its header tells.

    Attributes:
        kind: PageType.
        offset: Where its bytes begin in the file.
        packed_bytes: How many they are.
        num_bytes: How many they become.
        num_values: Values in it, nulls included.
        encoding: Of the values.
        level_bytes: Of a second version's page, bytes of the levels that stand before the values.
        is_packed: Whether its values are compressed, where the chunk says so.
    """

    kind: int
    offset: int
    packed_bytes: int
    num_bytes: int
    num_values: int
    encoding: int
    level_bytes: int = 0
    is_packed: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether each value takes its own bytes in it."""
        return self.encoding in (PLAIN, _DELTA_LENGTH_BYTE_ARRAY)

    @property
    def has_indices(self) -> bool:
        """Whether its values stand in the dictionary."""
        return self.encoding in _DICTIONARY_ENCODINGS


def list_pages(fd: int, chunk: Chunk) -> list[Page]:
    """The pages of a chunk: where there is a dictionary, that first.

    Raises:
        UnknownPages: Their headers are no such, or promise what only bombs do.
    """
    pages: list[Page] = []
    at, num_rows = chunk.start, 0
    while at < chunk.stop and num_rows < chunk.num_rows:
        page = _read_header(fd, at, chunk.stop)
        at = page.offset + page.packed_bytes
        if page.kind in (DATA_PAGE, DATA_PAGE_V2):
            num_rows += page.num_values
        elif page.kind != DICTIONARY_PAGE or pages:
            raise UnknownPages
        pages.append(page)
    if num_rows != chunk.num_rows:
        raise UnknownPages
    return pages


def _read_header(fd: int, at: int, stop: int) -> Page:
    for size in (_HEADER_BYTES, _MOST_HEADER_BYTES):
        data = os.pread(fd, min(size, stop - at), at)
        try:
            told, header_bytes = _read_struct(data, 0, 0)
            return _page(told, at + header_bytes, stop)
        except IndexError:
            continue
        except (KeyError, TypeError, AttributeError) as err:
            raise UnknownPages from err
    raise UnknownPages


def _page(told: dict[int, Any], offset: int, stop: int) -> Page:
    kind, num_bytes, packed_bytes = told[1], told[2], told[3]
    if kind == DATA_PAGE_V2:
        about = told[8]
        num_values, encoding, level_bytes, is_packed = about[1], about[4], about[5], about.get(7, True)
        if about[6]:
            raise UnknownPages
    else:
        about = told[7 if kind == DICTIONARY_PAGE else 5]
        num_values, encoding, level_bytes, is_packed = about[1], about[2], 0, True
        if kind == DATA_PAGE and about[3] != _RLE:
            raise UnknownPages
    page = Page(kind, offset, packed_bytes, num_bytes, num_values, encoding, level_bytes, is_packed)
    if min(page[1:7]) < 0 or offset + packed_bytes > stop or level_bytes > min(packed_bytes, num_bytes):
        raise UnknownPages
    if num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * packed_bytes):
        raise UnknownPages
    return page


def _read_struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol, by the numbers of its fields, and where it ends.

    Raises:
        IndexError: It ends behind the data.
        UnknownPages: It is none of a page's header.
    """
    found: dict[int, Any] = {}
    number = 0
    while (byte := data[at]) != 0:
        at += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, at = _read_int(data, at)
        kind = byte & 15
        if kind in (_TRUE, _FALSE):
            found[number] = kind == _TRUE
        elif kind in _INTS[1:]:
            found[number], at = _read_int(data, at)
        elif kind == _INTS[0]:
            at += 1
        elif kind == _BINARY:
            num_bytes, at = read_varint(data, at)
            at += num_bytes
        elif kind == _STRUCT and depth < _MOST_DEPTH:
            found[number], at = _read_struct(data, at, depth + 1)
        else:
            raise UnknownPages
    return found, at + 1


def _read_int(data: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(data, at)
    return value >> 1 ^ -(value & 1), at


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number of seven bits a byte, the lowest first, and where it ends.

    Raises:
        IndexError: It ends behind the data.
        UnknownPages: It has more than 64 bits.
    """
    value = shift = 0
    while (byte := data[at]) & 128:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise UnknownPages
    return value | byte << shift, at + 1


def find_chunk(file: pq.ParquetFile, group: int, column: int) -> Chunk:
    """The pages of a column of bytes or text in a row group.

    Raises:
        UnknownPages: It is repeated, or of another type.
    """
    kind = file.schema.column(column)
    if kind.physical_type != "BYTE_ARRAY" or kind.max_repetition_level:
        raise UnknownPages
    about = file.metadata.row_group(group)
    chunk = about.column(column)
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    stop = start + chunk.total_compressed_size
    return Chunk(start, stop, chunk.compression, about.num_rows, kind.max_definition_level)
