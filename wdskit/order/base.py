"""What every order has in common: samples of shards, counted through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]

DEPTHS = 1 << 20
"""Into so many parts the data are divided where only the place in them counts."""

_FEW = 24  # places of a table below which it is quicker to take them one by one


class Order(Protocol):
    """Which sample stands at which position of an endless sequence, and nothing else.

    Those but mixtures have `num_samples`, the length of a pass over all samples; position `q` of the endless sequence
    is position `q % num_samples` of pass `q // num_samples`.
    """

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """The samples at `positions`.

        Args:
            positions: int64 (n,), each at least 0, in any order.

        Returns:
            (shard, sample), int64 (n,) each: the shard's number in the list of counts, and the sample's number in it.
        """
        ...

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Where in the data positions stand: near ones are read from the same shards at about the same time.

        Args:
            positions: int64 (n,), each at least 0.

        Returns:
            (part of a mixture, depth in its data), int64 (n,) each, 0 <= depth < DEPTHS.
        """
        ...

    def substitute(self, position: int, attempt: int) -> tuple[int, int] | None:
        """What stands in for a bad sample: others of its lane's window, one after the other from its place on and
        around; then others near it.

        Args:
            position: Of the bad sample.
            attempt: 1 for the next one, 2 for the one behind that.

        Returns:
            (shard, sample), None where there are no more.
        """
        ...


def one_of(order: Order, position: int) -> tuple[int, int]:
    """The sample at one position."""
    shards, samples = order.take([position])
    return int(shards[0]), int(samples[0])


class Stack:
    """Shards laid end to end: from a running number to (shard, sample).

    Args:
        counts: Samples of each shard, (num_shards,), each at least 0.

    Attributes:
        num_samples: Their sum.

    Raises:
        ValueError: A count is negative, or there is no sample at all.
    """

    def __init__(self, counts: ArrayLike) -> None:
        counts = np.asarray(counts, dtype=np.int64)
        if counts.ndim != 1 or (counts < 0).any():
            msg = "counts are one number a shard, 0 or more"
            raise ValueError(msg)
        self.stops: Ints = np.cumsum(counts)
        self.num_samples = int(self.stops[-1]) if len(counts) else 0
        if not self.num_samples:
            msg = "there is no sample in any shard"
            raise ValueError(msg)

    def find(self, numbers: Ints) -> tuple[Ints, Ints]:
        """(shard, sample) of running numbers, 0 <= number < num_samples. Empty shards are never found."""
        shards = np.searchsorted(self.stops, numbers, side="right")
        return shards, numbers - self.starts(shards)

    def starts(self, shards: Ints) -> Ints:
        """Running number of the first sample of each of `shards`."""
        before = self.stops[shards - 1]
        before[shards == 0] = 0
        return before

    def counts(self, shards: Ints) -> Ints:
        """Samples of each of `shards`."""
        return self.stops[shards] - self.starts(shards)


def looked_up(keys: Ints, places: Ints, tables: Mapping[int, NDArray[Any]]) -> Ints:
    """`tables[key][place]` for each key and place.

    A batch of one rank with 240 lanes asks 240 tables for one place each: then one by one is five times quicker than
    table by table.
    """
    if len(tables) * _FEW > len(keys):
        found = [tables[key].item(place) for key, place in zip(keys.tolist(), places.tolist(), strict=True)]
        return np.array(found, dtype=np.int64)
    values = np.empty_like(places)
    for key, at in grouped(keys):
        values[at] = tables[key][places[at]]
    return values


def grouped(keys: Ints) -> list[tuple[int, Ints]]:
    """Each different key with the places where it stands: [(key, places), ...], keys ascending."""
    by_key = np.argsort(keys, kind="stable")
    in_order = keys[by_key]
    firsts = np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))
    return list(zip(in_order[firsts].tolist(), np.split(by_key, firsts)[1:], strict=True))
