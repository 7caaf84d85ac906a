"""How far batches are from a uniform draw, told by an order alone.

The worst case is taken for the data: sorted by class, as a folder of folders is. What shuffles then is the order and
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wdskit.order.base import Ints, Order
from wdskit.order.exact import ExactOrder
from wdskit.order.reads import shared
from wdskit.order.steps import Steps

_MAX_STEPS = 24
_MAX_POSITIONS = 1 << 18


class SortedData:
    """Data sets as if each were sorted by class, all into the same classes of equal size.

    Args:
        counts: For each data set of an order, samples of its shards; the shards are numbered through.
        num_classes: K; at most as many as a data set has samples.
    """

    def __init__(self, counts: Sequence[ArrayLike], num_classes: int) -> None:
        self.num_classes = num_classes
        each = [np.asarray(one, dtype=np.int64) for one in counts]
        self._firsts = np.concatenate([np.cumsum(one) - one for one in each])
        self._totals = np.concatenate([np.full(len(one), max(1, int(one.sum()))) for one in each])

    def depths(self, shards: Ints, samples: Ints) -> NDArray[np.float64]:
        """Where samples stand in their data set, 0 at its beginning, below 1."""
        depths: NDArray[np.float64] = (self._firsts[shards] + samples) / self._totals[shards]
        return depths

    def classes(self, shards: Ints, samples: Ints) -> Ints:
        """Number of the class of each sample, 0..K-1."""
        classes: Ints = (self._firsts[shards] + samples) * self.num_classes // self._totals[shards]
        return classes


class Mixing(NamedTuple):
    """Classes in batches of some steps of an epoch.

    Attributes:
        steps: Their numbers, (num_steps,).
        of_ranks: Different classes in the batch of each rank, (num_steps, world_size).
        of_all: Different classes in the global batch, (num_steps,).
    """

    steps: Ints
    of_ranks: Ints
    of_all: Ints


def mixing(order: Order, data: SortedData, steps: Steps, start: int) -> Mixing | None:
    """Count classes in steps all over an epoch, the first and the last full one among them.

    Args:
        order: The order.
        data: Its data sets.
        steps: Of the epoch.
        start: Position of the epoch's first sample in the endless sequence.

    Returns:
        None where no step is full.
    """
    size = steps.global_batch
    num_full = steps.num_samples // size
    if not num_full:
        return None
    num = max(1, min(_MAX_STEPS, num_full, _MAX_POSITIONS // size))
    numbers = np.unique(np.linspace(0, num_full - 1, num).round().astype(np.int64))
    of_ranks, of_all = [], []
    for number in numbers.tolist():
        classes = data.classes(*order.take(start + number * size + np.arange(size)))
        of_ranks.append(_different(classes.reshape(steps.batch, steps.world_size).T))
        of_all.append(int(_different(classes[None])[0]))
    return Mixing(numbers, np.array(of_ranks), np.array(of_all))


def expected_classes(num_classes: int, num_samples: int, batch: int) -> float:
    """Different classes in a batch drawn uniformly without replacement from K classes of equal size."""
    batch = min(batch, num_samples)
    others = num_samples - num_samples / num_classes
    if batch > others:
        return float(num_classes)
    with_others, in_all = (
        math.lgamma(size + 1) - math.lgamma(size - batch + 1) for size in (others, float(num_samples))
    )
    return -num_classes * math.expm1(with_others - in_all)


class SeenAgain(NamedTuple):
    """The share of a rank's samples of one pass that the same rank sees in the next: on the ranks with least and most,
    and of all.
    """

    least: float
    mean: float
    most: float


def seen_again(order: ExactOrder, number: int, world_size: int, *, is_cut: bool) -> SeenAgain:
    """How much of pass `number` ranks see again in the next pass, from the cuts of lanes; where ranks share lanes, as
    expected.

    Args:
        order: The order.
        number: Of the first of the two passes.
        world_size: R.
        is_cut: Whether epochs are not passes, so that positions are counted through from pass to pass.
    """
    share = shared(order.num_lanes, world_size)
    starts = np.cumsum(order.counts) - order.counts
    cuts, groups = [], []
    for each in (number, number + 1):
        pieces = order.pieces(each)
        within = np.cumsum(pieces.sizes) - pieces.sizes
        new = np.diff(pieces.turns, prepend=-1) != 0
        # Pieces of a shard follow each other from its first sample on.
        first = (
            starts[pieces.shards][pieces.turns]
            + within
            - np.repeat(within[new], np.diff(np.flatnonzero(np.append(new, True))))
        )
        in_index = np.argsort(first, kind="stable")
        cuts.append(first[in_index])
        shift = each * order.num_samples if is_cut else 0
        groups.append((pieces.windows.lanes[pieces.at[in_index]] + shift) % share.num_groups)
    both = np.unique(np.concatenate(cuts))
    sizes = np.diff(both, append=order.num_samples)
    here, next_ = (group[np.searchsorted(cut, both, side="right") - 1] for cut, group in zip(cuts, groups, strict=True))
    again = np.bincount(here, sizes * (here == next_), minlength=share.num_groups)
    ratios = share.taken * again / np.maximum(1, np.bincount(here, sizes, minlength=share.num_groups))
    return SeenAgain(float(ratios.min()), float(again.sum() * share.taken / order.num_samples), float(ratios.max()))


def _different(rows: Ints) -> Ints:
    """How many different numbers stand in each row."""
    in_turn = np.sort(rows, axis=1)
    different: Ints = 1 + (np.diff(in_turn, axis=1) != 0).sum(axis=1)
    return different
