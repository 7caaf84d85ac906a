"""Pack rows that can be read only once: the shards are filled while the rows are read."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from wdskit.dataset.classes import CLASS_FIELD, CLASSES_NAME
from wdskit.dataset.index import ShardEntry
from wdskit.packing.division import divide_stream
from wdskit.packing.fill import ProgressCounter, fill_shard
from wdskit.packing.plan import ShardJob, StreamedKeys, required_rows
from wdskit.packing.publish import Destination
from wdskit.packing.row import Row, key_taken, row_error
from wdskit.packing.sources import Source, streamed_rows


def pack_stream(dest: Destination, source: Source, *, skip_bad: bool) -> list[ShardEntry]:
    """Fill shards with the rows of the source and publish the shards. Return the index entries of the shards, in order.

    If this run is done already, the rows are compared with its shards and nothing is written.
    With `skip_bad`, a row that cannot be packed is left out, and its error is added to `source.rejected`. The call uses
    up `source.rows`.

    Raises:
        PackError: The source has no row, an option is for a field or for images that no row has, the folder cannot be
            written, or its existing shards, lists or columns conflict with this run.
        RowError: A row cannot be packed, or has the key of an earlier row or of an existing sample.
        SelectionError: A sample has no valid value for a column.
        ShardError: An existing shard is damaged or was replaced.
        FolderIndexError: Another process is writing in the folder, or its index does not match its shards.
        StorageError: A bucket cannot be read or written, or the folder cannot be locked.
        OSError: The source cannot be read.
    """
    source.rows = required_rows(source.rows, dest.options.transforms, source.rejected)
    rows = streamed_rows(source, dest.options.transforms, skip_bad=skip_bad)
    first_row = next(rows, None)
    if first_row is None:
        raise source.no_rows_error()
    has_labels = CLASS_FIELD in dict(first_row.fields)
    dest.resolve_previous_run(source, num_rows=None, rows="", has_labels=has_labels, first_key=first_row.key)
    if dest.options.append and not has_labels and not source.classes and (dest.folder / CLASSES_NAME).exists():
        rows = _refuse_labels(rows, dest.folder)
    first = dest.first_number(dest.names[0])
    dest.check_folder([])
    dest.start(None)
    with contextlib.closing(StreamedKeys(lambda: dest.work_folder)) as keys:
        for key in dest.existing_keys():
            keys.add(key, "")
        entries = _fill(dest, itertools.chain([first_row], rows), keys, first)
    dest.publish(entries, dest.lists(source))
    return entries


def _refuse_labels(rows: Iterable[Row], folder: Path) -> Generator[Row, None, None]:
    """Yield the rows to add to `folder`, which has class names. RowError: A row has a label (`cls`), and the source
    does not name its class.
    """
    for row in rows:
        if CLASS_FIELD in dict(row.fields):
            problem = f"it has a label, whose name is not known, but {folder} has {CLASSES_NAME}"
            raise row_error(row.where, problem, f"Pack with --classes {folder}.")
        yield row


def _fill(dest: Destination, rows: Iterable[Row], keys: StreamedKeys, first: int) -> list[ShardEntry]:
    """Fill shards with the rows, and return the index entries of the shards, in order. If an earlier run has filled a
    shard already, the digest of the shard is compared with the rows.

    `keys` has the keys of existing samples, and gets the keys of the rows. `first` is the number of the first shard.

    Raises:
        RowError: A row cannot be packed, or has a key that is in `keys`.
        PackError: The folder cannot be written, has a file with the name of a shard, or is packed already with
            different rows.
        SelectionError: A sample has no valid value for a column.
        StorageError: An object with bytes of a field cannot be read, or an upload failed.
        OSError: The source cannot be read.
    """
    options, existing = dest.options, dest.filled()
    count = ProgressCounter(dest.on_progress, (None, None))
    entries = []
    for number, shard in enumerate(divide_stream(_mark_source_errors(rows), options.limits), start=first):
        name = dest.names[0][number]
        known = existing.get(name)
        if known is None:
            if dest.is_done:
                raise dest.indexed_already([f"its rows made {len(existing)} shards, and these rows make more."])
            dest.check_name(name)
        sha256 = None if known is None else known.sha256
        rows_of_shard = _new_keys(shard, keys, dest)
        job = ShardJob(dest.path / name, rows_of_shard, 0, options.transforms, options.threads, sha256, dest.columns)
        try:
            entry = fill_shard(job, disk=options.disk, on_sample=count)
        except _SourceError as err:
            raise err.error from err.error.__cause__
        assert options.transforms.changes_bytes or entry.num_bytes == shard.num_bytes
        if known is None:
            dest.add(entry)
        entries.append(entry)
    if dest.is_done and len(entries) != len(existing):
        raise dest.indexed_already([f"its rows made {len(existing)} shards, and these rows make {len(entries)}."])
    return entries


def _new_keys(rows: Iterable[Row], keys: StreamedKeys, dest: Destination) -> Iterator[Row]:
    """Yield the rows, and add their keys to `keys`. RowError: A key is in `keys` already."""
    for row in rows:
        before = keys.add(row.key, row.where)
        if before is not None:
            raise key_taken(row, before) if before else dest.key_exists(row)
        yield row


class _SourceError(Exception):
    """Wraps an OSError of the source, to distinguish it from an OSError of the destination. `error` is the OSError."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


def _mark_source_errors(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows. _SourceError: The source raised an OSError."""
    try:
        yield from rows
    except OSError as err:
        raise _SourceError(err) from err
