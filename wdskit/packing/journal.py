"""How a run that has filled all its shards makes them the folder's: by a journal that can be replayed.

The staging folder holds everything that is to come: shards, what is beside them, lists, and the index. The journal
names the files that go and those that come. Once it is on the device the run is decided: whoever writes in the folder
next, after a kill or a full disk, replays it first. Each step may be done twice.

1. The index of what is replaced goes, then its other files. An addition removes nothing.
2. The new shards, then what is beside them, get their names in the folder, and keep those in the staging folder.
3. `.wdskit.last-run` says which run made the index that comes next.
4. `index.bin`, `index.json`.
5. The staging folder goes, the journal last.
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
        folder: Where.
        run: What it packed; its `shards` are left out.
        entries: The shards that it added to the index.
        etags: ETags of the files that it uploaded, by name; empty for a local folder.
    """

    folder: Path
    run: RunDescription
    entries: tuple[ShardEntry, ...]
    etags: Mapping[str, Sequence[str]]

    def first_key(self) -> str:
        """The key of the first sample that it added."""
        path = str(self.folder / self.entries[0].name)
        with contextlib.closing(LocalFile(path)) as file:
            return str(next(iter(HeaderReader(file, shard=path)))["__key__"])

    def check_there(self) -> None:
        """Compare its shards with the folder: the bytes of those that were written since.

        Raises:
            PackError: One is gone.
            ShardError: One was damaged or replaced.
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
    """Make the filled shards the folder's, with an index of them all. The folder's lock is held. Those of a bucket are
    there already, and the index comes last.

    Args:
        staging: Where they are.
        entries: Their lines of the index, in order.
        lists: Files of all of them, by name.
        before: The folder's index; None where there is none.
        replaces: The shards of `before` go. Otherwise they stay.

    Raises:
        PackError, FolderIndexError: Something else stands in the way.
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
    """All files of a data set, the index left out, its twin first."""
    folder = Path(index.folder)
    yield from (BINARY_NAME, IDENTITIES_NAME, LAST_RUN_NAME)
    for entry in index.entries:
        yield from shard_files(entry.name)
    yield from (selection_path(folder, name).name for name in list_selections(folder))
    yield from LIST_NAMES


def replay(
    folder: Path, path: Path, disk: Disk, *, index: FolderIndex | None = None, before: FolderIndex | None = None
) -> None:
    """Do what a journal says, or what is left of it. `index` is the new index of the folder, and `before` the one that
    it has, if they are known.

    Raises:
        PackError: A file of the run is gone, or the journal names what is no file of the data set.
    """
    if (path / INDEX_NAME).exists():
        disk.fsync_folder(path)  # for good: whoever wrote the journal may have been killed before it came to this
        journal = _read_journal(path)
        index = index or read_index(path)
        before = before or (read_index(folder) if (folder / INDEX_NAME).exists() else None)
        if journal["replaces"]:
            _remove(folder, [INDEX_NAME], disk)  # first, so that it never stands beside shards of another run
            _remove(folder, journal["go"], disk)
        shards = {entry.name for entry in index.entries}
        _link_all(folder, path, [name for name in journal["come"] if name in shards], disk)
        _link_all(folder, path, [name for name in journal["come"] if name not in shards], disk)
        publish_bytes(folder / LAST_RUN_NAME, json.dumps(journal["last_run"]).encode() + b"\n", disk=disk)
        known = before.by_name if before is not None else {}
        entries = [replace(entry, identity=_identity(known.get(entry.name), entry)) for entry in index.entries]
        write_index(folder, entries, data=read_own(path / INDEX_NAME), disk=disk)
        disk.remove(path / INDEX_NAME)
        disk.fsync_folder(path)  # for good: a journal that came back after a later run would undo that
    else:
        disk.fsync_folder(folder)  # the index has its name for good now, wherever the run was killed
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
    """The file that an entry of a shard that stays was made of; None for a new shard."""
    return known.identity if known is not None and known == entry else None


def _link_all(folder: Path, path: Path, names: Sequence[str], disk: Disk) -> None:
    """Give the new files their names in the folder. They keep the others until the staging folder goes: a power
    loss may lose both names of a file that is renamed from one folder to another.
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
            # A link cannot replace a file, and a name is to be never without one. A rename between two names of one
            # file does nothing, so what a run that was killed has linked goes first.
            disk.remove(temp)
            disk.link(source, temp)
            disk.rename(temp, target)
    for parent in parents:
        disk.fsync_folder(parent)


def _remove(folder: Path, names: Iterable[str], disk: Disk) -> None:
    """Remove files for good."""
    paths = [folder / name for name in names if (folder / name).exists()]
    for path in paths:
        disk.remove(path)
    for parent in {folder, *(path.parent for path in paths)}:
        disk.fsync_folder(parent)


def remove_locks(folder: Path, disk: Disk) -> None:
    """Remove the folder of staging folders, with the locks of parts, where no run is left in it. The folder's lock is
    held.
    """
    root = folder / RUN_FOLDER
    for path in run_folders(folder):
        if not (path / DESCRIPTION_NAME).exists() and not (path / JOURNAL_NAME).exists():
            remove_run(path, disk)  # killed before it began, or in the middle of its removal
    if not root.is_dir() or run_folders(folder):
        return
    for file in sorted(root.iterdir()):
        disk.remove(file)
    disk.remove_folder(root)


def remove_finished(folder: Path, last: LastRun | None, disk: Disk) -> None:
    """Remove what a power loss has brought back of the staging folder of the run that made the folder's index."""
    if last is not None and folder / RUN_FOLDER / last.run.digest in run_folders(folder):
        remove_run(folder / RUN_FOLDER / last.run.digest, disk)


def finish_publishing(folder: Path, disk: Disk) -> None:
    """Replay the journal of a run that was stopped while it published, if there is one, and remove the temporary files
    that it left in the folder. The folder's lock is held.

    Raises:
        PackError: As `check_runs` and `replay`.
    """
    check_runs(folder)
    for path in run_folders(folder):
        if (path / JOURNAL_NAME).exists():
            replay(folder, path, disk)
    remove_temp_files(folder, disk=disk)


def is_publishing(folder: Path) -> bool:
    """Whether there is a journal to replay."""
    return any((path / JOURNAL_NAME).exists() for path in run_folders(folder))


def find_last_run(folder: Path, index: FolderIndex | None = None) -> LastRun | None:
    """The run that made the folder's index; None if it is not known, as in a folder that `index` has indexed.

    Args:
        folder: Where.
        index: Its index, if it was read already.
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
    """What is kept of a run: not the names of its shards, which the index has."""
    kept: dict[str, object] = json.loads(replace(run, shards=None, parts=0).to_json())
    return kept


def in_the_way(path: Path) -> PackError:
    """The error for a file in the way, of which the folder's index does not know."""
    msg = f"{path}: this file exists already and is in the way. Nothing was overwritten."
    what = (
        f"run `wdskit index {path.parent}`, if these are whole shards" if path.name.endswith(".tar") else "move it away"
    )
    return PackError(f"{msg}\n  Pack into another folder, or {what}.")


def indexed_already(folder: Path, changes: Sequence[str] = ()) -> PackError:
    """The error for a folder that is packed. `changes` is what its last run did otherwise, where that is known."""
    msg = f"{folder}: this folder is packed and indexed already"
    msg += "." if not changes else f", by a different run:\n  {first_few(changes)}"
    return PackError(f"{msg}\n  {WAYS}")
