"""Interleave the parts of a mixture: find the part at each position, in proportion to the weights.

Positions are divided into blocks, and the samples of each part are spread evenly over a block. If c of the W samples
of a block are of one part, the first p positions of the block have p c / W of these samples, to within one. So any
range of positions has each part's share to within two samples.

Consecutive blocks with equal counts form a piece. The number of samples of each part before each piece is stored, so
a position is found without counting from the start.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wdskit.order.base import Ints, group_indices

Schedule = Mapping[int, float]
"""Maps positions to the weights at these positions; `Change` decides between them. The first position is 0."""

Change = Literal["step", "linear"]

MAX_BLOCK = 1 << 16
MIN_SCHEDULED_BLOCK = 1 << 12
SLOPE_PIECES = 1 << 10
"""A linear change between two weights has less than twice this number of steps of whole blocks."""
_NO_WEIGHT = "at every position, at least one part must have a weight above 0"


class _Block(NamedTuple):
    """A block of positions.

    Attributes:
        parts: The part at each place of the block.
        before: For each place, the number of earlier places of the block with the same part.
    """

    parts: NDArray[np.uint32]
    before: NDArray[np.uint32]


class PartInterleaver:
    """Finds the part of a mixture at each position of an endless sequence.

    Args:
        schedules: For each part, a mapping of positions to the part's weights from these positions on. The first
            position is 0. Weights are finite and at least 0. At every position, one part or more has a weight above 0.
        change: Between two positions of a schedule, the weight keeps its earlier value ("step"), or changes linearly
            ("linear"). After the last position of a schedule, the weight stays the same.

    Raises:
        ValueError: `schedules` is empty, a schedule does not start at 0, a weight is negative or not finite, or all
            weights are 0 at a position.
    """

    def __init__(self, schedules: Sequence[Schedule], *, change: Change = "step") -> None:
        keys = sorted({key for schedule in schedules for key in schedule})
        weights = [_weights(schedule, keys, change) for schedule in schedules]
        columns = [_normalised(column) for column in zip(*weights, strict=True)]
        if not columns:
            raise ValueError(_NO_WEIGHT)
        pieces = _pieces(keys, change, _block_size(columns, scheduled=len(keys) > 1))
        middles = [(first + stop) // 2 for (first, _), (stop, _) in pairwise([*pieces, pieces[-1]])]
        shares = (_normalised([_weight_at(row, keys, change, middle) for row in weights]) for middle in middles)
        counts = [_apportion(share, size) for share, (_, size) in zip(shares, pieces, strict=True)]
        self._firsts: Ints = np.array([first for first, _ in pieces], dtype=np.int64)
        self._sizes: Ints = np.array([size for _, size in pieces], dtype=np.int64)
        self._counts: Ints = np.array(counts, dtype=np.int64)
        num_blocks = np.diff(self._firsts) // self._sizes[:-1]
        grown = np.cumsum(self._counts[:-1] * num_blocks[:, None], axis=0)
        self._before: Ints = np.concatenate([np.zeros_like(self._counts[:1]), grown])

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return the part at each position, and how many earlier positions have the same part.

        Args:
            positions: int64 (n,), at least 0, in any order.

        Returns:
            (part, index), int64 (n,) each. The index is also the position in the part's own order.
        """
        positions = np.asarray(positions, dtype=np.int64)
        pieces = np.searchsorted(self._firsts, positions, side="right") - 1
        blocks, places = np.divmod(positions - self._firsts[pieces], self._sizes[pieces])
        parts, indices = np.empty_like(places), np.empty_like(places)
        for piece, at in group_indices(pieces):
            counts = self._counts[piece]
            block = _make_block(*counts.tolist())
            own = block.parts[places[at]].astype(np.int64)
            parts[at] = own
            indices[at] = self._before[piece][own] + blocks[at] * counts[own] + block.before[places[at]]
        return parts, indices


def _weights(schedule: Schedule, keys: Sequence[int], change: Change) -> list[Fraction]:
    """Return the weight of a part at each of the positions `keys`.

    Raises ValueError if `schedule` does not start at position 0, or a weight is negative or not finite.
    """
    if min(schedule, default=-1) != 0 or any(not 0 <= weight < math.inf for weight in schedule.values()):
        msg = f"a schedule must start at position 0 and have weights of 0 or more, not {dict(schedule)}"
        raise ValueError(msg)
    own = sorted(schedule)
    values = [Fraction(str(schedule[key])) for key in own]
    return [_weight_at(values, own, change, key) for key in keys]


