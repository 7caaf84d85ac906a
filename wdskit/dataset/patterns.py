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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn
from urllib.parse import unquote

from wdskit.dataset.index import RUN_FOLDER, FolderIndex, ShardEntry, has_index, is_label, join_url, read_index
from wdskit.errors import FolderIndexError, StorageError
from wdskit.limits import MAX_SHARD_NAMES
from wdskit.storage.urls import is_local, local_path, scheme_of

_JOINT = re.compile(r"::(?![^\[\]/]*\])")  # not the one inside http://[::1]/
_BRACES = re.compile(  # what counts in a brace pattern: a range of numbers or letters, or one of these
    r"\{(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d+))?\}|\\.|[{},]"
)
_MAX_DIGITS = 18
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


@dataclass
class _Folders:
    """The indexes of the folders met so far; None for a folder without one."""

    known: dict[str, FolderIndex | None] = field(default_factory=dict)

    def index_of(self, folder: str) -> FolderIndex | None:
        """Of a local folder that has one."""
        if folder not in self.known:
            self.known[folder] = read_index(folder) if is_local(folder) and has_index(folder) else None
        return self.known[folder]

    def needed_index(self, folder: str) -> FolderIndex:
        """Of a folder that must have one, local or remote."""
        index = self.known.get(folder)
        if index is None:
            index = self.known[folder] = read_index(folder)
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


def expand_patterns(shards: str) -> Iterator[str]:
    """The paths, URLs, globs and folders of what a user wrote, braces expanded and `::` split. Nothing is looked up.

    Raises:
        StorageError: Braces do not match, they name too many, or a scheme is not supported.
    """
    for part in split_parts(shards):
        yield from expand_braces(part)


def check_pattern(shards: str) -> None:
    """Refuse what can never name shards, without looking for any: schemes that are not supported, braces that do not
    match or name too many.

    Raises:
        StorageError: It is such.
    """
    for part in split_parts(shards):
        expand_braces(part)


def has_wildcards(path: str) -> bool:
    """Whether a local path is a glob."""
    return _GLOB.search(path) is not None


def split_parts(item: str) -> list[str]:
    """What stands between the `::` of one text."""
    return [item] if "::" in item and os.path.lexists(item) else _JOINT.split(item)


def expand_braces(pattern: str) -> Iterator[str]:
    """The names of a brace pattern, in order."""
    if not pattern:
        raise StorageError("a shard pattern is empty. Name a path, a glob, a brace pattern or a folder.")
    scheme_of(pattern)
    if "{" not in pattern or os.path.lexists(pattern):
        return iter((pattern,))
    import braceexpand

    try:
        if _count_names(pattern) <= MAX_SHARD_NAMES:
            return braceexpand.braceexpand(pattern)
    except (ValueError, RecursionError) as err:
        msg = f"{pattern}: its braces do not match. Write {{000000..000127}} or {{a,b}}."
        raise StorageError(msg, url=pattern) from err
    msg = f"{pattern}: it names more than {MAX_SHARD_NAMES} shards. Name fewer, or a folder or a glob."
    raise StorageError(msg, url=pattern)


def _count_names(pattern: str) -> int:
    """How many names a brace pattern has at most, before any is made; over the limit, some number over it.

    Raises:
        ValueError: A brace has no other.
    """
    most = MAX_SHARD_NAMES + 1
    open_braces = [[0, 1]]  # of each: names of its alternatives so far, names of the present one
    for match in _BRACES.finditer(pattern):
        found, inner = match[0], open_braces[-1]
        if found == "{":
            open_braces.append([0, 1])
        elif found == "}":
            del open_braces[-1]
            if not open_braces:
                break
            open_braces[-1][1] = min(most, open_braces[-1][1] * sum(inner))
        elif found == "," and len(open_braces) > 1:
            inner[:] = min(most, sum(inner)), 1
        elif len(found) > 2:
            inner[1] = min(most, inner[1] * _count_range(*match.groups()))
    if len(open_braces) != 1:
        raise ValueError("unbalanced braces")
    return open_braces[0][1]


def _count_range(first: str | None, last: str | None, first_letter: str, last_letter: str, step: str | None) -> int:
    """How many names a range has, at most."""
    if first is None or last is None:
        return abs(ord(last_letter) - ord(first_letter)) + 1
    if max(map(len, (first, last, step or ""))) > _MAX_DIGITS:
        return MAX_SHARD_NAMES + 1
    return abs(int(last) - int(first)) // (int(step or 1) or 1) + 1


def _match(pattern: str, folders: _Folders) -> list[str]:
    """The shards that one expanded pattern names."""
    if not is_local(pattern):
        return _match_remote(pattern, folders) or nothing_matches(pattern)
    path = local_path(pattern)
    if os.path.isdir(path):
        return _match_folder(path.rstrip("/") or "/", "*.tar", folders) or nothing_matches(pattern)
    if has_wildcards(path) and not os.path.lexists(path):
        parent, name = os.path.split(path)
        is_plain = os.path.lexists(parent) or not has_wildcards(parent)
        if is_plain and not os.path.isdir(parent or "."):
            raise no_such(pattern, parent)
        parents = [parent] if is_plain else sorted(filter(os.path.isdir, glob.glob(parent)))
        found = [url for folder in parents for url in _match_folder(folder, name or "*.tar", folders)]
        return found or nothing_matches(pattern)
    if not os.path.exists(path):
        raise no_such(pattern, path)
    return [path]


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
        msg = f"{join_url(folder, missing[0])}: the folder's index lists this shard, but there is no such file."
        raise FolderIndexError(msg, folder=folder)
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
    msg = f"{pattern}: no shard matches."
    raise StorageError(msg, url=pattern)
