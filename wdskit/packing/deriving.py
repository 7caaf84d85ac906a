"""Facts of a packed image that go into its sample's JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from wdskit.codecs.checks import read_header
from wdskit.codecs.structure import check_pixels

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
