"""`Destination`: the folder that a run packs into, from the first check to the published index.

A run fills its shards in a staging folder (`run_journal`). Then it publishes: it moves the shards, the lists and the
index to the destination, step by step. A journal in the staging folder lists the files to remove and to add. Once the
journal is on the disk, the run can be completed: after a kill or a full disk, the next `pack`, `reshard` or
`pack-finish` in the folder first repeats the steps. Each step can be repeated.

1. With `overwrite`, remove the replaced index, then the other replaced files.
2. Link the new shards into the folder, then the other new files. The files keep their names in the staging folder. On
   a disk without hard links, the files are moved.
3. Write `.wdskit.last-run`, which describes the run that made the new index.
4. Write `index.json`.
5. Remove old columns, then the staging folder. The journal is removed last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, TypeVar

from typing_extensions import ParamSpec

from wdskit.dataset.classes import CLASSES_NAME, classes_json, read_classes
from wdskit.dataset.columns import (
    Columns,
    NewColumn,
    Part,
    as_part,
    check_split_values,
    is_column_file,
    remove_columns,
    write_columns,
)
from wdskit.dataset.index import (
    INDEX_NAME,
    RUN_FOLDER,
    Index,
    ShardEntry,
    digest_of_entries,
    index_json,
    read_index,
    write_index,
)
from wdskit.dataset.lock import lock_folder, share_folder, wait_for_workers
from wdskit.dataset.samples import HeaderReader
from wdskit.errors import FolderIndexError, PackError, RowError, SelectionError, StorageError
from wdskit.files import (
    Disk,
    append_lines,
    describe_os_error,
    make_folders,
    publish_bytes,
    read_own,
    remove_temp_files,
    temp_path,
)
from wdskit.packing.division import PlannedShard, ShardNames, names_of
from wdskit.packing.options import WriteOptions
from wdskit.packing.plan import Plan
from wdskit.packing.row import OnProgress, Progress, Row, row_error
from wdskit.packing.run_journal import (
    DESCRIPTION_NAME,
    DUPLICATES_NAME,
    JOURNAL_NAME,
    LIST_NAMES,
    REJECTED_NAME,
    LastRun,
    RunDescription,
    check_runs,
    differences,
    has_shard,
    read_description,
    read_filled,
    read_journal,
    read_last_run,
    read_log,
    read_sent,
    run_folders,
    shard_files,
    values_path,
)
from wdskit.packing.sources import Source
from wdskit.packing.upload import (
    LAST_RUN_NAME,
    MAX_PENDING,
    PACKED_REMEDY,
    SentFile,
    Upload,
    UploadedShard,
    digest_of,
    open_upload,
)
from wdskit.shards.column_values import Source as ColumnSource
from wdskit.shards.column_values import pack_columns, parse_columns
from wdskit.shards.export import remove_exports
from wdskit.storage.file_identity import FileIdentity
from wdskit.storage.urls import LocalFile, is_local, local_path

P = ParamSpec("P")
Result = TypeVar("Result")

_START_LOCK = "begins.lock"
_PART_LOCK = "part-{}-of-{}.lock"
_SHOWN_CHANGES = 5
_SHOWN_SHARDS = 10


@contextlib.contextmanager
def raised_as_pack_errors(folder: Path) -> Iterator[None]:
    """Convert each OSError of the block to a PackError with the folder's name."""
    try:
        yield
    except OSError as err:
        raise PackError(f"{folder}: cannot be written: {describe_os_error(err)}") from err


def _raises_pack_errors(
    method: Callable[Concatenate[Destination, P], Result],
) -> Callable[Concatenate[Destination, P], Result]:
    """Decorate a method of `Destination`: each OSError becomes a PackError with the folder's name."""

    @functools.wraps(method)
    def call(self: Destination, /, *args: P.args, **keywords: P.kwargs) -> Result:
        with raised_as_pack_errors(self.folder):
            return method(self, *args, **keywords)

    return call


@contextlib.contextmanager
def open_destination(dest: str, options: WriteOptions) -> Iterator[Destination]:
    """Open a local folder, or a folder of a bucket, to pack into. Yield its `Destination` for the `with` block.

    `dest` is a path or a URL. For a bucket, the folder of the `Destination` is a local copy, from which the files are
    uploaded. PackErrors and FolderIndexErrors of the block show the URL instead of the path of the copy, except
    RowErrors and errors of the local disk.

    Raises:
        PackError: `dest` is empty, a file, or a URL that is not a folder of a bucket; an option is only for local
            folders or only for URLs; or the local copy cannot be written.
        StorageError: The bucket cannot be read.
    """
    with contextlib.ExitStack() as stack:
        upload = open_upload(dest, options)
        if upload is not None:
            stack.callback(upload.cancel)
            stack.enter_context(upload.show_url())
        destination = Destination(dest if upload is None else upload.folder, options, upload=upload)
        stack.enter_context(destination.resources)
        yield destination


