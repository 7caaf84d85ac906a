"""The folder of a data set. `index.json` is the only commit point: a file that it does not list is no part of the data.
One run at a time writes in it (`open_folder` locks it), or several parts of one; another run is refused at once.

A run fills shards in `DEST/.wdskit/`, in files named by the digests of their jobs. `commit` writes
`.wdskit/commit.json`, with the final names and the new index: from now on the run will be completed. Then the files get
their names, and `index.json` last (`files.publish` renames it). After a kill, `open_folder` completes the moves. Every
step can be repeated. With `--append`, the new index lists the old shards, too. A run removes only files of `.wdskit/`
with names that it makes (`_OWN`), temporary files of its own, and columns that `columns.json` no longer lists.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wdskit.dataset.classes import CLASSES_NAME, read_classes
from wdskit.dataset.columns import COLUMNS_NAME, Columns, NewColumn, Texts, is_column_file, list_columns, write_columns
from wdskit.dataset.index import COMMIT_NAME, INDEX_NAME, Index, ShardEntry, has_index, index_json, read_index
from wdskit.dataset.lock import lock_folder, wait_for_workers
from wdskit.dataset.samples import HeaderReader
from wdskit.dataset.shard import offsets_path
from wdskit.errors import FolderIndexError, PackError
from wdskit.files import DISK, Disk, describe_foreign, make_folders, publish_bytes, read_own, remove_temp_files
from wdskit.packing.fill import Filled, is_whole, parse_note, publish_note, read_filled
from wdskit.packing.plan import PlannedShard
from wdskit.shards.make_columns import pack_columns
from wdskit.storage.urls import LocalFile

WORK_NAME = ".wdskit"
RUN_NAME = ".wdskit.last-run"
REJECTED_NAME = "rejected.jsonl"
_SHARD = re.compile(r"(.+)-([0-9]+)\.tar", re.DOTALL)
_OWN = re.compile(
    r"[0-9a-f]{32}\.(tar|idx|json)|(index|commit|classes|columns)\.json|run|"
    r"rejected\.jsonl|.+\.put|.+\.[0-9a-f]{16}\.npy|\..*\.wdskit-temp"
)
"""Names of the files that wdskit makes in the folder `.wdskit`."""


class Folder:
    """A local folder of shards, and the run that writes into it.

    Args:
        path: The folder.
        work: The folder of the run's files.
        disk: Performs the file operations.

    Attributes:
        shown: The folder as messages name it.
        entries: The shards in `index.json`; empty without an index.
        classes: Class names in the order of their numbers; None without `classes.json`.

    Raises:
        FolderIndexError: `index.json` or `classes.json` is damaged or foreign.
    """

    def __init__(self, path: Path, work: Path, disk: Disk) -> None:
        self.path, self.work, self.disk = path, work, disk
        self.shown = str(path)
        self.entries: tuple[ShardEntry, ...] = read_index(path).entries if has_index(path) else ()
        self.classes = read_classes(path)

    def first_number(self, prefix: str) -> int:
        """Return the number of the next shard with this prefix. The numbers follow those of the folder's shards."""
        found = (_SHARD.fullmatch(entry.name) for entry in self.entries)
        return max((int(match[2]) + 1 for match in found if match and match[1] == prefix), default=0)

    def _read(self, name: str) -> bytes | None:
        """Return the bytes of a file of the folder; None if it does not exist."""
        return read_own(self.path / name)

    def _sizes(self) -> Mapping[str, int]:
        """Return the size of each file of the folder by its name."""
        if not self.path.is_dir():
            return {}
        with os.scandir(self.path) as found:
            return {item.name: item.stat(follow_symlinks=False).st_size for item in found}

    def done(self, run: str) -> tuple[ShardEntry, ...]:
        """Return the shards of the run with the digest `run` if it wrote the index that is here; empty otherwise."""
        note, index = None, self._read(INDEX_NAME) or b""
        with contextlib.suppress(FolderIndexError):  # also the file of an older version
            note = parse_note(self._read(RUN_NAME), self.path / RUN_NAME)
        if note is None or (note["run"], note["index"]) != (run, hashlib.sha256(index).hexdigest()):
            return ()
        entries, sizes = self.entries[-note["num_shards"] :], self._sizes()
        lost = next((entry.name for entry in entries if sizes.get(entry.name) != entry.num_bytes), None)
        if lost is not None:
            msg = f"{self.shown}/{lost}: the index lists this shard, but it is gone or has another size."
            raise FolderIndexError(msg, folder=self.shown)
        return entries

    def check_names(self, shards: Iterable[PlannedShard]) -> None:
        """Raise PackError if a file that is not part of the data has the name of a new shard or list, and other bytes
        than the shard.
        """
        files = {f"{one.name}{last}": self.work / f"{one.digest}{end}" for one in shards for end, last in ENDS}
        for name in sorted((files.keys() if self.entries else files.keys() | LISTS) & self._others()):
            if name not in files or not is_same(files[name], self.path / name):
                raise PackError(f"{self.shown}: {name} exists already and is not part of its index. Move it away.")

    def _others(self) -> set[str]:
        """Return the names of all files in the folder; of a bucket, of the objects that the run did not write."""
        return {*self._sizes()}

    def column_sources(self) -> dict[str, Mapping[str, Any]]:
        """Return how each column of the folder is computed, by its name. SelectionError: The columns are damaged."""
        known = Columns(read_index(self.path))
        return {name: known.column(name).source for name in known}

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yield for each sample the name of its shard, and its key."""
        for entry in self.entries:
            path = str(self.path / entry.name)
            with contextlib.closing(LocalFile(path)) as file:
                yield from ((entry.name, sample["__key__"]) for sample in HeaderReader(file, shard=path))

    def known(self, name: str, digest: str) -> Filled | None:
        """Return the filled shard of a job; None if it must be filled. FolderIndexError: The entry is damaged."""
        return read_filled(self.work, name, digest)

    def keep(self, filled: Filled) -> Filled:
        """Keep a filled shard until the commit."""
        return filled

    def commit(
        self, shards: Sequence[Filled], lists: Mapping[str, bytes], columns: Mapping[str, Mapping[str, Any]], run: str
    ) -> None:
        """Make the shards part of the data.

        Args:
            shards: The new shards, in order.
            lists: Bytes of other files of the folder, such as `classes.json`, by name.
            columns: How each column is computed, by its name.
            run: Digest of the run, for `done`.

        Raises:
            SelectionError: The values of a column do not fit together.
            OSError: An operation of the disk fails.
        """
        for name, content in lists.items():
            publish_bytes(self.work / name, content, disk=self.disk)
        entries = (*self.entries, *(each.entry for each in shards))
        names = [*lists, *(self._write_columns(shards, entries, columns) if columns else ())]
        index = index_json(entries)
        done = {"run": run, "index": hashlib.sha256(index).hexdigest(), "num_shards": len(shards)}
        self._finish(shards, names, index, done)

    def _finish(self, shards: Sequence[Filled], names: Sequence[str], index: bytes, done: Mapping[str, object]) -> None:
        """Move the shards and the files `names` of the work folder to the data, `index.json` last."""
        kept = {*names, *(each.file_name for each in list_columns(self.path)[1].values())}  # loaders may map the latter
        old = sorted(name for name in self._sizes() if self.entries and is_column_file(name) and name not in kept)
        moves = {"shards": [(each.digest, asdict(each.entry)) for each in shards], "names": names, "remove": old}
        publish_note(self.work / COMMIT_NAME, {**moves, "index": index.decode(), "done": done}, disk=self.disk)
        self.roll_forward()

    def _write_columns(
        self, shards: Sequence[Filled], entries: Sequence[ShardEntry], columns: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Write the columns of all entries into the work folder. Return the names of their files."""
        parts: dict[str, list[Any]] = {name: [] for name in columns}
        if self.entries:
            known = Columns(read_index(self.path))
            for name in columns:
                column = known.column(name)
                column.check()
                parts[name].append(column.data if column.values is None else Texts(column.data, column.values))
        for shard in shards:
            for name, part in pack_columns(shard.columns, shard.entry.name).items():
                parts[name].append(part)
        made = {name: NewColumn(source, parts[name]) for name, source in columns.items()}
        before = read_index(self.path) if self.entries else None
        return write_columns(self.work, Index.of("", entries).digest, made, before=before, disk=self.disk)

    def roll_forward(self) -> None:
        """Complete a commit, if one was begun: move all files to their names, `index.json` last.

        Raises:
            FolderIndexError: `commit.json` or a shard is damaged.
            OSError: An operation of the disk fails.
        """
        commit = self.work / COMMIT_NAME
        note = parse_note(read_own(commit), commit)
        if note is None:
            return
        self.disk.fsync_folder(self.work)
        for digest, entry in note["shards"]:
            shard = self.path / entry["name"]
            self._move(self.work / f"{digest}.tar", shard)
            self._move(self.work / f"{digest}.idx", offsets_path(shard))
            if not is_whole(shard, offsets_path(shard), ShardEntry(**entry)):
                msg = f"{shard}: this shard or its .idx is damaged. Remove {self.work} and this shard, and pack again."
                raise FolderIndexError(msg, folder=self.shown)
        for name in note["names"]:
            self._move(self.work / name, self.path / name)
        publish_note(self.path / RUN_NAME, note["done"], disk=self.disk)
        self.disk.fsync_folder(self.path)
        publish_bytes(self.path / INDEX_NAME, note["index"].encode(), disk=self.disk)
        for name in note["remove"]:
            self.disk.remove(self.path / name)
        self.disk.fsync_folder(self.path)
        self.clean()

    def _move(self, source: Path, target: Path) -> None:
        """Give a file of the run its name in the folder. Where the disk has hard links, it keeps its first name until
        `clean`: a power loss may undo one half of a rename between two folders.
        """
        if source.suffix not in {".tar", ".idx", ".npy"}:
            publish_bytes(target, source.read_bytes(), disk=self.disk)  # may replace a file of the old data
        elif (source.exists() or not target.exists()) and not is_same(source, target):
            self.disk.link(source, target)  # OSError if another file has the name

    def clean(self) -> None:
        """Remove all files that wdskit made in the work folder."""
        self.disk.remove(self.work / COMMIT_NAME)
        self.disk.fsync_folder(self.work)  # it must be gone for certain before the files that it names
        for path in sorted(self.work.iterdir()):
            if _OWN.fullmatch(path.name):
                self.disk.remove(path)


