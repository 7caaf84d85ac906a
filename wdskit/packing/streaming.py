"""A run of `pack` whose rows come once: its shards are filled while they come."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from wdskit.dataset.index import Exports, ShardEntry
from wdskit.packing.beginning import Work, end_finished, settle_stream, told_of
from wdskit.packing.destination import Destination
from wdskit.packing.fill import ShardJob, fill_shard
from wdskit.packing.places import Place, told_as_pack_errors
from wdskit.packing.plan import fill_in_turn
from wdskit.packing.record import RunRecord
from wdskit.packing.rows import Row
from wdskit.packing.running import Count, complete, lists_of
from wdskit.packing.sources import streamed_rows
from wdskit.packing.started import Run, begin, compare
from wdskit.packing.streamed_keys import StreamedKeys
from wdskit.packing.treating import required_rows


def pack_stream(work: Work, place: Place) -> tuple[Destination, list[ShardEntry]]:
    """Fill the shards, and write the index. The folder, and the lines of the index.

    Raises:
        PackError: There is no row.
    """
    options, treatment = work.options, work.options.treatment
    work.found.rows = required_rows(work.found.rows, treatment, work.found.rejected)
    rows = streamed_rows(work.found, treatment, skip_bad=options.skip_bad)
    first_row = next(rows, None)
    if first_row is None:
        raise work.found.nothing()
    with told_as_pack_errors(place.folder):
        target = settle_stream(work, place, first_row.key)
    with StreamedKeys(place.room, disk=work.disk) as keys:
        if target.append:
            keys.add_taken(target, work.tell)
        first = target.first_number(work.names[0])
        also = target.beside(options.also, options.split_name)
        run = None if target.finished is not None else _begin(work, target, told_of(work, [first], also))
        entries = _fill(work, target, itertools.chain([first_row], rows), keys, first, also)
    if run is not None:
        complete(target, lists_of(work, target), entries, also, run)
    else:
        with told_as_pack_errors(target.folder):
            end_finished(work, target, len(entries))
    return target, entries


def _begin(work: Work, target: Destination, told: dict[str, Any]) -> Run:
    """Write the record, or go on with that of a run that was stopped."""
    options = work.options
    with told_as_pack_errors(target.folder):
        record = compare(
            target.folder,
            RunRecord(told, None, 1, (), None),
            str,
            restart=options.restart,
            overwrite=options.overwrite,
            disk=work.disk,
        )
        return begin(target.folder, record, overwrite=options.overwrite, disk=work.disk)


def _fill(
    work: Work, target: Destination, rows: Iterable[Row], keys: StreamedKeys, first: int, also: Exports
) -> list[ShardEntry]:
    """Fill the shards, each while its rows come; before it has its name its keys are compared with all before them."""
    options = work.options
    by_count = options.treatment.changes_bytes
    count = Count(work.tell, (None, None))
    entries = []
    for number, shard in enumerate(fill_in_turn(_guarded(rows), options.limits, by_count=by_count), start=first):
        path = target.folder / work.names[0][number]
        sha256 = target.finished.sha256_of(path.name) if target.finished is not None else None
        job = ShardJob(path, keys.watch(shard), 0, also, options.treatment, options.threads, sha256)
        try:
            entry = fill_shard(job, disk=work.disk, on_sample=count)
        except _SourceFault as fault:
            raise fault.error from fault.error.__cause__
        assert by_count or entry.num_bytes == shard.num_bytes
        entries.append(entry)
    return entries


class _SourceFault(Exception):
    """Carries an error of the source past those who take it for one of the disk."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


def _guarded(rows: Iterable[Row]) -> Iterator[Row]:
    try:
        yield from rows
    except OSError as err:
        raise _SourceFault(err) from err
