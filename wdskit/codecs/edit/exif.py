"""Read the orientation of an EXIF block, or remove it. Other entries are neither read nor changed.

An EXIF block is a TIFF header and a chain of directories whose entries have 12 bytes each: tag, type, count, value
(CIPA DC-008-2023, 4.6.2).
"""

from __future__ import annotations

from typing import Literal

PREFIX = b"Exif\0\0"
"""The bytes before an EXIF block in a JPEG segment."""

_ORIENTATION = 0x0112
_ENTRY_BYTES = 12
_VALUE_BYTES = {3: 2, 4: 4}  # SHORT, the standard's type, and LONG, which some programs write
_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}


def orientation_of(block: bytes) -> int:
    """Return the orientation, 1 to 8; 1 (upright) if the block is invalid or has no valid orientation."""
    order, _, entries = _first_directory(block)
    for entry in entries:
        if int.from_bytes(entry[:2], order) == _ORIENTATION:
            num_bytes = _VALUE_BYTES.get(int.from_bytes(entry[2:4], order), 0)
            value = int.from_bytes(entry[8 : 8 + num_bytes], order)
            return value if 1 <= value <= 8 else 1
    return 1


def without_orientation(block: bytes) -> bytes:
    """Return an EXIF block without its orientation; `block` itself if it has no orientation.

    The new block has the same length, and the values outside of the directory keep their offsets.
    """
    order, first, entries = _first_directory(block)
    kept = [entry for entry in entries if int.from_bytes(entry[:2], order) != _ORIENTATION]
    num_removed = len(entries) - len(kept)
    if not num_removed:
        return block
    count = int.from_bytes(block[first - 2 : first], order)
    end = first + _ENTRY_BYTES * count + 4  # the offset of the next directory follows the entries
    rest = b"".join(kept) + block[first + _ENTRY_BYTES * len(entries) : end] + bytes(_ENTRY_BYTES * num_removed)
    return block[: first - 2] + (count - num_removed).to_bytes(2, order) + rest + block[end:]


def _first_directory(block: bytes) -> tuple[Literal["little", "big"], int, list[bytes]]:
    """Return the byte order, the offset of the first entry, and the entries of the first directory.

    Entries that are cut off are left out. An invalid block gives ("little", 0, []).
    """
    order = _ORDERS.get(block[:4])
    directory = int.from_bytes(block[4:8], order) if order else 0
    if order is None or directory < 8:
        return "little", 0, []
    first = directory + 2
    end = first + _ENTRY_BYTES * int.from_bytes(block[directory:first], order)
    starts = range(first, min(end, len(block)) - _ENTRY_BYTES + 1, _ENTRY_BYTES)
    return order, first, [block[start : start + _ENTRY_BYTES] for start in starts]
