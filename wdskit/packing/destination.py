"""The folder that is packed into: what it holds already, and what that forbids."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.classes import CLASSES_NAME, classes_json, read_classes
from wdskit.dataset.index import INDEX_NAME, RUN_FOLDER, FolderIndex, ShardEntry, read_index
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.samples import HeaderReader
from wdskit.dataset.unfinished import JOURNAL_NAME, run_folders
from wdskit.errors import FolderIndexError, PackError, RowError
from wdskit.files import Disk, describe_os_error, make_folders, read_own, remove_temp_files
from wdskit.packing.division import Names, PlannedShard
from wdskit.packing.journal import (
    LastRun,
    find_last_run,
    finish_publishing,
    in_the_way,
    indexed_already,
    is_publishing,
    remove_locks,
)
from wdskit.packing.options import WriteOptions
from wdskit.packing.plan import Plan
from wdskit.packing.row import OnProgress, Progress, Row, row_error
from wdskit.packing.sources import Source
from wdskit.packing.staging import (
    DUPLICATES_NAME,
    REJECTED_NAME,
    check_runs,
    differences,
    read_begun,
    read_filled,
    remove_run,
    shard_files,
)
from wdskit.packing.upload import SentFile, Upload
from wdskit.storage.urls import LocalFile, is_local, local_path

_PART = "part-{}-of-{}.lock"


def check_place(folder: Path, source: object, options: WriteOptions) -> None:
    """Refuse what can be refused before a row is read.

    Raises:
        PackError: The folder lies in the source, is indexed and should not be, or the other way round.
    """
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
        root = os.path.realpath(os.fsdecode(source))
        if os.path.commonpath([root, os.path.realpath(folder)]) == root:
            msg = f"{folder}: it is inside the source {os.fsdecode(source)}, and would be packed with it the next time."
            raise PackError(f"{msg}\n  Pack into a folder outside of it.")
    is_indexed = (folder / INDEX_NAME).exists()
    if is_indexed and options.dry_run and not options.append and not options.overwrite:
        raise indexed_already(folder)
    if options.append and not is_indexed:
        msg = f"{folder}: append: it has no index, so --append has nothing to add to. Pack without --append."
        raise PackError(f"{msg}\n  If others wrote shards there, run `wdskit index {folder}` first.")


def refuse_other_options(folder: Path, intent: WriteOptions, described: Mapping[str, Any], *, is_stream: bool) -> None:
    """Refuse a folder that a run with other options has packed, before any row is read.

    Args:
        folder: Where.
        intent: Its options: some say what may become of what stands there.
        described: The options of this run that a shard could depend on.
        is_stream: Whether its rows come once.

    Raises:
        PackError: It is packed already, and is neither added to nor replaced.
    """
    if intent.append or intent.overwrite or not (folder / INDEX_NAME).exists():
        return
    last = find_last_run(folder)
    if last is None:
        raise indexed_already(folder)
    num_rows = None if is_stream else last.run.num_rows or 0
    changes = differences(last.run, dataclasses.replace(last.run, options=described, num_rows=num_rows))
    if changes:
        raise indexed_already(folder, changes)


@dataclass(frozen=True)
class Destination:
    """A folder to pack into.

    Attributes:
        folder: Where it is.
        append: Whether it is indexed, and added to.
        index: Its index; None where it has none.
        replaces: Whether the shards of the index are to be replaced.
        last_run: The run that made the index, where this one may be the same.
        is_done: Whether it is the same, so that nothing is to do.
        upload: Uploads to the folder of a bucket for which `folder` stands; None where the folder is local.
    """

    folder: Path
    append: bool = False
    index: FolderIndex | None = None
    replaces: bool = False
    last_run: LastRun | None = None
    is_done: bool = False
    upload: Upload | None = None

    @property
    def entries(self) -> tuple[ShardEntry, ...]:
        """Shards that are there already and stay: those of the last run not, where this is the same run."""
        if self.index is None or not self.append:
            return ()
        own = len(self.last_run.entries) if self.last_run is not None and self.is_done else 0
        return self.index.entries[: len(self.index.entries) - own]

    def first_number(self, names: Names) -> int:
        """The number of the first new shard: behind all that the index has under this pattern."""
        numbers = (names.number_of(entry.name) for entry in self.entries)
        return max((number for number in numbers if number is not None), default=-1) + 1

    def check_keys(self, plan: Plan, on_progress: OnProgress) -> None:
        """Refuse a row whose key a shard here has. The headers of the shards are read.

        Raises:
            RowError: A row has such a key.
            ShardError: A shard here is damaged.
        """
        row = plan.find_taken(self.all_keys(on_progress))
        if row is not None:
            raise self.key_taken(row)

    def key_taken(self, row: Row) -> RowError:
        """The error of a row whose key the shards here have."""
        remedy = "Keys must be unique. Rename it; or, for a table, choose a column with unique values: --key-column."
        return row_error(row.where, f"its key {row.key!r} is in {self.folder} already", remedy)

    def all_keys(self, on_progress: OnProgress) -> Iterator[str]:
        """The keys of the shards here. Their headers are read.

        Raises:
            ShardError: One is damaged.
        """
        num_keys = num_bytes = 0
        total_bytes = sum(entry.num_bytes for entry in self.entries)
        total_samples = sum(entry.num_samples for entry in self.entries)
        for entry in self.entries:
            on_progress(Progress("comparing", num_keys, num_bytes, total_samples, total_bytes))
            yield from self._keys(entry)
            num_keys += entry.num_samples
            num_bytes += entry.num_bytes

    def _keys(self, entry: ShardEntry) -> Iterator[str]:
        path = str(self.folder / entry.name)
        file = LocalFile(path)
        try:
            for sample in HeaderReader(file, shard=path):
                yield sample["__key__"]
        finally:
            file.close()

    def check_free(self, shards: Sequence[PlannedShard]) -> None:
        """Refuse files in the way, before anything is written.

        Raises:
            PackError: Names one.
        """
        known: set[str] = set()
        if self.index is not None:
            known = {name for entry in self.index.entries for name in shard_files(entry.name)}
        others = self._others()
        for shard in () if self.is_done else shards:
            for name in shard_files(shard.name):
                if (name in others or (self.folder / name).exists()) and not (self.replaces and name in known):
                    raise in_the_way(self.folder / name)
        tars = fnmatch.filter({*others, *(path.name for path in self.folder.glob("*.tar"))}, "[!.]*.tar")
        strays = sorted(name for name in tars if name not in known)
        if strays:
            msg = f"{self.folder / strays[0]}: this shard is in no index, and is not one of those being packed."
            remedy = f"Pack into another folder, or run `wdskit index {self.folder}` if these are whole shards."
            raise PackError(f"{msg} Nothing was written.\n  {remedy}")

    def check_there(self, last: LastRun) -> None:
        """Compare the shards of the run that made the index with the folder. Raises as `LastRun.check_there`."""
        if self.upload is None:
            last.check_there()
        elif lost := self.upload.lost(last.entries, last.etags):
            raise indexed_already(self.folder, [f"{name} is gone, or was replaced." for name in lost])

    def _others(self) -> set[str]:
        """Return the names in the bucket's folder that no run of this machine has uploaded. Raises as `find_others`."""
        if self.upload is None:
            return set()
        sent: dict[str, SentFile] = {}
        for path in run_folders(self.folder):
            sent |= read_begun(path)
        return self.upload.find_others(sent)

    def lists(self, found: Source) -> dict[str, bytes]:
        """The bytes of `classes.json`, `rejected.jsonl` and `duplicates.jsonl`, where there is something to write."""
        lists = {}
        if found.classes and not self.append:
            lists[CLASSES_NAME] = classes_json(found.classes)
        rejected: list[object] = [{"where": err.where, "reason": err.problem} for err in found.rejected]
        for name, listed in ((REJECTED_NAME, rejected), (DUPLICATES_NAME, [one.to_dict() for one in found.duplicates])):
            if listed:
                lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in listed)
                # Half a surrogate pair, of a file name that is no UTF-8, is written as JSON escapes it.
                added = lines.encode(errors="backslashreplace")
                lists[name] = self._before(name) + added
        return lists

    def _before(self, name: str) -> bytes:
        """What is added to."""
        return (read_own(self.folder / name) or b"") if self.append else b""

    def check_lists(self, lists: Mapping[str, bytes]) -> None:
        """Refuse to replace a list that something else has written, or to leave one that is not of this run.

        Raises:
            PackError: Names one.
        """
        names = () if self.append or self.replaces else sorted({*lists, REJECTED_NAME, DUPLICATES_NAME})
        others = set() if self.is_done else self._others()
        for name in names:
            path = self.folder / name
            if name in others or (os.path.lexists(path) and read_own(path) != lists.get(name)):
                raise in_the_way(path)


