"""A run of `pack` whose rows come once: its shards are filled while they come."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from wdskit.dataset.index import Exports, ShardEntry
from wdskit.packing.destination import Destination, raised_as_pack_errors
from wdskit.packing.fill import Count, ShardJob, fill_shard
from wdskit.packing.journal import indexed_already, remove_finished
from wdskit.packing.plan import fill_in_turn
from wdskit.packing.planning import PlannedShard
from wdskit.packing.row import Row
from wdskit.packing.run import Work, begin, publish_all, resolve_last_run
from wdskit.packing.sources import streamed_rows
from wdskit.packing.staging import RunDescription, Staging
from wdskit.packing.streamed_keys import StreamedKeys
from wdskit.packing.treating import required_rows


def pack_stream(work: Work) -> tuple[Destination, list[ShardEntry]]:
    """Fill the shards, and publish them. The folder, and the lines of the index.

    Where the last run in the folder had the same options, its shards are compared with what the rows give, and nothing
    is written.

    Raises:
        PackError: There is no row; or the folder is packed already, with other rows.
    """
    options, found = work.options, work.found
    found.rows = required_rows(found.rows, options.treatment, found.rejected)
    rows = streamed_rows(found, options.treatment, skip_bad=options.skip_bad)
    first_row = next(rows, None)
    if first_row is None:
        raise found.nothing()
    with raised_as_pack_errors(work.folder):
        target = work.look()
        also = target.beside(options.also, options.split_name)
        run = RunDescription(work.described(also), None, 1, (), None)
        target = resolve_last_run(target, run, str)
        if target.is_done and options.append and target.last_run is not None:
            target = dataclasses.replace(target, is_done=first_row.key == target.last_run.first_key())
        first = target.first_number(work.names[0])
        target.check_free([], also)
        staging = None if target.is_done else begin(work, dataclasses.replace(run, first=(first,)), str)
    with StreamedKeys(lambda: work.room, disk=work.disk) as keys:
        if target.append:
            keys.add_taken(target, work.tell)
        entries = _fill(work, target, staging, itertools.chain([first_row], rows), keys, first, also)
    lists = target.lists(found)
    with raised_as_pack_errors(work.folder):
        if staging is not None:
            publish_all(target, staging, entries, lists, also)
        else:
            target.check_lists(lists)
            remove_finished(work.folder, work.disk)
    return target, entries


def _fill(
    work: Work,
    target: Destination,
    staging: Staging | None,
    rows: Iterable[Row],
    keys: StreamedKeys,
    first: int,
    also: Exports,
) -> list[ShardEntry]:
    """Fill the shards, each while its rows come; before it has its name its keys are compared with all before them.
    A shard that is there already is compared.
    """
    options = work.options
    by_count = options.treatment.changes_bytes
    count = Count(work.tell, (None, None))
    there = {entry.name: entry for entry in target.last_run.entries} if target.is_done and target.last_run else {}
    there |= staging.filled() if staging is not None else {}
    entries = []
    for number, shard in enumerate(fill_in_turn(_guarded(rows), options.limits, by_count=by_count), start=first):
        name = work.names[0][number]
        known = there.get(name)
        if staging is None and known is None:
            raise indexed_already(target.folder, [f"its rows made {len(there)} shards, these make more."])
        if known is None:
            target.check_free([PlannedShard(name, 0, 0)], also)
        path = (target.folder if staging is None else staging.path) / name
        sha256 = None if known is None else known.sha256
        job = ShardJob(path, keys.watch(shard), 0, also, options.treatment, options.threads, sha256)
        try:
            entry = fill_shard(job, disk=work.disk, on_sample=count, only_compare=known is not None)
        except _SourceFault as fault:
            raise fault.error from fault.error.__cause__
        assert by_count or entry.num_bytes == shard.num_bytes
        if staging is not None and known is None:
            with raised_as_pack_errors(target.folder):
                staging.note(entry)
        entries.append(entry)
    if staging is None and len(entries) != len(there):
        raise indexed_already(target.folder, [f"its rows made {len(there)} shards, these {len(entries)}."])
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
