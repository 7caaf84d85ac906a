"""The header of an npy file: what numpy's writer and others write, and nothing else of Python.

Format: numpy.org/doc/stable/reference/generated/numpy.lib.format.html. The header is the text of a Python dictionary.
numpy reads it with `ast.literal_eval`, which in CPython 3.11 raises SystemError now and then when several threads call
it. Here its few literals are rewritten as JSON, and the JSON parser finds what is wrong with their order.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any, NamedTuple

import numpy as np

from wdskit.errors import DecodeError
from wdskit.files import Buffer

MAX_NPY_HEADER = 10_000
"""Bytes. numpy's own limit for headers that it did not write itself."""

_MAGIC = b"\x93NUMPY"
_VERSIONS = {1: (2, "latin1"), 2: (4, "latin1"), 3: (4, "utf8")}  # bytes of the header's length, its encoding
_KEYS = {"descr", "fortran_order", "shape"}
_MAX_DEPTH = 32  # of nested dtypes
_ESCAPE = r"""\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[\\'"nrt])"""  # those that `repr` makes
_TOKEN = re.compile(
    rf"""\s*(?:(?P<text>'(?:[^'\\\n]|{_ESCAPE})*'|"(?:[^"\\\n]|{_ESCAPE})*")"""
    r"""|(?P<number>0|[1-9][0-9]{0,19})L?\b|(?P<word>True|False)\b|(?P<open>[\[({])|(?P<close>[])}])|(?P<mark>[,:]))"""
)  # `L` follows numbers that Python 2 wrote
_TUPLE = "("
_JSON = {"(": f'{{"{_TUPLE}":[', ")": "]}"}
# As dtypes say of themselves, `<f4` or `<M8[ns]`, and plain names. numpy would parse a text with commas or brackets by
# way of `ast`.
_DTYPE = re.compile(r"[<>=|]?[?bBhHiIlLqQpPefdgFDGcSUVMmuO][0-9]{0,9}(?:\[[0-9A-Za-zμ/]+\])?|u?int[0-9]+|float[0-9]+")


class NpyHeader(NamedTuple):
    """What the header of an npy file says, and where the elements start."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    start: int


def read_npy_header(data: Buffer) -> NpyHeader:
    """The header of a whole npy file.

    Raises:
        DecodeError: It is none of version 1.0, 2.0 or 3.0, the elements are Python objects or have no size, or others
            than it says follow it.
    """
    head = bytes(data[:12])
    if head[:6] != _MAGIC or len(head) < 12:
        what = f"it starts with {head[:8]!r} ({len(data)} bytes in all)" if head else "the file is empty"
        raise DecodeError(f"not an npy file; {what}")
    size_bytes, encoding = _VERSIONS.get(head[6], (0, ""))
    if not size_bytes or head[7]:
        raise DecodeError(f"npy version {head[6]}.{head[7]}; supported are 1.0, 2.0 and 3.0")
    first = 8 + size_bytes
    start = first + int.from_bytes(head[8:first], "little")
    if start - first > MAX_NPY_HEADER:
        raise DecodeError(f"damaged npy header: it claims {start - first} bytes, over the limit of {MAX_NPY_HEADER}")
    if start > len(data):
        raise DecodeError(f"the npy file stops at byte {len(data)}, inside its header of {start} bytes")
    try:
        header, num_bytes = _parse(bytes(data[first:start]), encoding, start)
    except ValueError as err:
        raise DecodeError(f"damaged npy header: {err}") from err
    if num_bytes != len(data) - start:
        what = f"{header.shape} of {header.dtype}"
        raise DecodeError(f"{what} takes {num_bytes} bytes, but {len(data) - start} follow the header")
    return header


@functools.lru_cache(maxsize=256)  # the arrays of a data set have few shapes
def _parse(raw: bytes, encoding: str, start: int) -> tuple[NpyHeader, int]:
    """The header in its dictionary, and how many bytes follow it."""
    found = json.loads(_to_json(str(raw, encoding).strip()), object_pairs_hook=_dict_or_tuple)
    if not isinstance(found, dict) or found.keys() != _KEYS:
        raise ValueError("it does not hold `descr`, `fortran_order` and `shape`")
    shape, fortran_order, dtype = found["shape"], found["fortran_order"], _dtype(found["descr"])
    if type(shape) is not tuple or any(type(size) is not int for size in shape):
        raise ValueError(f"its shape is {shape!r}")
    if type(fortran_order) is not bool:
        raise ValueError(f"its fortran_order is {fortran_order!r}")
    if dtype.hasobject:
        raise DecodeError("an array of Python objects, which would have to be unpickled. Store numbers, or JSON")
    if dtype.itemsize == 0 or dtype.subdtype is not None:
        raise DecodeError(f"dtype {dtype} has no elements of one size")
    return NpyHeader(shape, fortran_order, dtype, start), math.prod(shape) * dtype.itemsize


def _to_json(text: str) -> str:
    """The literal as JSON, in which a tuple is an object of one list."""
    parts: list[str] = []
    at = depth = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or depth > _MAX_DEPTH:
            raise ValueError(f"{text[at : at + 40]!r} is not part of a header")
        at = match.end()
        kind = match.lastgroup or ""
        found = match[kind]
        if kind == "text":
            found = json.dumps(found[1:-1].encode("latin1", "backslashreplace").decode("unicode_escape"))
        elif kind == "word":
            found = found.lower()
        elif kind == "open":
            depth += 1
        elif kind == "close":
            depth -= 1
            if parts[-1:] == [","]:
                parts.pop()
            elif found == ")" and parts[-2:-1] == [_JSON["("]]:
                raise ValueError(f"{match.string[:40]!r} holds one value in parentheses instead of a tuple")
        parts.append(_JSON.get(found, found) if kind in {"open", "close"} else found)
    return "".join(parts)


def _dict_or_tuple(pairs: list[tuple[str, Any]]) -> Any:
    if [key for key, _ in pairs] == [_TUPLE]:
        return tuple(pairs[0][1])
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _dtype(descr: Any) -> np.dtype[Any]:
    try:
        _check_texts(descr)
        return np.lib.format.descr_to_dtype(descr)
    except (TypeError, ValueError, LookupError, ArithmeticError) as err:
        raise ValueError(f"{str(descr)[:200]} is not a dtype: {err}") from err


def _check_texts(descr: Any) -> None:
    """Refuse what is no dtype on its own, as `i4,i4`."""
    if isinstance(descr, tuple):
        _check_texts(descr[0])
    elif isinstance(descr, list):
        for field in descr:
            _check_texts(field[1])
    elif not isinstance(descr, str) or not _DTYPE.fullmatch(descr):
        raise ValueError(f"{descr!r} is not known")
