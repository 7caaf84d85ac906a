"""Interleave the parts of a mixture: find the part at each position, in proportion to the weights.

Positions are divided into blocks, and the samples of each part are spread evenly over a block. If c of the W samples
of a block are of one part, the first p positions of the block have p c / W of these samples, to within one. So any
range of positions has each part's share to within two samples.

Consecutive blocks with equal counts form a piece. The number of samples of each part before each piece is stored, so
a position is found without counting from the start.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wdskit.order.base import Ints, group_indices

Schedule = Mapping[int, float]
"""Maps positions to the weights from these positions on. The first position is 0."""

MAX_BLOCK = 1 << 16
MIN_SCHEDULED_BLOCK = 1 << 12
_NO_WEIGHT = "each schedule must start at 0, and at every position one part must have a weight above 0"


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

    Raises:
        ValueError: `schedules` is empty, a schedule does not start at 0, a weight is negative or not finite, or all
            weights are 0 at a position.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        starts = sorted({start for schedule in schedules for start in schedule})
        shares = [_shares_at(schedules, start) for start in starts]
        if not shares:
            raise ValueError(_NO_WEIGHT)
        # each part gets a whole number of samples of a block, or the shares are rounded to a block of `MAX_BLOCK`
        block = min(MAX_BLOCK, math.lcm(*(share.denominator for column in shares for share in column)))
        if len(starts) > 1:
            block *= -(-MIN_SCHEDULED_BLOCK // block)
        # From one change of the weights to the next: a piece of whole blocks, then a piece of one smaller block.
        pieces: list[tuple[int, int, list[int]]] = []  # (first position, block size, samples of each part in a block)
        for start, stop, share in zip(starts[:-1], starts[1:], shares[:-1], strict=True):
            rest = (stop - start) % block
            if stop - start > rest:
                pieces.append((start, block, _apportion(share, block)))
            if rest:
                pieces.append((stop - rest, rest, _apportion(share, rest)))
        pieces.append((starts[-1], block, _apportion(shares[-1], block)))
        self._firsts, self._sizes, self._counts = (np.array(each, dtype=np.int64) for each in zip(*pieces, strict=True))
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


def _shares_at(schedules: Sequence[Schedule], position: int) -> list[Fraction]:
    """Return the share of each part at a position. The sum of the shares is 1.

    Raises ValueError if a weight is negative or not finite, a schedule starts after `position`, or all weights are 0.
    """
    starts = [max((start for start in schedule if start <= position), default=None) for schedule in schedules]
    weights = [math.nan if at is None else schedule[at] for schedule, at in zip(schedules, starts, strict=True)]
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(_NO_WEIGHT)
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


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
