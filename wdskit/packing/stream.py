"""Pack rows that can be read only once: the shards are filled while the rows are read."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from wdskit.dataset.classes import CLASS_FIELD, CLASSES_NAME
from wdskit.dataset.index import ShardEntry
from wdskit.packing.destination import Destination, raised_as_pack_errors
from wdskit.packing.division import PlannedShard, fill_in_turn
from wdskit.packing.fill import Count, ShardJob, fill_shard, required_rows
from wdskit.packing.journal import indexed_already, remove_finished
from wdskit.packing.plan import StreamedKeys
from wdskit.packing.row import Row, key_taken, row_error
from wdskit.packing.run import Work, begin, publish_all, resolve_last_run
from wdskit.packing.sources import streamed_rows
from wdskit.packing.staging import RunDescription, Staging


def pack_stream(work: Work, *, skip_bad: bool) -> tuple[Destination, list[ShardEntry]]:
    """Fill the shards and publish them. Return the destination and the index entries of the shards.

    If the last run in the folder had the same options, the rows are compared with its shards and nothing is written.

    Raises:
        PackError: The source has no row, or the folder is packed already with different rows.
        RowError: A row cannot be packed, or has the key of an earlier row.
    """
    options, found = work.options, work.found
    found.rows = required_rows(found.rows, options.transforms, found.rejected)
    rows = streamed_rows(found, options.transforms, skip_bad=skip_bad)
    first_row = next(rows, None)
    if first_row is None:
        raise found.nothing()
    with raised_as_pack_errors(work.folder):
        has_labels = CLASS_FIELD in dict(first_row.fields)
        target = work.look(has_labels=has_labels)
        if target.append and not has_labels and not found.classes and (work.folder / CLASSES_NAME).exists():
            rows = _unlabelled(rows, work.folder)
        run = RunDescription(work.to_dict(), None, "", None)
        target = resolve_last_run(target, run)
        if target.is_done and options.append and target.last_run is not None:
            target = dataclasses.replace(target, is_done=first_row.key == target.last_run.first_key())
        first = target.first_number(work.names[0])
        target.check_free([])
        staging = None if target.is_done else begin(work, target, dataclasses.replace(run, first=(first,)))
    with contextlib.closing(StreamedKeys(lambda: work.room)) as keys:
        if target.append:
            for key in target.all_keys(work.on_progress):
                keys.add(key, "")
        entries = _fill(work, target, staging, itertools.chain([first_row], rows), keys, first)
    lists = target.lists(found)
    with raised_as_pack_errors(work.folder):
        if staging is not None:
            publish_all(target, staging, entries, lists)
        else:
            target.check_lists(lists)
            remove_finished(work.folder, target.last_run, work.disk)
    return target, entries


def _unlabelled(rows: Iterable[Row], folder: Path) -> Generator[Row, None, None]:
    """Yield the rows of an addition without class names to a folder with class names. RowError: A row has a label."""
    for row in rows:
        if CLASS_FIELD in dict(row.fields):
            problem = f"it has a label, whose name is not known, but {folder} has {CLASSES_NAME}"
            raise row_error(row.where, problem, f"Pack with --classes {folder}.")
        yield row


def _fill(
    work: Work,
    target: Destination,
    staging: Staging | None,
    rows: Iterable[Row],
    keys: StreamedKeys,
    first: int,
) -> list[ShardEntry]:
    """Fill each shard while its rows are read, and return the index entries of all shards.

    Keys are compared with all earlier keys before a shard is complete. The rows of an existing shard are compared with
    its digest.
    """
    options = work.options
    by_count = options.transforms.changes_bytes
    count = Count(work.on_progress, (None, None))
    there = {entry.name: entry for entry in target.last_run.entries} if target.is_done and target.last_run else {}
    there |= staging.filled() if staging is not None else {}
    entries = []
    for number, shard in enumerate(fill_in_turn(_guarded(rows), options.limits, by_count=by_count), start=first):
        name = work.names[0][number]
        known = there.get(name)
        if staging is None and known is None:
            raise indexed_already(target.folder, [f"its rows made {len(there)} shards, and these rows make more."])
        if known is None:
            target.check_free([PlannedShard(name, 0, 0)])
        path = (target.folder if staging is None else staging.path) / name
        sha256 = None if known is None else known.sha256
        job = ShardJob(path, _new_keys(shard, keys, target), 0, options.transforms, options.threads, sha256)
        try:
            entry = fill_shard(job, disk=work.disk, on_sample=count)
        except _SourceFault as fault:
            raise fault.error from fault.error.__cause__
        assert by_count or entry.num_bytes == shard.num_bytes
        if staging is not None and known is None:
            with raised_as_pack_errors(target.folder):
                staging.note(entry)
        entries.append(entry)
    if staging is None and len(entries) != len(there):
        raise indexed_already(
            target.folder, [f"its rows made {len(there)} shards, and these rows make {len(entries)}."]
        )
    return entries


def _new_keys(rows: Iterable[Row], keys: StreamedKeys, target: Destination) -> Iterator[Row]:
    """Yield the rows and check that each key is new.

    Raises:
        RowError: A row has the key of an earlier row, or of an existing sample in an addition.
    """
    for row in rows:
        before = keys.add(row.key, row.where)
        if before is not None:
            raise key_taken(row, before) if before else target.key_taken(row)
        yield row


class _SourceFault(Exception):
    """Carries an OSError of the source through code that converts an OSError to an error of the destination."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


def _guarded(rows: Iterable[Row]) -> Iterator[Row]:
    try:
        yield from rows
    except OSError as err:
        raise _SourceFault(err) from err
