"""The shards of a planned source as columns, taken from the mapped indexes of their folders without opening one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import BinaryIndex
from wdskit.dataset.index import join_url
from wdskit.dataset.mapped import find_mapped
from wdskit.errors import FolderIndexError

Ints = NDArray[np.int64]
Bound = int | Fraction
"""Number of a sample, or a share of all."""


class ShardTable:
    """Indexed local shards, in the order in which they were named, and which of their samples count.

    Args:
        shards: As `dataset.patterns.list_shards` takes it.
        bounds: The first sample that counts and the one behind the last, in the order of the shards; None for all.

    Attributes:
        counts: Samples of each shard that count, int64 (num_shards,).
        sizes: Bytes of each shard's file, int64 (num_shards,).

    Raises:
        StorageError: Nothing matches, a shard is missing, or one is remote.
        FolderIndexError: A folder has no index, or one that does not match its shards; or no sample is left.
    """

    def __init__(self, shards: str | Sequence[str], *, bounds: tuple[Bound, Bound] | None = None) -> None:
        self._segments = find_mapped(shards)
        self._stops = np.cumsum([len(segment.numbers) for segment in self._segments])
        self.sizes: Ints = self._column("sizes")
        self._whole: Ints = self._column("counts")
        self._firsts: Ints = np.zeros_like(self._whole)
        self.counts: Ints = self._whole
        self.bounds = (0, int(self._whole.sum()))
        if bounds is not None:
            self._cut(*bounds)
        if not self.counts.sum():
            folder = str(self._segments[0].index.folder)
            where = "these shards" if bounds is None else f"this range of their {self._whole.sum()} samples"
            raise FolderIndexError(f"{folder}: there is no sample in {where}.", folder=folder)

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.counts)

    def path(self, shard: int) -> str:
        """Path of a shard, 0 <= shard < len(self)."""
        index, number = self._locate(shard)
        return join_url(str(index.folder), index.name(number))

    def whole_count(self, shard: int) -> int:
        """Samples that the index says are in a shard, whether they count or not."""
        return int(self._whole[shard])

    def number(self, shard: int, sample: int) -> int:
        """Which sample of the file is sample `sample` of those that count, 0 <= sample < counts[shard]."""
        return int(self._firsts[shard]) + sample

    def digest(self) -> str:
        """Hex sha256 over names, counts and which samples count: what the order depends on, and not where they lie."""
        digest = hashlib.sha256()
        for part in self._segments:
            part.index.hash_names(digest, part.numbers)
        for column in (self._whole, self._firsts, self.counts):
            digest.update(column.astype("<i8").tobytes())
        return digest.hexdigest()

    def _locate(self, shard: int) -> tuple[BinaryIndex, int]:
        at = int(np.searchsorted(self._stops, shard, side="right"))
        segment = self._segments[at]
        start = int(self._stops[at]) - len(segment.numbers)
        return segment.index, int(segment.numbers[shard - start])

    def _column(self, name: str) -> Ints:
        columns = [getattr(segment.index, name)[segment.numbers] for segment in self._segments]
        return np.concatenate(columns).astype(np.int64)

    def _cut(self, first: Bound, stop: Bound) -> None:
        """Let only samples `first` to `stop` count."""
        total = int(self._whole.sum())
        start, end = (
            min(total, int(bound * total) if isinstance(bound, Fraction) else bound) for bound in (first, stop)
        )
        stops = np.cumsum(self._whole)
        starts = stops - self._whole
        self._firsts = np.clip(start - starts, 0, self._whole)
        self.counts = np.maximum(0, np.clip(end - starts, 0, self._whole) - self._firsts)
        self.bounds = (start, end)
