"""Split the names of members into key and field, and compare names in extension headers with the member's own."""

from __future__ import annotations

import re

from wdskit.limits import MAX_NAME_BYTES
from wdskit.tar.header import HeaderError

_META = re.compile(r"__[^/]*__($|/)")  # webdataset skips these members; energon stores notes in them


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and lower-case field at the first dot after the last slash (WebDataset's rule).

    Returns:
        (key, field). None for a member that belongs to no sample: the part after the last slash has no dot, starts with
        a dot, or has its only dot at the end; or the name starts with a part like `__meta__`.
    """
    key, _, field = name.partition(".")
    if "/" in field:  # the first dot belongs to a folder
        base = name.rfind("/") + 1
        stem, _, field = name[base:].partition(".")
        key = name[:base] + stem
    if not field or not key or key.endswith("/") or (name.startswith("__") and _META.match(name)):
        return None
    return key, field.lower()


def check_long_name(name: str, own: bytes) -> None:
    """Check the name in an extension header, which no checksum covers, against the name in the member's own header.

    Writers put only a part of a long name into the member's own header, or replace its non-ASCII characters. So two
    different names are accepted if `name` has a key and the names differ in more than one byte.

    Args:
        name: The name in the extension header.
        own: The name in the member's own header, with the prefix.

    Raises:
        HeaderError: The names differ in exactly one byte; of a longer name, `own` may be only the first 99 or 100
            bytes. Or `name` has no key, and `own` is another name: a damaged byte may have removed the key. Non-ASCII
            characters that `own` lacks or replaces with `?` do not make it another name.
    """
    raw, replaced = name.encode(), name.encode("ascii", "replace")
    if own in (raw, replaced, name.encode("ascii", "ignore")):
        return
    for known in (raw, replaced):
        is_cut = MAX_NAME_BYTES - 1 <= len(own) <= MAX_NAME_BYTES < len(known)
        if (is_cut or len(own) == len(known)) and sum(map(int.__ne__, known, own)) == 1:
            raise HeaderError(f"the long name {name!r} and the member's header differ in one byte")
    if split_name(name) is None:
        raise HeaderError(f"the long name {name!r} has no key, and the member's header does not confirm it")


def restored_field(name: str, key: str) -> str:
    """Return the field of a member that belongs to the sample `key`, if its name is damaged in one byte.

    Except for this byte, `name` starts with `key` and exactly one dot. The byte must be after the first 100 bytes of
    the name, or not ASCII in both `name` and `key`, because a header's checksum covers all other bytes. Return "" for
    any other `name`, also if no byte differs.
    """
    text, known = name.encode(), f"{key}.".encode()
    wrong = [at for at, (one, other) in enumerate(zip(text, known, strict=False)) if one != other]
    if len(text) <= len(known) or len(wrong) != 1:
        return ""
    [at] = wrong
    is_weak = at >= MAX_NAME_BYTES or (text[at] >= 128 and known[at] >= 128)  # a checksum covers all other bytes
    field = text[len(known) :].decode(errors="replace").lower()
    return field if is_weak and not field.startswith(".") else ""  # `n10.jpg` after `n1.jpg` is another sample
