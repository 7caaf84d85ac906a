"""Batches of one shape: the samples are divided into buckets, and each step of an epoch takes one batch of one bucket.

A bucket has only whole batches in an epoch (`tail: drop`), or also a last, padded batch (`tail: pad`). Batch j of a
bucket with n batches gets the number (j + u) / n, with a random u in [0, 1) for each bucket and epoch. The steps are
sorted by these numbers, so the batches of each bucket are spread evenly over the epoch.

Each bucket has its own order, and epoch e takes the first batches of pass e. The positions of an epoch are the
positions of its batches, concatenated in the order of the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wdskit.order.base import Ints, Order, Tail, group_indices, philox


class EpochBatches(NamedTuple):
    """The steps of one epoch. Each step takes one batch of one bucket.

    Attributes:
        buckets: Bucket of each step, (num_steps,).
        batches: Number of each step's batch among the batches of its bucket, from 0, (num_steps,).
        edges: First position of each step in the epoch, then the number of positions of the epoch, (num_steps + 1,).
    """

    buckets: Ints
    batches: Ints
    edges: Ints


@dataclass(frozen=True)
class BucketPlan:
    """Decides which batch of which bucket each step of each epoch takes.

    Args:
        counts: Number of samples of each bucket.
        sizes: For each bucket, the number of rows of a global batch (the batches of all ranks together), at least 1.
        tail: For the samples of a bucket that do not fill a global batch: "drop" leaves out the samples, "pad" pads the
            batch.
        seed: 0 <= seed < 2**64.
    """

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    tail: Tail
    seed: int

    @functools.cached_property
    def num_batches(self) -> tuple[int, ...]:
        """Number of batches of each bucket in an epoch."""
        pairs = zip(self.counts, self.sizes, strict=True)
        return tuple(count // size if self.tail == "drop" else -(-count // size) for count, size in pairs)

    @functools.cached_property
    def num_samples(self) -> int:
        """Number of positions of an epoch, one per sample. Dropped samples and padded rows have no position."""
        if self.tail == "pad":
            return sum(self.counts)
        return sum(number * size for number, size in zip(self.num_batches, self.sizes, strict=True))

    def epoch(self, number: int) -> EpochBatches:
        """Return the steps of the epoch with this number."""
        return _make_epoch(self, number)

    def bucket_at(self, position: int) -> int:
        """Return the bucket of a position. Positions are counted over all epochs."""
        epoch, rest = divmod(position, self.num_samples)
        batches = self.epoch(epoch)
        return int(batches.buckets[np.searchsorted(batches.edges, rest, side="right") - 1])


@dataclass(frozen=True)
class Buckets:
    """The buckets of a pipeline: the plan of their batches, and a label for each bucket.

    A label is the shape or the largest length of the bucket's samples.
    """

    plan: BucketPlan
    labels: tuple[Any, ...]


@functools.lru_cache(maxsize=8)  # 17 bytes per step
def _make_epoch(plan: BucketPlan, number: int) -> EpochBatches:
    num_batches = np.array(plan.num_batches, dtype=np.int64)
    buckets = np.repeat(np.arange(len(num_batches)), num_batches)
    batches = np.arange(len(buckets)) - np.repeat(np.cumsum(num_batches) - num_batches, num_batches)
    words = philox("buckets", plan.seed, number).random_raw(len(num_batches)) >> np.uint64(11)
    shares = (batches + (words * 2.0**-53)[buckets]) / num_batches[buckets]
    by_share = np.argsort(shares, kind="stable")
    buckets, batches = buckets[by_share], batches[by_share]
    sizes, counts = np.array(plan.sizes, dtype=np.int64), np.array(plan.counts, dtype=np.int64)
    num = np.minimum(sizes[buckets], counts[buckets] - batches * sizes[buckets])
    return EpochBatches(buckets, batches, np.concatenate([[0], np.cumsum(num)]))


@dataclass(frozen=True)
class BucketSteps:
    """The steps of one epoch of buckets from a resume point on. Has all attributes and methods of `order.steps.Steps`.

    Args:
        plan: The batches of all epochs.
        epoch: Number of the epoch.
        world_size: Number of ranks, a divisor of each size in the plan.
        consumed: Number of positions of the epoch before the resume point. The resume point is the start of a step, or
            the end of the epoch.
    """

    plan: BucketPlan
    epoch: int
    world_size: int
    consumed: int = 0

    @property
    def tail(self) -> Tail:
        """What happens to incomplete batches: "drop" or "pad"."""
        return self.plan.tail

    @property
    def num_samples(self) -> int:
        """Number of positions of the epoch, one per sample. Dropped samples and padded rows have no position."""
        return self.plan.num_samples

    @property
    def batch(self) -> int:
        """Largest number of rows of a rank's batch, over all buckets. Padded rows count."""
        return max(self.plan.sizes) // self.world_size

    @property
    def global_batch(self) -> int:
        """Largest number of rows of a global batch, over all buckets. Padded rows count."""
        return max(self.plan.sizes)

    @property
    def num_dropped(self) -> int:
        """Number of samples that are in no step of the epoch."""
        return sum(self.plan.counts) - self.plan.num_samples

    @property
    def num_padded(self) -> int:
        """Number of rows in the epoch, over all ranks, that have no sample."""
        sizes = zip(self.plan.num_batches, self.plan.sizes, strict=True)
        return sum(number * size for number, size in sizes) - self.plan.num_samples

    def describe_dropped(self) -> str:
        """Return the warning that samples of the epoch are dropped; empty if at most 1 % of the samples are dropped."""
        total = sum(self.plan.counts)
        if 100 * self.num_dropped <= total:
            return ""
        return (
            f"{self.num_dropped:,} of {total:,} samples are dropped in each epoch ({self.num_dropped / total:.1%}): "
            f"they do not fill a batch of their bucket.\n  Use smaller batches or fewer buckets, or `tail: pad`."
        )

    @functools.cached_property
    def _before(self) -> int:
        """Number of steps before the resume point."""
        return int(np.searchsorted(self.plan.epoch(self.epoch).edges, self.consumed, side="left"))

    def __len__(self) -> int:
        """Return the number of steps from the resume point to the end of the epoch."""
        return max(0, len(self.plan.epoch(self.epoch).buckets) - self._before)

    def batch_at(self, step: int) -> int:
        """Return the number of rows of a rank's batch at a step. Padded rows count. Steps are counted from the resume
        point.
        """
        return self.plan.sizes[self.bucket_at(step)] // self.world_size

    def bucket_at(self, step: int) -> int:
        """Return the bucket of a step. Steps are counted from the resume point."""
        return int(self.plan.epoch(self.epoch).buckets[self._before + step])

    def first(self, step: int) -> int:
        """Return the first position of a step, counted in the epoch. Steps are counted from the resume point."""
        return int(self.plan.epoch(self.epoch).edges[self._before + step])

    def block_of(self, position: int) -> tuple[int, int]:
        """Return the first position, and the position after the last, of the step that has this position of the epoch.
        A bad sample is replaced by a sample of its step, which has its shape.
        """
        edges = self.plan.epoch(self.epoch).edges
        at = int(np.searchsorted(edges, position, side="right"))
        return int(edges[at - 1]), int(edges[at])

    def consumed_after(self, step: int) -> int:
        """Return the resume point after a step: the number of positions of the epoch that are then consumed."""
        return self.first(step + 1)


