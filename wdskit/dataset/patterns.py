"""From what a user writes for shards to the list of their URLs.

`shards` is a list, a glob, a brace pattern or a folder, several joined by `::`. Where the folder of a pattern has an
index, the pattern selects from it, and files that the index does not know are an error instead of a surprise.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn
from urllib.parse import unquote

from wdskit.dataset.braces import expand_braces, expand_patterns, split_parts
from wdskit.dataset.index import RUN_FOLDER, FolderIndex, ShardEntry, has_index, is_label, join_url, read_index
from wdskit.errors import FolderIndexError, StorageError
from wdskit.storage.urls import is_local, local_path

_MAX_NEAR = 10_000  # names of a folder among which the nearest is looked for
_GLOB = re.compile(r"[*?\[]")
_URL_GLOB = re.compile(r"[*\[]")


@dataclass(frozen=True)
class ShardList:
    """Shards in the order they were named.

    Attributes:
        urls: Path or URL of each.
        parts: For each, the number of the `::`-part or list item that named it.
        entries: For each, its line in its folder's index, None where the folder has none.
    """

    urls: tuple[str, ...]
    parts: tuple[int, ...]
    entries: tuple[ShardEntry | None, ...]

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return self.parts[-1] + 1

    @property
    def folders(self) -> dict[str, bool]:
        """The folders of the shards, and whether their samples may have labels, as far as their indexes say."""
        folders: dict[str, bool] = {}
        for url, entry in zip(self.urls, self.entries, strict=True):
            folder = split_url(url)[0]
            folders[folder] = folders.get(folder, False) or entry is None or any(map(is_label, entry.fields))
        return folders


@dataclass(frozen=True)
class Target:
    """The shards that a path, folder or pattern names.

    Attributes:
        path: As the user wrote it.
        kind: What it is.
        urls: Path or URL of each shard, in order.
        entries: Their lines in the folder's index, compared with the files; None without one, and for a single shard.
    """

    path: str
    kind: Literal["shard", "folder", "pattern"]
    urls: tuple[str, ...]
    entries: tuple[ShardEntry, ...] | None


Fault = Literal["missing", "unlisted"]


class _Folders:
    """The indexes of the folders met so far; None for a folder without one."""

    def __init__(self) -> None:
        self._known: dict[str, FolderIndex | None] = {}

    def index_of(self, folder: str) -> FolderIndex | None:
        """Of a local folder that has one."""
        if folder not in self._known:
            self._known[folder] = read_index(folder) if is_local(folder) and has_index(folder) else None
        return self._known[folder]

    def needed_index(self, folder: str) -> FolderIndex:
        """Of a folder that must have one, local or remote."""
        index = self._known[folder] = self._known.get(folder) or read_index(folder)
        return index


def list_shards(shards: str | Sequence[str], *, need_index: bool = False) -> ShardList:
    """Expand what a user wrote for shards.

    They come in the order in which they are written, and twice where they are named twice. A glob and a folder give
    theirs in the order of the folder's index; without one sorted by name as text, `s-10.tar` before `s-2.tar`. A local
    file that exists is itself, whatever its name looks like. In a URL `?` begins the query, so globs there are `*` and
    `[...]`.

    Args:
        shards: A path, URL, glob, brace pattern (`a-{000..127}.tar`) or folder; several joined by `::`, or a list of
            such.
        need_index: Whether every shard must stand in its folder's index; remote indexes are fetched then.

    Raises:
        StorageError: Nothing matches, a local shard is missing, or a scheme is not supported.
        FolderIndexError: An index is needed and missing, or does not match the shards on disk.
    """
    items = [shards] if isinstance(shards, str) else list(shards)
    folders = _Folders()
    urls: list[str] = []
    parts: list[int] = []
    entries: list[ShardEntry | None] = []
    number = 0
    for item in items:
        for part in split_parts(item):
            found = [url for pattern in expand_braces(part) for url in _match(pattern, folders)]
            urls += found
            parts += [number] * len(found)
            entries += [_entry(url, folders, need_index=need_index) for url in found]
            number += 1
    if not urls:
        raise StorageError("no shards: the list is empty. Name a path, a glob, a brace pattern or a folder.")
    return ShardList(tuple(urls), tuple(parts), tuple(entries))


def find_shards(path: str) -> Target:
    """Find out what a path is, and the shards it names.

    Args:
        path: A shard, a folder, or a pattern as `list_shards` takes it; local or http(s). A file that
            exists is itself, whatever its name looks like and whatever the folder's index says.

    Raises:
        StorageError: There is nothing.
        FolderIndexError: The folder's index does not match its files.
    """
    local = is_local(path)
    is_folder = path.endswith("/") or (local and Path(local_path(path)).is_dir())
    if local and not is_folder and Path(local_path(path)).exists():
        return Target(path, "shard", (path,), None)
    found = list_shards(path)
    if found.urls == (path,):
        return Target(path, "shard", found.urls, None)
    kind: Literal["folder", "pattern"] = "folder" if is_folder else "pattern"
    entries = tuple(entry for entry in found.entries if entry is not None)
    if len(entries) < len(found.urls):
        return Target(path, kind, found.urls, None)
    for folder in sorted({Path(local_path(url)).parent for url in found.urls if is_local(url)}):
        read_index(folder).check_files()
    return Target(path, kind, found.urls, entries)


def collect_shards(
    path: str, *, open_index: Callable[[Path], FolderIndex | None], on_fault: Callable[[Fault, str, str], None]
) -> dict[str, ShardEntry | None]:
    """Find local shards where what is missing or not listed is no error.

    Args:
        path: A shard, folder, glob or brace pattern; several joined by `::`.
        open_index: Gives the index of a folder, None where there is none that reads. Called once a folder.
        on_fault: Called with `missing` or `unlisted`, the path of the shard, and what is wrong.

    Returns:
        Path and line in the index of each shard that is there, in the order of the index, then by name.

    Raises:
        StorageError: One is not local, or a folder cannot be listed.
    """
    shards: dict[str, ShardEntry | None] = {}
    known: dict[str, tuple[Path, FolderIndex | None, frozenset[str]]] = {}  # two spellings of one folder are one
    for place in (place for pattern in expand_patterns(path) for place in _local_places(pattern)):
        real = os.path.realpath(place.folder)
        if real not in known:
            folder = Path(place.folder)
            try:
                names = frozenset(os.listdir(folder))
            except OSError as err:
                raise StorageError(f"{folder}: cannot be read: {err.strerror}.", url=str(folder)) from err
            known[real] = folder, open_index(folder), names
        folder, index, names = known[real]
        for name in _names_at(place, index, names):
            shard = str(folder / name)
            entry = index.by_name.get(name) if index else None
            if name not in names:
                problem = "the index lists this shard, and there is no such file" if entry else "there is no such shard"
                on_fault("missing", shard, problem)
            elif shard not in shards:
                shards[shard] = entry
                if index and entry is None:
                    on_fault("unlisted", shard, "the index does not list this shard")
    return shards


def _local_places(pattern: str) -> list[Place]:
    if not is_local(pattern):
        raise StorageError(f"{pattern}: only local shards can be looked at. Run this where the files are.", url=pattern)
    return [place for place in find_places(pattern) if os.path.isdir(place.folder or ".")]


def _names_at(place: Place, index: FolderIndex | None, names: frozenset[str]) -> list[str]:
    """The names that a place stands for: those of the index in its order, then the others."""
    if not place.is_glob:
        return [place.name]
    listed = [one.name for one in index.entries] if index else []
    stray = sorted(
        one
        for one in names.difference(listed)
        if one.startswith(".") <= place.name.startswith(".") and may_be_shard(one, place.name)
    )
    return [one for one in (*listed, *stray) if fnmatch.fnmatchcase(one, place.name)]


def has_wildcards(path: str) -> bool:
    """Whether a local path is a glob."""
    return _GLOB.search(path) is not None


class Place(NamedTuple):
    """Where shards of one local folder are looked for: those with this name, or that this glob matches."""

    folder: str
    name: str
    is_glob: bool


def find_places(pattern: str) -> list[Place]:
    """The places that one local path, glob or folder stands for; none where no folder matches.

    Raises:
        StorageError: The folder of a glob is not there.
    """
    path = local_path(pattern)
    if os.path.isdir(path):
        return [Place(path.rstrip("/") or "/", "*.tar", is_glob=True)]
    parent, name = os.path.split(path)
    if not has_wildcards(path) or os.path.lexists(path):
        return [Place(parent, name, is_glob=False)]
    is_plain = os.path.lexists(parent) or not has_wildcards(parent)
    if is_plain and not os.path.isdir(parent or "."):
        raise no_such(pattern, parent)
    parents = [parent] if is_plain else sorted(filter(os.path.isdir, glob.glob(parent)))
    return [Place(folder, name or "*.tar", is_glob=True) for folder in parents]


def _match(pattern: str, folders: _Folders) -> list[str]:
    """The shards that one expanded pattern names."""
    if not is_local(pattern):
        return _match_remote(pattern, folders) or nothing_matches(pattern)
    found: list[str] = []
    for folder, name, is_glob in find_places(pattern):
        if is_glob:
            found += _match_folder(folder, name, folders)
        elif os.path.exists(local_path(pattern)):
            found.append(local_path(pattern))
        else:
            raise no_such(pattern, local_path(pattern))
    return found or nothing_matches(pattern)


def _match_folder(folder: str, name: str, folders: _Folders) -> list[str]:
    """The shards of a local folder whose names match a glob, by its index where it has one."""
    on_disk = {os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(folder), name))}
    index = folders.index_of(folder)
    if index is None:
        return [join_url(folder, each) for each in sorted(on_disk) if may_be_shard(each, name)]
    listed = [entry for entry in index.entries if fnmatch.fnmatchcase(entry.name, name)]
    names = {entry.name for entry in listed}
    stray = sorted(path for path in on_disk - names if path.endswith(".tar"))
    if stray:
        raise not_listed(folder, stray[0])
    missing = sorted(names - on_disk)
    if missing:
        raise no_such_file(folder, missing[0])
    return [index.url(entry) for entry in listed]


def _match_remote(url: str, folders: _Folders) -> list[str]:
    """One remote shard, or those of a remote folder's index that a glob selects."""
    path, query, _ = url.partition("?")
    folder, _, name = path.rpartition("/")
    if name and not _URL_GLOB.search(name):
        return [url]
    if query:
        msg = f"{url}: a URL with a query names one shard, not those of a folder. Name each, or leave the query out."
        raise StorageError(msg, url=url)
    index = folders.needed_index(folder)
    return [index.url(entry) for entry in index.entries if fnmatch.fnmatchcase(entry.name, unquote(name) or "*")]


