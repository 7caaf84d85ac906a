"""Which run this is: one that begins, that goes on with another one, or that is over already."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wdskit.dataset.index import Exports
from wdskit.errors import PackError
from wdskit.files import Disk
from wdskit.packing.destination import Destination
from wdskit.packing.finished import forget, indexed_already
from wdskit.packing.options import PackOptions
from wdskit.packing.places import Place, begins_part
from wdskit.packing.plan import Names
from wdskit.packing.planning import Jobs, PlannedShard
from wdskit.packing.record import RunRecord
from wdskit.packing.sources import Source, Tell
from wdskit.packing.splits import Splitter
from wdskit.packing.spool import Spool, digest_blocks
from wdskit.packing.started import Run, begin, compare


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


def settle(work: Work, place: Place, spool: Spool | None) -> Destination:
    """The folder that is packed into. Where a run of the same was killed behind its index, it is `finished`.

    Args:
        work: What is packed.
        place: Where.
        spool: All rows; None for such that come once only, of which nothing is known yet.

    Raises:
        PackError: The folder is packed already, by another run, and is neither added to nor replaced.
    """
    target = place.open()
    if target.finished is None:
        return target
    options, old = work.options, target.finished.record
    also = target.beside(options.also, options.split_name)
    told = told_of(work, [*map(target.first_number, work.names)], also)
    now = RunRecord(told, None, 1, (), None) if spool is None else _record_of(told, spool, old.shards)
    others = target.finished.others(now, str if spool is None else lambda number: spool[number].where)
    if not others:
        return target
    if not options.append and not options.overwrite:
        raise indexed_already(target.folder, others)
    make_way(work, target)
    return place.open()


def settle_stream(work: Work, place: Place, first_key: str) -> Destination:
    """As `settle`, for rows that come once, of which only the first is known yet."""
    target = settle(work, place, None)
    if target.finished is None:
        return target
    if work.options.overwrite or (target.append and first_key != target.finished.first_key()):
        make_way(work, target)  # rows that have gone cannot be packed any more, once the first other one is met
        return place.open()
    return target


def end_finished(work: Work, target: Destination, num_shards: int | None = None) -> None:
    """Remove what a run of the same has left that was killed behind its index; of a part, `finish_pack` does so.

    Args:
        work: What was to be packed.
        target: The folder, `finished`.
        num_shards: Of rows that came once; None for others, which are known to be the same.

    Raises:
        PackError: It was another run.
    """
    finished = target.finished
    assert finished is not None
    if num_shards is not None and num_shards != len(finished.entries):
        raise indexed_already(target.folder, [f"its rows made {len(finished.entries)} shards, these {num_shards}."])
    target.check_lists(target.lists(work.found))
    if work.options.part is None:
        finished.end(work.disk)


def make_way(work: Work, target: Destination) -> None:
    """Remove what is left of a run that is over, for another one to begin.

    Raises:
        PackError: Other parts of it are at work.
    """
    assert target.finished is not None
    if work.options.part is None:
        target.finished.end(work.disk)
        return
    with contextlib.ExitStack() as stack, begins_part(stack, target.folder) as is_alone:
        if not is_alone():
            raise PackError(f"{target.folder}: other parts are at work. Wait for their end, or stop them.")
        work.disk.fsync_folder(target.folder)
        forget(target.folder, work.disk)


def begin_run(work: Work, target: Destination, jobs: Jobs) -> Run:
    """Write the record, or take over what a run of the same record has done."""
    told = told_of(work, [series.first for series in jobs.series], jobs.also)
    record = _record_of(told, jobs.spool, jobs.plan().shards)
    part = work.options.part
    if part is None:
        return _begin_locked(work, target, jobs, record, lambda: True)
    with begins_part(work.stack, target.folder) as is_alone:
        record = dataclasses.replace(record, parts=part[1])
        return _begin_locked(work, target, jobs, record, is_alone)


def told_of(work: Work, firsts: Sequence[int], also: Exports) -> dict[str, Any]:
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
    check_free(work, target, jobs)
    if options.part is not None:
        target.publish_lists(target.lists(work.found), disk=work.disk)
    return begin(folder, record, overwrite=options.overwrite, part=options.part, disk=work.disk)


def check_free(work: Work, target: Destination, jobs: Jobs) -> None:
    """Refuse what is in the way."""
    target.check_free(jobs.plan().shards)
    target.check_lists(target.lists(work.found))


def _record_of(told: Mapping[str, Any], spool: Spool, shards: tuple[PlannedShard, ...] | None) -> RunRecord:
    return RunRecord(told, len(spool), *digest_blocks(spool), shards)
