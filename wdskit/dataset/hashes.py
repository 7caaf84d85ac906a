"""Hashes of 64 bits: of keys, and which of many are repeated or known, in little more memory than they take."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 20
_PARTS = 16


def hash_key(key: str) -> bytes:
    """64 bits of a key: 10**7 keys take 80 MB as an array, where a set of them takes 1.1 GB."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()


def find_repeated(*parts: NDArray[Any]) -> NDArray[Any]:
    """Hashes that occur more than once in all parts together, sorted.

    A sorted copy of ten million takes 80 MB, so a sixteenth of them is sorted at a time.

    Args:
        parts: Spread evenly over int64 or uint64, all of one type; otherwise it takes more memory.
    """
    if not parts:
        return np.empty(0, np.uint64)
    pieces = [parts[0][:0], *(piece for part in parts for piece in _pieces(part))]
    found = []
    for number in range(_PARTS):
        some = np.concatenate([piece[_part_of(piece) == number] for piece in pieces])
        some.sort()
        found.append(np.unique(some[1:][some[1:] == some[:-1]]))
    every = np.concatenate(found)
    every.sort()
    return every


def is_among(hashes: NDArray[Any], known: NDArray[Any]) -> NDArray[np.bool_]:
    """Which hashes are among those known, which are sorted: bool (num_hashes,)."""
    if not len(known) or not len(hashes):
        return np.zeros(len(hashes), np.bool_)
    return np.concatenate(
        [known[np.minimum(known.searchsorted(each), len(known) - 1)] == each for each in _pieces(hashes)]
    )


class SortedRuns:
    """Many numbers, in sorted runs of which each is longer than the next: as many as their number has binary digits."""

    def __init__(self) -> None:
        self._runs: list[NDArray[Any]] = []

    def add(self, run: NDArray[Any]) -> None:
        """Take more, which are sorted."""
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # merges two runs
        self._runs.append(run)

    def find(self, values: NDArray[Any]) -> NDArray[Any]:
        """Those of some sorted values that are among the numbers."""
        is_there = np.zeros(len(values), np.bool_)
        for run in self._runs:
            is_there |= is_among(values, run)
        return values[is_there]


def _pieces(hashes: NDArray[Any]) -> Sequence[NDArray[Any]]:
    return [hashes[start : start + _PIECE] for start in range(0, len(hashes), _PIECE)]


def _part_of(hashes: NDArray[Any]) -> NDArray[np.uint64]:
    part: NDArray[np.uint64] = hashes.view(np.uint64) % np.uint64(_PARTS)
    return part
