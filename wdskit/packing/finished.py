"""The end of a run, and runs that were killed in it: behind the folder's index, before their record was removed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wdskit.dataset.index import INDEX_NAME, ShardEntry, read_index
from wdskit.dataset.samples import HeaderReader
from wdskit.dataset.unfinished import RECORD_NAME
from wdskit.errors import PackError
from wdskit.files import Disk
from wdskit.packing.record import (
    RunRecord,
    differences,
    is_there,
    log_paths,
    read_record,
    shards_of,
    shown,
)
from wdskit.storage.urls import LocalFile

LOCKS = ".wdskit-pack*.lock"


@dataclass(frozen=True)
class Finished:
    """A run whose shards the folder's index has, and whose record is still there.

    Attributes:
        folder: Where.
        record: What it packed.
        entries: Its shards, in order.
        before: The other shards of the index, which an addition found there.
    """

    folder: Path
    record: RunRecord
    entries: tuple[ShardEntry, ...]
    before: tuple[ShardEntry, ...]

    def others(self, now: RunRecord, where_of: Callable[[int], str]) -> list[str]:
        """What a run would do otherwise, a sentence each, or what is not there any more. As `record.differences`."""
        lost = [entry.name for entry in self.entries if not is_there(self.folder, entry)]
        gone = [f"{name} or its .idx is gone, or has another size." for name in lost]
        return differences(self.record, now, where_of) + gone

    def first_key(self) -> str:
        """The key of the first sample."""
        path = str(self.folder / self.entries[0].name)
        file = LocalFile(path)
        try:
            return str(next(iter(HeaderReader(file, shard=path)))["__key__"])
        finally:
            file.close()

    def sha256_of(self, name: str) -> str:
        """The digest of one of its shards.

        Raises:
            PackError: It has no shard of that name.
        """
        if name not in self._digests:
            raise indexed_already(self.folder, [f"its rows made {len(self.entries)} shards, these make more."])
        return self._digests[name]

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        return {entry.name: entry.sha256 for entry in self.entries}

    def end(self, disk: Disk) -> None:
        """Remove what is left of the run. With the folder's lock held."""
        disk.fsync_folder(self.folder)  # the index has its name for good now, wherever the run was killed
        end(self.folder, disk)


def find_finished(folder: Path) -> Finished | None:
    """The run that a folder has a record of, if it came as far as the index.

    Raises:
        PackError: The record cannot be read.
        FolderIndexError: The index cannot be read.
    """
    record = read_record(folder) if (folder / INDEX_NAME).exists() else None
    if record is None or record.replaces:
        return None
    index = read_index(folder)
    names = shards_of(folder, record)
    if not names or not all(name in index.by_name for name in names):
        return None
    its_own = {*names}
    before = tuple(entry for entry in index.entries if entry.name not in its_own)
    return Finished(folder, record, tuple(index.by_name[name] for name in names), before)


def end(folder: Path, disk: Disk) -> None:
    """Remove all that a run has kept for itself, with the folder's lock held. Its record goes last, and when the rest
    is gone for good: as long as it is there, the same run can be told from another one.
    """
    left = [*log_paths(folder), *sorted(folder.glob(LOCKS))]
    for path in left:
        disk.remove(path)
    if left:
        disk.fsync_folder(folder)
    if (folder / RECORD_NAME).exists():
        disk.remove(folder / RECORD_NAME)


def forget(folder: Path, disk: Disk) -> None:
    """Remove the record and the logs of a run, but no locks, which parts may hold."""
    for path in (*log_paths(folder), folder / RECORD_NAME):
        if path.exists():
            disk.remove(path)


def indexed_already(folder: Path, told: Sequence[str] = (), *, may_add: bool = True) -> PackError:
    """The error for a folder that is packed. `told` is what its last run did otherwise, where that is known."""
    msg = f"{folder}: this folder is packed and indexed already"
    msg += "." if not told else f", and that run was another one:\n  {shown(told)}"
    add = "Pack into another folder, add to it with --append" if may_add else "Write to another folder"
    return PackError(f"{msg}\n  {add}, or replace it with --overwrite.")
