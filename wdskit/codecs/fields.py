"""Convert field bytes to Python values and back, by the field's name. Nothing is ever unpickled."""

from __future__ import annotations

import io
import json
import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from wdskit.codecs.npy_header import MAX_NPY_HEADER, read_npy_header
from wdskit.errors import DecodeError
from wdskit.files import Buffer

TEXT_FIELDS = frozenset(["txt", "text", "transcript"])
INT_FIELDS = frozenset(["cls", "cls2", "index", "inx", "id"])
JSON_FIELDS = frozenset(["json", "jsn"])
NPY_FIELDS = frozenset(["npy"])

_INT = re.compile(rb"\s*[+-]?[0-9]+\s*")
_DIGITS_TO_0 = bytes(ord("0") if chr(code).isdecimal() and code < 128 else ord(" ") for code in range(256))
_LONG_NUMBER = b"0" * 19
_MAX_DEPTH = 512  # levels of JSON that the standard library may read; orjson itself reads 1024 levels
_JSON_MARK = re.compile(rb"[\[\]{}]")
_JSON_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')


def decode_field(field: str, data: Buffer) -> object:
    """Decode the bytes of a field. The last component of the field's name, in upper or lower case, decides the type.

    Args:
        field: Name of the field.
        data: The whole field.

    Returns:
        - `txt`, `text`, `transcript`: str.
        - `cls`, `cls2`, `index`, `inx`, `id`: int.
        - `json`, `jsn`: the JSON value, with NaN and integers of any size.
        - `npy`: array, writable, C-contiguous, owned by the caller.
        - All other names: `data` itself. Pickles are not loaded.

    Raises:
        DecodeError: The bytes do not match the name; the message names the field.
    """
    decoder = _DECODERS.get(field.rpartition(".")[2].lower())
    if decoder is None:
        return data
    try:
        return decoder(data)
    except DecodeError as err:
        raise DecodeError(f"{field}: {err}", field=field) from err
    except ValueError as err:  # includes UnicodeDecodeError and JSONDecodeError
        raise DecodeError(f"{field}: {err}; it starts with {bytes(data[:40])!r}", field=field) from err


def is_json_field(field: str) -> bool:
    """Return True if the last component of a field's name is `json` or `jsn`, in upper or lower case."""
    return field.rpartition(".")[2].lower() in JSON_FIELDS


def is_path(name: str) -> bool:
    """Return True if a name can be a path into a JSON field, such as `json.caption`.

    A component of such a name, but not the last component, is `json` or `jsn`, in upper or lower case.
    """
    return any(part.lower() in JSON_FIELDS for part in name.split(".")[:-1])


def follow_path(value: object, path: Sequence[str]) -> object:
    """Return the value at a path in a JSON value or a text. Each part of `path` names a member of an object.

    If the value so far is a list of objects, a part selects this member of each object, and the result is a list:
    `bbox` in `annotations.bbox`. As the last part, `length` is the number of characters of a text, of items of a list,
    or of members of an object. In an object with a member `length`, it is this member.

    Raises:
        KeyError: The value, or an item of a list, has no member for a part. The message is the path up to and including
            this part.
    """
    for at, part in enumerate(path):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif part == "length" and at == len(path) - 1 and isinstance(value, str | list | dict):
            value = len(value)
        elif isinstance(value, list) and all(isinstance(each, dict) and part in each for each in value):
            value = [each[part] for each in value]
        else:
            raise KeyError(".".join(path[: at + 1]))
    return value


