"""From what a user writes for shards to the list of their URLs.

`shards` is a list, a glob, a brace pattern or a folder, several joined by `::`. Where the folder of a pattern has an
index, the pattern selects from it, and files that the index does not know are an error instead of a surprise.
"""

from __future__ import annotations

import fnmatch
import glob
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from wdskit.dataset.index import FolderIndex, ShardEntry, has_index, join_url, read_index
from wdskit.errors import FolderIndexError, StorageError
from wdskit.limits import MAX_SHARD_NAMES
from wdskit.storage.urls import is_local, local_path, scheme_of

_JOINT = re.compile(r"::(?![^\[\]/]*\])")  # not the one inside http://[::1]/
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?\}")
_GLOB = re.compile(r"[*?\[]")


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


@dataclass
class _Folders:
    """The indexes of the folders met so far; None for a folder without one."""

    known: dict[str, FolderIndex | None] = field(default_factory=dict)

    def index_of(self, folder: str) -> FolderIndex | None:
        if folder not in self.known:
            self.known[folder] = read_index(folder) if is_local(folder) and has_index(folder) else None
        return self.known[folder]

    def remote_index(self, folder: str) -> FolderIndex:
        index = self.known.get(folder)
        if index is None:
            index = self.known[folder] = read_index(folder)
        return index


def list_shards(shards: str | Sequence[str], *, need_index: bool = False) -> ShardList:
    """Expand what a user wrote for shards.

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
        for part in _JOINT.split(item):
            found = [url for pattern in _expand_braces(part) for url in _match(pattern, folders)]
            urls += found
            parts += [number] * len(found)
            entries += [_entry(url, folders, need_index=need_index) for url in found]
            number += 1
    if not urls:
        raise StorageError("no shards: the list is empty. Name a path, a glob, a brace pattern or a folder.")
    return ShardList(tuple(urls), tuple(parts), tuple(entries))


def _expand_braces(pattern: str) -> Iterator[str]:
    """The names of a brace pattern, in order."""
    if not pattern:
        raise StorageError("a shard pattern is empty. Name a path, a glob, a brace pattern or a folder.")
    scheme_of(pattern)
    if "{" not in pattern:
        return iter((pattern,))
    sizes = [
        abs(int(last) - int(first)) // (abs(int(step or 1)) or 1) + 1 for first, last, step in _RANGE.findall(pattern)
    ]
    if math.prod(sizes) > MAX_SHARD_NAMES:
        msg = f"{pattern}: it names {math.prod(sizes)} shards, over the limit of {MAX_SHARD_NAMES}."
        raise StorageError(msg, url=pattern)
    import braceexpand

    try:
        return iter(list(braceexpand.braceexpand(pattern)))
    except ValueError as err:  # UnbalancedBracesError is one
        msg = f"{pattern}: its braces do not match. Write {{000000..000127}} or {{a,b}}."
        raise StorageError(msg, url=pattern) from err


def _match(pattern: str, folders: _Folders) -> list[str]:
    """The shards that one expanded pattern names."""
    if not is_local(pattern):
        return _match_remote(pattern, folders)
    path = local_path(pattern)
    if os.path.isdir(path):
        return _match_folder(path, "*.tar", pattern, folders)
    if _GLOB.search(path) and not os.path.lexists(path):
        parent, name = os.path.split(path)
        if not _GLOB.search(parent):
            return _match_folder(parent, name, pattern, folders)
        found = sorted(glob.glob(path))
        return found or _nothing(pattern)
    if not os.path.exists(path):
        msg = f"{pattern}: there is no such shard."
        raise StorageError(msg, url=pattern)
    return [path]


def _match_folder(folder: str, name: str, pattern: str, folders: _Folders) -> list[str]:
    """The shards of a local folder whose names match a glob, by its index where it has one."""
    on_disk = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
    index = folders.index_of(folder)
    if index is None:
        return on_disk or _nothing(pattern)
    listed = [index.url(entry) for entry in index.entries if fnmatch.fnmatchcase(entry.name, name)]
    stray = sorted({os.path.basename(path) for path in on_disk} - {os.path.basename(path) for path in listed})
    if stray:
        raise _not_listed(folder, stray[0])
    missing = sorted({os.path.basename(path) for path in listed} - {os.path.basename(path) for path in on_disk})
    if missing:
        msg = f"{join_url(folder, missing[0])}: the folder's index lists this shard, but there is no such file."
        raise FolderIndexError(msg, folder=folder)
    return listed or _nothing(pattern)


def _match_remote(url: str, folders: _Folders) -> list[str]:
    """One remote shard, or those of a remote folder's index that a glob selects."""
    folder, _, name = url.rpartition("/")
    if not name or _GLOB.search(name):
        index = folders.remote_index(folder)
        found = [index.url(entry) for entry in index.entries if fnmatch.fnmatchcase(entry.name, name or "*")]
        return found or _nothing(url)
    return [url]


def _entry(url: str, folders: _Folders, *, need_index: bool) -> ShardEntry | None:
    """The line of a shard in its folder's index."""
    folder, name = os.path.split(url)
    index = folders.remote_index(folder) if need_index else folders.index_of(folder)
    if index is None:
        return None
    entry = index.by_name.get(name)
    if entry is None:
        raise _not_listed(folder, name)
    return entry


def _not_listed(folder: str, name: str) -> FolderIndexError:
    msg = (
        f"{join_url(folder, name)}: the folder's index does not list this shard.\n  Run `wdskit index {folder or '.'}`."
    )
    return FolderIndexError(msg, folder=folder)


def _nothing(pattern: str) -> NoReturn:
    msg = f"{pattern}: no shard matches."
    raise StorageError(msg, url=pattern)
