"""What is known of a sample beside its own JSON: both stand in one `json`, neither overwrites the other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.references import FieldBytes
from wdskit.packing.rows import to_json

_BOM = b"\xef\xbb\xbf"


def add_facts(data: bytes, facts: Mapping[str, Any]) -> bytes:
    """A JSON object with facts before its own members, which keep their text: no digit of a number is lost.

    A fact that the object states too, with the same value, is not said twice.

    Raises:
        ValueError: It is no JSON object in UTF-8, a name stands twice in it, or it says something else than a fact.
    """
    data = data.removeprefix(_BOM).strip(b" \t\r\n")
    own = read_json(data)
    if not isinstance(own, dict):
        raise ValueError(f"it holds a {type(own).__name__}, where {', '.join(facts)} could not be added")  # noqa: TRY004
    for name in facts.keys() & own.keys():
        if type(own[name]) is not type(facts[name]) or own[name] != facts[name]:
            raise ValueError(f"it says {name!r} is {own[name]!r}, and it is {facts[name]!r}")
    new = {name: value for name, value in facts.items() if name not in own}
    if not new:
        return data
    return to_json(new)[:-1] + (b"," if own else b"") + data[1:].lstrip(b" \t\r\n")


def field_with_facts(data: FieldBytes, facts: Mapping[str, Any]) -> bytes:
    """`add_facts` to a field that may not be read yet.

    Raises:
        ValueError: As `add_facts`, or it is too large.
        OSError: It cannot be read.
    """
    num_bytes = len(data) if isinstance(data, bytes) else data.num_bytes
    if num_bytes > MAX_ROW_BYTES:
        raise _too_large(num_bytes)
    return add_facts(data if isinstance(data, bytes) else data.read(), facts)


def read_json(data: bytes | str) -> Any:
    """A JSON value, more strictly than Python reads it: no NaN, no name twice, no bytes that are no UTF-8.

    Raises:
        ValueError: It is not, or too large or too deep.
    """
    if len(data) > MAX_ROW_BYTES:
        raise _too_large(len(data))
    text = data if isinstance(data, str) else data.decode()
    try:
        return _DECODE(text)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


def _too_large(num_bytes: int) -> ValueError:
    return ValueError(f"it has {num_bytes} bytes, over the {MAX_ROW_BYTES} that the JSON of one sample may have")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's members as a dict.

    Raises:
        ValueError: Two have one name.
    """
    row = dict(pairs)
    if len(row) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r} stands twice")
    return row


def refuse_constant(text: str) -> None:
    """For `parse_constant`.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{text} is no JSON")


_DECODE = json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse_constant).decode
