"""What is known of a sample beside its own JSON: both stand in one `json`, neither overwrites the other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.references import FieldBytes

_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_MOST_DIGITS = 4000  # of which Python makes a number


def to_json(value: Any) -> bytes:
    """A JSON field: compact, UTF-8, keys in their order.

    Raises:
        ValueError: NaN or infinity, which JSON has not, or half of a surrogate pair.
    """
    return _TO_JSON(value).encode()


def add_facts(data: bytes, facts: Mapping[str, Any], *, at_end: bool = False) -> bytes:
    """A JSON object with facts before its own members, or behind them; every byte of what it was stays as it is.

    So no digit of a number, member of an equal name, NaN or white space is lost. A fact that the object states too,
    with the same value, is not said twice.

    Raises:
        ValueError: It is no JSON object in UTF-8, says something else than a fact, or names one twice.
    """
    own = _read(data.removeprefix(_BOM))
    if not isinstance(own, _Members):
        raise ValueError(f"it holds a {type(own).__name__}, where {', '.join(facts)} could not be added")  # noqa: TRY004
    new = dict(facts)
    for name, value in own:
        if name not in facts:
            continue
        if name not in new:
            raise ValueError(f"the name {name!r} stands twice")
        if type(value) is not type(facts[name]) or value != facts[name]:
            raise ValueError(f"it says {name!r} is {value!r}, and it is {facts[name]!r}")
        del new[name]
    if not new:
        return data
    place = len(data[: data.rindex(b"}")].rstrip(_SPACE)) if at_end and own else data.index(b"{") + 1
    first, last = (b",", b"") if at_end else (b"", b",")
    added = to_json(new)[1:-1]
    return data[:place] + (first + added + last if own else added) + data[place:]


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


class _Members(list[tuple[str, Any]]):
    """Members of an object, in their order."""


def _read(data: bytes) -> Any:
    try:
        return _DECODE(data.decode())
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
    except ValueError as err:
        raise ValueError(f"it is no JSON in UTF-8: {err}") from err


def _parse_int(text: str) -> int | str:
    return int(text) if len(text) <= _MOST_DIGITS else text


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


_DECODE = json.JSONDecoder(object_pairs_hook=_Members, parse_int=_parse_int).decode
_TO_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
