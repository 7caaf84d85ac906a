"""Find the shards that a user names by a path, a URL, a glob, a brace pattern or a folder.

Several patterns can be joined by `::`, or be given as a list. If the folder of a pattern has an index, the pattern
selects from the index, and a matching file that is not in the index is an error.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote

from wdskit.dataset.binary_index import ShardEntry
from wdskit.dataset.braces import expand_parts, expand_patterns
from wdskit.dataset.index import RUN_FOLDER, FolderIndex, has_index, is_label, join_url, read_index
from wdskit.errors import FolderIndexError, StorageError, WdskitError
from wdskit.files import describe_missing
from wdskit.storage.urls import ABSENT_STATUSES, is_local, local_path, scheme_of

_GLOB = re.compile(r"[*?\[]")
_URL_GLOB = re.compile(r"[*\[]")
_FILE_NAME = re.compile(r"[*\[]|[.]tar\b", re.IGNORECASE)  # folders may have a dot, such as v1.0

ABSENT = "there is no such shard"
LISTED_ABSENT = "the folder's index lists this shard, but there is no such file"
UNLISTED = "the folder's index does not list this shard"

OpenIndex = Callable[[str], FolderIndex | None]
"""Returns the index of a folder; None if the folder has no index."""


@dataclass(frozen=True)
class ShardList:
    """Shards in the order in which they were named.

    Attributes:
        urls: Path or URL of each shard.
        parts: For each shard, the number of the part that named it. Parts are list items divided at `::`, numbered from
            0 over all items.
        entries: For each shard, its index entry; None if the folder has no index, or if the index was not read.
    """

    urls: tuple[str, ...]
    parts: tuple[int, ...]
    entries: tuple[ShardEntry | None, ...]

    @property
    def folders(self) -> dict[str, bool]:
        """Maps each folder of the shards to whether its samples may have labels. True if a shard of the folder has a
        field `cls` or `*.cls`, or has no index entry.
        """
        folders: dict[str, bool] = {}
        for url, entry in zip(self.urls, self.entries, strict=True):
            folder = split_url(url)[0]
            folders[folder] = folders.get(folder, False) or entry is None or any(map(is_label, entry.fields))
        return folders


@dataclass(frozen=True)
class Target:
    """The shards that a user's path names.

    Attributes:
        path: The path as the user wrote it.
        kind: "shard" if the path names one shard, "folder" if it names a folder, "pattern" for a glob, a brace pattern
            or several paths joined by `::`.
        urls: Path or URL of each shard, in order.
        entries: Index entry of each shard. Names and sizes of local files match the entries. None if `kind` is "shard",
            or if a shard has no index entry.
    """

    path: str
    kind: Literal["shard", "folder", "pattern"]
    urls: tuple[str, ...]
    entries: tuple[ShardEntry, ...] | None


class ShardMatch(NamedTuple):
    """One shard that a pattern names.

    Attributes:
        url: Path or URL of the shard.
        entry: Index entry of the shard; None if the shard is in no index, or if the index was not read.
        problem: `ABSENT` (the file does not exist), `LISTED_ABSENT` (the index lists the shard, but the file does not
            exist), `UNLISTED` (the folder has an index, but the index does not list the shard), or empty.
    """

    url: str
    entry: ShardEntry | None
    problem: str = ""


def list_shards(
    shards: str | Sequence[str], *, need_index: bool = False, has_remote: bool = False, check_files: bool = False
) -> ShardList:
    """Find the shards that a user named.

    The shards keep the order in which they are named. A shard that is named twice appears twice. The shards of a glob
    or folder have the order of the folder's index; without an index, they are sorted by name as text: `s-10.tar` before
    `s-2.tar`. The name of an existing local file is never read as a pattern. In a URL `?` starts the query, so the
    wildcards are `*` and `[...]`.

    Args:
        shards: A path, URL, glob, brace pattern (`a-{000..127}.tar`) or folder; several joined by `::`, or a list of
            them.
        need_index: Every shard must be listed in the index of its folder, local or remote.
        has_remote: Read the index of each remote folder, if it exists. For a glob or folder in a bucket without an
            index, list the files of the bucket's folder. If both flags are False, a remote index is read only for a
            glob or folder, and must exist.
        check_files: If all shards are in an index, compare the names and sizes of the files in local folders with the
            index.

    Raises:
        StorageError: `shards` is empty, a pattern matches no shard, a local shard is missing, a pattern or a scheme is
            invalid, or a bucket cannot be listed.
        FolderIndexError: An index is needed and missing, is invalid, or does not match the shards on disk. Or no shard
            matches in a local folder with an unfinished run.
    """

    @functools.cache
    def open_index(folder: str) -> FolderIndex | None:
        if need_index or is_local(folder):
            return read_index(folder) if need_index or has_index(folder) else None
        return find_remote_index(folder) if has_remote else None

    found: list[ShardMatch] = []
    parts: list[int] = []
    for number, patterns in enumerate(expand_parts(shards)):
        for pattern in patterns:
            num_before = len(found)
            for one in _match(pattern, open_index, is_listed=has_remote):
                if one.problem:
                    raise shard_error(one.url, one.problem)
                found.append(one)
            if len(found) == num_before:
                raise nothing_matches(pattern)
        parts += [number] * (len(found) - len(parts))
    if not found:
        raise StorageError("no shards: the list is empty. Name a path, a glob, a brace pattern or a folder.")
    if check_files and all(one.entry for one in found):
        for folder in sorted({split_url(one.url)[0] for one in found if is_local(one.url)}):
            if (index := open_index(folder)) is not None:
                index.check_files()
    return ShardList(tuple(one.url for one in found), tuple(parts), tuple(one.entry for one in found))


def find_shards(path: str) -> Target:
    """Find the shards of a user's path: a shard, a folder, a glob or a brace pattern; or several joined by `::`.

    The path of an existing local file is always one shard, and the index of the file's folder is not read.

    Raises:
        StorageError: No shard matches, a local shard is missing, a pattern or a scheme is invalid, or a bucket cannot
            be listed.
        FolderIndexError: An index is invalid or does not match the shards on disk, or a remote folder has no index. Or
            no shard matches in a local folder with an unfinished run.
    """
    local = is_local(path)
    has_many = [*expand_patterns(path)] != [path]
    if local:
        is_folder = not has_many and os.path.isdir(local_path(path))
    else:
        key = split_url(path)[1]
        is_folder = not has_many and (not key or (key.endswith("/") and not _URL_GLOB.search(key)))
    if local and not is_folder and os.path.exists(local_path(path)):
        return Target(path, "shard", (path,), None)
    found = list_shards(path, has_remote=has_many, check_files=True)
    if found.urls == (path,):
        return Target(path, "shard", found.urls, None)
    kind: Literal["folder", "pattern"] = "folder" if is_folder else "pattern"
    entries = tuple(entry for entry in found.entries if entry is not None)
    return Target(path, kind, found.urls, entries if len(entries) == len(found.urls) else None)


def find_remote_index(folder: str) -> FolderIndex | None:
    """Return the index of a remote folder. Return None if the folder has no index, or if the store forbids reading it.

    Raises:
        FolderIndexError: The index is invalid, or cannot be read for another reason.
        StorageError: The URL is invalid, or its scheme is not supported.
    """
    try:
        return read_index(folder)
    except FolderIndexError as err:
        if isinstance(err.__cause__, StorageError) and err.__cause__.status in ABSENT_STATUSES:
            return None
        raise


def match_shards(path: str, open_index: OpenIndex) -> tuple[dict[str, ShardEntry | None], list[ShardMatch]]:
    """Find the shards that a path names. Return missing and unlisted shards as faults instead of raising. A shard that
    is named twice is returned once. If no shard matches, both results are empty.

    Args:
        path: A path, URL, glob, brace pattern or folder; several joined by `::`.
        open_index: Returns the index of a folder, or None. Called once for each folder; `""` is the current folder. Its
            exceptions are not caught.

    Returns:
        (shards, faults). `shards` maps the path or URL of each existing shard to its index entry; None if the shard has
        no entry. Shards of a glob or folder have the order of the index; shards without an entry follow, sorted by
        name. `faults` are all shards with a problem. An unlisted shard is in `shards` and in `faults`. Remote shards
        are taken from the index; their files are not looked up.

    Raises:
        StorageError: The local folder of a glob does not exist or cannot be listed, or a pattern or a scheme is
            invalid.
        FolderIndexError: A glob or folder is remote, and the folder has no valid index.
    """
    shards: dict[str, ShardEntry | None] = {}
    faults: list[ShardMatch] = []
    spellings: dict[str, str] = {}
    open_once = functools.cache(open_index)

    @functools.cache
    def first_spelling(folder: str) -> str:
        if not is_local(folder):
            return folder
        plain = str(Path(folder))
        return spellings.setdefault(os.path.realpath(folder), "" if plain == "." else plain)

    for pattern in expand_patterns(path):
        for one in _match(pattern, lambda folder: open_once(first_spelling(folder))):
            found = one
            if is_local(pattern):
                folder, name = os.path.split(one.url)
                found = one._replace(url=join_url(first_spelling(folder), name))
            if found.url in shards:
                continue
            if found.problem:
                faults.append(found)
            if found.problem in ("", UNLISTED):
                shards[found.url] = found.entry
    return shards, faults


def has_wildcards(path: str) -> bool:
    """Return whether a local path has `*`, `?` or `[`."""
    return _GLOB.search(path) is not None


class FolderPattern(NamedTuple):
    """The shards of one folder whose names match the glob `name`. If `is_glob` is False, `name` is the name of one
    shard.
    """

    folder: str
    name: str
    is_glob: bool


def find_folders(pattern: str) -> list[FolderPattern]:
    """Return the folders of a path, URL, glob or folder, each with a name or a glob for its shards. A local pattern
    such as `train-*/*.tar` may give several folders, or no folder.

    Raises:
        StorageError: The local folder of a glob does not exist.
    """
    if not is_local(pattern):
        url = pattern.partition("?")[0]
        folder, name = split_url(url)
        is_glob = not name or _URL_GLOB.search(url.rpartition("/")[2]) is not None
        return [FolderPattern(folder, name or "*.tar", is_glob)]
    path = local_path(pattern)
    if os.path.isdir(path):
        return [FolderPattern(path.rstrip("/") or "/", "*.tar", is_glob=True)]
    parent, name = os.path.split(path)
    if not has_wildcards(path) or os.path.lexists(path):
        return [FolderPattern(parent, name, is_glob=False)]
    is_plain = os.path.lexists(parent) or not has_wildcards(parent)
    if is_plain and not os.path.isdir(parent or "."):
        raise shard_error(path, ABSENT)
    parents = [parent] if is_plain else sorted(filter(os.path.isdir, glob.glob(parent)))
    return [FolderPattern(folder, name or "*.tar", is_glob=True) for folder in parents]


def check_planned_url(url: str) -> None:
    """Check that a planned source such as `exact` can read a URL.

    Raises:
        StorageError: The URL has a query, which may be a signature for one file only. Or the URL names a folder of a
            web server without a slash at the end.
    """
    path, query, _ = url.partition("?")
    if query:
        msg = f"{path}: a URL with a query names one file, but a planned source reads a folder and its index."
        raise StorageError(f"{msg} Leave the query out, or use `stream`.", url=path)
    name = split_url(path)[1]
    if name and not _FILE_NAME.search(name):
        msg = f"{path}: this is not the name of a shard. A folder of a web server ends with a slash: {path}/"
        raise StorageError(msg, url=path)


def _match(pattern: str, open_index: OpenIndex, *, is_listed: bool = False) -> Iterator[ShardMatch]:
    """Yield the shards that one pattern without braces names; nothing if no shard matches.

    A glob or a folder yields the shards that `_match_folder` (local) or `_match_remote` (remote) finds. The name of one
    shard yields one `ShardMatch`. Its problem is `ABSENT` if the shard is local and missing, and `UNLISTED` if the
    index of the folder does not list the shard. `is_listed` is for `_match_remote`. The errors are those of
    `find_folders`, `_match_folder` and `_match_remote`.
    """
    for folder, name, is_glob in find_folders(pattern):
        if is_glob and is_local(pattern):
            yield from _match_folder(folder, name, open_index(folder))
            continue
        if is_glob:
            yield from _match_remote(pattern, folder, name, open_index, is_listed=is_listed)
            continue
        url = local_path(pattern) if is_local(pattern) else pattern
        if is_local(pattern) and not os.path.exists(url):
            yield ShardMatch(url, None, ABSENT)
            continue
        index = open_index(folder)
        entry = index.by_name.get(name) if index else None
        yield ShardMatch(url, entry, UNLISTED if index and entry is None else "")


def _match_folder(folder: str, name: str, index: FolderIndex | None) -> Iterator[ShardMatch]:
    """Yield the shards of a local folder whose names match the glob `name`: first the shards in `index`, in its order,
    then other files, sorted. If there is an index, a shard that is only in the index has the problem `LISTED_ABSENT`,
    and a file that is only on disk has `UNLISTED`. Raises StorageError if the folder cannot be read.
    """
    try:
        on_disk = frozenset(os.listdir(folder or "."))
    except OSError as err:
        raise StorageError(f"{folder}: cannot be read: {err.strerror}.", url=folder) from err
    listed = index.by_name if index else {}
    for entry in listed.values():
        if fnmatch.fnmatchcase(entry.name, name):
            yield ShardMatch(join_url(folder, entry.name), entry, "" if entry.name in on_disk else LISTED_ABSENT)
    for each in _select(on_disk.difference(listed), name):
        yield ShardMatch(join_url(folder, each), None, UNLISTED if index else "")


def _select(names: Iterable[str], pattern: str) -> Iterator[str]:
    """Yield the names that the glob `pattern` matches, sorted. A glob without a dot after its last wildcard, such as
    `a-*`, yields only names that end in `.tar`. Names with a leading dot are yielded only for a glob with a leading
    dot.
    """
    has_ending = "." in re.split(r"[*?\]]", pattern)[-1]  # a glob without an ending matches only `.tar`
    for each in sorted(names):
        is_shard = (has_ending or each.endswith(".tar")) and each.startswith(".") <= pattern.startswith(".")
        if is_shard and fnmatch.fnmatchcase(each, pattern):
            yield each


def _match_remote(url: str, folder: str, name: str, open_index: OpenIndex, *, is_listed: bool) -> Iterator[ShardMatch]:
    """Yield the shards of a remote folder whose names match the glob `name`. `url` is the whole pattern.

    The shards come from the index, in its order. If the folder has no index and `is_listed` is True, the files in the
    bucket's folder are listed, and the shards are sorted by name.

    Raises:
        StorageError: `url` has a query. Or the files are listed, and the listing fails or no file matches.
        FolderIndexError: The folder has no index, and `is_listed` is False.
    """
    path, query, _ = url.partition("?")
    if query:
        msg = f"{path}: a URL with a query names one shard, not a folder. Name each shard, or leave the query out."
        raise StorageError(msg, url=path)
    index = open_index(folder)
    if index is None and is_listed:
        from wdskit.storage.buckets import list_objects

        urls = {unquote(one.url.rpartition("/")[2]): one.url for one in list_objects(folder)}
        names = [*_select(urls, name)]
        if not names:
            remedy = "Only tars are read from a store. Copy other files to a local disk first."
            raise StorageError(f"{url}: no tar in this folder matches.\n  {remedy}", url=url)
        yield from (ShardMatch(urls[each], None) for each in names)
        return
    index = index or read_index(folder)
    yield from (ShardMatch(index.url(one), one) for one in index.entries if fnmatch.fnmatchcase(one.name, name))


def split_url(url: str) -> tuple[str, str]:
    """Split the path or URL of a shard into (folder, file name); the folder `""` is the current folder. Of a URL, the
    query is left out, and the file name is percent-decoded.

    The file name is empty if the URL ends with `/`, or has only a bucket or host. It is also empty if the last part of
    a URL in a bucket has no wildcard and no `.tar`: `s3://bucket/v1.0` is a folder.
    """
    if is_local(url):
        return os.path.split(url)
    path = url.partition("?")[0]
    folder, _, name = path.rpartition("/")
    is_bucket = folder.endswith(":/")
    if is_bucket or (name and not _FILE_NAME.search(name) and scheme_of(url) not in ("http", "https")):
        return path, ""
    return folder, unquote(name)


def shard_error(url: str, problem: str) -> WdskitError:
    """Return the error for the shard `url`: a StorageError if `problem` is `ABSENT`, a FolderIndexError if `problem` is
    `LISTED_ABSENT` or `UNLISTED`.
    """
    folder, name = split_url(url)
    if problem == LISTED_ABSENT:
        return FolderIndexError(f"{url}: {problem}.", folder=folder)
    if problem == UNLISTED:
        remedy = f"Run `wdskit index {folder or '.'}`."
        if is_local(url) and os.path.isdir(os.path.join(folder, RUN_FOLDER)):
            remedy = "A run of `wdskit pack` or `wdskit reshard` is unfinished here: run the same command again."
        msg = f"{join_url(folder, name)}: {problem}.\n  {remedy}"
        return FolderIndexError(msg, folder=folder)
    if url.startswith("~"):
        remedy = "Only a shell expands `~`: write ${HOME} in a configuration, or the whole path."
        return StorageError(f"{url}: {ABSENT}.\n  {remedy}", url=url)
    what = "shard" if url.rstrip("/").endswith(".tar") else "shard or folder"
    return StorageError(f"{url}: {describe_missing(url, what)}", url=url)


def nothing_matches(pattern: str) -> WdskitError:
    """Return the error for a pattern that matches no shard: a FolderIndexError if the local folder has an unfinished
    run, otherwise a StorageError.
    """
    if is_local(pattern):
        path = local_path(pattern)
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if os.path.isdir(os.path.join(folder, RUN_FOLDER)):
            msg = f"{pattern}: no shard matches: a run here is unfinished.\n  Run the same command "
            msg += "again to continue it. If it fills parts, end with `wdskit pack-finish`."
            return FolderIndexError(msg, folder=folder)
        if not os.path.exists(path) and not has_wildcards(path):
            return shard_error(path, ABSENT)
    return StorageError(f"{pattern}: no shard matches.", url=pattern)


def local_folder(folder: str | Path, *, command: str, done: str) -> Path:
    """Return the path of a local folder. `command` ("index") and `done` ("indexed") are words for messages.

    Raises:
        StorageError: The folder is remote, does not exist, or is a file; or its name is empty.
    """
    if not str(folder).strip():
        raise StorageError(f"an empty path: name the folder that can be {done}, or write . for this one.", url="")
    if not is_local(str(folder)):
        msg = f"{folder}: only a local folder can be {done}. Run `wdskit {command}` on the machine with its files."
        raise StorageError(msg, url=str(folder))
    path = Path(local_path(str(folder)))
    if not os.path.isdir(path):
        problem = "this is a file, not a folder." if os.path.exists(path) else describe_missing(str(path), "folder")
        raise StorageError(f"{folder}: {problem} Name the folder that holds the shards.", url=str(folder))
    return path
