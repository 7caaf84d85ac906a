"""The header of an npy file: what numpy's writer and others write, and nothing else of Python.

Format: numpy.org/doc/stable/reference/generated/numpy.lib.format.html. The header is the text of a Python dictionary.
numpy reads it with `ast.literal_eval`, which in CPython 3.11 raises SystemError now and then when several threads call
it; this parser has no state, and knows only the literals that occur there.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from wdskit.errors import DecodeError
from wdskit.files import Buffer

MAX_NPY_HEADER = 10_000
"""Bytes. numpy's own limit for headers that it did not write itself."""

_MAGIC = b"\x93NUMPY"
_VERSIONS = {1: (2, "latin1"), 2: (4, "latin1"), 3: (4, "utf8")}  # bytes of the header's length, its encoding
_KEYS = {"descr", "fortran_order", "shape"}
_MAX_DEPTH = 32  # of nested dtypes
_ENDS = {"(": ")", "[": "]", "{": "}"}
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<number>[0-9]{1,20})L?\b|(?P<word>True|False)\b|(?P<mark>[][(){},:]))"""
)  # `L` stands behind numbers that Python 2 wrote
_ESCAPE = re.compile(r"""\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|([\\'"nrt]))""")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
# As dtypes say of themselves, `<f4` or `<M8[ns]`, and plain names. numpy would parse a text with commas or brackets by
# way of `ast`.
_DTYPE = re.compile(r"[<>=|]?[?bBhHiIlLqQpPefdgFDGcSUVMmuO][0-9]{0,9}(?:\[[0-9A-Za-zμ/]+\])?|u?int[0-9]+|float[0-9]+")


def read_npy_header(data: Buffer) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether in Fortran order, dtype, and where the elements start.

    Raises:
        DecodeError: It is no header of version 1.0, 2.0 or 3.0.
    """
    head = bytes(data[:12])
    if head[:6] != _MAGIC or len(head) < 12:
        raise DecodeError(f"not an npy file; it starts with {head[:8]!r} ({len(data)} bytes in all)")
    size_bytes, encoding = _VERSIONS.get(head[6], (0, ""))
    if not size_bytes or head[7]:
        raise DecodeError(f"npy version {head[6]}.{head[7]}; known are 1.0, 2.0 and 3.0")
    first = 8 + size_bytes
    stop = first + int.from_bytes(head[8:first], "little")
    if stop - first > MAX_NPY_HEADER:
        raise DecodeError(f"damaged npy header: it claims {stop - first} bytes, over the limit of {MAX_NPY_HEADER}")
    if stop > len(data):
        raise DecodeError(f"the npy file stops at byte {len(data)}, inside its header of {stop} bytes")
    try:
        return *_checked(_Literals(str(data[first:stop], encoding)).value()), stop
    except ValueError as err:
        raise DecodeError(f"damaged npy header: {err}") from err


def _checked(found: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and dtype in the header's dictionary."""
    if not isinstance(found, dict) or found.keys() != _KEYS:
        raise ValueError("it does not hold `descr`, `fortran_order` and `shape`")
    shape, fortran_order = found["shape"], found["fortran_order"]
    if type(shape) is not tuple or any(type(size) is not int for size in shape):
        raise ValueError(f"its shape is {shape!r}")
    if type(fortran_order) is not bool:
        raise ValueError(f"its fortran_order is {fortran_order!r}")
    return shape, fortran_order, _dtype(found["descr"])


class _Literals:
    """Reads one Python literal of texts, whole numbers, truth values, tuples, lists and dictionaries."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def value(self) -> Any:
        """The value that the whole text stands for.

        Raises:
            ValueError: It is not one such literal.
        """
        found = self._value(self._token(), 0)
        if self._text[self._at :].strip():
            raise ValueError(f"{self._text[self._at :][:40]!r} stands behind its end")
        return found

    def _token(self) -> Any:
        """The next text, number or truth value in a tuple of one; or the next mark."""
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise ValueError(f"{self._text[self._at :][:40]!r} is no part of one")
        self._at = match.end()
        found = match[match.lastgroup or 0]
        match match.lastgroup:
            case "mark":
                return found
            case "number":
                return (int(found),)
            case "word":
                return (found == "True",)
            case _:
                return (_unescaped(found[1:-1]),)

    def _value(self, part: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deep")
        if isinstance(part, tuple):
            return part[0]
        if part not in _ENDS:
            raise ValueError(f"{part!r} stands where a value belongs")
        items: list[Any] = []
        names: list[str] = []
        has_comma = False
        while (first := self._token()) != _ENDS[part]:
            if part == "{":
                name = self._value(first, depth + 1)
                if type(name) is not str or name in names or self._token() != ":":
                    raise ValueError(f"{name!r} is no key, or stands there twice")
                names.append(name)
                first = self._token()
            items.append(self._value(first, depth + 1))
            behind = self._token()
            if behind == _ENDS[part]:
                break
            if behind != ",":
                raise ValueError(f"{behind!r} stands where a comma belongs")
            has_comma = True
        if part == "{":
            return dict(zip(names, items, strict=True))
        return items if part == "[" else tuple(items) if has_comma or not items else items[0]


def _unescaped(text: str) -> str:
    """What a text in quotes stands for, with the escapes that `repr` makes."""
    if "\\" not in text:
        return text
    if "\\" in _ESCAPE.sub("", text):
        raise ValueError(f"{text!r} holds an unknown escape")

    def replace(match: re.Match[str]) -> str:
        code = match[1] or match[2] or match[3]
        return chr(int(code, 16)) if code else _ESCAPED.get(match[4], match[4])

    return _ESCAPE.sub(replace, text)


def _dtype(descr: Any) -> np.dtype[Any]:
    try:
        _check_texts(descr)
        return np.lib.format.descr_to_dtype(descr)
    except (TypeError, ValueError, LookupError, ArithmeticError) as err:
        raise ValueError(f"{str(descr)[:200]} is no dtype: {err}") from err


def _check_texts(descr: Any) -> None:
    """Refuse what is no dtype on its own, as `i4,i4`."""
    if isinstance(descr, str):
        if not _DTYPE.fullmatch(descr):
            raise ValueError(f"{descr!r} is not known")
    elif isinstance(descr, tuple):
        _check_texts(descr[0])
    elif isinstance(descr, list):
        for field in descr:
            _check_texts(field[1])
    else:
        raise TypeError(f"{descr!r} is not known")