def _entry(url: str, folders: _Folders, *, need_index: bool) -> ShardEntry | None:
    """The line of a shard in its folder's index."""
    folder, name = split_url(url)
    index = folders.needed_index(folder) if need_index else folders.index_of(folder)
    if index is None:
        return None
    entry = index.by_name.get(name)
    if entry is None:
        raise not_listed(folder, name)
    return entry


def split_url(url: str) -> tuple[str, str]:
    """Folder and file name of a shard; the folder of one in the current folder is empty."""
    if is_local(url):
        return os.path.split(url)
    folder, _, name = url.partition("?")[0].rpartition("/")
    return folder, unquote(name)


def not_listed(folder: str, name: str) -> FolderIndexError:
    """The error for a shard that its folder's index does not have."""
    msg = (
        f"{join_url(folder, name)}: the folder's index does not list this shard.\n  Run `wdskit index {folder or '.'}`."
    )
    return FolderIndexError(msg, folder=folder)


def no_such_file(folder: str, name: str) -> FolderIndexError:
    """The error for a shard that only its folder's index has."""
    msg = f"{join_url(folder, name)}: the folder's index lists this shard, but there is no such file."
    return FolderIndexError(msg, folder=folder)


def may_be_shard(name: str, pattern: str) -> bool:
    """Whether a file that a glob matches is a shard by its name: it ends in `.tar`, unless the glob has an ending."""
    return name.endswith(".tar") or "." in re.split(r"[*?\]]", pattern)[-1]


