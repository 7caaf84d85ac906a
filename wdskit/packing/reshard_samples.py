"""Samples by columns: a row of numbers each, 10 million in 300 MB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wdskit.packing.reshard_look import Bools, Ints

Column = NDArray[np.uint32]


@dataclass
class Samples:
    """Samples by columns, in the order in which they are written.

    Attributes:
        sources: Paths of the shards that they come from.
        source: Which of these.
        start: Where it starts there, in blocks of 512 bytes.
        span: How long it is there, in blocks.
        size: How long it becomes, in blocks.
        check: Half of the 64 bits that its key gives, to know it again.
        copied: Whether its bytes are copied as they are.
    """

    sources: Sequence[str]
    source: Column
    start: Column
    span: Column
    size: Column
    check: Column
    copied: Bools

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.source)

    def part(self, rows: slice) -> Samples:
        """Neighbours, with those sources only that they need."""
        needed, source = np.unique(self.source[rows], return_inverse=True)
        columns = (getattr(self, name)[rows] for name in ("start", "span", "size", "check", "copied"))
        return Samples([self.sources[number] for number in needed.tolist()], source.astype(np.uint32), *columns)

    def take(self, rows: Ints | Bools) -> None:
        """Keep these samples in this order, one column after the other: two copies of all would be too much."""
        for name in ("source", "start", "span", "size", "check", "copied"):
            setattr(self, name, getattr(self, name)[rows])
