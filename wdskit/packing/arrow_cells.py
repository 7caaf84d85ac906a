"""Cells of an Arrow column of encoded images, with no copy before one is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

START_BYTES = 32  # enough to tell what an image is


class Cells:
    """The cells of a column of bytes, as they are or through a dictionary."""

    def __init__(self, column: pa.Array) -> None:
        import pyarrow as pa

        values = column
        at: list[int | None] | None = None
        if isinstance(column, pa.DictionaryArray):
            values, at = column.dictionary, column.indices.to_pylist()
        self._at = at
        self._data: pa.Buffer = values.buffers()[-1]
        # A scalar of pyarrow would copy the bytes, and its buffer would say nothing of where they lie.
        self._offsets: list[int] = _offsets(values).tolist()
        self._is_valid: list[bool] = values.is_valid().to_pylist()

    def _value(self, number: int) -> int | None:
        """Where among the values a cell is, None where it is null."""
        at = number if self._at is None else self._at[number]
        return at if at is not None and self._is_valid[at] else None

    def size(self, number: int) -> int | None:
        """Bytes of a cell, None where it is null."""
        at = self._value(number)
        return None if at is None else self._offsets[at + 1] - self._offsets[at]

    def address(self, number: int) -> int:
        """Where in memory the bytes of a cell lie that is not null."""
        at = self._value(number)
        assert at is not None
        return int(self._data.address) + self._offsets[at]

    def start(self, number: int) -> bytes:
        """The first bytes of a cell that is not null."""
        return self._part(number, START_BYTES)

    def read(self, number: int) -> bytes:
        """All bytes of a cell that is not null."""
        return self._part(number, None)

    def _part(self, number: int, most: int | None) -> bytes:
        at = self._value(number)
        assert at is not None
        first, stop = self._offsets[at], self._offsets[at + 1]
        stop = stop if most is None else min(stop, first + most)
        return bytes(memoryview(self._data)[first:stop]) if stop > first else b""


def _offsets(values: pa.Array) -> NDArray[np.int64]:
    """Where each value begins in the buffer of bytes, and where the last one ends."""
    from pyarrow import types

    first, stop = values.offset, values.offset + len(values) + 1
    if types.is_fixed_size_binary(values.type):
        width: int = values.type.byte_width
        return np.arange(first, stop, dtype=np.int64) * width
    if not len(values):
        return np.zeros(1, np.int64)
    dtype = np.int64 if types.is_large_binary(values.type) else np.int32
    return np.frombuffer(values.buffers()[1], dtype)[first:stop].astype(np.int64)


def image_parts(column: pa.Array) -> tuple[list[Any] | None, Cells]:
    """Paths, where it has them, and bytes of a column of images."""
    import pyarrow as pa

    if not isinstance(column, pa.StructArray):
        return None, Cells(column)
    return image_paths(column), Cells(column.flatten()[column.type.get_field_index("bytes")])


def image_paths(column: pa.StructArray) -> list[Any] | None:
    """Paths of a column of images, where it has them."""
    number = column.type.get_field_index("path")
    return column.flatten()[number].to_pylist() if number >= 0 else None  # where the struct is null, so are its parts
