"""The values of single pages of a Parquet column of bytes or text.

pyarrow decodes a row group from its start, and a group may be the whole file. So the cell that is packed next may cost
gigabytes, where its page has one. How values are encoded is told by parquet-format's Encodings.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wdskit.packing.parquet_headers import (
    DATA_PAGE_V2,
    PLAIN,
    PLAIN_DICTIONARY,
    Chunk,
    Page,
    UnknownPages,
    read_varint,
)

_CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "GZIP": "gzip", "ZSTD": "zstd", "BROTLI": "brotli"}
_MOST_VALUES = 1 << 20  # a page that says so in a few bytes may hold a thousand million nulls

Spans = list[tuple[int, int] | None]
"""Where the value of each row begins and ends in some bytes; None where it is null."""


@dataclass(frozen=True)
class Values:
    """The values of a page: `spans` in `data`, which may be those of the dictionary."""

    data: bytes
    spans: Spans
    is_shared: bool = False

    @property
    def held_bytes(self) -> int:
        """Memory that they take, roughly."""
        return 8 * len(self.spans) if self.is_shared else len(self.data) + 130 * len(self.spans)


def are_known(chunk: Chunk, pages: Iterable[Page]) -> bool:
    """Whether such pages can be decoded here, if they are not damaged."""
    return chunk.codec in _CODECS and all(
        page.num_values <= _MOST_VALUES and (page.encoding == PLAIN or page.has_indices) for page in pages
    )


def read_dictionary(fd: int, chunk: Chunk, page: Page) -> Values:
    """The values of a dictionary.

    Raises:
        UnknownPages: It is damaged.
    """
    if page.encoding not in (PLAIN, PLAIN_DICTIONARY):
        raise UnknownPages
    data = _unpack(_read(fd, page), page.num_bytes, chunk.codec)
    return Values(data, _plain_spans(data, 0, page.num_values))


def read_page(fd: int, chunk: Chunk, page: Page, dictionary: Values | None) -> Values:
    """The values of a data page.

    Raises:
        UnknownPages: It is of another encoding, or damaged.
    """
    data = _read(fd, page)
    if page.kind == DATA_PAGE_V2:
        levels, data = data[: page.level_bytes], data[page.level_bytes :]
        data = _unpack(data, page.num_bytes - page.level_bytes, chunk.codec if page.is_packed else "UNCOMPRESSED")
        at = 0
    else:
        data = _unpack(data, page.num_bytes, chunk.codec)
        at = 4 + int.from_bytes(data[:4], "little") if chunk.level else 0
        levels = data[4:at]
    is_there = np.ones(page.num_values, np.bool_)
    if chunk.level:
        is_there = _read_hybrid(levels, 0, chunk.level.bit_length(), page.num_values) == chunk.level
    num = int(np.count_nonzero(is_there))
    if page.encoding == PLAIN:
        spans = _plain_spans(data, at, num)
    elif page.has_indices and dictionary is not None:
        width = int.from_bytes(data[at : at + 1], "little")
        indices = _read_hybrid(data, at + 1, width, num)
        if num and not 0 <= int(indices.min()) <= int(indices.max()) < len(dictionary.spans):
            raise UnknownPages
        data, spans = dictionary.data, [dictionary.spans[index] for index in indices.tolist()]
    else:
        raise UnknownPages
    if num < page.num_values:
        rest = iter(spans)
        spans = [next(rest) if each else None for each in is_there.tolist()]
    return Values(data, spans, is_shared=page.has_indices)


def _read(fd: int, page: Page) -> bytes:
    data = os.pread(fd, page.packed_bytes, page.offset)
    if len(data) != page.packed_bytes:
        raise UnknownPages
    return data


def _unpack(data: bytes, num_bytes: int, codec: str) -> bytes:
    import pyarrow as pa

    if not num_bytes:
        return b""
    name = _CODECS[codec]
    if name is not None:
        try:
            data = pa.decompress(data, num_bytes, name, asbytes=True)
        except (pa.ArrowException, OSError, ValueError) as err:
            raise UnknownPages from err
    if len(data) != num_bytes:
        raise UnknownPages
    return data


def _plain_spans(data: bytes, at: int, num: int) -> Spans:
    """Values that stand one behind the other, each after its length."""
    spans: Spans = []
    for _ in range(num):
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        if at > len(data) or start > len(data):
            raise UnknownPages
        spans.append((start, at))
    return spans


def _read_hybrid(data: bytes, at: int, width: int, num: int) -> NDArray[np.int64]:
    """Numbers of so many bits each, in runs: one number many times, or eights of packed ones.

    Raises:
        UnknownPages: There are fewer, or they are wider than any index.
    """
    if width > 32:
        raise UnknownPages
    found = np.zeros(num, np.int64)
    done = 0
    weights = 1 << np.arange(width, dtype=np.int64)
    try:
        while done < num:
            header, at = read_varint(data, at)
            count = min((header >> 1) * (8 if header & 1 else 1), num - done)
            if not count:
                raise UnknownPages
            if header & 1:
                num_bytes = (header >> 1) * width
                packed = np.frombuffer(data[at : at + num_bytes], np.uint8)
                bits = np.unpackbits(packed, bitorder="little")[: count * width]
                found[done : done + count] = bits.reshape(count, width) @ weights
            else:
                num_bytes = (width + 7) // 8
                found[done : done + count] = int.from_bytes(data[at : at + num_bytes], "little")
            at += num_bytes
            done += count
    except (IndexError, ValueError) as err:
        raise UnknownPages from err
    return found
