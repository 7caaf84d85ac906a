"""One field of many samples -> its values, all at once: `fields.decode_field` of each, for less."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, NPY_FIELDS, TEXT_FIELDS, decode_field, has_long_number
from wdskit.codecs.npy_header import read_npy_header
from wdskit.dataset.many import Spans
from wdskit.errors import DecodeError


def decode_column(field: str, spans: Spans) -> list[Any] | NpyColumn | Spans:
    """The values of one field of many samples.

    Args:
        field: As in `decode_field`. A field that `decode_field` returns as bytes is returned as `spans`.
        spans: The bytes of the field in each sample.

    Raises:
        DecodeError: As `decode_field`, of any of the samples.
    """
    kind = field.rpartition(".")[2].lower()
    if kind in NPY_FIELDS:
        return NpyColumn(field, spans)
    if kind not in JSON_FIELDS | TEXT_FIELDS | INT_FIELDS:
        return spans
    found = spans.cut()
    with contextlib.suppress(orjson.JSONDecodeError, UnicodeDecodeError):  # NaN, or damage that decode_field names
        if kind in JSON_FIELDS and not has_long_number(b" ".join(found)):
            return list(map(orjson.loads, found))
        if kind in TEXT_FIELDS:
            return [str(data, "utf-8") for data in found]
        if kind in INT_FIELDS and all(found) and b"".join(found).isdigit():
            return list(map(int, found))
    return [decode_field(field, data) for data in found]


class NpyColumn:
    """The arrays of many samples, not copied yet. Each npy header is checked as `decode_field` does.

    Args:
        field: Name of the field, for messages.
        spans: The npy files.

    Attributes:
        shapes: Shape of each array.
        dtype: The dtype of all arrays; None if they differ, or if an array is in Fortran order.

    Raises:
        DecodeError: A file is not a valid npy file.
    """

    def __init__(self, field: str, spans: Spans) -> None:
        self._field = field
        self._spans = spans
        try:
            self._headers = [read_npy_header(data[start:stop]) for data, start, stop in spans.places()]
        except DecodeError as err:
            raise DecodeError(f"{field}: {err}", field=field) from err
        self.shapes = [header.shape for header in self._headers]
        different = {id(header): header for header in self._headers}.values()  # equal ones are mostly one
        dtypes = {None if header.fortran_order else header.dtype for header in different}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None

    def __len__(self) -> int:
        """Number of arrays."""
        return len(self._headers)

    def arrays(self) -> list[Any]:
        """Return each array as `decode_field` does."""
        return [decode_field(self._field, data[start:stop]) for data, start, stop in self._spans.places()]

    def copy_to(self, stacked: NDArray[Any]) -> None:
        """Copy all arrays, end to end, into `stacked`: C-contiguous, with their dtype and the sum of their sizes."""
        joined = memoryview(stacked.reshape(-1).view(np.uint8).data)
        at = 0
        for header, (data, start, stop) in zip(self._headers, self._spans.places(), strict=True):
            size = stop - start - header.start
            joined[at : at + size] = data[stop - size : stop]
            at += size
