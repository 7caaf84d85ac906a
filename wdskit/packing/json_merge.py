"""Change the JSON of a sample without loss of other bytes: add metadata, or replace the value of one member.

An addition never overwrites a value. The module also writes compact JSON, and has the hooks of `json` that refuse
repeated names and NaN.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.references import FieldBytes

_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_MAX_DIGITS = 4000  # int() accepts at most 4,300
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


_decode_part = json.JSONDecoder().raw_decode


class MetadataConflict(ValueError):
    """A JSON object already has the member `name` of the metadata to add, with another value."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name


def to_json(value: Any) -> bytes:
    """Return compact JSON in UTF-8 with the keys in the order of `value`.

    Raises:
        ValueError: The value contains NaN, infinity or a lone surrogate, or is nested too deeply.
        TypeError: JSON cannot represent the type of a value or of a key.
    """
    try:
        return _encode(value).encode()
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


def add_metadata(data: bytes, metadata: Mapping[str, Any], *, at_end: bool = False) -> bytes:
    """Return the JSON object `data` with the members of `metadata` before its own members, or after them with `at_end`.

    A member that `data` already has with the same value is not added again. All bytes of `data` are kept. The values of
    `metadata` must not contain dicts.

    Raises:
        ValueError: `data` is not a JSON object in UTF-8, is nested too deeply, or has a name of `metadata` twice.
        MetadataConflict: `data` has a name of `metadata` with a different value.
    """
    try:
        own = _decode(data.removeprefix(_BOM).decode())
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
    except ValueError as err:
        raise ValueError(f"it is not JSON in UTF-8: {err}") from err
    if not isinstance(own, _Members):
        raise ValueError(f"it holds a {type(own).__name__}, to which {', '.join(metadata)} cannot be added")  # noqa: TRY004
    new = dict(metadata)
    for name, value in own:
        if name not in metadata:
            continue
        if name not in new:
            raise ValueError(f"the name {name!r} appears twice")
        if type(value) is not type(metadata[name]) or value != metadata[name]:
            raise MetadataConflict(name, f"it says {name!r} is {value!r}, but it is {metadata[name]!r}")
        del new[name]
    if not new:
        return data
    added = to_json(new)[1:-1]
    if at_end and own:
        place, added = len(data[: data.rindex(b"}")].rstrip(_SPACE)), b"," + added
    else:
        place, added = data.index(b"{") + 1, added + (b"," if own else b"")
    return data[:place] + added + data[place:]


def replace_member(data: bytes, name: str, value: bytes) -> bytes:
    """Return a JSON object whose top-level member `name` has a new value. All other bytes are kept.

    Args:
        data: The object: valid JSON in UTF-8, which is not checked here.
        name: Name of a member of the object.
        value: The new value, as JSON.

    Raises:
        ValueError: `data` does not have the member exactly once.
    """
    text = data.decode()
    places = []
    at = _skip_space(text, text.index("{") + 1)
    while text[at] != "}":
        member, at = _decode_part(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)  # after the colon
        _, stop = _decode_part(text, start)
        if member == name:
            places.append((start, stop))
        at = _skip_space(text, stop)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    if len(places) != 1:
        raise ValueError(f"its json has {len(places)} members {name!r}, not one")
    [(start, stop)] = places
    return text[:start].encode() + value + text[stop:].encode()


def _skip_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def field_with_metadata(data: FieldBytes, metadata: Mapping[str, Any]) -> bytes:
    """Return the JSON object of a field with `metadata` before its own members. A reference is read first.

    Raises:
        ValueError: The field is larger than `MAX_ROW_BYTES`, is not a JSON object in UTF-8, or has a name of `metadata`
            twice or with a different value; or the file of the field changed.
        OSError: The file of the field cannot be read.
        StorageError: The object in a store that has the field cannot be read, or was replaced.
    """
    num_bytes = len(data) if isinstance(data, bytes) else data.num_bytes
    if num_bytes > MAX_ROW_BYTES:
        raise ValueError(
            f"it has {num_bytes} bytes, more than the {MAX_ROW_BYTES} that the JSON of one sample can have"
        )
    return add_metadata(data if isinstance(data, bytes) else data.read(), metadata)


class _Members(list[tuple[str, Any]]):
    """The members (name, value) of a JSON object, in order."""


_decode = json.JSONDecoder(
    object_pairs_hook=_Members, parse_int=lambda text: int(text) if len(text) <= _MAX_DIGITS else text
).decode


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the members of a JSON object to a dict, as `object_pairs_hook` of `json.loads`.

    Raises ValueError if a name comes twice.
    """
    row = dict(pairs)
    if len(row) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r} appears twice")
    return row


def refuse_constant(text: str) -> None:
    """Raise ValueError for NaN and the infinities, as `parse_constant` of `json.loads`."""
    raise ValueError(f"{text} is not JSON")