class Destination:
    """A folder to pack into.

    A run calls `prepare`, `refuse_other_options`, `resolve_previous_run`, `check_folder`, `start`, `add` and `publish`,
    in this order. A dry run stops before `start`. `work_folder` or `resolve_previous_run` creates and locks the folder,
    except in a dry run. If a file operation fails, a method raises PackError. A method that locks the folder, or reads
    or writes a bucket, raises StorageError if this fails.

    Args:
        folder: Path of the folder; or the path or `file:` URL as a user wrote it.
        options: The options of the run.
        upload: Uploads the files to a bucket, for which `folder` is the local copy; None for a local folder.

    Attributes:
        folder: Path of the folder.
        resources: The locks and temporary files of the run. The end of the `with` block of `open_destination` closes
            them. After an error, temporary files and staging folders with nothing to continue are also removed; a part
            of a run leaves them.
        on_progress: Called with the progress of the run.
        index: The folder's index; None without an index. Set by `resolve_previous_run`.
        last_run: The run that made `index`; None if it is unknown, or if this run replaces the index.
        is_done: True if an earlier call of this run already made `index`, so that nothing remains to do.
        path: The staging folder, in which shards are filled. Set by `start`.
        log: The file in which this process logs filled shards. Set by `start`. Its workers share the file's lock.

    Raises:
        PackError: `folder` is empty, a URL of a store, or a file.
    """

    def __init__(self, folder: str | Path, options: WriteOptions, *, upload: Upload | None = None) -> None:
        self.folder = folder if isinstance(folder, Path) else _folder_of(folder)
        self.options = options
        self.upload = upload
        self.on_progress: OnProgress = options.progress or (lambda _: None)
        self.index: Index | None = None
        self.last_run: LastRun | None = None
        self.is_done = False
        self.path = self.log = self.folder
        self._run = RunDescription({}, None, "", None)
        self._disk: Disk = options.disk
        self._appends = options.append
        self.resources = contextlib.ExitStack()
        self._cached_index: tuple[FileIdentity, Index] | None = None
        self._taken: set[str] = set()  # names of the files at the last `check_folder`

    @property
    def shown(self) -> Path | str:
        """The folder for results and messages: its path, or the URL as text."""
        return self.folder if self.upload is None else self.upload.url

    # Before any row is read.

    @_raises_pack_errors
    def prepare(self, source: object) -> None:
        """Complete an earlier run that was killed while it published. Then check whether this run can start.

        `source` is the first argument of `pack`. If it is a folder, the destination must not be inside it. A dry run
        completes nothing.

        Raises:
            PackError: The folder is the source or inside the source; `append` is set and the folder has no index; the
                folder is indexed and a dry run has neither `append` nor `overwrite`; another user or program made a
                path in `.wdskit-run`; or the earlier run cannot be completed.
            FolderIndexError: An earlier run must be completed, and another process is writing in the folder.
        """
        check_runs(self.folder)
        if self._journals() and not self.options.dry_run:
            with lock_folder(self.folder):
                self._finish_publishing()
        if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
            root = os.path.realpath(os.fsdecode(source))
            if os.path.commonpath([root, os.path.realpath(self.folder)]) == root:
                inside = f"it is inside the source {os.fsdecode(source)}, and would be packed with it the next time"
                raise PackError(f"{self.folder}: {inside}.\n  Pack into a folder outside of it.")
        self._check_indexed()

    def _check_indexed(self) -> None:
        """Raise PackError if `append` is set and the folder has no index.

        A dry run without `append` and `overwrite` also raises PackError if the folder has an index.
        """
        options, is_indexed = self.options, self._has_index()
        if is_indexed and options.dry_run and not options.append and not options.overwrite:
            raise self.indexed_already()
        if options.append and not is_indexed:
            msg = f"{self.folder}: append: it has no index, so --append has nothing to add to. Pack without --append."
            raise PackError(f"{msg}\n  If others wrote shards there, run `wdskit index {self.folder}` first.")

    @functools.cached_property
    def names(self) -> Sequence[ShardNames]:
        """The rules for the file names of shards: one, or one for each split. Raises PackError if a rule is invalid."""
        with raised_as_pack_errors(self.folder):
            return names_of(self.folder, self.options.pattern, self.options.shares)

    def describe_options(self, source: Source) -> dict[str, Any]:
        """Return all settings that can change a shard, by name: the options, the digests of the files in
        `source.lists`, and the patterns of the shards' file names.
        """
        patterns = [names.pattern for names in self.names]
        return {
            **self.options.to_dict(),
            **{
                f"digest of {name}": hashlib.sha256(data).hexdigest()[:16]
                for name, data in (source.lists or {}).items()
            },
            "pattern": patterns[0] if self.options.shares is None else patterns,
        }

    @_raises_pack_errors
    def refuse_other_options(self, source: Source) -> None:
        """Check that the folder was not packed with other options. A run that appends or overwrites may differ.

        Raises:
            PackError: A run with other options packed the folder, and the message lists the differences; or the run
                that packed the folder is unknown. Or the names of the shards are invalid.
        """
        _ = self.names
        if self.options.append or self.options.overwrite or not self._has_index():
            return
        last = self._find_last_run()
        if last is None:
            raise self.indexed_already()
        num_rows = None if source.is_stream else last.run.num_rows or 0
        now = dataclasses.replace(last.run, options=self.describe_options(source), num_rows=num_rows)
        if changes := differences(last.run, now):
            raise self.indexed_already(changes)

    @functools.cached_property
    def work_folder(self) -> Path:
        """A folder for temporary files, such as a plan that is too large for memory.

        The first access creates the destination folder, and locks it until `resources` is closed. A part of a run locks
        only the part. A dry run locks nothing and uses a temporary folder.

        Raises:
            PackError: The folder cannot be written, or another user or program made its `.wdskit-run`.
            FolderIndexError: Another process is writing in the folder, or the part is running already.
            StorageError: The folder cannot be locked.
        """
        if self.options.dry_run:
            return Path(self.resources.enter_context(tempfile.TemporaryDirectory()))
        return self.resources.enter_context(self._locked())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Path]:
        """Create the folder and its sub-folder `.wdskit-run`, and yield the sub-folder. The folder is locked during the
        block; a part of a run locks only the part.

        For a run without parts: before the block, a run that was stopped while it published is completed. After the
        block, `.wdskit-run` is removed unless it contains a run. After an error, `_tidy` is called.

        Raises:
            PackError: The folder cannot be written, or another user or program made its `.wdskit-run`.
            FolderIndexError: Another process is writing in the folder, or the part is running already.
            StorageError: The folder cannot be locked.
        """
        root, part = self.folder / RUN_FOLDER, self.options.part_of
        with raised_as_pack_errors(self.folder):
            check_runs(self.folder)
            is_new = not root.exists()
            make_folders(root, disk=self._disk)
        if part is not None:
            with lock_folder(root, _PART_LOCK.format(*part), f"part {part[0]}/{part[1]} is running already"):
                yield root
            return
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(lock_folder(self.folder))
            except StorageError:  # an empty folder of this user would be in the way of others
                if is_new:
                    with contextlib.suppress(OSError):
                        root.rmdir()
                raise
            try:
                with raised_as_pack_errors(self.folder):
                    self._finish_publishing()
                    make_folders(root, disk=self._disk)
                    remove_temp_files(root, disk=self._disk)
                yield root
            except BaseException:
                with contextlib.suppress(OSError, PackError):
                    self._tidy()
                raise
            with raised_as_pack_errors(self.folder):
                self._remove_locks()

    def _tidy(self) -> None:
        """Remove temporary files, and staging folders without a filled shard, a started upload or a journal.

        If no staging folder is left, also remove `.wdskit-run`.
        """
        for path in run_folders(self.folder):
            remove_temp_files(path, disk=self._disk)
            if not (path / JOURNAL_NAME).exists() and not read_filled(path) and not read_sent(path):
                self._remove_run(path)
        for parent in (self.folder, self.folder / RUN_FOLDER):
            remove_temp_files(parent, disk=self._disk)
        self._remove_locks()

    # The existing shards.

    @_raises_pack_errors
    def resolve_previous_run(
        self, source: Source, *, num_rows: int | None, rows: str, has_labels: bool, first_key: str = ""
    ) -> None:
        """Lock the folder, read its index, and find out whether this run already made the index.

        Sets `index`, `last_run` and `is_done`.

        Args:
            source: The source.
            num_rows: Number of the source's rows; None for rows that can be read only once.
            rows: Digest of the source's rows; empty for rows that can be read only once.
            has_labels: True if samples of this run have a `cls`.
            first_key: Key of the first row, for an addition of rows that can be read only once. The addition is done
                already only if the folder's last addition began with this key.

        Raises:
            PackError: Another run packed the folder, and this run neither appends nor overwrites; this run appends, and
                the folder has no index; this run is done, and one of its shards or `.idx` files is missing, has a
                different size or, in a bucket, was replaced; or an addition has other classes than the folder.
            ShardError: A shard of this run was damaged or replaced.
            StorageError: The folder cannot be locked, or a bucket or a shard cannot be read.
            FolderIndexError: Another process is writing in the folder; the index is invalid; or this run appends, and
                the index does not match the shards.
        """
        _ = self.work_folder
        self._check_indexed()
        self._run = RunDescription(self.describe_options(source), num_rows, rows, None)
        if not self._has_index():
            return
        self.index = self._read_index()
        if self.options.overwrite:
            return
        self.last_run = self._find_last_run()
        if self._appends:
            self._check_sizes(self.index.entries)
            if source.classes or has_labels:
                self._check_classes(source.classes)
        if self.last_run is None:
            if self._appends:
                return
            raise self.indexed_already()
        now = dataclasses.replace(self._run, first=self.last_run.run.first)
        changes = differences(self.last_run.run, now)
        if not changes:
            self._check_last_run(self.last_run)
            self.is_done = not (self._appends and first_key) or first_key == self._first_key(self.last_run)
        elif not self._appends:
            raise self.indexed_already(changes)

    def _check_sizes(self, entries: Iterable[ShardEntry]) -> None:
        """Raise FolderIndexError if a shard is missing, or does not have the size in `entries`."""
        for entry in entries:
            path = self.folder / entry.name
            num_bytes = path.stat().st_size if path.exists() else None
            if num_bytes != entry.num_bytes:
                what = "is not there" if num_bytes is None else f"has {num_bytes} bytes, not {entry.num_bytes}"
                msg = f"{self.folder / INDEX_NAME}: it does not match the shards: {entry.name} {what}."
                remedy = f"Put the right file there, or run `wdskit index {self.folder}`."
                raise FolderIndexError(f"{msg}\n  {remedy}", folder=str(self.folder))

    def _check_classes(self, classes: Mapping[str, int]) -> None:
        """Raise PackError if `classes` (number by name) differ from the classes of the folder."""
        path = self.folder / CLASSES_NAME
        known = {name: number for number, name in enumerate(read_classes(self.folder) or ())}
        if known == dict(classes):
            return
        msg = f"{path}: its classes ({len(known)}) differ from those that you add ({len(classes)})"
        if not classes:
            remedy = f"With --classes {self.folder} they are checked and get these names."
            raise PackError(f"{msg}: the labels that you add have no names.\n  {remedy}")
        if not known:
            msg = f"{self.folder}: its labels have no names, but those that you add do."
            raise PackError(f"{msg}\n  Pack into another folder.")
        name = next(name for name in [*classes, *known] if known.get(name) != classes.get(name))
        numbers = f"{name!r} is {known.get(name, 'not there')} and {classes.get(name, 'not there')}"
        remedy = f"With --classes {self.folder}, images get the existing numbers; new classes need another folder."
        raise PackError(f"{msg}: {numbers}.\n  {remedy}")

    def _check_last_run(self, last: LastRun) -> None:
        """Check that the shards of the last run still exist unchanged. Only files that seem changed are read.

        Raises:
            PackError: A shard or its `.idx` is missing or has a different size. In a bucket: an object is missing, or
                another writer replaced the object.
            ShardError: A shard of the same size was damaged or replaced.
            StorageError: The bucket or a shard cannot be read.
        """
        if self.upload is not None:
            if lost := self.upload.find_lost(last.entries, last.etags):
                raise self.indexed_already([f"{name} or its .idx is gone, or was replaced." for name in lost])
            return
        lost = [entry.name for entry in last.entries if not has_shard(self.folder, entry)]
        if lost:
            raise self.indexed_already([f"{name} or its .idx is gone, or has a different size." for name in lost])

    def _first_key(self, last: LastRun) -> str:
        """Return the key of the first sample that the last run added.

        Raises ShardError if the shard is damaged, StorageError if it cannot be read.
        """
        path = str(self.folder / last.entries[0].name)
        with contextlib.closing(LocalFile(path)) as file:
            return str(next(iter(HeaderReader(file, shard=path)))["__key__"])

    @property
    def kept(self) -> tuple[ShardEntry, ...]:
        """The index entries of the shards that were in the folder before this addition. Empty if this run is not an
        addition.
        """
        if self.index is None or not self._appends:
            return ()
        own = len(self.last_run.entries) if self.last_run is not None and self.is_done else 0
        return self.index.entries[: len(self.index.entries) - own]

    def first_number(self, names: ShardNames) -> int:
        """Return the number of the first new shard: the largest number of a shard in `kept` whose name fits `names`,
        plus one.

        The number is 0 if no shard in `kept` has such a name.
        """
        numbers = (names.number_of(entry.name) for entry in self.kept)
        return max((number for number in numbers if number is not None), default=-1) + 1

    @_raises_pack_errors
    def check_keys(self, plan: Plan) -> None:
        """Check that no row of an addition has the key of an existing sample. The headers of existing shards are read.

        If this run is done, nothing is checked.

        Raises:
            RowError: An existing sample has the key of a row.
            ShardError: An existing shard is damaged.
            StorageError: An existing shard cannot be read.
        """
        if not self.is_done and self.kept and (row := plan.find_row_with_key(self.existing_keys())) is not None:
            raise self.key_exists(row)

    def key_exists(self, row: Row) -> RowError:
        """Return the error for a row whose key is also the key of an existing sample of the folder."""
        remedy = "Keys must be unique. Rename one of the two samples, or leave out the new one."
        return row_error(row.where, f"its key {row.key!r} is in {self.folder} already", remedy)

    def existing_keys(self) -> Iterator[str]:
        """Yield the keys of all samples in the shards of `kept`, from their headers. Report the progress.

        Raises ShardError if a shard is damaged, StorageError if a shard cannot be read.
        """
        num_keys = num_bytes = 0
        totals = sum(entry.num_samples for entry in self.kept), sum(entry.num_bytes for entry in self.kept)
        for entry in self.kept:
            self.on_progress(Progress("comparing", num_keys, num_bytes, *totals))
            path = str(self.folder / entry.name)
            with contextlib.closing(LocalFile(path)) as file:
                for sample in HeaderReader(file, shard=path):
                    yield sample["__key__"]
            num_keys += entry.num_samples
            num_bytes += entry.num_bytes

    @_raises_pack_errors
    def lists(self, source: Source) -> dict[str, bytes]:
        """Return the bytes of `classes.json`, `rejected.jsonl` and `duplicates.jsonl` by name, without empty files.

        An addition leaves out `classes.json`, and its other lists begin with the folder's existing lines. If
        `source.lists` is set, the result is `source.lists`, or empty in an addition.
        """
        if source.lists is not None:
            return {} if self._appends else dict(source.lists)
        lists = {}
        if source.classes and not self._appends:
            lists[CLASSES_NAME] = classes_json(source.classes)
        rejected: list[object] = [{"where": err.where, "reason": err.problem} for err in source.rejected]
        duplicates: list[object] = [each.to_dict() for each in source.duplicates]
        for name, listed in ((REJECTED_NAME, rejected), (DUPLICATES_NAME, duplicates)):
            if listed:
                lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in listed)
                before = (read_own(self.folder / name) or b"") if self._appends else b""
                # A file name that is not UTF-8 has lone surrogates. JSON writes them as escapes.
                lists[name] = before + lines.encode(errors="backslashreplace")
        return lists

    @_raises_pack_errors
    def check_folder(self, shards: Iterable[str], lists: Mapping[str, bytes] | None = None) -> None:
        """Check that the names of the new files are free, and that the folder has no shard that is not in its index.

        Args:
            shards: File names of the new shards. If this run is done, they are not checked.
            lists: Bytes of the new lists (`classes.json`, ...), by name; None if they are not known yet. The lists are
                not checked if they are None, in an addition, or if `overwrite` replaces an index.

        Raises:
            PackError: A file that this run does not replace has the name of a new shard or of its `.idx`; a tar of the
                folder is not in the index; or the folder has a list whose content differs from `lists`.
        """
        others: set[str] = set()  # objects in the bucket that no known run uploaded
        if self.upload is not None:
            sent: dict[str, SentFile] = {}
            for path in run_folders(self.folder):
                sent |= read_sent(path)
            others = self.upload.find_others(sent)
        self._taken = {*others}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a dry run makes no folder
            self._taken |= {*os.listdir(self.folder)}
        for shard in () if self.is_done else shards:
            self.check_name(shard)
        listed = self.index.by_name if self.index is not None else {}
        strays = sorted(name for name in self._taken if name.endswith(".tar") and name[0] != "." and name not in listed)
        if strays:
            msg = f"{self.folder / strays[0]}: this shard is in no index, and is not one of those being packed."
            remedy = f"Pack into another folder, or run `wdskit index {self.folder}` if these are whole shards."
            raise PackError(f"{msg} Nothing was written.\n  {remedy}")
        if lists is None or self._appends or (self.options.overwrite and self.index is not None):
            return
        for name in sorted({*lists, REJECTED_NAME, DUPLICATES_NAME}):
            path = self.folder / name
            if (name in others and not self.is_done) or (os.path.lexists(path) and read_own(path) != lists.get(name)):
                raise self._in_the_way(name)

    def check_name(self, shard: str) -> None:
        """Check that the file names of a new shard and its `.idx` were free when `check_folder` was called last.

        Raises PackError if a file has one of the names, and does not belong to a shard that this run replaces.
        """
        replaces = self.options.overwrite and self.index is not None and shard in self.index.by_name
        for name in () if replaces else shard_files(shard):
            if name in self._taken:
                raise self._in_the_way(name)

    # Filling.

    @_raises_pack_errors
    def start(self, shards: tuple[PlannedShard, ...] | None) -> None:
        """Start this run, or continue it if it was stopped. Sets `path` and `log`.

        If the run is done, it is not started. A run without parts then removes its staging folder, if the folder still
        exists; with `restart` and a local destination, it removes all staging folders.

        Args:
            shards: The planned shards; None for rows that can be read only once.

        Raises:
            PackError: A different run with filled shards was stopped here and `restart` is not set, or its parts are
                running; or this run is running with another number of parts. Or another writer replaced an object of a
                run to remove.
            StorageError: The folder cannot be locked, or the bucket cannot be changed.
            FolderIndexError: Another process is writing in the folder.
        """
        options, part = self.options, self.options.part_of
        first = tuple(map(self.first_number, self.names))
        self._run = dataclasses.replace(self._run, shards=shards, first=first, parts=part[1] if part else 0)
        if self.is_done:
            if part is None:
                self._remove_finished()
            # A stopped `overwrite`. A bucket has none, and objects of another run may be those of this run.
            if part is None and options.restart and self.upload is None:
                for other in run_folders(self.folder):
                    self._remove_run(other)
        elif part is None:
            if not options.overwrite:
                self._remove_finished()
            self._open_staging(is_alone=lambda: True)
        else:
            with lock_folder(self.work_folder, _START_LOCK, wait=True):
                is_alone = self.resources.enter_context(share_folder(self.folder))
                if is_alone():
                    self._remove_finished()
                self._open_staging(is_alone=is_alone)

    def _open_staging(self, *, is_alone: Callable[[], bool]) -> None:
        """Make or reuse the staging folder of this run, and set `path` and `log`.

        Staging folders of other runs are removed if they have no filled shard. With the option `restart`, staging
        folders with filled shards are removed too; in a run without parts, also the old folder of this run. In a
        bucket, the objects that a removed run uploaded are deleted. `is_alone` returns True if no other part is running
        here.

        Raises:
            PackError: A different run with filled shards was stopped here, and `restart` is not set. Or other parts are
                running that belong to a different run or to another number of parts. Or another writer replaced an
                object that a run to remove had uploaded.
            StorageError: The bucket cannot be changed.
        """
        run, part, disk = self._run, self.options.part_of, self._disk
        path = self.folder / RUN_FOLDER / run.digest
        for other in run_folders(self.folder):
            old = read_description(other)
            if old is None:  # the run was stopped before it wrote its description, or during its removal
                if is_alone():
                    self._remove_run(other)
                continue
            changes = differences(old, run)
            if not changes and (old.parts == run.parts or is_alone()) and (part or not self.options.restart):
                continue
            filled = read_filled(other)
            if not changes and part is not None:
                msg = f"{self.folder}: part: this run is divided into {old.parts} parts, some of which are running."
                raise PackError(f"{msg}\n  Use the same number of parts, or wait until they end.")
            if filled and not self.options.restart:
                msg = f"{self.folder}: a different run was stopped here; {len(filled)} of its shards are there."
                way = "Run that command again to continue it, or start again with --restart, which removes these shards"
                raise PackError(f"{msg}\n  {_first_few(changes)}\n  {way}.")
            if not is_alone():
                msg = f"{self.folder}: other parts of that run are running. Wait until they end, or stop them."
                raise PackError(msg)
            if self.upload is not None:
                self.upload.remove(read_sent(other))
            self._remove_run(other)
        make_folders(path, disk=disk)
        self.path = path
        self.log = path / ("shards.log" if part is None else f"shards-{part[0]}-of-{part[1]}.log")
        description = path / DESCRIPTION_NAME
        if part is None or is_alone():
            for log in path.glob("*.log"):
                wait_for_workers(log)
            remove_temp_files(path, disk=disk)
        if read_own(description) != run.to_json():
            publish_bytes(description, run.to_json(), disk=disk)
        disk.close(disk.open_log(self.log))  # creates the log, whose lock the workers share
        wait_for_workers(self.log)
        if part is not None and run.shards is not None:  # other parts may be writing their own files
            own = run.shards[part[0] :: part[1]]
            remove_temp_files(path, of={name for shard in own for name in shard_files(shard.name)}, disk=disk)

    @_raises_pack_errors
    def filled(self) -> dict[str, ShardEntry]:
        """Return the filled shards of this run that still exist, by name. If the run is done, return all its shards.

        StorageError: The bucket cannot be read.
        """
        if self.is_done:
            assert self.last_run is not None
            return {entry.name: entry for entry in self.last_run.entries}
        if self.upload is None:
            return read_filled(self.path)
        shards = (item for item in read_log(self.path) if isinstance(item, UploadedShard))
        return self.upload.find_uploaded(shards, read_sent(self.path))

    @_raises_pack_errors
    def add(self, entry: ShardEntry) -> None:
        """Log a filled shard, so that a later run does not fill it again. For a bucket, upload the shard in the
        background; it is logged after the upload.

        The call waits while more than `MAX_PENDING` shards are uploading. StorageError: An upload failed.
        """
        if self.upload is None:
            self._write_log(_log_line(entry))
            return
        self.upload.start(entry, self._log_upload(shard_files(entry.name), {entry.name: entry.sha256}))
        self._log_uploaded(MAX_PENDING)

    def _log_upload(self, names: Sequence[str], known: Mapping[str, str]) -> dict[str, Path]:
        """Log the size and the sha256 of files before their upload, so that a later run recognizes the objects.

        `names` are files of the staging folder. `known` maps file names to the sha256 digests, in hex, that the caller
        knows; all other files are read. Return the path of each file, by name.
        """
        files = {name: self.path / name for name in names}
        digests = {name: known.get(name) or digest_of(str(path.absolute())) for name, path in files.items()}
        self._write_log({"begun": {name: (path.stat().st_size, digests[name]) for name, path in files.items()}})
        return files

    def _log_uploaded(self, max_pending: int) -> None:
        """Wait until at most `max_pending` uploads run, and log the uploaded shards. StorageError: An upload failed."""
        assert self.upload is not None
        for shard in self.upload.finished(max_pending, self._disk):
            self._write_log([*_log_line(shard.entry), shard.etags])

    def _write_log(self, line: object) -> None:
        # The empty line ends a line that was cut short.
        append_lines(self.log, ["", json.dumps(line)], disk=self._disk)

    # Publishing.

    @_raises_pack_errors
    def publish(self, entries: Sequence[ShardEntry], lists: Mapping[str, bytes]) -> None:
        """Move the filled shards into the folder and write its index. For a bucket, upload the index.

        If the run is done, nothing is written, and `lists` are only compared with the files of the folder. A part of a
        run only stores its lists; `publish_parts` publishes all parts.

        Args:
            entries: Index entries of the shards, in order.
            lists: Bytes of the lists (`classes.json`, ...), by file name.

        Raises:
            PackError: Another file has the name of a new file, a shard of the folder is not in the index, a file of the
                run is missing, or another writer replaced a shard in the bucket.
            SelectionError: The values of a column do not fit together.
            StorageError: The bucket cannot be reached or refuses the request.
        """
        if self.is_done:
            self.check_folder([], lists)
            return
        if self.options.part_of is None:
            self.check_folder([entry.name for entry in entries], lists)
        for name, data in lists.items():
            publish_bytes(self.path / name, data, disk=self._disk)
        if self.options.part_of is None:
            self._publish_index(entries, lists)

    def _publish_index(self, entries: Sequence[ShardEntry], lists: Iterable[str]) -> None:
        """Write the new index and the journal, and perform the steps of the journal. For a bucket, upload the index.

        `entries` are the shards of this run. `lists` are names of files in the staging folder. Raises the errors of
        `publish`.
        """
        replaces = self.options.overwrite and self.index is not None
        kept = self.index.entries if self.index is not None and not replaces else ()
        all_entries = (*kept, *entries)
        data = index_json(all_entries)
        index = Index.of(str(self.folder), all_entries)
        index.sha256 = hashlib.sha256(data).hexdigest()
        run = dataclasses.replace(self._run, shards=None, parts=0)  # the index has the names
        last = {"run": json.loads(run.to_json()), "num_shards": len(entries), "index": index.sha256}
        publish_bytes(self.path / INDEX_NAME, data, disk=self._disk)
        if self.upload is not None:
            self._upload_index(index, entries, last, lists)
            return
        come = [name for entry in entries for name in shard_files(entry.name)]
        come += [*lists, *self._write_columns(all_entries, entries)]
        new = {*come}
        go = [name for name in self._existing_files() if name not in new] if replaces else []
        journal = {"go": go, "come": come, "replaces": replaces, "last_run": last}
        publish_bytes(self.path / JOURNAL_NAME, json.dumps(journal, indent=0).encode() + b"\n", disk=self._disk)
        self._replay(self.path, index=index)
        if replaces:
            remove_exports(self.folder, self._disk)

    def _write_columns(self, all_entries: Sequence[ShardEntry], new: Sequence[ShardEntry]) -> list[str]:
        """Write the columns of all shards into the staging folder. Return the file names; an empty list for no columns.

        `new` are the last shards of `all_entries`. Their values are in a file next to each shard. The values of the
        other shards come from the folder's existing columns.

        Raises:
            PackError: The file with the values of a new shard is missing or has other columns.
            SelectionError: The values of a column do not fit together, or the folder's columns are damaged.
        """
        sources = self.columns
        if not sources:
            return []
        known = self._known_columns if len(all_entries) > len(new) else None
        parts: dict[str, list[Part]] = {
            name: [] if known is None else [as_part(known.column(name))] for name in sources
        }
        try:
            for entry in new:
                path = values_path(self.path / entry.name)
                values = json.loads(read_own(path) or b"{}")
                if values.keys() != sources.keys():
                    msg = f"{path}: this file was written with the shard, and is gone or has other columns."
                    raise PackError(f"{msg}\n  Pack again with --restart.")
                for name, part in pack_columns(values, entry.name).items():
                    parts[name].append(part)
            columns = {name: NewColumn(source, parts[name]) for name, source in sources.items()}
            if known is None:
                check_split_values(columns, str(self.folder))
            return write_columns(self.path, digest_of_entries(all_entries), columns, disk=self._disk)
        except SelectionError as err:
            msg = f"{err}\n  Correct the source or the columns, and pack with --restart."
            if known is not None:
                msg = f"{self.folder}: the added samples do not fit its columns: {msg} Or remove the column: delete "
                msg += f"{self.folder / RUN_FOLDER}, and run `wdskit index {self.folder} --drop-columns NAME`."
            raise SelectionError(msg, folder=str(self.folder)) from err

    @property
    def columns(self) -> dict[str, ColumnSource]:
        """How each column of this run is computed, by column name. An addition uses the columns of the folder.

        Raises:
            PackError: An addition has columns that the folder does not have.
            SelectionError: The columns of the folder are damaged, or were made for other shards.
        """
        new = parse_columns(self._run.options.get("columns", ()))
        if not self._appends or self.index is None:
            return new
        known = {name: self._known_columns.column(name).source for name in self._known_columns}
        if more := [name for name in new if name not in known]:
            msg = f"{self.folder}: columns: it has no column {more[0]!r}, so an addition cannot have one."
            raise PackError(f"{msg}\n  Run `wdskit index {self.folder} --columns {','.join(more)}` first.")
        return known

    @functools.cached_property
    def _known_columns(self) -> Columns:
        """The columns of the folder before this run. All their values are read and checked.

        SelectionError: They are damaged, or belong to other shards.
        """
        columns = Columns(read_index(self.folder))
        for name in columns:
            columns.column(name).check()
        return columns

    def _upload_index(
        self, index: Index, entries: Sequence[ShardEntry], last: dict[str, Any], lists: Iterable[str]
    ) -> None:
        """Wait until all shards are in the bucket. Then upload the lists and, last, the index.

        At the end, remove the staging folder. `entries` are the shards of this run. `lists` are names of files in the
        staging folder. `last` describes this run, for later runs; the ETags of the uploaded files are added to it.

        Raises:
            PackError: A shard is missing in the bucket or was replaced, or the file with its values is missing.
            SelectionError: The values of a column do not fit together.
            StorageError: The bucket cannot be reached or refuses the request.
        """
        assert self.upload is not None
        self._log_uploaded(0)
        if lost := sorted(read_filled(self.path).keys() - self.filled().keys()):
            msg = f"{self.upload.object_url(lost[0])}: it is gone, or another writer replaced it."
            raise PackError(f"{msg}\n  Run the same command again to continue.")
        last["etags"] = {name: sorted(file.etags) for name, file in read_sent(self.path).items() if file.etags}
        publish_bytes(self.path / LAST_RUN_NAME, json.dumps(last).encode() + b"\n", disk=self._disk)
        columns = self._write_columns(index.entries, entries)
        self.upload.put(self._log_upload([*lists, *columns, LAST_RUN_NAME, INDEX_NAME], {}))
        self._remove_run(self.path)
        self._remove_locks()

    def _existing_files(self) -> Iterator[str]:
        """Yield the names of the files of the existing data set, except `index.json`.

        A file with one of these names may be missing.
        """
        assert self.index is not None
        yield LAST_RUN_NAME
        for entry in self.index.entries:
            yield from shard_files(entry.name)
        yield from sorted(path.name for path in self.folder.iterdir() if is_column_file(path.name))
        yield from LIST_NAMES

    @_raises_pack_errors
    def publish_parts(self) -> tuple[Sequence[ShardEntry], bool]:
        """Publish a run whose shards were filled in parts, with the options of that run: `wdskit pack-finish`.

        Returns:
            (entries, was_done). `entries` are the index entries of the shards of all parts; if the folder has no parts,
            the entries of its last run. `was_done` is True if the shards were published before this call, or if an
            earlier call was stopped while it published them; this call then completes the publication.

        Raises:
            PackError: The folder has no parts and no earlier run; its stopped run is not divided into parts; a file
                cannot be written, or has the name of a new file; or shards are missing, and the message names them and
                their parts.
            FolderIndexError: A part of the run, or another process, is writing in the folder.
            SelectionError: The values of a column in two parts do not fit together.
        """
        with lock_folder(self.folder):
            check_runs(self.folder)
            was_publishing = bool(self._journals())
            if was_publishing:
                self._finish_publishing()
            self.last_run = self._find_last_run()
            published = self.last_run.entries if self.last_run is not None else ()
            if was_publishing:
                return published, True
            self._remove_finished()
            runs = [(path, run) for path in run_folders(self.folder) if (run := read_description(path)) is not None]
            if not runs:
                if self.last_run is not None:
                    self._remove_locks()
                    return published, True
                raise PackError(f"{self.folder}: no part of a run was packed here.")
            [(self.path, self._run), *others] = runs
            if others or not self._run.parts or self._run.shards is None:
                msg = f"{self.folder}: the run that was stopped here is not divided into parts."
                raise PackError(f"{msg}\n  Run the same command again to continue it.")
            for log in self.path.glob("*.log"):
                wait_for_workers(log)
            entries = self._entries_of_parts(self._run.shards)
            remove_temp_files(self.path, disk=self._disk)
            self._appends = self._run.options.get("append") is True
            self.index = self._read_index() if self._appends else None
            self.publish(
                entries, {name: data for name in LIST_NAMES if (data := read_own(self.path / name)) is not None}
            )
            return entries, False

    def _entries_of_parts(self, shards: Sequence[PlannedShard]) -> list[ShardEntry]:
        """Return the index entries of the planned shards. PackError: Shards are missing; the message names them."""
        filled, parts = read_filled(self.path), self._run.parts
        missing = [number for number, shard in enumerate(shards) if shard.name not in filled]
        if missing:
            which = ", ".join(f"{part}/{parts}" for part in sorted({number % parts for number in missing}))
            names = ", ".join(shards[number].name for number in missing[:_SHOWN_SHARDS])
            more = f" and {len(missing) - _SHOWN_SHARDS} more" if len(missing) > _SHOWN_SHARDS else ""
            msg = f"{self.folder}: {len(missing)} of {len(shards)} shards are missing: {names}{more}."
            raise PackError(f"{msg}\n  Run the same command again with --part {which}.")
        return [filled[shard.name] for shard in shards]

    # The journal.

    def _journals(self) -> list[Path]:
        """Return the staging folders with a journal to replay."""
        return [path for path in run_folders(self.folder) if (path / JOURNAL_NAME).exists()]

    def _finish_publishing(self) -> None:
        """Complete a run that was stopped while it published. Remove temporary files.

        The caller has locked the folder.

        Raises:
            PackError: A file of the run is missing, the journal is damaged, or `.wdskit-run` has a path that this
                user's wdskit did not write.
        """
        check_runs(self.folder)
        for path in self._journals():
            self._replay(path)
        remove_temp_files(self.folder, disk=self._disk)

    def _replay(self, path: Path, *, index: Index | None = None) -> None:
        """Perform the steps of a journal that are not done yet.

        Args:
            path: The staging folder with the journal.
            index: The folder's new index; None reads it from the staging folder.

        Raises:
            PackError: A file of the run is missing; or the journal is damaged, or names a file that is not part of a
                data set.
        """
        folder, disk = self.folder, self._disk
        if (path / INDEX_NAME).exists():
            disk.fsync_folder(path)  # the process that wrote the journal may have been killed before this fsync
            journal = read_journal(path)
            index = index or read_index(path)
            if journal["replaces"]:
                self._remove([INDEX_NAME])  # removed first: an index never describes shards of another run
                self._remove(journal["go"])
            shards = {entry.name for entry in index.entries}
            self._link_all(path, [name for name in journal["come"] if name in shards])
            self._link_all(path, [name for name in journal["come"] if name not in shards])
            publish_bytes(folder / LAST_RUN_NAME, json.dumps(journal["last_run"]).encode() + b"\n", disk=disk)
            write_index(folder, index.entries, disk=disk)
            if columns := [name for name in journal["come"] if is_column_file(name)]:
                remove_columns(folder, keep=columns, disk=disk)
            disk.remove(path / INDEX_NAME)
            disk.fsync_folder(path)  # a journal that came back after a later run would undo that run
        else:
            disk.fsync_folder(folder)  # makes the name of the index durable, even if the run was killed before
        self._remove_run(path)
        self._remove_locks()

    def _link_all(self, path: Path, names: Sequence[str]) -> None:
        """Link the files `names` of the staging folder `path` into the folder. Existing files are replaced.

        On a disk without hard links, the files are moved instead. PackError: A file is missing in both folders.
        """
        disk, parents = self._disk, {self.folder: None}
        for name in names:
            source, target = path / name, self.folder / name
            if target.parent not in parents:
                make_folders(target.parent, disk=disk)
                parents[target.parent] = None
            temp = temp_path(target)
            if not source.exists():  # without hard links, `disk.link` renames the file
                if temp.exists():
                    disk.rename(temp, target)
                elif not target.exists():
                    msg = f"{source}: this file was filled and is gone, so the run cannot be finished."
                    raise PackError(f"{msg}\n  Put it back, or remove {path} and pack again.")
            elif not target.exists():
                # Not a rename: a power loss can lose both names of a file that moves between folders.
                disk.link(source, target)
            elif not target.samefile(source):
                # A link cannot replace a file, and the name must always have a file. A rename between two names of one
                # file does nothing, so the temporary link of a killed run is removed first.
                disk.remove(temp)
                disk.link(source, temp)
                disk.rename(temp, target)
        for parent in parents:
            disk.fsync_folder(parent)

    def _remove(self, names: Iterable[str]) -> None:
        """Remove the files `names` of the folder, durably (fsync). Names of files that do not exist are ignored."""
        paths = [self.folder / name for name in names if (self.folder / name).exists()]
        for path in paths:
            self._disk.remove(path)
        for parent in {self.folder, *(path.parent for path in paths)}:
            self._disk.fsync_folder(parent)

    def _remove_run(self, path: Path) -> None:
        """Wait until the workers of the run in a staging folder have ended, and remove the folder. The logs are removed
        first, so that no shard counts as filled. The journal is removed last.
        """
        for log in path.glob("*.log"):
            wait_for_workers(log)
        last = path / JOURNAL_NAME
        others = [file for file in path.iterdir() if file != last]
        for file in sorted(others, key=lambda file: (file.suffix != ".log", file)):
            self._disk.remove(file)
        self._disk.remove(last)
        self._disk.remove_folder(path)

    def _remove_finished(self) -> None:
        """Remove the staging folder of `last_run`, if it still exists, for example after a power loss."""
        if self.last_run is not None:
            path = self.folder / RUN_FOLDER / self.last_run.run.digest
            if path in run_folders(self.folder):
                self._remove_run(path)

    def _remove_locks(self) -> None:
        """Remove `.wdskit-run` with its locks, unless it contains a run. The caller has locked the folder.

        A staging folder without `run.json` and without a journal is not a run, and is removed.
        """
        root = self.folder / RUN_FOLDER
        for path in run_folders(self.folder):
            if not (path / DESCRIPTION_NAME).exists() and not (path / JOURNAL_NAME).exists():
                self._remove_run(path)  # the run was killed before its first shard, or during its removal
        if not root.is_dir() or run_folders(self.folder):
            return
        for file in sorted(root.iterdir()):
            self._disk.remove(file)
        self._disk.remove_folder(root)

    # The index and its run.

    def _has_index(self) -> bool:
        return (self.folder / INDEX_NAME).exists()

    def _read_index(self) -> Index:
        """Return the folder's index. The index is read again only if its file changed.

        OSError: The file is missing. FolderIndexError: The index is invalid.
        """
        identity = FileIdentity.of(self.folder / INDEX_NAME)
        if self._cached_index is None or self._cached_index[0] != identity:
            self._cached_index = identity, read_index(self.folder)
        return self._cached_index[1]

    def _find_last_run(self) -> LastRun | None:
        """Return the run that made the folder's index; None without a valid index, or if the run is unknown."""
        try:
            index = self._read_index()
        except (OSError, FolderIndexError):
            return None
        return read_last_run(self.folder, index)

    def indexed_already(self, changes: Sequence[str] = ()) -> PackError:
        """Return the error for a folder that is packed already.

        `changes` has sentences that say how this run differs from the run that packed the folder; empty if this is
        unknown.
        """
        msg = f"{self.folder}: this folder is packed and indexed already"
        msg += "." if not changes else f", by a different run:\n  {_first_few(changes)}"
        return PackError(f"{msg}\n  {PACKED_REMEDY}")

    def _in_the_way(self, name: str) -> PackError:
        """Return the error for an existing file `name` that this run would have to overwrite."""
        path = self.folder / name
        msg = f"{path}: this file exists already and is in the way. Nothing was overwritten."
        what = (
            f"run `wdskit index {path.parent}`, if these are whole shards" if name.endswith(".tar") else "move it away"
        )
        return PackError(f"{msg}\n  Pack into another folder, or {what}.")


def _folder_of(dest: str) -> Path:
    """Return the path of the local folder to write to. PackError: `dest` is empty, not a local path, or a file."""
    with raised_as_pack_errors(Path(dest)):
        if not dest or "\x00" in dest:
            raise PackError(f"{dest!r} is not a folder to pack into. Write . for this one.")
        if not is_local(dest):
            raise PackError(f"{dest}: only a local folder can hold parts.")
        folder = Path(local_path(dest))
        if folder.exists() and not folder.is_dir():
            raise PackError(f"{dest}: this is a file, not a folder to pack into.")
        return folder


def _log_line(entry: ShardEntry) -> list[object]:
    return [entry.name, entry.num_samples, entry.num_bytes, entry.sha256, entry.fields, entry.idx_sha256]


def _first_few(sentences: Sequence[str]) -> str:
    """Return the first five sentences as lines of a message. If there are more, a last line says how many."""
    more = [f"... and {len(sentences) - _SHOWN_CHANGES} more."] if len(sentences) > _SHOWN_CHANGES else []
    return "\n  ".join([*sentences[:_SHOWN_CHANGES], *more])
