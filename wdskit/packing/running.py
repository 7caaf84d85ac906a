"""Filling the shards of a run: planned ones here or in several processes, those of a stream while its rows come."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

from wdskit.dataset.index import ShardEntry
from wdskit.errors import WdskitError
from wdskit.files import Disk
from wdskit.packing.destination import Destination
from wdskit.packing.fill import ShardJob, fill_shard
from wdskit.packing.options import PackOptions
from wdskit.packing.plan import Names, fill_in_turn
from wdskit.packing.planning import Jobs
from wdskit.packing.rows import Row
from wdskit.packing.sources import Progress, Source, Tell, streamed_rows
from wdskit.packing.workers import fill_in_worker
from wdskit.shards.parallel import map_shards
from wdskit.tar.writer import END_BYTES


class Count:
    """Tells how much is packed. `total` is samples and bytes in all."""

    def __init__(self, tell: Tell, total: tuple[int, int] | tuple[None, None]) -> None:
        self._tell = tell
        self._total = total
        self._samples = self._bytes = 0
        self(0, 0)

    def __call__(self, num_samples: int, num_bytes: int) -> None:
        """So many more."""
        self._samples += num_samples
        self._bytes += num_bytes
        self._tell(Progress("packing", self._samples, self._bytes, *self._total))


def fill_all(jobs: Jobs, *, workers: int, tell: Tell, disk: Disk) -> list[ShardEntry]:
    """Fill the planned shards, in this process or in several, and return their lines of the index in order."""
    num_bytes = sum(span.num_bytes - END_BYTES for span in jobs.spans)
    count = Count(tell, (jobs.spans[-1].stop, num_bytes))
    if workers == 1 or len(jobs) == 1:
        return [fill_shard(job, disk=disk, on_sample=count) for job in jobs]
    entries = []
    for entry in map_shards(functools.partial(fill_in_worker, disk=disk), jobs, workers=workers):
        if isinstance(entry, WdskitError):
            raise entry
        entries.append(entry)
        count(entry.num_samples, entry.num_bytes - END_BYTES)
    return entries


def fill_stream(
    found: Source,
    open_target: Callable[[], Destination],
    names: Names,
    options: PackOptions,
    *,
    tell: Tell,
    disk: Disk,
) -> list[ShardEntry]:
    """Fill the shards of rows that come once, while they come.

    Raises:
        PackError: There is no row.
    """
    rows = _one_at_least(found, streamed_rows(found, skip_bad=options.skip_bad))
    target = open_target()
    rows = target.refuse_taken(rows, tell) if target.append else rows
    count = Count(tell, (None, None))
    first = target.first_number(names)
    also = target.beside(options.also, options.split_name)
    return [
        fill_shard(ShardJob(target.folder / names[number], *shard, also=also), disk=disk, on_sample=count)
        for number, shard in enumerate(fill_in_turn(rows, options.limits), start=first)
    ]


def _one_at_least(found: Source, rows: Iterator[Row]) -> Iterable[Row]:
    first = next(rows, None)
    if first is None:
        raise found.nothing()
    return itertools.chain([first], rows)
