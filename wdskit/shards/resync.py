"""Finding the way again behind damage: offsets that may be believed, and headers that are some."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wdskit.dataset.offsets import offsets_path
from wdskit.errors import StorageError
from wdskit.limits import BLOCK_BYTES
from wdskit.storage.urls import LocalFile, read_bytes
from wdskit.tar.header import GNU_LONG_NAME_TYPE, PAX_TYPE, REGULAR_TYPES, HeaderError, checksum_holds, parse_header

SEARCH_BYTES = 1 << 20

_MAGIC = b"ustar"
_MAGIC_AT = 257
_STARTING_TYPES = REGULAR_TYPES | {PAX_TYPE, GNU_LONG_NAME_TYPE}
_MAX_IDX_BYTES = 16 << 20  # two million samples
_MAX_PLAIN_KEY = 90


def is_header(block: bytes) -> bool:
    """Whether a member can start with this block: all of a header is right, its checksum exactly."""
    if len(block) < BLOCK_BYTES or not any(block):
        return False
    try:
        return parse_header(block).typeflag in _STARTING_TYPES and checksum_holds(block)
    except HeaderError:
        return False


def headers_after(file: LocalFile, at: int) -> Iterator[int]:
    """Offsets of valid ustar headers behind `at`, at any byte: what is lost need not be a multiple of a block."""
    at += 1
    while data := file.read_at(at, SEARCH_BYTES):
        place = data.find(_MAGIC, _MAGIC_AT)
        while place >= 0:
            start = at + place - _MAGIC_AT
            if is_header(file.read_at(start, BLOCK_BYTES)):
                yield start
            place = data.find(_MAGIC, place + 1)
        if len(data) < SEARCH_BYTES:
            return
        at += SEARCH_BYTES - _MAGIC_AT - len(_MAGIC)


def is_plain_key(key: str) -> bool:
    """Whether a header alone can have given this key: where an extension header is lost, what follows has the name's
    first 100 bytes, or question marks in it.
    """
    return len(key) < _MAX_PLAIN_KEY and key.isascii() and "?" not in key


def known_starts(shard: str) -> frozenset[int]:
    """Where the .idx says that samples start and the last one ends; nothing where it does not read.

    They are not compared with the shard's size, for it may be cut.
    """
    path = offsets_path(shard)
    try:
        data = read_bytes(str(path), limit=_MAX_IDX_BYTES) if path.is_file() else b""
    except StorageError:
        return frozenset()
    starts = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8")
    if len(data) % 8 or np.any(starts[1:] <= starts[:-1]) or np.any(starts % np.uint64(BLOCK_BYTES)):
        return frozenset()
    return frozenset(starts.tolist())