LISTS = frozenset({CLASSES_NAME, COLUMNS_NAME, REJECTED_NAME})
"""Names of the files that belong to `index.json`."""

ENDS = ((".tar", ""), (".idx", ".idx"))
"""Ends of the names of a job's files, and of the shard's files."""


def is_same(source: Path, target: Path) -> bool:
    """Return whether both files exist and have the same bytes. One file under two names is not read."""
    both = source.exists() and target.exists()
    return both and (source.samefile(target) or filecmp.cmp(source, target, shallow=False))


@contextlib.contextmanager
def look_at(path: Path) -> Iterator[Folder]:
    """Yield a folder that is not changed. The files of the run are in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="wdskit-") as work:
        yield Folder(path, Path(work), DISK)


@contextlib.contextmanager
def open_folder(path: Path, *, is_part: bool, disk: Disk) -> Iterator[Folder]:
    """Lock a folder for a run, complete a commit that was killed, and yield the folder. The parts of a run share it.

    Raises:
        FolderIndexError: Another process writes in the folder, its index is damaged, or `.wdskit` is not a folder that
            wdskit made.
        StorageError: The folder cannot be locked.
        OSError: The folder cannot be made or written.
    """
    work = path / WORK_NAME
    check_work(work)
    make_folders(path, disk=disk)
    is_shared = is_part and not (work / COMMIT_NAME).exists()
    with lock_folder(path, shared=is_shared):
        make_folders(work, disk=disk)
        folder = Folder(path, work, disk)
        if not is_shared:
            wait_for_workers(work)
            remove_temp_files(path, disk=disk)
            remove_temp_files(work, disk=disk)
            folder.roll_forward()
            folder = Folder(path, work, disk)
        try:
            yield folder
        finally:
            disk.remove_folder(work)  # if no shard waits for a commit


def check_work(work: Path) -> None:
    """Raise FolderIndexError if `work` exists and is not a folder that wdskit made."""
    try:
        if not stat.S_ISDIR(work.lstat().st_mode):
            raise FolderIndexError(describe_foreign(work, "is not a folder"), folder=str(work.parent))
        other = next((path for path in sorted(work.iterdir()) if not _OWN.fullmatch(path.name)), None)
    except FileNotFoundError:
        return
    if other is not None:
        raise FolderIndexError(describe_foreign(other, "is in the work folder of wdskit"), folder=str(work.parent))
