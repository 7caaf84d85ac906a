"""Member names: how a name splits into key and field, and whether the name of an extension header can be trusted."""

from __future__ import annotations

import re

from wdskit.limits import MAX_NAME_BYTES
from wdskit.tar.header import HeaderError

_META = re.compile(r"__[^/]*__($|/)")  # webdataset passes these over; energon and others keep notes there


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and lower-cased field: WebDataset's rule, the path up to the first dot after the
    last slash, and the rest.

    Returns:
        None for a member that belongs to no sample: its basename starts with a dot, has none, or ends in its only one,
        or its name begins with `__meta__`-like text.
    """
    key, _, field = name.partition(".")
    if "/" in field:  # the first dot is a folder's
        base = name.rfind("/") + 1
        stem, _, field = name[base:].partition(".")
        key = name[:base] + stem
    if not field or not key or key.endswith("/") or (name.startswith("__") and _META.match(name)):
        return None
    return key, field.lower()


def check_long_name(name: str, own: bytes) -> None:
    """Compare the name in an extension header, which no checksum covers, with the one in the member's own header.

    GNU tar, Python's tarfile and most others write the first 100 bytes of the long name there, or all of a name that is
    not ASCII, with `?` for other characters or without them. An abbreviation (libarchive) says nothing. What follows
    the first 100 bytes is covered by the shard's sha256 only. One changed byte there can take the key away, and the
    member would be passed over in silence; so only a name that the header confirms may have no key.

    Args:
        name: The name in the extension header.
        own: The name in the member's header, with its prefix.

    Raises:
        HeaderError: One byte differs, or the name has no key and the header does not confirm it.
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
    """Return the field that a member adds to the sample `key` if one byte of its name that no checksum covers is put
    right; "" if that does not make it a member of that sample.
    """
    text, known = name.encode(), f"{key}.".encode()
    wrong = [at for at, (one, other) in enumerate(zip(text, known, strict=False)) if one != other]
    if len(text) <= len(known) or len(wrong) != 1:
        return ""
    [at] = wrong
    is_weak = at >= MAX_NAME_BYTES or (text[at] >= 128 and known[at] >= 128)  # others are in the member's own header
    field = text[len(known) :].decode(errors="replace").lower()
    return field if is_weak and not field.startswith(".") else ""  # `n10.jpg` after `n1.jpg` is another sample
