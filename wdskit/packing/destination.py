"""The destination folder: inspect its existing files and refuse to overwrite them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.classes import CLASSES_NAME, classes_json, read_classes
from wdskit.dataset.index import INDEX_NAME, RUN_FOLDER, FolderIndex, ShardEntry, compare_names, read_index
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
    """Check the folder and the options before any row is read.

    Raises:
        PackError: The folder is inside the source; `append` is set and the folder has no index; or the folder is
            indexed and a dry run has neither `append` nor `overwrite`.
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
    """Refuse a folder that a run with different options packed. No row is read before this check.

    Args:
        folder: The destination folder.
        intent: The options of this run; `append` and `overwrite` allow a packed folder.
        described: The options of this run that can change a shard, by name.
        is_stream: True if the rows of the source can be read only once.

    Raises:
        PackError: The folder is packed already, and this run neither appends nor overwrites.
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
        folder: Path of the folder.
        append: True if the run adds shards to an indexed folder.
        index: The folder's index; None without an index.
        replaces: True if the run replaces the shards of the index.
        last_run: The run that made the index; None if this run cannot be the same.
        is_done: True if `last_run` is this run, so that nothing remains to do.
        upload: Uploads the files to a bucket, for which `folder` is the local copy; None for a local folder.
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
        """Return the existing shards that are kept. They exclude the shards of the last run if this is the same run."""
        if self.index is None or not self.append:
            return ()
        own = len(self.last_run.entries) if self.last_run is not None and self.is_done else 0
        return self.index.entries[: len(self.index.entries) - own]

    def first_number(self, names: Names) -> int:
        """Return the number of the first new shard: the index's largest number under this pattern, plus one."""
        numbers = (names.number_of(entry.name) for entry in self.entries)
        return max((number for number in numbers if number is not None), default=-1) + 1

    def check_keys(self, plan: Plan, on_progress: OnProgress) -> None:
        """Refuse a row whose key an existing shard has. The headers of the existing shards are read.

        Raises:
            RowError: An existing shard has the key of a row.
            ShardError: An existing shard is damaged.
        """
        row = plan.find_taken(self.all_keys(on_progress))
        if row is not None:
            raise self.key_taken(row)

    def key_taken(self, row: Row) -> RowError:
        """Return the error for a row whose key an existing shard has."""
        remedy = "Keys must be unique. Rename it; or, for a table, choose a column with unique values: --key-column."
        return row_error(row.where, f"its key {row.key!r} is in {self.folder} already", remedy)

    def all_keys(self, on_progress: OnProgress) -> Iterator[str]:
        """Yield the keys of the existing shards, read from their headers.

        Raises:
            ShardError: An existing shard is damaged.
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
        """Check that the names of the new shards are free, before anything is written.

        Raises:
            PackError: A file already has the name of a new shard, or a tar of the folder is not in the index.
        """
        known = self.index.by_name if self.index is not None else {}
        names = self._others()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a dry run makes no folder
            names |= {*os.listdir(self.folder)}
        for shard in () if self.is_done else shards:
            for name in shard_files(shard.name):
                if name in names and not (self.replaces and shard.name in known):
                    raise in_the_way(self.folder / name)
        _, strays = compare_names(names, known)
        if strays:
            msg = f"{self.folder / strays[0]}: this shard is in no index, and is not one of those being packed."
            remedy = f"Pack into another folder, or run `wdskit index {self.folder}` if these are whole shards."
            raise PackError(f"{msg} Nothing was written.\n  {remedy}")

    def check_there(self, last: LastRun) -> None:
        """Compare the shards of the last run with the folder. Raises the errors of `LastRun.check_there`."""
        if self.upload is None:
            last.check_there()
        elif lost := self.upload.lost(last.entries, last.etags):
            raise indexed_already(self.folder, [f"{name} is gone, or was replaced." for name in lost])

    def _others(self) -> set[str]:
        """Return the names in the bucket that no run of this machine uploaded. Raises the errors of `find_others`."""
        if self.upload is None:
            return set()
        sent: dict[str, SentFile] = {}
        for path in run_folders(self.folder):
            sent |= read_begun(path)
        return self.upload.find_others(sent)

    def lists(self, found: Source) -> dict[str, bytes]:
        """Return the bytes of `classes.json`, `rejected.jsonl` and `duplicates.jsonl` by name, without empty files."""
        lists = {}
        if found.classes and not self.append:
            lists[CLASSES_NAME] = classes_json(found.classes)
        rejected: list[object] = [{"where": err.where, "reason": err.problem} for err in found.rejected]
        for name, listed in ((REJECTED_NAME, rejected), (DUPLICATES_NAME, [one.to_dict() for one in found.duplicates])):
            if listed:
                lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in listed)
                # A file name that is not UTF-8 has lone surrogates. JSON writes them as escapes.
                added = lines.encode(errors="backslashreplace")
                lists[name] = self._before(name) + added
        return lists

    def _before(self, name: str) -> bytes:
        """Return the bytes of an existing list that the run appends to; empty without `append`."""
        return (read_own(self.folder / name) or b"") if self.append else b""

    def check_lists(self, lists: Mapping[str, bytes]) -> None:
        """Check that the run neither replaces nor keeps a list that another program wrote.

        Raises:
            PackError: The folder has such a list; the message names it.
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
    """Inspect the folder to pack into. `resolve_last_run` later compares its last run with this run.

    Args:
        folder: The destination folder.
        options: The options of this run.
        classes: Number of each class that the run adds, by name.
        has_labels: True if samples that the run adds have a `cls`.

    Raises:
        PackError: The folder is packed by an unknown run; `append` is set and the folder has no index; or the classes
            differ from the folder's classes in an addition.
        FolderIndexError: `append` is set and the index does not match the shards.
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
    """Compare the sizes in the index with the shards. Shards of a stopped addition are ignored.

    Raises:
        FolderIndexError: A shard is missing or has a different size.
    """
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
    """Return the path of the local folder to write to.

    Raises:
        PackError: `dest` is empty, is not a local path, or is a file.
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
    """Convert each OSError of the block to a PackError with the folder's name."""
    try:
        yield
    except OSError as err:
        raise PackError(f"{folder}: cannot be written: {describe_os_error(err)}") from err


@contextlib.contextmanager
def locked(folder: Path, part: tuple[int, int] | None, disk: Disk) -> Iterator[Path]:
    """Create the destination folder and hold its lock while the block runs. A part of a run holds the part's lock.

    Yields:
        The folder `.wdskit-run`. After a fault or Ctrl-C it contains no temporary file, and no run without a filled
        shard.
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
    """Complete a run that was killed while it published. Check the folder and the options before any row is read.

    Raises:
        PackError: Raised by `check_place`.
        FolderIndexError: Another process is writing in the folder.
    """
    with raised_as_pack_errors(folder):
        check_runs(folder)
        if is_publishing(folder) and not options.dry_run:
            with lock_folder(folder):
                finish_publishing(folder, disk)
        check_place(folder, source, options)