def look_at_destination(
    folder: Path, options: WriteOptions, classes: Mapping[str, int], *, has_labels: bool
) -> Destination:
    """Look at the folder to pack into. Whether its last run was the same is found out later.

    Args:
        folder: Where.
        options: Of the run.
        classes: Number of each class that the run adds, by name.
        has_labels: Whether samples that the run adds have a `cls`.

    Raises:
        PackError: It is indexed and should not be, or the other way round, or its classes are others.
        FolderIndexError: It is to be added to and has no index, or its index does not match its shards.
    """
    check_place(folder, None, options)
    if not (folder / INDEX_NAME).exists():
        return Destination(folder)
    index = read_index(folder)
    if options.overwrite:
        return Destination(folder, index=index, replaces=True)
    last_run = find_last_run(folder, index)
    if options.append:
        _check_sizes(folder, index.entries)
        if classes or has_labels:
            _check_classes(folder, classes)
    elif last_run is None:
        raise indexed_already(folder)
    return Destination(folder, append=options.append, index=index, last_run=last_run)


def _check_sizes(folder: Path, entries: Iterable[ShardEntry]) -> None:
    """Compare the index with its shards. Others may stand there: those of an addition that was stopped."""
    for entry in entries:
        path = folder / entry.name
        num_bytes = path.stat().st_size if path.exists() else None
        if num_bytes != entry.num_bytes:
            what = "is not there" if num_bytes is None else f"has {num_bytes} bytes, not {entry.num_bytes}"
            msg = f"{folder / INDEX_NAME}: it does not match the shards: {entry.name} {what}."
            raise FolderIndexError(
                f"{msg}\n  Put the right file there, or run `wdskit index {folder}`.", folder=str(folder)
            )


