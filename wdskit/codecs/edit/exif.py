"""EXIF blocks: the orientation in one, and the block without it. Nothing else of them is looked at or changed.

An EXIF block is a TIFF header and a chain of directories whose entries have 12 bytes each: tag, type, count, value
(CIPA DC-008-2023, 4.6.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

PREFIX = b"Exif\0\0"
"""What stands before the block in a JPEG."""

_ORIENTATION = 0x0112
_ENTRY_BYTES = 12
_VALUE_BYTES = {3: 2, 4: 4}  # SHORT, as the standard says, and LONG, as some programs write


class _Found(NamedTuple):
    """An orientation entry: where its directory starts and ends, where it stands, and its value."""

    directory: int
    end: int
    at: int
    order: Literal["little", "big"]
    value: int


def orientation_of(block: bytes) -> int:
    """The orientation, 1 to 8; 1 (upright) where the block has none, or none of these."""
    for found in _orientations(block):
        return found.value if 1 <= found.value <= 8 else 1
    return 1


def without_orientation(block: bytes) -> bytes:
    """The block without its orientation, every other byte where it was but for the entries behind it."""
    while found := next(_orientations(block), None):
        count = int.from_bytes(block[found.directory : found.directory + 2], found.order) - 1
        rest = block[found.at + _ENTRY_BYTES : found.end] + bytes(_ENTRY_BYTES)
        counted = block[: found.directory] + count.to_bytes(2, found.order) + block[found.directory + 2 : found.at]
        block = counted + rest + block[found.end :]
    return block


def _orientations(block: bytes) -> Iterator[_Found]:
    """The orientation entries of the first directory."""
    order: Literal["little", "big"] | None
    order = "little" if block[:4] == b"II*\0" else "big" if block[:4] == b"MM\0*" else None
    if order is None:
        return
    directory = int.from_bytes(block[4:8], order)
    first = directory + 2
    count = int.from_bytes(block[directory:first], order) if directory >= 8 else 0
    end = min(len(block), first + _ENTRY_BYTES * count + 4)  # the place of the next directory stands behind the entries
    for at in range(first, end - _ENTRY_BYTES + 1, _ENTRY_BYTES):
        if at >= first + _ENTRY_BYTES * count:
            return
        if int.from_bytes(block[at : at + 2], order) != _ORIENTATION:
            continue
        num_bytes = _VALUE_BYTES.get(int.from_bytes(block[at + 2 : at + 4], order), 0)
        yield _Found(directory, end, at, order, int.from_bytes(block[at + 8 : at + 8 + num_bytes], order))
