"""Facts of a packed image that go into its sample's JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from wdskit.codecs.fields import decode_field
from wdskit.codecs.headers import read_header
from wdskit.codecs.images import check_pixels
from wdskit.errors import DecodeError

DERIVED = ("width", "height", "bytes", "sha256")
JSON_FIELD = "json"


def derive_facts(image: bytes, names: Sequence[str], *, max_pixels: int) -> dict[str, int | str]:
    """The wanted facts in the order of `DERIVED`: width and height as the header has them, whatever EXIF says.

    Raises:
        DecodeError: The header is damaged, or promises more than `max_pixels`.
    """
    facts: dict[str, int | str] = {}
    if "width" in names or "height" in names:
        header = read_header(lambda size: image[:size])
        check_pixels(header.width, header.height, max_pixels=max_pixels)
        facts = {"width": header.width, "height": header.height}
    facts |= {"bytes": len(image), "sha256": hashlib.sha256(image).hexdigest() if "sha256" in names else ""}
    return {name: facts[name] for name in DERIVED if name in names}


def add_to_json(text: bytes | None, facts: Mapping[str, int | str]) -> bytes:
    """A JSON object with the facts at its end; what it had stays as it was written.

    Args:
        text: The object, None for an empty one.
        facts: Names and values. One that it has already, with the same value, is not added again.

    Raises:
        DecodeError: It is no object, or has another value under one of the names.
    """
    known: Any = {} if text is None else decode_field(JSON_FIELD, text)
    if not isinstance(known, dict):
        raise DecodeError(f"it holds a {type(known).__name__}; facts of the image go into an object")
    for name, value in facts.items():
        if name in known and (known[name] != value or type(known[name]) is not type(value)):
            raise DecodeError(f"it says {name!r} is {known[name]!r}, the image's is {value!r}")
    new = {name: value for name, value in facts.items() if name not in known}
    added = json.dumps(new, separators=(",", ":")).encode()[1:]
    if not new and text is not None:
        return text
    head = b"{" if text is None else text.rstrip()[:-1].rstrip()  # without the last brace
    return head + (b"," if known else b"") + added