def encode_field(field: str, value: object) -> bytes:
    """Encode the value of a field. The bytes depend only on `value` and the field's name.

    Args:
        field: Name of the field. Its last component decides the type of `value`.
        value: str for `txt`, `text`, `transcript`; int for `cls`, `cls2`, `index`, `inx`, `id`; a JSON value for
            `json`, `jsn`; an array for `npy`; bytes for every field. Bytes are returned unchanged. Members of JSON
            objects are written in their order.

    Raises:
        DecodeError: `value` has another type, or cannot be written, such as NaN in JSON.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    encoder = _ENCODERS.get(field.rpartition(".")[2].lower())
    if encoder is None:
        raise DecodeError(f"{field}: this field is written from bytes, not from {type(value).__name__}", field=field)
    try:
        return encoder(value)
    except DecodeError as err:
        raise DecodeError(f"{field}: {err}", field=field) from err
    except (ValueError, TypeError, RecursionError) as err:  # UnicodeEncodeError is a ValueError
        raise DecodeError(f"{field}: cannot be written: {err}", field=field) from err


def _decode_text(data: Buffer) -> str:
    return str(data, "utf-8")


def _decode_int(data: Buffer) -> int:
    if isinstance(data, bytes) and data.isdigit():  # nearly all values; the regular expression takes 3 us more
        return int(data)
    if _INT.fullmatch(data) is None:
        raise DecodeError(f"not an integer in decimal digits: {bytes(data[:40])!r}")
    return int(bytes(data))


def _decode_json(data: Buffer) -> Any:
    # orjson silently turns integers beyond 64 bits into floats: the standard library reads JSON with 19 digits in a row
    raw = bytes(data)
    if not has_long_number(raw):
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass  # the standard library also reads NaN, a byte order mark and half a surrogate pair, as webdataset does
    _check_depth(raw)
    return json.loads(str(raw, "utf-8-sig"))


def _check_depth(raw: bytes) -> None:
    """Raise DecodeError if JSON is nested too deep for the standard library (over `_MAX_DEPTH` levels)."""
    if raw.count(b"[") + raw.count(b"{") <= _MAX_DEPTH:
        return
    depth = 0
    for mark in _JSON_MARK.finditer(_JSON_TEXT.sub(b"", raw)):
        depth += 1 if mark[0] in b"[{" else -1
        if depth > _MAX_DEPTH:
            raise DecodeError(f"JSON nested deeper than {_MAX_DEPTH} levels")


def has_long_number(raw: bytes) -> bool:
    """Return True if JSON has 19 digits or more in a row, so that it may have an integer beyond 64 bits."""
    return _LONG_NUMBER in raw.translate(_DIGITS_TO_0)  # ten times faster than a regular expression


def _decode_npy(data: Buffer) -> NDArray[Any]:
    shape, fortran_order, dtype, start = read_npy_header(data)
    flat = np.frombuffer(data, dtype, offset=start) if start < len(data) else np.empty(0, dtype)
    return np.array(flat.reshape(shape, order="F" if fortran_order else "C"), order="C")


def _encode_text(value: object) -> bytes:
    if not isinstance(value, str):
        raise _wrong_type(value, "str")
    return value.encode()


def _encode_int(value: object) -> bytes:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _wrong_type(value, "int")
    return str(int(value)).encode()


def _encode_json(value: object) -> bytes:
    if value is not None and not isinstance(value, dict | list | tuple | str | int | float):
        raise _wrong_type(value, "dict, list, str, int, float or None")
    try:
        orjson.dumps(value)  # raises TypeError if a key is not a str, in 0.1 us
    except TypeError:
        _check_names(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _check_names(value: object) -> None:
    """Raise DecodeError if two keys of one dict, at any depth, such as 1 and "1", become the same name in JSON."""
    if isinstance(value, dict):
        names: dict[str, object] = {}
        for key in value:
            name = key if isinstance(key, str) else next(iter(json.loads(json.dumps({key: 0}))))
            if name in names:
                raise DecodeError(f"its keys {names[name]!r} and {key!r} have the same name in JSON")
            names[name] = key
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _check_names(item)


def _encode_npy(value: object) -> bytes:
    if not isinstance(value, np.ndarray):
        raise _wrong_type(value, "numpy array")
    if isinstance(value, np.ma.MaskedArray):
        raise DecodeError("a masked array would lose its mask. Replace the masked values: `array.filled(0)`")
    if value.dtype.hasobject or value.dtype.itemsize == 0:
        raise DecodeError(f"an array of dtype {value.dtype} cannot be written without pickle. Write numbers, or JSON")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(value, order="C"), version=(1, 0), allow_pickle=False)
    header_bytes = stream.tell() - value.nbytes
    if header_bytes > MAX_NPY_HEADER:
        raise DecodeError(f"its dtype needs a header of {header_bytes} bytes; readers accept at most {MAX_NPY_HEADER}")
    return stream.getvalue()


def _wrong_type(value: object, wanted: str) -> DecodeError:
    return DecodeError(f"this field is written from {wanted} or bytes, not from {type(value).__name__}")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(TEXT_FIELDS, _decode_text),
    **dict.fromkeys(INT_FIELDS, _decode_int),
    **dict.fromkeys(JSON_FIELDS, _decode_json),
    **dict.fromkeys(NPY_FIELDS, _decode_npy),
}
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(TEXT_FIELDS, _encode_text),
    **dict.fromkeys(INT_FIELDS, _encode_int),
    **dict.fromkeys(JSON_FIELDS, _encode_json),
    **dict.fromkeys(NPY_FIELDS, _encode_npy),
}
