"""The shards that a path names, where what is missing or not listed is a finding and no error."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wdskit.dataset.index import FolderIndex, ShardEntry
from wdskit.dataset.offsets import offsets_path
from wdskit.dataset.patterns import expand_patterns, may_be_shard
from wdskit.dataset.unfinished import find_unfinished
from wdskit.errors import StorageError
from wdskit.shards.findings import Finding
from wdskit.shards.freshness import look_at_index
from wdskit.storage.urls import is_local, local_path

_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class _Folder:
    """A folder with shards: its index, None where it has none that reads, and the names that stand in it."""

    index: FolderIndex | None
    names: frozenset[str]


@dataclass
class Targets:
    """What was found.

    Attributes:
        shards: Path and line in the index of each shard that is there, in the order of the index, then by name.
        findings: What is wrong with the indexes, and with what they list.
        indexed: Folders with an index, whether it reads or not.
        indexes: Those that read.
    """

    shards: dict[str, ShardEntry | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    indexed: set[Path] = field(default_factory=set)
    indexes: list[FolderIndex] = field(default_factory=list)

    def has_offsets(self, shard: str) -> bool:
        """Whether an .idx belongs beside a shard: there is an index, or the .idx itself."""
        return Path(shard).parent in self.indexed or offsets_path(shard).exists()

    def beside(self, shard: str, entry: ShardEntry | None) -> tuple[str, ...]:
        """What is kept beside a shard for other readers, by the index that lists it."""
        if entry is None:
            return ()
        return next(one.also.kinds for one in self.indexes if Path(one.folder) == Path(shard).parent)


def find_targets(path: str) -> Targets:
    """Find the shards and read the indexes of their folders.

    Args:
        path: A shard, folder, glob or brace pattern; several joined by `::`.

    Raises:
        StorageError: There is nothing at all, it is not local, or a folder cannot be listed.
    """
    targets = Targets()
    folders: dict[Path, _Folder] = {}
    spelled: dict[str, Path] = {}  # two spellings of one folder are one
    for pattern in expand_patterns(path):
        if not is_local(pattern):
            msg = f"{pattern}: only local shards can be looked at. Run this where the files are."
            raise StorageError(msg, url=pattern)
        for place, name in _places(Path(local_path(pattern))):
            folder = spelled.setdefault(os.path.realpath(place), place)
            if folder not in folders:
                folders[folder] = _open_folder(folder, targets)
            for shard in _match(folders[folder], name):
                _add(targets, folders[folder], folder, shard)
    if not targets.shards and not targets.indexed:
        raise StorageError(f"{path}: there is no such shard, or no shard (*.tar) in this folder.", url=path)
    return targets


def _places(path: Path) -> Iterator[tuple[Path, str]]:
    """Folder and name of the shards that a path or a glob stands for."""
    if path.is_dir():
        yield path, "*.tar"
    elif _GLOB.search(str(path.parent)) and not path.parent.exists():
        parents = sorted(glob.glob(str(path.parent)))  # noqa: PTH207 (Path.glob has no absolute patterns)
        yield from ((Path(one), path.name) for one in parents if Path(one).is_dir())
    elif path.parent.is_dir():
        yield path.parent, path.name


def _open_folder(folder: Path, targets: Targets) -> _Folder:
    try:
        names = frozenset(one.name for one in folder.iterdir())
    except OSError as err:
        raise StorageError(f"{folder}: cannot be read: {err.strerror}.", url=str(folder)) from err
    index, findings = look_at_index(folder)
    targets.findings += findings
    begun = find_unfinished(folder)
    if begun is not None:
        targets.findings.append(Finding("unfinished", str(folder), f"{begun.problem}. {begun.remedy}"))
    if index is not None:
        targets.indexes.append(index)
    if index is not None or findings:
        targets.indexed.add(folder)
    return _Folder(index, names)


def _match(folder: _Folder, name: str) -> list[str]:
    """The names that a name or a glob stands for: those of the index in its order, then the others."""
    if name in folder.names or not _GLOB.search(name):
        return [name]
    listed = [one.name for one in folder.index.entries] if folder.index else []
    stray = sorted(
        one
        for one in folder.names.difference(listed)
        if one.startswith(".") <= name.startswith(".") and may_be_shard(one, name)
    )
    return [one for one in (*listed, *stray) if fnmatch.fnmatchcase(one, name)]


def _add(targets: Targets, folder: _Folder, path: Path, name: str) -> None:
    """Note one shard, and what is wrong with its place in the index."""
    shard = str(path / name)
    entry = folder.index.by_name.get(name) if folder.index else None
    if name not in folder.names:
        problem = "the index lists this shard, and there is no such file" if entry else "there is no such shard"
        targets.findings.append(Finding("missing", shard, problem))
        return
    if shard in targets.shards:
        return
    targets.shards[shard] = entry
    if folder.index and entry is None:
        targets.findings.append(Finding("unlisted", shard, "the index does not list this shard"))
