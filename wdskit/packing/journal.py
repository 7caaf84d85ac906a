"""Publish the filled shards of a run with a journal that can be replayed.

The staging folder holds all new files: shards, their offsets, lists, and the index. The journal names the files to
remove and the files to add. The run is decided once the journal is on the device. After a kill or a full disk, the next
process that writes in the folder replays the journal first. Each step can be repeated.

1. Remove the replaced index, then the other replaced files. An addition removes nothing.
2. Link the new shards into the folder, then the other new files. The files keep their names in the staging folder.
3. Write `.wdskit.last-run`. The file names the run that made the new index.
4. Write `index.bin`, then `index.json`.
5. Remove the staging folder. The journal is removed last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wdskit.dataset.binary import BINARY_NAME, IDENTITIES_NAME, Verified, build_binary
from wdskit.dataset.index import (
    INDEX_NAME,
    RUN_FOLDER,
    FolderIndex,
    ShardEntry,
    index_json,
    read_index,
    write_index,
)
from wdskit.dataset.samples import HeaderReader
from wdskit.dataset.selection import list_selections, selection_path
from wdskit.dataset.unfinished import DESCRIPTION_NAME, JOURNAL_NAME, run_folders
from wdskit.errors import FolderIndexError, PackError
from wdskit.files import Disk, foreign, make_folders, publish_bytes, read_own, remove_temp_files, temp_path
from wdskit.packing.staging import (
    LIST_NAMES,
    RunDescription,
    Staging,
    check_runs,
    first_few,
    is_own_name,
    is_there,
    read_begun,
    remove_run,
    shard_files,
)
from wdskit.packing.upload import LAST_RUN_NAME, WAYS
from wdskit.shards.export import remove_exports
from wdskit.storage.identity import FileIdentity
from wdskit.storage.urls import LocalFile


@dataclass(frozen=True)
class LastRun:
    """The run that made a folder's index.

    Attributes:
        folder: The folder of the index.
        run: Description of the run, without its `shards`.
        entries: Index entries of the shards that the run added.
        etags: ETags of the uploaded files, by name; empty for a local folder.
    """

    folder: Path
    run: RunDescription
    entries: tuple[ShardEntry, ...]
    etags: Mapping[str, Sequence[str]]

    def first_key(self) -> str:
        """Return the key of the first sample that the run added."""
        path = str(self.folder / self.entries[0].name)
        with contextlib.closing(LocalFile(path)) as file:
            return str(next(iter(HeaderReader(file, shard=path)))["__key__"])

    def check_there(self) -> None:
        """Compare the shards of the run with the folder. The bytes of changed files are read again.

        Raises:
            PackError: A shard is missing.
            ShardError: A shard was damaged or replaced.
        """
        lost = [entry.name for entry in self.entries if not is_there(self.folder, entry)]
        if lost:
            raise indexed_already(
                self.folder, [f"{name} or its .idx is gone, or has a different size." for name in lost]
            )
        verified = Verified()
        for entry in self.entries:
            with contextlib.closing(LocalFile(str(self.folder / entry.name))) as file:
                verified.check(file, entry.identity, entry.sha256)


def publish_run(
    staging: Staging,
    entries: Sequence[ShardEntry],
    *,
    lists: Mapping[str, bytes],
    before: FolderIndex | None,
    replaces: bool,
) -> None:
    """Move the filled shards into the folder and write its index. The caller holds the folder's lock.

    The shards of a bucket are uploaded already. The index is written last.

    Args:
        staging: The staging folder with the shards.
        entries: Index entries of the shards, in order.
        lists: Bytes of the files that describe all shards, by file name.
        before: The folder's existing index; None without an index.
        replaces: True removes the shards of `before`. False keeps them.

    Raises:
        PackError: A shard or another file of the run is missing.
        FolderIndexError: The folder's existing index cannot be read.
        StorageError: The store of a bucket cannot be reached or refuses.
    """
    folder, path, disk = staging.folder, staging.path, staging.disk
    kept = before.entries if before is not None and not replaces else ()
    all_ = (*kept, *entries)
    for name, data in lists.items():
        publish_bytes(path / name, data, disk=disk)
    come = [name for entry in entries for name in shard_files(entry.name)] + [*lists]
    data = index_json(all_)
    index = FolderIndex(str(folder), all_, hashlib.sha256(data).hexdigest())
    last = {"run": _description(staging.run), "num_shards": len(entries), "index": index.sha256}
    publish_bytes(path / INDEX_NAME, data, disk=disk)
    if staging.upload is not None:
        staging.finish_uploads()
        last["etags"] = {name: sorted(file.etags) for name, file in read_begun(path).items() if file.etags}
        publish_bytes(path / LAST_RUN_NAME, json.dumps(last).encode() + b"\n", disk=disk)
        publish_bytes(path / BINARY_NAME, build_binary(all_, bytes.fromhex(index.sha256)), disk=disk)
        staging.publish([*lists, LAST_RUN_NAME, BINARY_NAME, INDEX_NAME])
        remove_run(path, disk)
        remove_locks(folder, disk)
        return
    new = {*come}
    go = [name for name in _files_of(before) if name not in new] if before is not None and replaces else []
    journal = {"go": go, "come": come, "replaces": replaces, "last_run": last}
    publish_bytes(path / JOURNAL_NAME, json.dumps(journal, indent=0).encode() + b"\n", disk=disk)
    replay(folder, path, disk, index=index, before=before)
    if replaces:
        remove_exports(folder, disk)


def _files_of(index: FolderIndex) -> Iterable[str]:
    """Return the file names of a data set without `index.json`; `index.bin` is the first."""
    folder = Path(index.folder)
    yield from (BINARY_NAME, IDENTITIES_NAME, LAST_RUN_NAME)
    for entry in index.entries:
        yield from shard_files(entry.name)
    yield from (selection_path(folder, name).name for name in list_selections(folder))
    yield from LIST_NAMES


def replay(
    folder: Path, path: Path, disk: Disk, *, index: FolderIndex | None = None, before: FolderIndex | None = None
) -> None:
    """Perform the steps of a journal that are not done yet.

    Args:
        folder: The folder to publish in.
        path: The staging folder with the journal.
        disk: Performs the file operations; tests replace it.
        index: The folder's new index; None reads it from the staging folder.
        before: The folder's existing index; None reads it from the folder.

    Raises:
        PackError: A file of the run is missing, or the journal names a file that is not part of a data set.
    """
    if (path / INDEX_NAME).exists():
        disk.fsync_folder(path)  # the process that wrote the journal may have been killed before this fsync
        journal = _read_journal(path)
        index = index or read_index(path)
        before = before or (read_index(folder) if (folder / INDEX_NAME).exists() else None)
        if journal["replaces"]:
            _remove(folder, [INDEX_NAME], disk)  # removed first: an index never describes shards of another run
            _remove(folder, journal["go"], disk)
        shards = {entry.name for entry in index.entries}
        _link_all(folder, path, [name for name in journal["come"] if name in shards], disk)
        _link_all(folder, path, [name for name in journal["come"] if name not in shards], disk)
        publish_bytes(folder / LAST_RUN_NAME, json.dumps(journal["last_run"]).encode() + b"\n", disk=disk)
        known = before.by_name if before is not None else {}
        entries = [replace(entry, identity=_identity(known.get(entry.name), entry)) for entry in index.entries]
        write_index(folder, entries, data=read_own(path / INDEX_NAME), disk=disk)
        disk.remove(path / INDEX_NAME)
        disk.fsync_folder(path)  # a journal that came back after a later run would undo that run
    else:
        disk.fsync_folder(folder)  # makes the name of the index durable, even if the run was killed before
    remove_run(path, disk)
    remove_locks(folder, disk)


def _read_journal(path: Path) -> dict[str, Any]:
    """Return the journal of a run whose names are all names of files of a data set.

    Raises:
        PackError: The file is damaged, or wdskit did not write it.
    """
    file = path / JOURNAL_NAME
    try:
        journal = json.loads(read_own(file) or b"")
        names = [*journal["go"], *journal["come"]]
        is_right = isinstance(journal["replaces"], bool) and isinstance(journal["last_run"], dict)
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        raise PackError(foreign(file, "is not a journal of a run")) from err
    for name in names:
        if not is_own_name(name):
            raise PackError(foreign(file, f"names {name!r:.200}, which is not a file of this folder"))
    if not is_right:
        raise PackError(foreign(file, "is not a journal of a run"))
    return dict(journal)


def _identity(known: ShardEntry | None, entry: ShardEntry) -> FileIdentity | None:
    """Return the file identity in the old index if the shard is kept; None for a new shard."""
    return known.identity if known is not None and known == entry else None


def _link_all(folder: Path, path: Path, names: Sequence[str], disk: Disk) -> None:
    """Link the new files into the folder. The files also keep their names in the staging folder: a power loss can lose
    both names of a file that is renamed from one folder to another.
    """
    parents = {folder: None}
    for name in names:
        source, target = path / name, folder / name
        if target.parent not in parents:
            make_folders(target.parent, disk=disk)
            parents[target.parent] = None
        temp = temp_path(target)
        if not source.exists():  # a disk without links
            if temp.exists():
                disk.rename(temp, target)
            elif not target.exists():
                msg = f"{source}: this file was filled and is gone, so the run cannot be finished."
                raise PackError(f"{msg}\n  Put it back, or remove {path} and pack again.")
        elif not target.exists():
            disk.link(source, target)
        elif not target.samefile(source):
            # A link cannot replace a file, and the name must always have a file. A rename between two names of one
            # file does nothing, so the temporary link of a killed run is removed first.
            disk.remove(temp)
            disk.link(source, temp)
            disk.rename(temp, target)
    for parent in parents:
        disk.fsync_folder(parent)


def _remove(folder: Path, names: Iterable[str], disk: Disk) -> None:
    """Remove files, then fsync their folders."""
    paths = [folder / name for name in names if (folder / name).exists()]
    for path in paths:
        disk.remove(path)
    for parent in {folder, *(path.parent for path in paths)}:
        disk.fsync_folder(parent)


def remove_locks(folder: Path, disk: Disk) -> None:
    """Remove `.wdskit-run` and the locks of parts if no run is left in it. The caller holds the folder's lock."""
    root = folder / RUN_FOLDER
    for path in run_folders(folder):
        if not (path / DESCRIPTION_NAME).exists() and not (path / JOURNAL_NAME).exists():
            remove_run(path, disk)  # the run was killed before its first shard, or during its removal
    if not root.is_dir() or run_folders(folder):
        return
    for file in sorted(root.iterdir()):
        disk.remove(file)
    disk.remove_folder(root)


