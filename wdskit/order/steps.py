"""The steps of an epoch: which positions each one takes on all ranks together, from any point of the epoch on.

Global batch k behind a resume point c is the positions [c + k * G, c + (k + 1) * G), G = R * B. Nothing else is known
here: not the order, not the shards, not the workers. Which of them a rank takes is the deal's (`order.deal`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tail = Literal["drop", "pad"]

MUCH_DROPPED = 0.01
"""Share of an epoch. A larger part that is dropped is reported."""


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

    def describe_dropped(self) -> str:
        """Return the warning that a part of the epoch is dropped; empty if it is at most `MUCH_DROPPED`."""
        if self.num_dropped <= MUCH_DROPPED * self.num_samples:
            return ""
        return (
            f"{self.num_dropped:,} of {self.num_samples:,} samples are dropped in each epoch "
            f"({self.num_dropped / self.num_samples:.1%}): they do not fill a batch of {self.batch:,} on each of "
            f"{self.world_size:,} ranks.\n  Use smaller batches, or `tail: pad`, which uses all samples."
        )

    @property
    def num_padded(self) -> int:
        """Rows of the last step that hold no sample."""
        return 0 if self.tail == "drop" else len(self) * self.global_batch - max(0, self.num_samples - self.consumed)

    def first(self, step: int) -> int:
        """First position of a step, which is counted from the resume point."""
        return self.consumed + step * self.global_batch

    def consumed_after(self, step: int) -> int:
        """The resume point behind step `step`: never behind the end of the epoch."""
        return min(self.num_samples, self.first(step + 1))
