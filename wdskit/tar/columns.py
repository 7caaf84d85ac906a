"""Parse the headers of many plain members at once with numpy: a batch of small samples is mostly headers.

wdskit and most other writers write plain headers: a regular file, ustar without a prefix, 11 octal digits and a NUL for
the size, 6 octal digits, NUL and space for the checksum, an ASCII name. Other headers are only marked, as not plain;
the strict reader (`tar.reader`) has to read and check them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.limits import MAX_NAME_BYTES
from wdskit.tar.header import USTAR

_TYPE_AT, _PREFIX_AT = 156, 345
_FIXED = {135: 0, 154: 0, 155: ord(" "), _TYPE_AT: ord("0"), **dict(enumerate(USTAR, start=257)), _PREFIX_AT: 0}
_DIGITS = [*range(124, 135), *range(148, 154)]  # offsets of the size's digits, then of the checksum's
_OFFSETS = np.array(_DIGITS + list(_FIXED))
_LOWEST = np.array([ord("0")] * len(_DIGITS) + list(_FIXED.values()), dtype=np.uint8)
_RANGE = np.array([7] * len(_DIGITS) + [0] * len(_FIXED), dtype=np.uint8)
# Columns: the size, the checksum, the sum of the checksum's digits.
_WEIGHTS = np.array([[8.0**n, 0, 0] for n in range(10, -1, -1)] + [[0, 8.0**n, 1] for n in range(5, -1, -1)])
# The checksum counts its own field as eight spaces; the sum of the block counts six digits, a NUL and a space there.
_UNCOUNTED = 6 * ord("0") + ord(" ") - 8 * ord(" ")
_SUM_MODULUS = 1 << 16
_IS_ALNUM = np.array([chr(code).isalnum() and code < 128 for code in range(256)])


Ints = NDArray[np.int64]


class Headers(NamedTuple):
    """Parsed headers, one array per value. If `plain` is False for a header, its other values are undefined.

    Attributes:
        plain: Whether the header describes a plain member and its checksum, compared modulo 2**16, is right, bool (n,).
        sizes: Bytes of the member's data, int64 (n,).
        names: Names, uint8 (n, bytes of the longest name); bytes after the end of a name are undefined.
        name_sizes: Bytes of each name, int64 (n,).
    """

    plain: NDArray[np.bool_]
    sizes: Ints
    names: NDArray[np.uint8]
    name_sizes: Ints


def parse_headers(blocks: NDArray[np.uint8]) -> Headers:
    """Parse header blocks, uint8 (n, 512), n >= 1. The result marks an invalid block as not `plain`."""
    found = blocks[:, _OFFSETS]
    found -= _LOWEST  # a smaller byte wraps around to more than any range
    numbers = (found[:, : len(_DIGITS)].astype(np.float64) @ _WEIGHTS).astype(np.int64)  # at most 8**11, so exact
    sizes, checksums, digits = numbers.T
    names = blocks[:, :MAX_NAME_BYTES]
    width = min(MAX_NAME_BYTES, int(np.flatnonzero(names.any(axis=0))[-1:].sum()) + 2)
    names = np.ascontiguousarray(names[:, :width])
    name_sizes = (names == 0).argmax(axis=1)
    if width == MAX_NAME_BYTES:
        name_sizes[names.all(axis=1)] = width
    plain = (found <= _RANGE).all(axis=1)
    plain &= _checksums_hold(blocks, checksums, digits)
    plain &= _IS_ALNUM[names[np.arange(len(names)), name_sizes - 1]]
    plain &= name_sizes > 0
    if names.max() >= 128:
        plain &= (names < 128).all(axis=1)
    return Headers(plain, sizes, names, name_sizes)


def _checksums_hold(blocks: NDArray[np.uint8], checksums: Ints, digits: Ints) -> NDArray[np.bool_]:
    """Return whether the checksum of each block is right, bool (n,).

    `checksums` are the numbers in the checksum fields, and `digits` the sums of the octal digits of these numbers.
    """
    # a function of its own, because a test replaces it
    sums = blocks.sum(axis=1, dtype=np.uint16)
    hold: NDArray[np.bool_] = sums == (checksums + digits + _UNCOUNTED) % _SUM_MODULUS
    return hold


def key_sizes(headers: Headers) -> Ints:
    """Return the number of bytes of the key in each name, int64 (n,). A key ends at the first dot after the last slash.

    The number is 0 for a name without a key or without a field, and for a name that starts with `__`, which
    `names.split_name` must split.
    """
    names, columns = headers.names, np.arange(headers.names.shape[1])
    is_meta = (names[:, :2] == ord("_")).all(axis=1)
    dots = names == ord(".")
    base_starts: Ints | int = 0
    slashes = names == ord("/")
    if slashes.any():
        slashes &= headers.name_sizes[:, None] > columns
        base_starts = np.where(slashes.any(axis=1), len(columns) - slashes[:, ::-1].argmax(axis=1), 0)  # the last slash
        dots &= base_starts[:, None] <= columns
    sizes: Ints = dots.argmax(axis=1)  # 0 without a dot, or with a dot at the start
    sizes[(sizes <= base_starts) | (sizes + 1 >= headers.name_sizes) | is_meta] = 0
    return sizes


def has_inline_name(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return for each block whether its first 100 bytes are the whole name of a regular file, bool (n,).

    `blocks` is uint8 (n, 512). True also for the zeros of the end marker. False for an extension header, and for a
    header with a prefix.
    """
    kinds = blocks[:, _TYPE_AT]
    is_inline: NDArray[np.bool_] = ((kinds == ord("0")) | (kinds == 0)) & (blocks[:, _PREFIX_AT] == 0)
    return is_inline


def have_equal_starts(names: NDArray[np.uint8], others: NDArray[np.uint8], sizes: Ints) -> NDArray[np.bool_]:
    """Compare the starts of rows: return whether `names[i, :sizes[i]]` and `others[i, :sizes[i]]` are equal, bool (n,).

    Both arrays need at least `max(sizes)` columns.
    """
    width = min(names.shape[1], others.shape[1])
    same = names[:, :width] == others[:, :width]
    same |= sizes[:, None] <= np.arange(width)
    is_equal: NDArray[np.bool_] = same.all(axis=1)
    return is_equal
