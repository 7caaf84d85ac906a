"""Where batches are written: memory of their own, unless who makes them has some that can be used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Memory(Protocol):
    """Gives the tensors that batches are written into."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, channels_last: bool = False) -> torch.Tensor:
        """A tensor of undefined values.

        Args:
            shape: (batch, channels, height, width) if `channels_last`.
            dtype: Of its values.
            channels_last: Whether it lies in channels_last memory; contiguous otherwise.
        """
        ...


class FreshMemory:
    """Memory that nobody used before: 9,408 page faults for a float batch of 64 x 3 x 224 x 224."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, channels_last: bool = False) -> torch.Tensor:
        """See `Memory`."""
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty(tuple(shape), dtype=dtype, memory_format=layout)


FRESH = FreshMemory()
