"""A run of `pack` whose rows come once: its shards are filled while they come."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import numpy as np
import orjson
from typing_extensions import Self

from wdskit.dataset.classes import CLASSES_NAME
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.keys import SortedRuns, is_among
from wdskit.files import DISK, Disk, TempFile, scratch, temp_path
from wdskit.packing.destination import Destination, raised_as_pack_errors
from wdskit.packing.fill import Count, ShardJob, fill_shard, required_rows
from wdskit.packing.journal import indexed_already, remove_finished
from wdskit.packing.labels import CLASS_FIELD
from wdskit.packing.plan import PlannedShard, fill_in_turn
from wdskit.packing.row import OnProgress, Row, key_taken, row_error
from wdskit.packing.run import Work, begin, publish_all, resolve_last_run
from wdskit.packing.sources import streamed_rows
from wdskit.packing.staging import RunDescription, Staging
from wdskit.packing.store import Ints, hash_keys


def pack_stream(work: Work, *, skip_bad: bool) -> tuple[Destination, list[ShardEntry]]:
    """Fill the shards, and publish them. The folder, and the lines of the index.

    Where the last run in the folder had the same options, its shards are compared with what the rows give, and nothing
    is written.

    Raises:
        PackError: There is no row; or the folder is packed already, with other rows.
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
        run = RunDescription(work.to_dict(), None, 1, (), None)
        target = resolve_last_run(target, run, str)
        if target.is_done and options.append and target.last_run is not None:
            target = dataclasses.replace(target, is_done=first_row.key == target.last_run.first_key())
        first = target.first_number(work.names[0])
        target.check_free([])
        staging = None if target.is_done else begin(work, dataclasses.replace(run, first=(first,)), str)
    with StreamedKeys(lambda: work.room, disk=work.disk) as keys:
        if target.append:
            keys.add_taken(target, work.on_progress)
        entries = _fill(work, target, staging, itertools.chain([first_row], rows), keys, first)
    lists = target.lists(found)
    with raised_as_pack_errors(work.folder):
        if staging is not None:
            publish_all(target, staging, entries, lists)
        else:
            target.check_lists(lists)
            remove_finished(work.folder, work.disk)
    return target, entries


def _unlabelled(rows: Iterable[Row], folder: Path) -> Generator[Row, None, None]:
    """The rows of an addition without class names to a folder that has them, none of which may have a label."""
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
    """Fill the shards, each while its rows come; before it has its name its keys are compared with all before them.
    A shard that is there already is compared.
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
        job = ShardJob(path, keys.watch(shard), 0, options.transforms, options.threads, sha256)
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


_BATCH_KEYS = 1 << 14


class StreamedKeys:
    """Finds a key that came before. `close` ends it.

    Args:
        room: Gives the folder for the keys on disk, when there are so many.
        name: What they are called there.
        disk: Performs the file operations; tests replace it.
    """

    def __init__(self, room: Callable[[], Path], *, name: str = "wdskit-keys", disk: Disk = DISK) -> None:
        self._room = room
        self._name = name
        self._disk = disk
        self._stack = contextlib.ExitStack()
        self._temp: TempFile | None = None
        self._new: dict[str, str] = {}
        self._num_checked = 0
        self._hashes = SortedRuns()
        self._target: Destination | None = None
        self._taken: Ints = np.empty(0, np.int64)

    def __enter__(self) -> Self:
        """Itself; it is closed when the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """Remove what is on disk."""
        self._stack.close()

    def add_taken(self, target: Destination, on_progress: OnProgress) -> None:
        """Count the keys of a folder that is added to as taken. Its shards are read.

        Raises:
            ShardError: One is damaged.
        """
        self._target = target
        self._taken = hash_keys(target.all_keys(on_progress))
        self._taken.sort()

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows of a shard. Once they are through, none of their keys came before.

        Raises:
            RowError: The first one has a key that came before.
            OSError: The disk does not take the keys.
        """
        for row in rows:
            if row.key in self._new:
                self._check()  # an earlier row may have a key that is on disk
                raise key_taken(row, self._new[row.key])
            self._new[row.key] = row.where
            if len(self._new) == _BATCH_KEYS:
                self._check()
                self._keep()
            yield row
        self._check()

    def _check(self) -> None:
        """Compare the keys that are not compared yet with those before them."""
        new = [*itertools.islice(self._new.items(), self._num_checked, None)]
        self._num_checked = len(self._new)
        hashes = hash_keys(key for key, _ in new)
        hashes.sort()
        found = np.concatenate([self._hashes.find(hashes), hashes[is_among(hashes, self._taken)]])
        if not len(found):
            return
        twice = {*found.tolist()}
        suspects = {key: where for key, where in new if hash(key) in twice}
        before = {key: where for key, where in self._kept() if key in suspects}
        taken = self._target.taken_of(suspects) if self._target is not None else set()
        for key, where in suspects.items():
            row = Row(key, (), where)
            if key in before:
                raise key_taken(row, before[key])
            if self._target is not None and key in taken:
                raise self._target.key_taken(row)

    def _keep(self) -> None:
        """Of the new keys keep their hashes, and themselves on disk."""
        if self._temp is None:
            self._path = self._room() / self._name
            self._temp = self._stack.enter_context(scratch(self._path, disk=self._disk))
        self._temp.write(_encode([*self._new.items()]))
        hashes = hash_keys(self._new)
        hashes.sort()
        self._hashes.add(hashes)
        self._new = {}
        self._num_checked = 0

    def _kept(self) -> Iterator[list[str]]:
        """Each key on disk and its place, in their order."""
        if self._temp is None:
            return
        self._temp.wait()
        with open(temp_path(self._path), "rb") as file:
            for line in file:
                yield from json.loads(line)


def _encode(keys: list[tuple[str, str]]) -> bytes:
    """A line of JSON."""
    try:
        return orjson.dumps(keys, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # the name of a file is no UTF-8
        return json.dumps(keys).encode() + b"\n"
