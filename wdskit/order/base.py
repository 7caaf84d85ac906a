"""The protocol of orders, and the functions that all orders use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Tail = Literal["drop", "pad"]
"""Whether the samples of an epoch that do not fill a global batch are dropped, or padded to a whole batch."""

DEPTHS = 1 << 20
"""Number of different depths. `Order.locate` returns 0 <= depth < DEPTHS."""

_MIN_PER_TABLE = 24  # with fewer lookups per table, single lookups are faster


class Order(Protocol):
    """An order of samples: maps each position 0, 1, 2, ... of an endless sequence to a sample.

    Every order except a mixture has `num_samples`, the number of positions of a pass. Position `q` is position
    `q % num_samples` of pass `q // num_samples`.
    """

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return the samples at `positions`.

        Args:
            positions: int64 (n,), each at least 0, in any order.

        Returns:
            (shard, sample), int64 (n,) each: the number of the shard among all shards, and the number of the
            sample among those samples of the shard that the pipeline uses. `ShardTable.numbers` returns the number
            among all samples.
        """
        ...

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part of the mixture and the depth of each position.

        The depth is about the place of the sample in the part's data: positions of one part with close depths mostly
        read the same shards. In a `ResampledOrder`, the depth does not depend on the shard.

        Args:
            positions: int64 (n,), each at least 0.

        Returns:
            (part, depth), int64 (n,) each; 0 <= depth < DEPTHS = 2**20. The part is 0 if the order is not a mixture.
        """
        ...


def take_one(order: Order, position: int) -> tuple[int, int]:
    """Return (shard, sample) of one position of an order, as `Order.take` does for an array of positions."""
    shards, samples = order.take([position])
    return int(shards[0]), int(samples[0])


class ShardOffsets:
    """Numbers the samples of all shards consecutively, and maps a sample's number to (shard, sample).

    Args:
        counts: Number of samples of each shard, (num_shards,), each at least 0.

    Attributes:
        num_samples: The sum of `counts`.
        stops: Cumulative sum of `counts`, int64 (num_shards,).

    Raises:
        ValueError: All counts are 0.
    """

    def __init__(self, counts: ArrayLike) -> None:
        self.stops: Ints = np.cumsum(np.asarray(counts, dtype=np.int64))
        self.num_samples = int(self.stops[-1])
        if self.num_samples < 1:
            raise ValueError("all shards are empty")

    def find(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of each sample, int64 (n,) each.

        `numbers` are the numbers of the samples over all shards: 0 <= number < num_samples.
        """
        shards = np.searchsorted(self.stops, numbers, side="right")
        return shards, numbers - self.starts(shards)

    def starts(self, shards: Ints) -> Ints:
        """Return the number, over all shards, of the first sample of each shard in `shards`: int64 (n,).

        For an empty shard, return the number of the first sample after the shard.
        """
        before = self.stops[shards - 1]
        before[shards == 0] = 0
        return before

    def counts(self, shards: Ints) -> Ints:
        """Return the number of samples in each of `shards`: int64 (n,)."""
        return self.stops[shards] - self.starts(shards)


def look_up(keys: Ints, places: Ints, tables: Mapping[int, NDArray[Any]]) -> Ints:
    """Return `tables[key][place]` for each pair of `keys` (n,) and `places` (n,): int64 (n,)."""
    # A rank's batch may need one place from each of 240 lanes: then single lookups are five times as fast.
    if len(tables) * _MIN_PER_TABLE > len(keys):
        single = [tables[key].item(place) for key, place in zip(keys.tolist(), places.tolist(), strict=True)]
        return np.array(single, dtype=np.int64)
    values = np.empty_like(places)
    for key, at in group_indices(keys):
        values[at] = tables[key][places[at]]
    return values


def group_indices(keys: Ints) -> list[tuple[int, Ints]]:
    """Return [(key, indices of `keys` with this key), ...], sorted by key. The indices are ascending, int64."""
    if len(keys) and keys[0] == keys[-1] and (keys == keys[0]).all():  # most often, as with the pass of a batch
        return [(int(keys[0]), np.arange(len(keys)))]
    by_key = np.argsort(keys, kind="stable")
    in_order = keys[by_key]
    firsts = np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))
    return list(zip(in_order[firsts].tolist(), np.split(by_key, firsts)[1:], strict=True))
