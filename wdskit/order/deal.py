"""The deal: which positions of a global batch each rank takes. It decides who computes what, and nothing else.

The positions of a step are sorted by their depth in the data, and node n takes the n-th block of B times (ranks of a
node): at every step about the same stretch of the data, so that a node reads its own shards and no others. Rank j of
the node takes every j-th of its block, of each part of a mixture, and another j at each step. So a rank's batch is
mixed from all that its node reads, and no rank sees one part only.

With `tail: pad` a rank takes neighbouring positions instead, the first rank the first ones: the rows of all ranks, one
behind the other, are in the order of their samples, as `gather_valid` gives them back. What the last step holds is
shared evenly.
"""

from __future__ import annotations

import numpy as np

from wdskit.order.base import Ints, Order
from wdskit.order.steps import Steps

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 times the golden ratio
_PLACE_BITS = 32  # of a position in its step; the depth stands above


def dealt(order: Order, start: int, steps: Steps, step: int, *, rank: int, ranks_per_node: int = 1) -> Ints:
    """The positions of an epoch that a rank takes at a step.

    Args:
        order: The endless sequence.
        start: Where the epoch starts in it.
        steps: Of the epoch.
        step: Counted from the resume point, 0 <= step < len(steps).
        rank: 0 <= rank < R.
        ranks_per_node: Neighbouring ranks that share what they read; a divisor of R.

    Returns:
        int64 (batch,), ascending. With padding some are `steps.num_samples`.
    """
    first, size = steps.first(step), steps.global_batch
    if steps.tail == "pad":
        num = min(size, steps.num_samples - first)
        low, high = (first + num * each // steps.world_size for each in (rank, rank + 1))
        own = np.full(steps.batch, steps.num_samples, dtype=np.int64)
        own[: high - low] = np.arange(low, high)
        return own
    positions = np.arange(first, first + size, dtype=np.int64)
    if steps.world_size == 1:
        return positions
    parts, depths = order.locate(positions + start)
    node, place = divmod(rank, ranks_per_node)
    low, high = (steps.batch * ranks_per_node * each for each in (node, node + 1))
    by_depth = np.partition(depths << _PLACE_BITS | np.arange(size), (low, high - 1))[low:high]
    by_depth.sort()
    block = by_depth & ((1 << _PLACE_BITS) - 1)
    block = block[np.argsort(parts[block], kind="stable")]
    turn = (start + first) // size * _GOLDEN % (1 << 64) >> 32  # in step with nothing that repeats
    return np.sort(positions[block[(place + turn) % ranks_per_node :: ranks_per_node]])


def nodes_of(order: Order, start: int, steps: Steps, step: int, *, ranks_per_node: int) -> Ints:
    """The node that takes each position of a step, as `dealt` deals them: int64 (num,), as many as hold a sample."""
    first, num_nodes = steps.first(step), steps.world_size // ranks_per_node
    num = min(steps.global_batch, steps.num_samples - first)
    if steps.tail == "pad":
        edges = num * np.arange(steps.world_size + 1) // steps.world_size
        return np.repeat(np.arange(num_nodes), np.diff(edges[::ranks_per_node]))
    nodes = np.empty(num, dtype=np.int64)
    depths = order.locate(np.arange(first, first + num) + start)[1]
    nodes[np.argsort(depths, kind="stable")] = np.arange(num) // (steps.batch * ranks_per_node)
    return nodes
