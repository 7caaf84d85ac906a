"""Split the names of members into key and field, without `./`, or find that a member belongs to no sample."""

from __future__ import annotations

import re

_META = re.compile(r"__[^/]*__($|/)")  # webdataset skips these members; energon stores notes in them


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and lower-case field at the first dot after the last slash (WebDataset's rule).
    A leading `./` is not part of the key.

    Returns:
        (key, field). None for a member that belongs to no sample: the part after the last slash has no dot, starts with
        a dot, or has its only dot at the end; or the name starts with a part like `__meta__`.
    """
    while name.startswith("./"):
        name = name[2:]
    key, _, field = name.partition(".")
    if "/" in field:  # the first dot belongs to a folder
        base = name.rfind("/") + 1
        stem, _, field = name[base:].partition(".")
        key = name[:base] + stem
    if not field or not key or key.endswith("/") or (name.startswith("__") and _META.match(name)):
        return None
    return key, field.lower()