class BucketOrder:
    """The order of a pipeline with buckets: all epochs, one after another. Implements `order.base.Order`.

    Args:
        plan: The batches of all epochs.
        orders: For each bucket, the order of its samples. A shard has the same number in all orders.

    Attributes:
        plan: `plan`.
        parts: `orders`.
        num_samples: Number of positions of an epoch.
        num_lanes: Largest number of lanes of `orders`; 0 if no order has lanes.
        window: Largest window of `orders`; 0 if no order has windows.
    """

    def __init__(self, plan: BucketPlan, orders: Sequence[Order]) -> None:
        self.plan = plan
        self.parts = tuple(orders)
        self.num_samples = plan.num_samples
        self._counts, self._sizes = np.array(plan.counts), np.array(plan.sizes)
        self.num_lanes = max(getattr(order, "num_lanes", 0) for order in orders)
        self.window = max(getattr(order, "window", 0) for order in orders)

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of the sample at each position: int64 (n,) each.

        Each position is at least 0.
        """
        wanted = np.asarray(positions, dtype=np.int64)
        buckets, inner = self._inner(wanted)
        shards, samples = np.empty_like(wanted), np.empty_like(wanted)
        for bucket, at in group_indices(buckets):
            shards[at], samples[at] = self.parts[bucket].take(inner[at])
        return shards, samples

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part (always 0) and the depth of each position: int64 (n,) each.

        The depth is the place in the bucket's data, 0 <= depth < 2**20. Positions of one bucket with close depths
        mostly read the same shards.
        """
        buckets, inner = self._inner(positions)
        depths = np.empty_like(positions)
        for bucket, at in group_indices(buckets):
            depths[at] = self.parts[bucket].locate(inner[at])[1]
        return np.zeros_like(depths), depths

    def _inner(self, positions: Ints) -> tuple[NDArray[Any], Ints]:
        """Return the bucket of each position, and the position in the bucket's own order: int64 (n,) each."""
        epochs, rest = np.divmod(positions, self.num_samples)
        buckets, inner = np.empty_like(rest), np.empty_like(rest)
        for number, at in group_indices(epochs):
            epoch = self.plan.epoch(number)
            steps = np.searchsorted(epoch.edges, rest[at], side="right") - 1
            own = buckets[at] = epoch.buckets[steps]
            places = rest[at] - epoch.edges[steps]
            inner[at] = number * self._counts[own] + epoch.batches[steps] * self._sizes[own] + places
        return buckets, inner