def _check_classes(folder: Path, classes: Mapping[str, int]) -> None:
    path = folder / CLASSES_NAME
    names = read_classes(folder) or ()
    known = {name: number for number, name in enumerate(names)}
    if known != dict(classes):
        msg = f"{path}: its classes ({len(known)}) differ from those that you add ({len(classes)})"
        if not classes:
            remedy = f"With --classes {folder} they are checked and get these names."
            raise PackError(f"{msg}: the labels that you add have no names.\n  {remedy}")
        if not known:
            raise PackError(
                f"{folder}: its labels have no names, but those that you add do.\n  Pack into another folder."
            )
        name = next(name for name in [*classes, *known] if known.get(name) != classes.get(name))
        numbers = f"{name!r} is {known.get(name, 'not there')} and {classes.get(name, 'not there')}"
        remedy = f"With --classes {folder}, images get the existing numbers; new classes need another folder."
        raise PackError(f"{msg}: {numbers}.\n  {remedy}")


def folder_of(dest: str) -> Path:
    """The folder to write to.

    Raises:
        PackError: It cannot be one.
    """
    if not dest or "\x00" in dest:
        raise PackError(f"{dest!r} is not a folder to pack into. Write . for this one.")
    if not is_local(dest):
        raise PackError(f"{dest}: only a local folder can hold parts.")
    folder = Path(local_path(dest))
    if folder.exists() and not folder.is_dir():
        raise PackError(f"{dest}: this is a file, not a folder to pack into.")
    return folder


@contextlib.contextmanager
def raised_as_pack_errors(folder: Path) -> Iterator[None]:
    """Raise faults of the disk as errors with the folder's name."""
    try:
        yield
    except OSError as err:
        raise PackError(f"{folder}: cannot be written: {describe_os_error(err)}") from err


@contextlib.contextmanager
def locked(folder: Path, part: tuple[int, int] | None, disk: Disk) -> Iterator[Path]:
    """Make the folder that is packed into, and hold its lock while the block runs; of a part of a run that part's.

    Yields:
        The folder of staging folders in it. After a fault or Ctrl-C it holds no temporary file, and no run that
        filled nothing.
    """
    root = folder / RUN_FOLDER
    with raised_as_pack_errors(folder):
        check_runs(folder)
        make_folders(root, disk=disk)
    if part is not None:
        with lock_folder(root, _PART.format(*part), f"part {part[0]}/{part[1]} is running already"):
            yield root
        return
    with lock_folder(folder):
        try:
            with raised_as_pack_errors(folder):
                finish_publishing(folder, disk)
                make_folders(root, disk=disk)
                remove_temp_files(root, disk=disk)
            yield root
        except BaseException:
            with contextlib.suppress(OSError, PackError):
                _tidy(folder, disk)
            raise
        with raised_as_pack_errors(folder):
            remove_locks(folder, disk)


def _tidy(folder: Path, disk: Disk) -> None:
    for path in run_folders(folder):
        remove_temp_files(path, disk=disk)
        if not (path / JOURNAL_NAME).exists() and not read_filled(path) and not read_begun(path):
            remove_run(path, disk)
    for parent in (folder, folder / RUN_FOLDER):
        remove_temp_files(parent, disk=disk)
    remove_locks(folder, disk)


def finish_what_was_stopped(folder: Path, source: object, options: WriteOptions, disk: Disk) -> None:
    """Refuse what can be refused before a row is read, and end a run that was killed while it published.

    Raises:
        PackError: As `check_place`.
        FolderIndexError: Another process is writing in the folder.
    """
    with raised_as_pack_errors(folder):
        check_runs(folder)
        if is_publishing(folder) and not options.dry_run:
            with lock_folder(folder):
                finish_publishing(folder, disk)
        check_place(folder, source, options)
