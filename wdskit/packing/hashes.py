"""Which of many numbers of 64 bits, hashes, come twice, or are among others: in little more memory than they take."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 20
_PARTS = 16


def find_twice(hashes: NDArray[Any]) -> NDArray[Any]:
    """Those that come more than once, sorted. Of ten million a sorted copy takes 80 MB, so a part is taken at a time.

    Args:
        hashes: Spread evenly over int64 or uint64; otherwise it takes more memory.
    """
    found = []
    for part in range(_PARTS):
        some = np.concatenate([each[_part_of(each) == part] for each in _pieces(hashes)] or [hashes])
        some.sort()
        found.append(np.unique(some[1:][some[1:] == some[:-1]]))
    every = np.concatenate(found)
    every.sort()
    return every


def stand_in(known: NDArray[Any], hashes: NDArray[Any]) -> NDArray[np.bool_]:
    """Which hashes are among those known, which are sorted."""
    if not len(known) or not len(hashes):
        return np.zeros(len(hashes), np.bool_)
    return np.concatenate(
        [known[np.minimum(known.searchsorted(each), len(known) - 1)] == each for each in _pieces(hashes)]
    )


def _pieces(hashes: NDArray[Any]) -> list[NDArray[Any]]:
    return [hashes[start : start + _PIECE] for start in range(0, len(hashes), _PIECE)]


def _part_of(hashes: NDArray[Any]) -> NDArray[np.uint64]:
    part: NDArray[np.uint64] = hashes.view(np.uint64) % np.uint64(_PARTS)
    return part
