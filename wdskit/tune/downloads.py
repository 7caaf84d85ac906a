"""What the nodes of a run download in two epochs, and what their caches must hold, by taking every position of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.remote import PART_BYTES, open_remote_shards, part_edges
from wdskit.dataset.table import ShardTable
from wdskit.limits import BLOCK_BYTES
from wdskit.order.base import Ints
from wdskit.order.deal import nodes_of
from wdskit.order.steps import Steps
from wdskit.stages.sources import Exact, PlannedData, PlannedSource

QUICK = 1 << 22
"""Samples of an epoch up to which this takes seconds: 0.4 us for each of them, several times over."""
MAX_OFFSETS = 4096
"""Shards whose offsets are read, so that bytes are those of a run. Of more the mean size of a sample is taken."""
_OPENED = 64  # shards whose offsets are on their way at once
_HOMES_A_NODE = 4


@dataclass(frozen=True)
class DownloadPlan:
    """What nodes fetch into their caches, in parts of about 8 MB, where these hold all that is needed again.

    Attributes:
        is_exact: Whether sizes are those of the parts; else those of mean samples.
        node_bytes: The most that a node fetches in the epoch.
        num_bytes: What all nodes fetch in it, and
        next_bytes: in the epoch behind it, where each kept what it had fetched.
        requests: Parts that it fetches.
        first_ratio: `num_bytes` over the bytes of all parts that are read in the epoch.
        second_ratio: `next_bytes` over the same.
        homes: Of these figures; 0 for a source that has none.
        other_homes: Another number, with which
        other_ratio: would be the second ratio.
        live_bytes: The most that a node needs again at one moment: what its cache must hold.
    """

    is_exact: bool
    node_bytes: int
    num_bytes: int
    next_bytes: int
    requests: int
    first_ratio: float
    second_ratio: float
    homes: int
    other_homes: int
    other_ratio: float
    live_bytes: int


def plan_downloads(source: PlannedSource, data: PlannedData, steps: Steps, epoch: int, node_size: int) -> DownloadPlan:
    """Look at an epoch and the one behind it.

    Args:
        source: The source, and
        data: its shards and their order.
        steps: Of each epoch.
        epoch: The first.
        node_size: Ranks of a node, a divisor of R.

    Raises:
        StorageError, FolderIndexError: The offsets of shards cannot be read.
    """
    parts = _Parts(data)
    first, second = (_take(data, parts, steps, each, node_size) for each in (epoch, epoch + 1))
    is_fetched = first.is_taken()
    whole = parts.num_bytes[is_fetched.any(axis=0)].sum()
    of_nodes = is_fetched @ parts.num_bytes
    most = int(of_nodes.argmax())
    homes = source.homes if isinstance(source, Exact) else 0
    other_homes, other_ratio = 0, 0.0
    if homes:
        other_homes = 1 if homes > 1 else _HOMES_A_NODE * max(1, steps.world_size // node_size)
        other = source.model_copy(update={"homes": other_homes}).plan()
        again = [_take(other, parts, steps, each, node_size).is_taken() for each in (epoch, epoch + 1)]
        other_ratio = float(((again[1] & ~again[0]) @ parts.num_bytes).sum() / whole)
    next_bytes = int(((second.is_taken() & ~is_fetched) @ parts.num_bytes).sum())
    return DownloadPlan(
        is_exact=parts.is_exact,
        node_bytes=int(of_nodes[most]),
        num_bytes=int(of_nodes.sum()),
        next_bytes=next_bytes,
        requests=int((is_fetched[most] & (parts.num_bytes > 0)).sum()),
        first_ratio=float(of_nodes.sum() / whole),
        second_ratio=float(next_bytes / whole),
        homes=homes,
        other_homes=other_homes,
        other_ratio=other_ratio,
        live_bytes=first.live_bytes(parts.num_bytes),
    )


class _Parts:
    """The parts of all shards, numbered through.

    Attributes:
        is_exact: Whether their bounds are those of the shards' offsets.
        num_bytes: Of each as it is fetched, (num_parts,); 0 of local shards.
    """

    def __init__(self, data: PlannedData) -> None:
        self._data = data
        self._stops = np.cumsum([len(table) for table in data.tables])
        own = [table for at, table in enumerate(data.tables) if data.parts.index(data.parts[at]) == at]
        self.is_exact = sum(len(table) for table in own) <= MAX_OFFSETS
        firsts: list[Ints] = []
        sizes: list[Ints] = []
        self._before: dict[int, Ints] = {}  # of each part of a mixture: samples before each shard
        num_samples = 0
        for at, table in enumerate(data.tables):
            part = data.parts[at]
            if part in self._before:  # repeated: the same shards
                continue
            stops = num_samples + np.cumsum(table.file_counts)
            self._before[part] = stops - table.file_counts
            if self.is_exact and table.is_remote:
                for offsets in _offsets(table):
                    edges = part_edges(offsets)
                    firsts.append(num_samples + edges[:-1])
                    sizes.append(np.diff(offsets[edges]) + BLOCK_BYTES)
                    num_samples += len(offsets) - 1
            else:
                counts, means = table.file_counts, table.sample_bytes()
                a_part = np.maximum(1, PART_BYTES / np.maximum(means, 1)).astype(np.int64)
                for count, step, mean in zip(counts.tolist(), a_part.tolist(), means.tolist(), strict=True):
                    edges = np.arange(0, count, step)
                    firsts.append(num_samples + edges)
                    size = np.diff(edges, append=count) * mean + BLOCK_BYTES
                    sizes.append(size.astype(np.int64) if table.is_remote else np.zeros_like(edges))
                    num_samples += count
        self._firsts = np.concatenate(firsts)
        self.num_bytes: Ints = np.concatenate(sizes)

    def of(self, shards: Ints, samples: Ints) -> Ints:
        """The part of each sample, as an order numbers them, (n,)."""
        tables = np.searchsorted(self._stops, shards, side="right")
        numbers = np.empty_like(samples)
        for at in np.flatnonzero(np.bincount(tables)).tolist():
            rows = np.flatnonzero(tables == at)
            table = self._data.tables[at]
            inner = shards[rows] - (int(self._stops[at]) - len(table))
            numbers[rows] = self._before[self._data.parts[at]][inner] + table.numbers(inner, samples[rows])
        found: Ints = np.searchsorted(self._firsts, numbers, side="right") - 1
        return found


def _offsets(table: ShardTable) -> list[Ints]:
    found: list[Ints] = []
    for first in range(0, len(table), _OPENED):
        named = [(table.path(at), table.entry(at)) for at in range(first, min(len(table), first + _OPENED))]
        found += [np.asarray(shard.offsets) for shard in open_remote_shards(named)]
    return found


class _Taken(NamedTuple):
    """The first and the last step at which nodes take from parts, (num_nodes, num_parts); -1 where they do not."""

    firsts: NDArray[np.int32]
    lasts: NDArray[np.int32]

    def is_taken(self) -> NDArray[np.bool_]:
        return self.lasts >= 0

    def live_bytes(self, num_bytes: Ints) -> int:
        """The most bytes of parts of a node between their first and last step."""
        most = 0.0
        for first, last in zip(self.firsts, self.lasts, strict=True):
            taken = last >= 0
            num_steps = int(last.max()) + 2
            came = np.bincount(first[taken], num_bytes[taken], minlength=num_steps)
            went = np.bincount(last[taken] + 1, num_bytes[taken], minlength=num_steps)
            most = max(most, float(np.cumsum(came - went).max()))
        return int(most)


def _take(data: PlannedData, parts: _Parts, steps: Steps, epoch: int, node_size: int) -> _Taken:
    start, num_parts = epoch * steps.num_samples, len(parts.num_bytes)
    shape = steps.world_size // node_size, num_parts
    firsts, lasts = np.full(shape, -1, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
    for step in range(len(steps)):
        positions = np.arange(steps.first(step), min(steps.first(step + 1), steps.num_samples))
        nodes = nodes_of(data.order, start, steps, step, ranks_per_node=node_size)
        cells = nodes * num_parts + parts.of(*data.order.take(positions + start))
        is_new = firsts.ravel()[cells] < 0
        firsts.ravel()[cells[is_new]] = step
        lasts.ravel()[cells] = step
    return _Taken(firsts, lasts)