def _normalised(weights: Sequence[Fraction]) -> list[Fraction]:
    """Return the weights divided by their sum. Raises ValueError if all weights are 0."""
    total = sum(weights, Fraction(0))
    if not total:
        raise ValueError(_NO_WEIGHT)
    return [weight / total for weight in weights]


def _block_size(columns: Sequence[Sequence[Fraction]], *, scheduled: bool) -> int:
    """Return the number of positions of a block, so that each part gets a whole number of samples.

    `columns` has the shares of all parts at each position of a schedule. If the block would have more than `MAX_BLOCK`
    positions, return `MAX_BLOCK`: the shares are then rounded. If `scheduled`, the weights change during the sequence,
    and the block has at least `MIN_SCHEDULED_BLOCK` positions.
    """
    denominator = min(MAX_BLOCK, math.lcm(*(share.denominator for column in columns for share in column)))
    return denominator * -(-MIN_SCHEDULED_BLOCK // denominator) if scheduled else denominator


def _pieces(keys: Sequence[int], change: Change, block: int) -> list[tuple[int, int]]:
    """Return (first position, block size) of each piece, sorted. The last piece is endless.

    The weights change at the positions `keys`; if `change` is "linear", also at positions between the keys. From one
    change to the next, there is a piece with blocks of `block` positions, then a piece of one smaller block for the
    positions that do not fill a block. A piece without positions is left out.
    """
    changes = set(keys)
    if change == "linear":
        for key, next_key in pairwise(keys):
            changes |= set(range(key, next_key, block * max(1, (next_key - key) // block // SLOPE_PIECES)))
    pieces = []
    for first, stop in pairwise(sorted(changes)):
        rest = (stop - first) % block
        if stop - first > rest:
            pieces.append((first, block))
        if rest:
            pieces.append((stop - rest, rest))
    return [*pieces, (max(changes), block)]


def _weight_at(weights: Sequence[Fraction], keys: Sequence[int], change: Change, position: int) -> Fraction:
    """Return a part's weight at a position.

    `weights` are the part's weights at the positions `keys`. Between two keys, the weight is the weight at the lower
    key ("step"), or changes linearly ("linear"). After the last key, the weight stays the same.
    """
    at = bisect.bisect_right(keys, position) - 1
    if change == "step" or at + 1 == len(keys):
        return weights[at]
    return weights[at] + (weights[at + 1] - weights[at]) * (position - keys[at]) / (keys[at + 1] - keys[at])


def _apportion(shares: Sequence[Fraction], total: int) -> list[int]:
    """Divide `total` into whole numbers in proportion to `shares`, whose sum is 1, and return these numbers.

    Each number is rounded down. Then the parts with the largest remainders get 1 more each, until the sum is `total`.
    Of parts with equal remainders, the first part gets 1 more first.
    """
    exact = [share * total for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(counts)), key=lambda part: (counts[part] - exact[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts


@functools.lru_cache(maxsize=16)  # 8 bytes for each of at most 65,536 places
def _make_block(*counts: int) -> _Block:
    """Return a block with `counts[i]` samples of part i, spread evenly.

    Algorithm: Steiner and Yeomans, Level schedules for mixed-model, just-in-time processes, 1993.
    """
    # Of W places, sample j of a part with c samples may take floor(j W / c) to ceil((j + 1) W / c) - 1. Each place gets
    # the allowed sample with the earliest last place.
    size = sum(counts)
    parts = np.empty(size, dtype=np.uint32)
    before = np.empty(size, dtype=np.uint32)
    waiting = [(0, part, 0) for part, count in enumerate(counts) if count]  # (first place, part, j)
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []  # (last place, part, j)
    for place in range(size):
        while waiting and waiting[0][0] <= place:
            _, part, j = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(j + 1) * size // counts[part]) - 1, part, j))
        last, part, j = heapq.heappop(ready)
        assert last >= place
        parts[place], before[place] = part, j
        if j + 1 < counts[part]:
            heapq.heappush(waiting, ((j + 1) * size // counts[part], part, j + 1))
    return _Block(parts, before)
