"""A run of `pack`: planned, its shards filled here or in several processes, its index."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from wdskit.dataset.index import Exports, ShardEntry, read_index, write_index
from wdskit.errors import PackError
from wdskit.export.api import check_export_names, export_folder
from wdskit.files import Disk
from wdskit.packing.beginning import Work, begin_run, check_free, end_finished, settle
from wdskit.packing.destination import Destination
from wdskit.packing.executors import fill_jobs
from wdskit.packing.fill import fill_shard
from wdskit.packing.finished import find_finished
from wdskit.packing.places import Place, told_as_pack_errors
from wdskit.packing.planning import Chosen, Jobs, Series, divide_rows, read_rows
from wdskit.packing.recorded import Ints
from wdskit.packing.sources import Progress, Tell
from wdskit.packing.splits import divide_splits
from wdskit.packing.spool import Spool
from wdskit.packing.started import Run
from wdskit.tar.writer import END_BYTES


class Count:
    """Tells how much is packed. `total` is samples and bytes in all."""

    def __init__(self, tell: Tell, total: tuple[int | None, int | None]) -> None:
        self._tell = tell
        self._total = total
        self._samples = self._bytes = 0
        self(0, 0)

    def __call__(self, num_samples: int, num_bytes: int) -> None:
        """So many more."""
        self._samples += num_samples
        self._bytes += num_bytes
        self._tell(Progress("packing", self._samples, self._bytes, *self._total))


def plan_jobs(work: Work, place: Place, spool: Spool) -> tuple[Destination, Jobs]:
    """Plan everything, and refuse what is wrong with the rows, before anything is written."""
    options = work.options
    with told_as_pack_errors(place.folder):
        kept = read_rows(
            work.found,
            spool,
            treatment=options.treatment,
            skip_bad=options.skip_bad,
            workers=options.workers,
            tell=work.tell,
        )
        target = settle(work, place, spool)
        if target.finished is None:
            target.check_keys(spool, kept, work.tell)
        also = target.beside(options.also, options.split_name)
        jobs = _divided(work, target, spool, kept, also)
        check_export_names([*(entry.name for entry in target.entries), *map(jobs.name, range(len(jobs)))], also.kinds)
        if options.dry_run:
            check_free(work, target, jobs)
    return target, jobs


def _divided(work: Work, target: Destination, spool: Spool, kept: Ints | None, also: Exports) -> Jobs:
    """The shards that the rows make."""
    options = work.options
    how: Any = {
        "limits": options.limits,
        "shuffle": options.shuffle,
        "by_count": options.treatment.changes_bytes,
    }
    firsts = map(target.first_number, work.names)
    if work.splitter is None:
        order, spans = divide_rows(spool, kept, **how)
        shards, splits = [spans], [""]
    else:
        order, shards = divide_splits(spool, kept, work.splitter, **how)
        splits = [*work.splitter.shares]
    series = [Series(*each) for each in zip(work.names, firsts, map(len, shards), splits, strict=True)]
    spans = [*itertools.chain(*shards)]
    return Jobs(target.folder, spool, order, spans, series, also, options.treatment, options.threads)


def pack_planned(work: Work, place: Place, target: Destination, jobs: Jobs) -> Sequence[ShardEntry]:
    """Fill the shards, or some of them, and where they are all there then, write the index."""
    part = work.options.part
    numbers = range(len(jobs)) if part is None else range(part[0], len(jobs), part[1])
    with told_as_pack_errors(place.folder):
        if work.options.only is not None:
            over = find_finished(target.folder)
            if over is not None:
                over.end(work.disk)
            return [_fill_again(work, target, jobs, work.options.only)]
        if target.finished is not None:
            end_finished(work, target)
            return [target.finished.entries[number] for number in numbers]
        run = begin_run(work, target, jobs)
    entries = fill_all(work, place, jobs, run, numbers)
    if part is None:
        complete(target, lists_of(work, target), entries, jobs.also, run)
    return entries


def _fill_again(work: Work, target: Destination, jobs: Jobs, only: int) -> ShardEntry:
    """Fill one shard of a packed folder again."""
    index = read_index(target.folder)
    name = work.names[0][only]
    if name not in index.by_name or only >= len(jobs):
        last = index.entries[-1].name if index.entries else "nothing"
        msg = f"{target.folder}: only: no {name}: its index ends with {last}, what these options make of the source"
        raise PackError(f"{msg} with {jobs.name(len(jobs) - 1)}.\n  Give the options that it was packed with.")
    entry = index.by_name[name]
    count = Count(work.tell, (entry.num_samples, entry.num_bytes - END_BYTES))
    job = dataclasses.replace(jobs[only], sha256=entry.sha256, also=index.also)
    fill_shard(job, disk=work.disk, on_sample=count)
    return entry


def fill_all(work: Work, place: Place, jobs: Jobs, run: Run, numbers: Sequence[int]) -> list[ShardEntry]:
    """Fill the planned shards of these numbers, but those that are done, in this process or in several, and return
    their lines of the index in order.
    """
    spans = [jobs.spans[number] for number in numbers]
    num_bytes = sum(span.num_bytes - END_BYTES for span in spans)
    total_bytes = None if work.options.treatment.changes_bytes else num_bytes
    count = Count(work.tell, (sum(span.stop - span.start for span in spans), total_bytes))

    def fill(chosen: Sequence[int]) -> Generator[ShardEntry, None, None]:
        return fill_jobs(
            Chosen(jobs, [numbers[at] for at in chosen]),
            on=work.options.on,
            workers=work.options.workers,
            folder=run.folder,
            held=place.held,
            disk=work.disk,
            count=count,
        )

    return fill_rest([jobs.name(number) for number in numbers], run, count, fill)


def fill_rest(
    names: Sequence[str],
    run: Run,
    count: Count,
    fill: Callable[[Sequence[int]], Generator[ShardEntry, None, None]],
) -> list[ShardEntry]:
    """Fill the shards that are not done yet, and note each.

    Args:
        names: Of all shards.
        run: Knows those that are done.
        count: Told of these.
        fill: Fills some, by their places in `names`; their lines of the index, in order.

    Returns:
        The lines of all.
    """
    entries = {at: run.done[name] for at, name in enumerate(names) if name in run.done}
    for entry in entries.values():
        count(entry.num_samples, entry.num_bytes - END_BYTES)
    todo = [at for at in range(len(names)) if at not in entries]
    with contextlib.closing(fill(todo)) as filled:
        for at, entry in zip(todo, filled, strict=True):
            with told_as_pack_errors(run.folder):
                run.note(entry)
            entries[at] = entry
    return [entries[at] for at in range(len(names))]


def lists_of(work: Work, target: Destination) -> dict[str, bytes]:
    """`Destination.lists` of the source."""
    with told_as_pack_errors(target.folder):
        return target.lists(work.found)


def complete(
    target: Destination, lists: Mapping[str, bytes], entries: Sequence[ShardEntry], also: Exports, run: Run
) -> None:
    """Write what stands beside the shards, the index last; and forget the run."""
    with told_as_pack_errors(target.folder):
        now = dataclasses.replace(target, replaced=())
        now.check_lists(lists)
        now.check_strays(entry.name for entry in entries)
        now.publish_lists(lists, disk=run.disk)
        publish_all(target, entries, also, run.disk)
        run.end()


def publish_all(target: Destination, entries: Sequence[ShardEntry], also: Exports, disk: Disk) -> None:
    """Write what is beside all shards for other readers, and the index."""
    all_ = (*target.entries, *entries)
    export_folder(target.folder, all_, also=also, before=target.also, earlier=target.entries, disk=disk)
    write_index(target.folder, all_, also=also, disk=disk)
