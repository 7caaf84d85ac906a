"""A run that has begun: what it takes over from one that was stopped, what it removes, and what it notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from wdskit.dataset.binary import BINARY_NAME
from wdskit.dataset.classes import CLASSES_NAME
from wdskit.dataset.index import INDEX_NAME, ShardEntry, read_index
from wdskit.dataset.offsets import offsets_path
from wdskit.dataset.selection import list_selections, selection_path
from wdskit.dataset.unfinished import RECORD_NAME
from wdskit.errors import PackError
from wdskit.export.api import folder_export_names, shard_export_names
from wdskit.files import Disk, append_lines, publish_bytes, remove_drafts
from wdskit.packing.destination import DUPLICATES_NAME, REJECTED_NAME
from wdskit.packing.finished import end, forget
from wdskit.packing.record import (
    RunRecord,
    changed,
    differences,
    log_line,
    log_path,
    read_logs,
    read_record,
    shards_of,
)

_LISTS = (CLASSES_NAME, REJECTED_NAME, DUPLICATES_NAME)


@dataclass(frozen=True)
class Run:
    """A run that has begun.

    Attributes:
        folder: Where.
        record: What is packed.
        log: Where it notes what it has published.
        done: What runs before it have published, by name.
        disk: What writes.
    """

    folder: Path
    record: RunRecord
    log: Path
    done: Mapping[str, ShardEntry]
    disk: Disk

    def note(self, entry: ShardEntry) -> None:
        """Write down that a shard is published."""
        append_lines(self.log, ["", log_line(self.record, entry)], disk=self.disk)  # behind one that was cut short

    def end(self) -> None:
        """Remove the record: all is there, the index too."""
        end(self.folder, self.disk)


def compare(
    folder: Path,
    record: RunRecord,
    where_of: Callable[[int], str],
    *,
    restart: bool,
    overwrite: bool,
    disk: Disk,
    is_part: bool = False,
    is_alone: Callable[[], bool] = lambda: True,
) -> RunRecord:
    """Look at what a run that was stopped has left, and return the record to work with: its own, or this one.

    Args:
        folder: Locked.
        record: What is to be packed.
        where_of: As `record.differences` takes it.
        restart: Remove the shards of that run, and begin anew.
        overwrite: Whether this run may remove what that one was about to replace.
        disk: What writes.
        is_part: Whether this is a part: of several that begin anew the first does so.
        is_alone: Tells whether no part of that run is at work.

    Raises:
        PackError: That run packed something else, and some of its shards are there; or it had not yet removed all that
            it replaces, and this one may not.
    """
    old = read_record(folder)
    if old is not None and old.replaces and (folder / INDEX_NAME).exists():
        forget(folder, disk)  # stopped before it replaced anything
        old = None
    if old is not None:
        if old.replaces:  # its index is gone already
            _check_word(folder, old, overwrite=overwrite)
            disk.fsync_folder(folder)  # for good: that run may have been killed before it came to this
            _remove(folder, old.replaces, disk)
            old = dataclasses.replace(old, replaces=())
            publish_bytes(folder / RECORD_NAME, old.to_json(), disk=disk)
        told = differences(old, record, where_of)
        if not told and (is_part or not restart):
            return old
        left = _published(folder, old)
        if left and not restart:
            raise changed(folder, told, sum(name.endswith(".tar") for name in left))
        if not is_alone():
            raise PackError(f"{folder}: other parts of that run are at work. Wait for their end, or stop them.")
        _remove(folder, left, disk)
        for parent in {(folder / name).parent for name in _lists(old)} - {folder}:  # where this run's own plan may be
            remove_drafts(parent, disk=disk)
        forget(folder, disk)
    found = [name for name in (*_files(folder, record), *_lists(record)) if (folder / name).exists()]
    return dataclasses.replace(record, found=tuple(found))


def _check_word(folder: Path, record: RunRecord, *, overwrite: bool) -> None:
    """Who said the word for a run that was stopped did not say it for whatever comes next."""
    left = [name for name in record.replaces if (folder / name).exists()]
    if left and not overwrite:
        msg = (
            f"{folder}: a run with --overwrite was stopped here, and {len(left)} of the files that it replaces are left"
        )
        remedy = (
            f"Replace them with --overwrite. Or keep them: `wdskit index {folder}` makes the shards a data set again."
        )
        raise PackError(f"{msg}: {left[0]}{', ...' if left[1:] else ''}.\n  {remedy}")


def begin(folder: Path, record: RunRecord, *, overwrite: bool, part: tuple[int, int] | None = None, disk: Disk) -> Run:
    """Write the record, unless it is there, after what it replaces is gone."""
    old = read_record(folder)
    if overwrite and (folder / INDEX_NAME).exists():
        record = dataclasses.replace(record, found=(), replaces=tuple(_files_of(folder)))
    if record.replaces:
        publish_bytes(folder / RECORD_NAME, record.to_json(), disk=disk)
        _remove(folder, [INDEX_NAME], disk)  # first, so that it never stands beside shards of another run
        _remove(folder, [BINARY_NAME, *record.replaces], disk)
        record = dataclasses.replace(record, replaces=())
    if record != old:
        publish_bytes(folder / RECORD_NAME, record.to_json(), disk=disk)
    log = log_path(folder, part)
    if part is not None and not log.exists():  # the one that was there belonged to a run that gave way
        disk.close(disk.open_log(log))  # its workers hold it
    return Run(folder, record, log, read_logs(folder, record), disk)


def clear_if_nothing_is_there(folder: Path, disk: Disk) -> None:
    """After a fault: a run that has published nothing leaves no record either."""
    record = read_record(folder)
    if record is not None and not record.replaces and not _published(folder, record):
        forget(folder, disk)


def _files_of(folder: Path) -> Iterable[str]:
    """All files of a data set that its index knows, the index left out."""
    index = read_index(folder)
    for entry in index.entries:
        yield entry.name
        yield offsets_path(entry.name).name
        yield from shard_export_names(entry.name, index.also.kinds)
    yield from folder_export_names(index.also.kinds)
    yield from (selection_path(folder, name).name for name in list_selections(folder))
    yield from _LISTS


def _published(folder: Path, record: RunRecord) -> list[str]:
    """Names of the files that runs of a record have published, shards with their offsets, and lists."""
    left = [name for name in _files(folder, record) if name not in record.found and (folder / name).exists()]
    lists = [] if record.options["append"] or not left else _lists(record)
    return [*left, *(name for name in lists if name not in record.found)]


def _lists(record: RunRecord) -> Iterable[str]:
    """Names of the files that are of all shards together, the index left out."""
    return (*_LISTS, *folder_export_names(record.options["also"]))


def _files(folder: Path, record: RunRecord) -> list[str]:
    """Names of a run's shards and what is beside them; of a stream of those shards that are there without a gap."""
    kinds = record.options["also"]
    names = [[name, offsets_path(name).name, *shard_export_names(name, kinds)] for name in shards_of(folder, record)]
    return [file for files in names for file in files]


def _remove(folder: Path, names: Iterable[str], disk: Disk) -> None:
    """Remove files for good."""
    there = [folder / name for name in names if (folder / name).exists()]
    for path in there:
        disk.remove(path)
    for parent in {path.parent: None for path in there}:
        disk.fsync_folder(parent)
