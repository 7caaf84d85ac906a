"""Pack rows that can be read only once: the shards are filled while the rows are read."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from wdskit.dataset.binary import ShardEntry
from wdskit.dataset.classes import CLASS_FIELD, CLASSES_NAME
from wdskit.packing.division import fill_in_turn
from wdskit.packing.fill import Count, fill_shard
from wdskit.packing.plan import ShardJob, StreamedKeys, required_rows
from wdskit.packing.publish import Destination
from wdskit.packing.row import Row, key_taken, row_error
from wdskit.packing.sources import Source, streamed_rows


def pack_stream(dest: Destination, found: Source, *, skip_bad: bool) -> list[ShardEntry]:
    """Fill the shards and publish them. Return the index entries of the shards.

    If the last run in the folder had the same options, the rows are compared with its shards and nothing is written.

    Raises:
        PackError: The source has no row, or the folder is packed already with different rows.
        RowError: A row cannot be packed, or has the key of an earlier row.
    """
    found.rows = required_rows(found.rows, dest.options.transforms, found.rejected)
    rows = streamed_rows(found, dest.options.transforms, skip_bad=skip_bad)
    first_row = next(rows, None)
    if first_row is None:
        raise found.nothing()
    has_labels = CLASS_FIELD in dict(first_row.fields)
    dest.resolve_previous_run(found, num_rows=None, rows="", has_labels=has_labels, first_key=first_row.key)
    if dest.options.append and not has_labels and not found.classes and (dest.folder / CLASSES_NAME).exists():
        rows = _unlabelled(rows, dest.folder)
    first = dest.first_number(dest.names[0])
    dest.check_folder([])
    dest.start(None)
    with contextlib.closing(StreamedKeys(lambda: dest.room)) as keys:
        for key in dest.existing_keys():
            keys.add(key, "")
        entries = _fill(dest, itertools.chain([first_row], rows), keys, first)
    dest.publish(entries, dest.lists(found))
    return entries


def _unlabelled(rows: Iterable[Row], folder: Path) -> Generator[Row, None, None]:
    """Yield the rows of an addition without class names to a folder with class names. RowError: A row has a label."""
    for row in rows:
        if CLASS_FIELD in dict(row.fields):
            problem = f"it has a label, whose name is not known, but {folder} has {CLASSES_NAME}"
            raise row_error(row.where, problem, f"Pack with --classes {folder}.")
        yield row


def _fill(dest: Destination, rows: Iterable[Row], keys: StreamedKeys, first: int) -> list[ShardEntry]:
    """Fill each shard while its rows are read, and return the index entries of all shards.

    Keys are compared with all earlier keys before a shard is complete. The rows of an existing shard are compared with
    its digest.
    """
    options, there = dest.options, dest.filled()
    by_count = options.transforms.changes_bytes
    count = Count(dest.on_progress, (None, None))
    entries = []
    for number, shard in enumerate(fill_in_turn(_guarded(rows), options.limits, by_count=by_count), start=first):
        name = dest.names[0][number]
        known = there.get(name)
        if known is None:
            if dest.is_done:
                raise dest.indexed_already([f"its rows made {len(there)} shards, and these rows make more."])
            dest.check_name(name)
        sha256 = None if known is None else known.sha256
        rows_of_shard = _new_keys(shard, keys, dest)
        job = ShardJob(dest.path / name, rows_of_shard, 0, options.transforms, options.threads, sha256, dest.columns)
        try:
            entry = fill_shard(job, disk=options.disk, on_sample=count)
        except _SourceFault as fault:
            raise fault.error from fault.error.__cause__
        assert by_count or entry.num_bytes == shard.num_bytes
        if known is None:
            dest.add(entry)
        entries.append(entry)
    if dest.is_done and len(entries) != len(there):
        raise dest.indexed_already([f"its rows made {len(there)} shards, and these rows make {len(entries)}."])
    return entries


def _new_keys(rows: Iterable[Row], keys: StreamedKeys, dest: Destination) -> Iterator[Row]:
    """Yield the rows and check that each key is new.

    Raises:
        RowError: A row has the key of an earlier row, or of an existing sample in an addition.
    """
    for row in rows:
        before = keys.add(row.key, row.where)
        if before is not None:
            raise key_taken(row, before) if before else dest.key_exists(row)
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
