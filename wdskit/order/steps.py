"""The steps of an epoch: which positions each rank takes at each step, from any point of the epoch on.

Global batch k behind a resume point c is the positions [c + k * G, c + (k + 1) * G), G = R * B. Rank r takes those with
(p - c) mod R == r, so that its j-th row is position j * R + r of the global batch whatever c is: that is the order in
which `gather_valid` puts rows together. Nothing else is known here: not the order, not the shards, not the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wdskit.order.base import Ints

Tail = Literal["drop", "pad"]


@dataclass(frozen=True)
class Steps:
    """The steps of one epoch that are left behind a resume point, the same number on every rank.

    Args:
        num_samples: Positions of the epoch, >= 0.
        batch: B, samples of a rank's batch, >= 1.
        world_size: R >= 1.
        tail: What becomes of the positions that do not fill a global batch: left out, or padded to a full one.
        consumed: c, positions of the epoch that were consumed before, 0 <= c.
    """

    num_samples: int
    batch: int
    world_size: int
    tail: Tail
    consumed: int = 0

    @property
    def global_batch(self) -> int:
        """G, positions of a step."""
        return self.batch * self.world_size

    def __len__(self) -> int:
        """Steps from the resume point to the end of the epoch."""
        left = max(0, self.num_samples - self.consumed)
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    @property
    def num_dropped(self) -> int:
        """Samples at the end of the epoch that no step holds."""
        return 0 if self.tail == "pad" else max(0, self.num_samples - self.consumed) % self.global_batch

    @property
    def num_padded(self) -> int:
        """Rows of the last step that hold no sample."""
        return 0 if self.tail == "drop" else len(self) * self.global_batch - max(0, self.num_samples - self.consumed)

    def positions(self, rank: int, step: int) -> Ints:
        """What a rank takes at a step.

        Args:
            rank: 0 <= rank < R.
            step: Counted from the resume point, 0 <= step < len(self).

        Returns:
            int64 (batch,), ascending, positions of the epoch. With padding some can be `num_samples` or more.
        """
        found = self.range(rank, step, step + 1)
        return np.arange(found.start, found.stop, found.step, dtype=np.int64)

    def range(self, rank: int, first: int, stop: int) -> range:
        """What a rank takes at steps `first` to `stop`: the positions of each step behind those of the one before."""
        own = self.consumed + first * self.global_batch + rank
        return range(own, own + (stop - first) * self.global_batch, self.world_size)

    def valid(self, positions: Ints) -> NDArray[np.bool_]:
        """Which of `positions` hold a sample of the epoch, and are no padding."""
        return positions < self.num_samples

    def consumed_after(self, step: int) -> int:
        """The resume point behind step `step`: never behind the end of the epoch."""
        return min(self.num_samples, self.consumed + (step + 1) * self.global_batch)
