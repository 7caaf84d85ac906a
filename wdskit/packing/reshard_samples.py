"""Samples by columns: a row of numbers each, 10 million in 300 MB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.packing.reshard_look import Bools, Ints
from wdskit.packing.reshard_read import SourcePath

Column = NDArray[np.uint32]


_LEAST = 1 << 12


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

    sources: Sequence[SourcePath]
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


class Columns:
    """Arrays that grow together. Each is one block of memory that the system moves, where it grows: pieces of a shard
    each, joined at the end, would take twice the memory and leave holes.

    Args:
        kinds: Type of each array, by its name.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._arrays: dict[str, NDArray[Any]] = {name: np.empty(_LEAST, dtype=kind) for name, kind in kinds.items()}
        self._count = 0
        self._room = _LEAST

    def append(self, values: Mapping[str, Any], count: int) -> None:
        """Add `count` values to each: an array of so many, or one value for all of them."""
        stop = self._count + count
        if stop > self._room:
            self._room = stop + (stop >> 3)
            for array in self._arrays.values():
                array.resize(self._room, refcheck=False)  # no view of it is ever given out before `take`
        for name, array in self._arrays.items():
            array[self._count : stop] = values[name]
        self._count = stop

    def take(self, name: str) -> NDArray[Any]:
        """One of them, which is not kept here any more."""
        array = self._arrays.pop(name)
        array.resize(self._count, refcheck=False)
        return array
