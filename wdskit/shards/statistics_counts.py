"""Counting in bounded memory: what the parts counted, put together in any order, is what one pass counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from fractions import Fraction
from itertools import count
from math import ceil, floor, log10
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

MAX_DIFFERENT = 100_000
"""Different numbers that are told apart: all widths of images there are, all sizes in most data sets."""

MAX_BINS = 40
_EXACT_BITS = 11


class Counts(Generic[T]):
    """How often each value came, up to a number of different ones.

    Args:
        limit: Beyond so many different values they are made coarse, or not counted any more.
        coarse: Makes a value one of few, the same when done twice.

    Attributes:
        total: Values that came.
        by_value: How often each; empty once there were too many and they cannot be made coarse.
        is_exact: Whether each value that came stands for itself in it.
    """

    def __init__(self, limit: int = MAX_DIFFERENT, coarse: Callable[[T], T] | None = None) -> None:
        self.total = 0
        self.by_value: dict[T, int] = {}
        self.is_exact = True
        self._limit = limit
        self._coarse = coarse

    def add(self, value: T, times: int = 1) -> None:
        """Count one value."""
        self.total += times
        if not self.is_exact:
            if self._coarse is None:
                return
            value = self._coarse(value)
        self.by_value[value] = self.by_value.get(value, 0) + times
        if self.is_exact and len(self.by_value) > self._limit:
            self._coarsen()

    def merge(self, other: Counts[T]) -> None:
        """Count what another one did."""
        if self.is_exact and not other.is_exact:
            self._coarsen()
        before = self.total
        for value, times in other.by_value.items():
            self.add(value, times)
        self.total = before + other.total

    def _coarsen(self) -> None:
        fine, self.by_value = self.by_value, {}
        self.is_exact = False
        if self._coarse is not None:
            for value, times in fine.items():
                coarse = self._coarse(value)
                self.by_value[coarse] = self.by_value.get(coarse, 0) + times

    def ranked(self) -> list[tuple[T, int]]:
        """Values and how often they came, the commonest first; of equally common ones the least."""

        def rank(item: tuple[Any, int]) -> tuple[int, Any]:
            return -item[1], item[0]

        return sorted(self.by_value.items(), key=rank)


def round_number(value: int) -> int:
    """The middle of 1,024 steps to the double: at most 0.05 % off; exact below 2,048."""
    shift = value.bit_length() - _EXACT_BITS
    return value if shift <= 0 else (value >> shift << shift) + (1 << shift >> 1)


def round_pair(pair: tuple[int, int]) -> tuple[int, int]:
    """Width and height in 16 steps to the double: at most 3.2 % off; exact below 32."""
    left, right = (max(0, side.bit_length() - 5) for side in pair)
    return (
        (pair[0] >> left << left) + (1 << left >> 1),
        (pair[1] >> right << right) + (1 << right >> 1),
    )


class Numbers:
    """Whole numbers of 0 or more: exact count, sum, least and most; quantiles exact up to `MAX_DIFFERENT` different
    numbers, beyond that within 0.05 %.

    Attributes:
        counts: The numbers.
        total: Their sum.
        least: The least, None without any.
        most: The most.
    """

    def __init__(self) -> None:
        self.counts: Counts[int] = Counts(MAX_DIFFERENT, round_number)
        self.total = 0
        self.least: int | None = None
        self.most: int | None = None

    def add(self, value: int) -> None:
        """Count one."""
        self.counts.add(value)
        self.total += value
        if self.most is None or value > self.most:
            self.most = value
        if self.least is None or value < self.least:
            self.least = value

    def merge(self, other: Numbers) -> None:
        """Count those of another."""
        if other.least is None or other.most is None:
            return
        self.counts.merge(other.counts)
        self.total += other.total
        self.least = other.least if self.least is None else min(self.least, other.least)
        self.most = other.most if self.most is None else max(self.most, other.most)

    def quantiles(self, shares: Iterable[Fraction]) -> list[int]:
        """For each share, rising, the least number so that at least this share of all numbers is no greater."""
        found = []
        items = iter(sorted(self.counts.by_value.items()))
        below, value = 0, 0
        for share in shares:
            while below < ceil(share * self.counts.total):
                value, times = next(items)
                below += times
            found.append(min(max(value, self.least or 0), self.most or 0))
        return found

    def bins(self) -> tuple[tuple[int, int, int], ...]:
        """(low, high, count): how many are from `low` to below `high`, rising, without a gap.

        Where the most is over 20 times the least the bins widen with their numbers, eight to a factor of ten.
        """
        if self.least is None or self.most is None:
            return ()
        edges = _log_edges(self.least, self.most) if self.most > 20 * self.least else _even_edges(self.least, self.most)
        counts = [0] * (len(edges) - 1)
        for value, times in self.counts.by_value.items():
            value = min(max(value, self.least), self.most)
            counts[bisect_right(edges, value) - 1] += times
        return tuple(zip(edges, edges[1:], counts, strict=False))


def _even_edges(least: int, most: int) -> list[int]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    steps = (digit * 10**power for power in count() for digit in (1, 2, 5))
    step = next(step for step in steps if (most - least) // step < MAX_BINS)
    return list(range(least // step * step, most + step + 1, step))[: (most // step) - (least // step) + 2]


def _log_edges(least: int, most: int) -> list[int]:
    """Eighths of a factor of ten, rounded; 0 has a bin of its own."""
    first = floor(8 * log10(least)) if least else 0
    edges = dict.fromkeys([] if least else [0])
    for eighth in count(first):
        edges[round(10 ** (eighth / 8))] = None
        if round(10 ** (eighth / 8)) > most:
            return list(edges)
    raise AssertionError
