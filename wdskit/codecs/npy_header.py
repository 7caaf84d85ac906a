"""Read the header of an npy file with numpy's parser.

Format: numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import functools
import io
import math
import threading
import tokenize
from typing import Any, NamedTuple

import numpy as np

from wdskit.errors import DecodeError
from wdskit.files import Buffer

MAX_NPY_HEADER = 10_000
"""In bytes; numpy's own limit for untrusted headers."""

_MAGIC = b"\x93NUMPY"
_READERS = {1: (2, np.lib.format.read_array_header_1_0), 2: (4, np.lib.format.read_array_header_2_0)}
"""For each major version: size in bytes of the field that stores the header's length, and the header's parser."""

# numpy's parser uses `ast`, which in CPython 3.11 raises SystemError now and then if several threads call it.
_ONE_THREAD = threading.Lock()
_NUM_TRIES = 20  # other code of the process may call `ast` without the lock


class NpyHeader(NamedTuple):
    """The header of an npy file.

    `start` is the byte offset of the first element. If `fortran_order` is True, the first index of an element changes
    fastest.
    """

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    start: int


def read_npy_header(data: Buffer) -> NpyHeader:
    """Read and check the header of an npy file.

    Args:
        data: The whole file.

    Raises:
        DecodeError: The file is not an npy file of version 1.0 or 2.0, its header is damaged, the elements are Python
            objects or have size 0, or the number of bytes after the header is wrong.
    """
    head = bytes(data[:12])
    if head[:6] != _MAGIC or len(head) < 12:
        what = f"it starts with {head[:8]!r} ({len(data)} bytes in all)" if head else "the file is empty"
        raise DecodeError(f"not an npy file; {what}")
    if head[6] not in _READERS or head[7]:
        raise DecodeError(f"npy version {head[6]}.{head[7]}; supported are 1.0 and 2.0")
    first = 8 + _READERS[head[6]][0]
    start = first + int.from_bytes(head[8:first], "little")
    if start - first > MAX_NPY_HEADER:
        raise DecodeError(f"damaged npy header: it claims {start - first} bytes, over the limit of {MAX_NPY_HEADER}")
    if start > len(data):
        raise DecodeError(f"the npy file stops at byte {len(data)}, inside its header of {start} bytes")
    header = _parse(bytes(data[:start]))
    num_bytes = math.prod(header.shape) * header.dtype.itemsize
    if num_bytes != len(data) - start:
        what = f"{header.shape} of {header.dtype}"
        raise DecodeError(f"{what} takes {num_bytes} bytes, but {len(data) - start} follow the header")
    return header


@functools.lru_cache(maxsize=256)  # the arrays of a dataset have few different shapes
def _parse(head: bytes) -> NpyHeader:
    try:
        shape, fortran_order, dtype = _read(head)
    except (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, MemoryError, RecursionError) as err:
        raise DecodeError(f"damaged npy header: {str(err)[:200]}") from err
    except tokenize.TokenError as err:
        raise DecodeError("damaged npy header: it is not a Python dictionary") from err
    if any(type(size) is not int or size < 0 for size in shape):
        raise DecodeError(f"damaged npy header: its shape is {shape!r}")
    if dtype.hasobject:
        raise DecodeError("an array of Python objects, which would have to be unpickled. Store numbers, or JSON")
    if dtype.itemsize == 0 or dtype.subdtype is not None:
        raise DecodeError(f"dtype {dtype} has no elements of one size")
    return NpyHeader(shape, fortran_order, dtype, len(head))


def _read(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    _, read = _READERS[head[6]]
    for last in range(_NUM_TRIES - 1, -1, -1):
        try:
            with _ONE_THREAD:
                return read(io.BytesIO(head[8:]), max_header_size=MAX_NPY_HEADER)
        except SystemError:
            if not last:
                raise
    raise AssertionError