def no_such(pattern: str, path: str) -> StorageError:
    """The error for a path that is not there; of a folder with the nearest name there is."""
    if path.startswith("~"):
        remedy = "Only a shell knows what `~` stands for: write ${HOME} in a configuration, or the whole path."
        return StorageError(f"{pattern}: there is no such shard.\n  {remedy}", url=pattern)
    missing = path.rstrip("/")
    while os.path.dirname(missing) and not os.path.isdir(os.path.dirname(missing)):
        missing = os.path.dirname(missing)
    parent, name = os.path.split(missing)
    if missing == path.rstrip("/") and name.endswith(".tar"):
        return StorageError(f"{pattern}: there is no such shard.", url=pattern)
    try:
        with os.scandir(parent or ".") as entries:
            folders = [entry.name for entry in itertools.islice(entries, _MAX_NEAR) if entry.is_dir()]
    except OSError:
        folders = []
    near = difflib.get_close_matches(name, folders, n=1)
    hint = f" Did you mean `{os.path.join(parent, near[0])}`?" if near else ""
    what = "shard or folder" if missing == pattern.rstrip("/") else f"folder: {missing}"
    return StorageError(f"{pattern}: there is no such {what}.{hint}", url=pattern)


def nothing_matches(pattern: str) -> NoReturn:
    """Say that a pattern names no shard."""
    path = local_path(pattern) if is_local(pattern) else ""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    if is_local(pattern) and os.path.isdir(os.path.join(folder, RUN_FOLDER)):
        msg = f"{pattern}: no shard matches: a run has begun here and is not finished.\n  "
        remedy = "Run the same command again; it goes on with what is there. Parts are ended by `wdskit pack-finish`."
        raise FolderIndexError(msg + remedy, folder=folder)
    raise StorageError(f"{pattern}: no shard matches.", url=pattern)
