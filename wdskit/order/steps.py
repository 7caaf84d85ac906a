"""The steps of an epoch, and the positions that each rank takes at a step.

With R ranks and batches of B samples per rank, a step takes a global batch of G = R * B positions. Step k after a
resume point c takes the positions from c + k * G on. `rank_positions` divides these positions between the ranks. This
division decides only which rank computes which sample.

With `tail: drop`, the positions of a step are sorted by their depth in the data and cut into one block per node. The
block of a node is about the same part of the data at every step, so a node mostly reads the same shards. The positions
of a block are sorted by the part of a mixture, and the ranks of the node take them in turn. So each rank gets about its
share of each part.

With `tail: pad`, each rank takes consecutive positions, and the first rank takes the first positions. So the rows of
all ranks, concatenated, are in the order of their samples. The positions of the last step are divided evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wdskit.order.base import Ints, Order, Tail
from wdskit.order.buckets import BucketSteps

SUBSTITUTES = 1024
"""Number of positions of an epoch that may replace each other's bad samples."""
_HASH_FACTOR = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
_POSITION_BITS = 32  # low bits, for the position in its step; the higher bits hold the position's depth


@dataclass(frozen=True)
class Steps:
    """The steps of one epoch from a resume point on. Their number is the same on every rank.

    Args:
        num_samples: Number of positions of the epoch, >= 0.
        batch: Size of a rank's batch, >= 1.
        world_size: Number of ranks, >= 1.
        tail: Whether positions that do not fill a global batch are dropped, or padded to a whole batch.
        consumed: Number of positions of the epoch before the resume point, >= 0.
    """

    num_samples: int
    batch: int
    world_size: int
    tail: Tail
    consumed: int = 0

    @property
    def global_batch(self) -> int:
        """Number of rows of a step: the batches of all ranks, with padded rows."""
        return self.batch * self.world_size

    def __len__(self) -> int:
        """Return the number of steps from the resume point to the end of the epoch. A padded last step counts."""
        left = max(0, self.num_samples - self.consumed)
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    @property
    def num_dropped(self) -> int:
        """Number of samples at the end of the epoch that are in no step."""
        return 0 if self.tail == "pad" else max(0, self.num_samples - self.consumed) % self.global_batch

    def describe_dropped(self) -> str:
        """Return the warning that samples of the epoch are dropped; empty if at most 1 % of the samples are dropped."""
        if 100 * self.num_dropped <= self.num_samples:
            return ""
        each = "" if self.world_size == 1 else f" on each of {self.world_size:,} ranks"
        return (
            f"{self.num_dropped:,} of {self.num_samples:,} samples are dropped in each epoch "
            f"({self.num_dropped / self.num_samples:.1%}): they do not fill a batch of {self.batch:,}{each}.\n"
            "  Use smaller batches, or `tail: pad`, which uses all samples."
        )

    @property
    def num_padded(self) -> int:
        """Number of rows of the last step, over all ranks, that have no sample."""
        return 0 if self.tail == "drop" else len(self) * self.global_batch - max(0, self.num_samples - self.consumed)

    def batch_at(self, step: int) -> int:  # noqa: ARG002 (BucketSteps needs it)
        """Return the number of rows of a rank's batch at a step, with padded rows. It is equal at all steps."""
        return self.batch

    def first(self, step: int) -> int:
        """Return the first position of a step, counted in the epoch. Steps are counted from the resume point."""
        return self.consumed + step * self.global_batch

    def block_of(self, position: int) -> tuple[int, int]:
        """Return the first position, and the position after the last, of the block of `SUBSTITUTES` positions of the
        epoch that has this position. A bad sample is replaced by a sample of its block.
        """
        first = position // SUBSTITUTES * SUBSTITUTES
        return first, min(first + SUBSTITUTES, self.num_samples)

    def consumed_after(self, step: int) -> int:
        """Return the resume point after a step: the number of positions of the epoch that are then consumed."""
        return min(self.num_samples, self.first(step + 1))


AnySteps = Steps | BucketSteps


def rank_positions(order: Order, start: int, steps: AnySteps, step: int, *, rank: int, ranks_per_node: int = 1) -> Ints:
    """Return the positions of an epoch that a rank takes at a step.

    Args:
        order: The order of the pipeline.
        start: The position in `order` at which the epoch starts.
        steps: The steps of the epoch.
        step: Number of the step, counted from the resume point, 0 <= step < len(steps).
        rank: Number of the rank, 0 <= rank < steps.world_size.
        ranks_per_node: Consecutive ranks that read the same shards; a divisor of the number of ranks.

    Returns:
        Positions relative to `start`, int64 (steps.batch_at(step),), ascending. Padded rows have the position
        `steps.num_samples`.
    """
    first, batch = steps.first(step), steps.batch_at(step)
    size = batch * steps.world_size
    if steps.tail == "pad":
        num = steps.consumed_after(step) - first
        low, high = (first + num * each // steps.world_size for each in (rank, rank + 1))
        own = np.full(batch, steps.num_samples, dtype=np.int64)
        own[: high - low] = np.arange(low, high)
        return own
    positions = np.arange(first, first + size, dtype=np.int64)
    if steps.world_size == 1:
        return positions
    parts, depths = order.locate(positions + start)
    node, local_rank = divmod(rank, ranks_per_node)
    low, high = (batch * ranks_per_node * each for each in (node, node + 1))
    by_depth = np.partition(depths << _POSITION_BITS | np.arange(size), (low, high - 1))[low:high]
    by_depth.sort()
    block = by_depth & ((1 << _POSITION_BITS) - 1)
    block = block[np.argsort(parts[block], kind="stable")]
    turn = (start + first) // size * _HASH_FACTOR % (1 << 64) >> 32  # has no common period with the data
    return np.sort(positions[block[(local_rank + turn) % ranks_per_node :: ranks_per_node]])
