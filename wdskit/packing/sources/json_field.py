"""The field `json` of rows: JSON is read, written without NaN, and gets the members that a source adds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import PackError
from wdskit.limits import MAX_COCO_BYTES, MAX_ROW_BYTES
from wdskit.packing.row import Field, File, LabelledJson, Row, SourceFiles, size_of


def _text_of(value: Any) -> str:
    """Return the text in JSON of a date, a time or a decimal, which Parquet has."""
    if isinstance(value, bytes):
        raise TypeError(f"bytes, such as {value[:8]!r}, cannot be in json: make them a field of their own")
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_text_of).encode


def to_json(value: Any, text: str | None = None) -> bytes:
    """Return compact JSON in UTF-8 with the keys in the order of `value`. NaN becomes null.

    `text` is the JSON text that `value` was read from; it is returned unless it has a NaN.

    Raises:
        ValueError: The value contains infinity or a lone surrogate.
        TypeError: JSON cannot represent the type of a value or of a key.
        RecursionError: The value is nested too deeply.
    """
    try:
        encoded = _encode(value).encode()
    except ValueError:
        return _encode(without_nan(value)).encode()
    return encoded if text is None else text.encode()


def without_nan(value: Any) -> Any:
    """Return a JSON value with None in place of each NaN. The value itself is not changed."""
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a name appears twice in one object: {sorted(name for name, _ in pairs)}")
    return found


parse_json = json.JSONDecoder(object_pairs_hook=_unique_members).decode
"""Return the value of JSON, with NaN as a float.

Raises:
    ValueError: The text is not JSON, or an object has a name twice.
    RecursionError: The text is nested too deeply.
"""


def read_json(field: Field, *, limit: int = MAX_ROW_BYTES) -> Any:
    """Return the value of JSON in UTF-8: bytes or a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has more than `limit` bytes, or is not JSON.
    """
    try:
        if size_of(field) > limit:
            raise ValueError(f"it has more than the {limit} bytes that are read at once")  # noqa: TRY301
        with contextlib.closing(SourceFiles()) as files:
            data = files.read([field])[0] if isinstance(field, File) else field
        assert isinstance(data, bytes)
        return parse_json(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as err:
        name = field.path if isinstance(field, File) else "json"
        raise ValueError(f"{name}: its JSON: {err}") from err


def read_document(path: str) -> Any:
    """Return the value of a file of JSON. PackError: The file cannot be read, or is not JSON."""
    try:
        return read_json(File.whole(path), limit=MAX_COCO_BYTES)
    except (OSError, ValueError) as err:
        raise PackError(f"{path}: {str(err).removeprefix(f'{path}: ')}.") from err


def read_object(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the object in the field `json` of a row; an empty object without the field.

    Raises:
        OSError, ValueError: As for `read_json`, or the JSON is not an object.
    """
    found = read_json(fields["json"]) if "json" in fields else {}
    if not isinstance(found, dict):
        raise ValueError(f"its json is a {type(found).__name__}, not an object")  # noqa: TRY004
    return found


def labelled_json(own: Mapping[str, Any], about: Mapping[str, str], *, has_label: bool) -> bytes | LabelledJson:
    """Return a JSON object with the members of `own`, then `cls` if `has_label` is True, then the members of `about`.

    A member that `own` has with the same value is not added again. In the result, a NUL stands for the number of the
    class.

    Raises:
        ValueError: `own` has one of these members with another value, or a `cls`, or cannot be written as JSON.
    """
    others = [name for name in own if own[name] != about.get(name, own[name]) or (name == CLASS_FIELD and has_label)]
    if others:
        raise ValueError(f"its json has another {others[0]!r}: {own[others[0]]!r}")
    added = {name: value for name, value in about.items() if name not in own}
    parts = to_json(own)[1:-1] if own else b"", b'"cls":\0' if has_label else b"", to_json(added)[1:-1]
    data = b"{%b}" % b",".join(filter(None, parts))
    return LabelledJson(data) if has_label else data


def keep_key(row: Row, given: str) -> Row:
    """Return the row with the key that the source gave as the member `key` of its `json`, if its own key was changed.

    Raises:
        OSError, ValueError: The row's `json` is not an object, or has another `key`.
    """
    if not row.is_cleaned:
        return row
    both = labelled_json(read_object(row.fields), {"key": given}, has_label=False)
    return row._replace(fields=dict(sorted({**row.fields, "json": both}.items())))
