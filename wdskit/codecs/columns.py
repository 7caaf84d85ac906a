"""Decode one field of many samples at once. The values are those of `fields.decode_field`, in less time."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, NPY_FIELDS, TEXT_FIELDS, decode_field, has_long_number
from wdskit.codecs.npy_header import NpyHeader, read_npy_header
from wdskit.errors import DecodeError


class RawColumn(list[bytes]):
    """The bytes of one field of many samples."""


def decode_column(field: str, raw: RawColumn) -> list[Any] | NpyColumn:
    """Decode one field of many samples. The last component of the field's name decides how.

    Args:
        field: Name of the field.
        raw: The bytes of the field in each sample.

    Returns:
        For `npy` an `NpyColumn`; for JSON, text and integers a list of values; for other fields `raw`. All are in the
        order of the samples.

    Raises:
        DecodeError: The bytes of a sample do not match the field's name.
    """
    kind = field.rpartition(".")[2].lower()
    if kind in NPY_FIELDS:
        try:
            headers = [read_npy_header(data) for data in raw]
        except DecodeError as err:
            raise DecodeError(f"{field}: {err}", field=field) from err
        return NpyColumn(field, raw, headers)
    if kind not in JSON_FIELDS | TEXT_FIELDS | INT_FIELDS:
        return raw
    with contextlib.suppress(ValueError):  # decode_field reads NaN, and reports damage
        if kind in JSON_FIELDS and not has_long_number(b" ".join(raw)):
            return list(map(orjson.loads, raw))
        if kind in TEXT_FIELDS:
            return [str(data, "utf-8") for data in raw]
        if kind in INT_FIELDS and all(raw) and b"".join(raw).isdigit():
            return list(map(int, raw))
    return [decode_field(field, data) for data in raw]


class NpyColumn:
    """The arrays of one npy field of many samples.

    Args:
        field: Name of the field, for messages.
        raw: The npy files.
        headers: The header of each file, in the same order.
    """

    def __init__(self, field: str, raw: list[bytes], headers: list[NpyHeader]) -> None:
        self._field = field
        self._raw = raw
        self._headers = headers

    def __getitem__(self, rows: slice) -> NpyColumn:
        """Return the column of the samples `rows`."""
        return NpyColumn(self._field, self._raw[rows], self._headers[rows])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each array."""
        return [header.shape for header in self._headers]

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The dtype of all arrays. None without arrays, if the dtypes differ, or if an array is in Fortran order."""
        different = {id(header): header for header in self._headers}.values()  # equal headers are mostly one object
        dtypes = {None if header.fortran_order else header.dtype for header in different}
        return dtypes.pop() if len(dtypes) == 1 else None

    def arrays(self) -> list[Any]:
        """Return the arrays in the order of the samples: writable, C-contiguous, owned by the caller."""
        return [decode_field(self._field, data) for data in self._raw]

    def copy_to(self, stacked: NDArray[Any]) -> None:
        """Copy the elements of all arrays, one array after the other, into `stacked`. `dtype` must not be None.

        `stacked` must be C-contiguous, with the dtype of the arrays and as many elements as all arrays together.
        """
        joined = memoryview(stacked.reshape(-1).view(np.uint8).data)
        at = 0
        for header, data in zip(self._headers, self._raw, strict=True):
            elements = memoryview(data)[header.start :]
            joined[at : at + len(elements)] = elements
            at += len(elements)
