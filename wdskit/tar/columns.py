"""Headers of many plain members at once, by numpy: a batch of small samples is mostly headers.

Plain is what our writer and most others write: a regular file, ustar without a prefix, 11 octal digits and a NUL for
the size, 6 and NUL and space for the checksum, an ASCII name. A header that is not plain is not refused here: the exact
reader (`tar.reader`) has to read it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.limits import MAX_NAME_BYTES
from wdskit.tar.header import USTAR

_TYPE_AT, _PREFIX_AT = 156, 345
_FIXED = {135: 0, 154: 0, 155: ord(" "), _TYPE_AT: ord("0"), **dict(enumerate(USTAR, start=257)), _PREFIX_AT: 0}
_DIGITS = [*range(124, 135), *range(148, 154)]  # of the size, then of the checksum
_PLACES = np.array(_DIGITS + list(_FIXED))
_LEAST = np.array([ord("0")] * len(_DIGITS) + list(_FIXED.values()), dtype=np.uint8)
_RANGE = np.array([7] * len(_DIGITS) + [0] * len(_FIXED), dtype=np.uint8)
# Columns: the size, the checksum, the sum of the checksum's digits.
_WEIGHTS = np.array([[8.0**n, 0, 0] for n in range(10, -1, -1)] + [[0, 8.0**n, 1] for n in range(5, -1, -1)])
_UNCOUNTED = 6 * ord("0") + ord(" ") - 8 * ord(" ")  # bytes of the checksum's own field but for its digits, for spaces
_SUM_MODULUS = 1 << 16
_IS_ALNUM = np.array([chr(code).isalnum() and code < 128 for code in range(256)])


Ints = NDArray[np.int64]


class Headers(NamedTuple):
    """Headers by columns. Where `plain` is false, the other columns are undefined.

    Attributes:
        plain: Whether the header is that of a plain member and its checksum holds, bool (n,). A sum that is off by
            exactly 2**16 passes: it would need 257 damaged bytes of 255.
        sizes: Bytes of the member's data, int64 (n,).
        names: Names, uint8 (n, bytes of the longest); bytes after the end of a name are undefined.
        name_sizes: Bytes of each name, int64 (n,).
    """

    plain: NDArray[np.bool_]
    sizes: Ints
    names: NDArray[np.uint8]
    name_sizes: Ints


def parse_headers(blocks: NDArray[np.uint8]) -> Headers:
    """Read header blocks, uint8 (n, 512), n at least 1."""
    found = blocks[:, _PLACES]
    found -= _LEAST  # a smaller byte wraps around to more than any range
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
    """Return whether each header has the checksum that it states; a test replaces this function."""
    sums = blocks.sum(axis=1, dtype=np.uint16)
    hold: NDArray[np.bool_] = sums == (checksums + digits + _UNCOUNTED) % _SUM_MODULUS
    return hold


def key_sizes(headers: Headers) -> Ints:
    """Return the bytes of each name before the first dot after its last slash, int64 (n,); 0 if the name has no key, or
    if only `names.split_name` can decide.
    """
    names, columns = headers.names, np.arange(headers.names.shape[1])
    is_meta = (names[:, :2] == ord("_")).all(axis=1)
    dots = names == ord(".")
    behind: Ints | int = 0
    slashes = names == ord("/")
    if slashes.any():
        slashes &= headers.name_sizes[:, None] > columns
        behind = np.where(slashes.any(axis=1), len(columns) - slashes[:, ::-1].argmax(axis=1), 0)  # of the last one
        dots &= behind[:, None] <= columns
    sizes: Ints = dots.argmax(axis=1)  # 0 without a dot, or with a dot at the start
    sizes[(sizes <= behind) | (sizes + 1 >= headers.name_sizes) | is_meta] = 0
    return sizes


def says_its_name(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return whether each block, uint8 (n, 512), has the whole name of a member at its start, or is not a header: bool
    (n,). It is false if an extension header or a prefix has the name.
    """
    kinds = blocks[:, _TYPE_AT]
    says: NDArray[np.bool_] = ((kinds == ord("0")) | (kinds == 0)) & (blocks[:, _PREFIX_AT] == 0)
    return says


def start_alike(names: NDArray[np.uint8], others: NDArray[np.uint8], sizes: Ints) -> NDArray[np.bool_]:
    """Return whether the first `sizes` bytes of two names are equal, bool (n,); no name is shorter."""
    width = min(names.shape[1], others.shape[1])
    same = names[:, :width] == others[:, :width]
    same |= sizes[:, None] <= np.arange(width)
    alike: NDArray[np.bool_] = same.all(axis=1)
    return alike
