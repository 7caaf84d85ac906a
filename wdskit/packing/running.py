"""A run of `pack`: planned, its shards filled here or in several processes, its index."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wdskit.dataset.index import Also, ShardEntry, read_index, write_index
from wdskit.errors import PackError
from wdskit.files import Disk
from wdskit.packing.destination import Destination
from wdskit.packing.executors import fill_jobs
from wdskit.packing.fill import fill_shard
from wdskit.packing.options import PackOptions
from wdskit.packing.places import Place, begins_part, remove_locks, told_as_pack_errors
from wdskit.packing.plan import Names
from wdskit.packing.planning import Chosen, Jobs, Series, divide_rows, read_rows
from wdskit.packing.record import RunRecord
from wdskit.packing.recorded import Ints
from wdskit.packing.sources import Progress, Source, Tell
from wdskit.packing.splits import Splitter, divide_splits
from wdskit.packing.spool import Spool, digest_blocks
from wdskit.packing.started import Run, begin, compare
from wdskit.shards.also import check_names, publish_beside_folder
from wdskit.tar.writer import END_BYTES


@dataclass(frozen=True)
class Work:
    """What is packed, and how.

    Attributes:
        stack: Closed when the run is over.
        found: The source.
        names: Of the shards; with splits those of each.
        options: As `pack` takes them.
        how: Those of the source, by name.
        splitter: Finds the split of each row; None where nothing is split.
        tell: Told how far it is.
        disk: What writes.
    """

    stack: contextlib.ExitStack
    found: Source
    names: Sequence[Names]
    options: PackOptions
    how: Mapping[str, Any]
    splitter: Splitter | None
    tell: Tell
    disk: Disk


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


def plan_jobs(work: Work, place: Place, spool: Spool) -> Jobs:
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
        target = place.open()
        target.check_keys(spool, kept, work.tell)
        also = target.beside(options.also, options.split_name)
        jobs = _divided(work, target, spool, kept, also)
        check_names([*(entry.name for entry in target.entries), *map(jobs.name, range(len(jobs)))], also)
        if options.dry_run:
            _check_free(work, target, jobs)
    return jobs


def _divided(work: Work, target: Destination, spool: Spool, kept: Ints | None, also: Also) -> Jobs:
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


def pack_planned(work: Work, place: Place, jobs: Jobs) -> Sequence[ShardEntry]:
    """Fill the shards, or some of them, and where they are all there then, write the index."""
    target, part = place.open(), work.options.part
    if work.options.only is not None:
        return [_fill_again(work, target, jobs, work.options.only)]
    with told_as_pack_errors(place.folder):
        run = _begin(work, target, jobs)
    numbers = range(len(jobs)) if part is None else range(part[0], len(jobs), part[1])
    entries = fill_all(work, place, jobs, run, numbers)
    if part is None:
        complete(target, work.found, entries, jobs.also, run)
    return entries


def _begin(work: Work, target: Destination, jobs: Jobs) -> Run:
    """Write the record, or take over what a run of the same record has done."""
    block_rows, blocks = digest_blocks(jobs.spool)
    told = told_of(work, [series.first for series in jobs.series], jobs.also)
    record = RunRecord(told, len(jobs.spool), block_rows, blocks, jobs.plan().shards)
    part = work.options.part
    if part is None:
        return _begin_locked(work, target, jobs, record, lambda: True)
    with begins_part(work.stack, target.folder) as is_alone:
        record = dataclasses.replace(record, parts=part[1])
        return _begin_locked(work, target, jobs, record, is_alone)


def told_of(work: Work, firsts: Sequence[int], also: Also) -> dict[str, Any]:
    """All options that a shard, or what is beside it, could depend on, by name."""
    told = {**work.options.told(), **work.how, "pattern": work.names[0].pattern, "first": firsts[0]}
    if work.splitter is not None:
        told |= {"pattern": [names.pattern for names in work.names], "first": [*firsts]}
    return {**told, "also": list(also.kinds), "split_name": also.split_name}


def _begin_locked(work: Work, target: Destination, jobs: Jobs, record: RunRecord, is_alone: Callable[[], bool]) -> Run:
    options, folder, parts = work.options, target.folder, record.parts
    record = compare(
        folder,
        record,
        lambda number: jobs.spool[number].where,
        restart=options.restart,
        overwrite=options.overwrite,
        is_part=options.part is not None,
        is_alone=is_alone,
        disk=work.disk,
    )
    if record.parts != parts:
        if not is_alone():
            msg = f"{folder}: part: this run is divided into {record.parts} parts, some of which are at work."
            raise PackError(f"{msg}\n  Give the same number of parts, or wait for their end.")
        record = dataclasses.replace(record, parts=parts)
    _check_free(work, target, jobs)
    if options.part is not None:
        target.publish_lists(target.lists(work.found), disk=work.disk)
    return begin(folder, record, overwrite=options.overwrite, part=options.part, disk=work.disk)


def _check_free(work: Work, target: Destination, jobs: Jobs) -> None:
    """Refuse what is in the way."""
    target.check_free(jobs.plan().shards)
    target.check_lists(target.lists(work.found))


def _fill_again(work: Work, target: Destination, jobs: Jobs, only: int) -> ShardEntry:
    """Fill one shard of a packed folder again."""
    index = read_index(target.folder)
    name = work.names[0][only]
    if name not in index.by_name or only >= len(jobs):
        msg = f"{target.folder}: only: there is no shard {name} in its index and in what is packed."
        raise PackError(f"{msg}\n  The last that the source gives is {jobs.name(len(jobs) - 1)}.")
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
    entries: dict[int, ShardEntry] = {}
    for number in numbers:
        if (entry := run.done.get(jobs.name(number))) is not None:
            entries[number] = entry
            count(entry.num_samples, entry.num_bytes - END_BYTES)
    todo = Chosen(jobs, [number for number in numbers if number not in entries])
    filled = fill_jobs(
        todo,
        on=work.options.on,
        workers=work.options.workers,
        folder=run.folder,
        held=place.held,
        disk=work.disk,
        count=count,
    )
    with contextlib.closing(filled):
        for number, entry in zip(todo.numbers, filled, strict=True):
            with told_as_pack_errors(run.folder):
                run.note(entry)
            entries[number] = entry
    return [entries[number] for number in numbers]


def complete(target: Destination, found: Source, entries: Sequence[ShardEntry], also: Also, run: Run) -> None:
    """Write what stands beside the shards, the index last; and forget the run."""
    with told_as_pack_errors(target.folder):
        lists = target.lists(found)
        now = dataclasses.replace(target, replaced=())
        now.check_lists(lists)
        now.check_strays(entry.name for entry in entries)
        now.publish_lists(lists, disk=run.disk)
        publish_all(target, entries, also, run.disk)
        run.end()
        remove_locks(target.folder, run.disk)


def publish_all(target: Destination, entries: Sequence[ShardEntry], also: Also, disk: Disk) -> None:
    """Write what is beside all shards for other readers, and the index."""
    all_ = (*target.entries, *entries)
    publish_beside_folder(target.folder, all_, also=also, before=target.also, earlier=target.entries, disk=disk)
    write_index(target.folder, all_, also=also, disk=disk)
