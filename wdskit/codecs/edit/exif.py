"""EXIF blocks: the orientation in one, and the block without it. Nothing else of them is looked at or changed.

An EXIF block is a TIFF header and a chain of directories whose entries have 12 bytes each: tag, type, count, value
(CIPA DC-008-2023, 4.6.2).
"""

from __future__ import annotations

from typing import Literal

PREFIX = b"Exif\0\0"
"""What stands before the block in a JPEG."""

_ORIENTATION = 0x0112
_ENTRY_BYTES = 12
_VALUE_BYTES = {3: 2, 4: 4}  # SHORT, as the standard says, and LONG, as some programs write
_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}


def orientation_of(block: bytes) -> int:
    """The orientation, 1 to 8; 1 (upright) where the block has none, or none of these."""
    order, _, entries = _first_directory(block)
    for entry in entries:
        if int.from_bytes(entry[:2], order) == _ORIENTATION:
            num_bytes = _VALUE_BYTES.get(int.from_bytes(entry[2:4], order), 0)
            value = int.from_bytes(entry[8 : 8 + num_bytes], order)
            return value if 1 <= value <= 8 else 1
    return 1


def without_orientation(block: bytes) -> bytes:
    """Remove the orientation from an EXIF block. Only the directory entries after it move."""
    order, first, entries = _first_directory(block)
    kept = [entry for entry in entries if int.from_bytes(entry[:2], order) != _ORIENTATION]
    num_gone = len(entries) - len(kept)
    if not num_gone:
        return block
    count = int.from_bytes(block[first - 2 : first], order)
    end = first + _ENTRY_BYTES * count + 4  # the offset of the next directory follows the entries
    rest = b"".join(kept) + block[first + _ENTRY_BYTES * len(entries) : end] + bytes(_ENTRY_BYTES * num_gone)
    return block[: first - 2] + (count - num_gone).to_bytes(2, order) + rest + block[end:]


def _first_directory(block: bytes) -> tuple[Literal["little", "big"], int, list[bytes]]:
    """The byte order, where the entries of the first directory start, and those that the block holds whole."""
    order = _ORDERS.get(block[:4])
    directory = int.from_bytes(block[4:8], order) if order else 0
    if order is None or directory < 8:
        return "little", 0, []
    first = directory + 2
    end = first + _ENTRY_BYTES * int.from_bytes(block[directory:first], order)
    starts = range(first, min(end, len(block)) - _ENTRY_BYTES + 1, _ENTRY_BYTES)
    return order, first, [block[start : start + _ENTRY_BYTES] for start in starts]