def remove_finished(folder: Path, last: LastRun | None, disk: Disk) -> None:
    """Remove the staging folder of the run that made the index. A power loss can bring that folder back."""
    if last is not None and folder / RUN_FOLDER / last.run.digest in run_folders(folder):
        remove_run(folder / RUN_FOLDER / last.run.digest, disk)


def finish_publishing(folder: Path, disk: Disk) -> None:
    """Replay the journal of a run that was stopped while it published. Remove temporary files in the folder.

    The caller holds the folder's lock.

    Raises:
        PackError: Raised by `check_runs` or `replay`.
    """
    check_runs(folder)
    for path in run_folders(folder):
        if (path / JOURNAL_NAME).exists():
            replay(folder, path, disk)
    remove_temp_files(folder, disk=disk)


def is_publishing(folder: Path) -> bool:
    """Return True if the folder has a journal to replay."""
    return any((path / JOURNAL_NAME).exists() for path in run_folders(folder))


def find_last_run(folder: Path, index: FolderIndex | None = None) -> LastRun | None:
    """Return the run that made the folder's index; None if the run is not known, for example after `wdskit index`.

    Args:
        folder: The folder of the index.
        index: The folder's index; None reads it.
    """
    if index is None and not (folder / INDEX_NAME).exists():
        return None
    try:
        document = json.loads(read_own(folder / LAST_RUN_NAME) or b"")
        index = index or read_index(folder)
        if document["index"] != index.sha256:
            return None
        run = RunDescription.from_json(json.dumps(document["run"]).encode(), folder / LAST_RUN_NAME)
        count = int(document["num_shards"])
        etags = {str(name): [*map(str, known)] for name, known in document.get("etags", {}).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, PackError, FolderIndexError):
        return None
    entries = index.entries
    return LastRun(folder, run, entries[len(entries) - count :], etags) if 0 < count <= len(entries) else None


def _description(run: RunDescription) -> dict[str, object]:
    """Return the JSON description of a run without its shard names: the index has the names."""
    kept: dict[str, object] = json.loads(replace(run, shards=None, parts=0).to_json())
    return kept


def in_the_way(path: Path) -> PackError:
    """Return the error for an existing file that has a needed name and is not in the folder's index."""
    msg = f"{path}: this file exists already and is in the way. Nothing was overwritten."
    what = (
        f"run `wdskit index {path.parent}`, if these are whole shards" if path.name.endswith(".tar") else "move it away"
    )
    return PackError(f"{msg}\n  Pack into another folder, or {what}.")


def indexed_already(folder: Path, changes: Sequence[str] = ()) -> PackError:
    """Return the error for a folder that is packed already. `changes` are the known differences from its last run."""
    msg = f"{folder}: this folder is packed and indexed already"
    msg += "." if not changes else f", by a different run:\n  {first_few(changes)}"
    return PackError(f"{msg}\n  {WAYS}")
