"""Find the shards that a user names by a path, a URL, a glob, a brace pattern or a folder: `find_shards`.

Several patterns can be joined by `::`, or be given as a list. If a folder has an index, a glob or a folder selects from
the index: other files are not part of the data. The name of an existing local file is never read as a pattern. In a
URL `?` starts the query, so the wildcards are `*` and `[...]`.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

import braceexpand

from wdskit.dataset.classes import is_label
from wdskit.dataset.index import Index, ShardEntry, has_index, has_run, join_url, read_index, unfinished
from wdskit.errors import FolderIndexError, StorageError, WdskitError
from wdskit.files import describe_missing
from wdskit.limits import MAX_SHARD_NAMES
from wdskit.storage.urls import LISTED_SCHEMES, is_local, local_path, scheme_of, shown_url

_JOINT = re.compile(r"::(?![^\[\]/]*\])")  # but not inside http://[::1]/
_GLOB = re.compile(r"[*?\[]")
_URL_GLOB = re.compile(r"[*\[]")
_FILE_NAME = re.compile(r"[*\[]|[.]tar\b", re.IGNORECASE)  # folders may have a dot, such as v1.0
_INNER_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|[A-Za-z]\.\.[A-Za-z])(?:\.\.-?\d+)?")
_MAX_LETTERS = 58  # from A to z
_MAX_RANGE_CHARS = 60

ABSENT = "there is no such shard"
LISTED_ABSENT = "the folder's index lists this shard, but there is no such file"
UNLISTED = "the folder's index does not list this shard"

_FEW = 100  # so many files are looked up one by one, without a list of their folder

OpenIndex = Callable[[str], Index | None]
"""Returns the index of a folder, a path or URL; None if the folder has no index. `""` is the current folder."""


@dataclass
class FolderShards:
    """Shards of one folder, in the order in which they were named.

    Attributes:
        folder: Path or URL of the folder; `""` is the current folder.
        index: The folder's index; None if it has no index, or if the index was not read.
        names: File names of the shards.
        part: Number of the part that named the shards. Parts are list items divided at `::`, numbered from 0 over all
            items.
        urls: URL of each shard as the user or the store wrote it; empty if it is folder and name.
    """

    folder: str
    index: Index | None
    names: Sequence[str]
    part: int = 0
    urls: Sequence[str] = ()

    def extend(self, other: FolderShards) -> bool:
        """Append the shards of `other`, and return True, if they belong to the same folder and part. Otherwise return
        False.
        """
        is_same = (self.folder, self.index, self.part) == (other.folder, other.index, other.part)
        if not is_same or self.urls or other.urls or not isinstance(self.names, list):
            return False
        self.names.extend(other.names)
        return True

    def url(self, at: int) -> str:
        """Return the path or URL of the shard `names[at]`. In a URL, the name is percent-encoded."""
        if self.urls:
            return self.urls[at]
        return join_url(self.folder, self.names[at] if is_local(self.folder) else quote(self.names[at]))

    def entry(self, at: int) -> ShardEntry | None:
        """Return the index entry of the shard `names[at]`; None if there is no index, or if it does not list it."""
        number = None if self.index is None else self.index.by_name.get(self.names[at])
        return None if self.index is None or number is None else self.index.entry(number)

    @property
    def real_folder(self) -> str:
        """The same text for all spellings of a folder."""
        return os.path.realpath(self.folder) if is_local(self.folder) else self.folder

    def problems(self, *, with_sizes: bool = False) -> Iterator[tuple[int, str]]:
        """Yield (at, problem) for each shard `names[at]` that does not exist (local shards only), that the index does
        not list, or with `with_sizes` that has another size than in the index.

        Raises:
            FolderIndexError: The folder cannot be read.
        """
        known = None if self.index is None else self.index.by_name
        local = is_local(self.folder)
        try:
            on_disk = frozenset(os.listdir(self.folder or ".")) if local and len(self.names) > _FEW else None
            for at, name in enumerate(self.names):
                is_listed = known is None or name in known
                if local and not (os.path.exists(self.url(at)) if on_disk is None else name in on_disk):
                    yield at, LISTED_ABSENT if known is not None and is_listed else ABSENT
                elif not is_listed:
                    yield at, UNLISTED
                elif with_sizes and local and (entry := self.entry(at)) is not None:
                    num_bytes = os.stat(self.url(at)).st_size
                    if num_bytes != entry.num_bytes:
                        yield at, f"it has {num_bytes} bytes, but the folder's index says {entry.num_bytes}"
        except OSError as err:
            where = err.filename or self.folder
            raise FolderIndexError(f"{where}: cannot be read: {err.strerror}.", folder=self.folder) from err


def find_shards(
    shards: str | Sequence[str],
    open_index: OpenIndex | None = None,
    *,
    needs_index: bool = False,
    is_absolute: bool = False,
) -> list[FolderShards]:
    """Find the shards that a user named. `check_found` checks that they exist.

    The shards keep the order in which they are named. A shard that is named twice appears twice. The shards of a glob
    or folder have the order of the folder's index; without an index, they are sorted by name as text: `s-10.tar` before
    `s-2.tar`. Of a glob or folder in a store, the index is read even if `open_index` did not read it. Without an index,
    the files of a bucket's folder are listed.

    Args:
        shards: A path, URL, glob, brace pattern (`a-{000..127}.tar`) or folder; several joined by `::`, or a list of
            them.
        open_index: Called once for each folder; its exceptions are not caught. Default: `local_index`.
        needs_index: Refuse URLs that name only a file, with a query, so that no index belongs to them.
        is_absolute: Make the paths of local folders absolute, for a program that changes its folder later.

    Raises:
        StorageError: `shards` is empty, a pattern matches no shard, a pattern or a URL is invalid, or a folder or
            bucket cannot be listed.
        FolderIndexError: An index is invalid, or is needed and missing. Or a local folder has no index because a run of
            `wdskit pack` is unfinished.
    """
    open_once = functools.cache(open_index or local_index)
    found: list[FolderShards] = []
    for part, patterns in enumerate(expand_parts(shards)):
        for pattern in patterns:
            places = find_folders(pattern)
            if not is_local(pattern):
                _check_url(pattern, is_folder=needs_index or places[0].is_glob)
            paths = [place.folder if place.is_glob else join_url(place.folder, place.name) for place in places]
            if needs_index and is_local(pattern) and not any(os.path.exists(path or ".") for path in paths):
                raise nothing_matches(pattern)
            if is_absolute and is_local(pattern):
                places = [place._replace(folder=os.path.abspath(place.folder)) for place in places]
            ones = [_match(pattern, place, open_once(place.folder), part) for place in places]
            if not any(one.names for one in ones):
                raise nothing_matches(pattern)
            for one in ones:
                if found and found[-1].extend(one):
                    continue  # the many names of a brace pattern make one item
                if one.names:
                    found.append(one)
    if not found:
        raise StorageError("no shards: the list is empty. Name a path, a glob, a brace pattern or a folder.")
    return found


def _match(pattern: str, place: FolderPattern, index: Index | None, part: int) -> FolderShards:
    """Return the shards of one folder that `pattern` names. `find_shards` lists the errors."""
    folder, name, is_glob = place
    if not is_glob:
        return FolderShards(folder, index, [name], part, () if is_local(pattern) else (pattern,))
    if index is None and not is_local(pattern):
        index = any_index(folder) if scheme_of(folder) in LISTED_SCHEMES else read_index(folder)
    if index is not None:
        if name in ("*", "*.tar"):
            return FolderShards(folder, index, index.names, part)
        matches = re.compile(fnmatch.translate(name)).match
        return FolderShards(folder, index, [each for each in index.names if matches(each)], part)
    if is_local(folder) and has_run(folder):
        raise unfinished(folder)
    urls = files_of(folder)
    names = [*_select(urls, name)]
    return FolderShards(folder, None, names, part, () if is_local(pattern) else [urls[each] for each in names])


def files_of(folder: str) -> dict[str, str]:
    """Return the path or URL of each file in a local folder, or in a folder of a bucket, by file name.

    Raises:
        StorageError: The folder cannot be listed.
    """
    if not is_local(folder):
        from wdskit.storage.buckets import list_objects

        return {unquote(one.url.rpartition("/")[2]): one.url for one in list_objects(folder)}
    try:
        return {name: join_url(folder, name) for name in os.listdir(folder or ".")}
    except OSError as err:
        raise StorageError(f"{folder}: cannot be read: {err.strerror}.", url=folder) from err


def local_index(folder: str) -> Index | None:
    """Return the index of a local folder; None for a remote folder, or if the folder has no index. Raises
    FolderIndexError if the index is invalid.
    """
    return read_index(folder) if is_local(folder) and has_index(folder) else None


def any_index(folder: str) -> Index | None:
    """Return the index of a local or remote folder. Return None if the folder has no index, or if the store forbids
    reading it.

    Raises:
        FolderIndexError: The index is invalid.
        StorageError: The URL is invalid, its scheme is not supported, or the store cannot be read.
    """
    if is_local(folder):
        return local_index(folder)
    try:
        return read_index(folder)
    except FolderIndexError as err:
        if isinstance(err.__cause__, StorageError):  # there is no index.json
            return None
        raise


def check_found(found: Iterable[FolderShards], *, with_sizes: bool = False) -> None:
    """Raise the error of the first shard that does not exist, that the index of its folder does not list, or with
    `with_sizes` that has another size than in the index: a StorageError or a FolderIndexError. Remote shards are only
    compared with the names in the index.
    """
    for shards in found:
        for at, problem in shards.problems(with_sizes=with_sizes):
            raise shard_error(shards.url(at), problem)


def refuse_doubles(found: Iterable[FolderShards], remedy: str) -> None:
    """Raise StorageError if a shard is named twice, also by two spellings of its folder or a link to its folder.
    `remedy` says how to use a shard more often.
    """
    known: dict[str, set[str]] = defaultdict(set)
    for shards in found:
        names = known[shards.real_folder]
        for at, name in enumerate(shards.names):
            if name in names:
                url = shards.url(at)
                msg = f"{url}: this shard is named twice, so its samples would be used twice as often."
                raise StorageError(f"{msg}\n  Name it once. To use it more often, {remedy}.", url=url)
            names.add(name)


@dataclass(frozen=True)
class ShardList:
    """Shards in the order in which they were named.

    Attributes:
        urls: Path or URL of each shard.
        parts: For each shard, the number of the part that named it (see `FolderShards`).
        entries: For each shard, its index entry; None if the folder has no index, or if the index was not read.
    """

    urls: tuple[str, ...]
    parts: tuple[int, ...]
    entries: tuple[ShardEntry | None, ...]

    @classmethod
    def of(cls, found: Sequence[FolderShards]) -> ShardList:
        """Return the shards of a result of `find_shards`."""
        places = [(shards, at) for shards in found for at in range(len(shards.names))]
        return cls(
            urls=tuple([shards.url(at) for shards, at in places]),
            parts=tuple([shards.part for shards, _ in places]),
            entries=tuple([shards.entry(at) for shards, at in places]),
        )

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


def list_shards(
    shards: str | Sequence[str], open_index: OpenIndex | None = None, *, is_absolute: bool = False
) -> ShardList:
    """Find the shards that a user named, and check that they exist. See `find_shards` and `check_found`."""
    found = find_shards(shards, open_index, is_absolute=is_absolute)
    check_found(found)
    return ShardList.of(found)


def expand_parts(shards: str | Sequence[str]) -> list[Iterator[str]]:
    """Return one iterator for each `::`-part of `shards`, in order. Each iterator yields the paths, URLs, globs and
    folders of its part, with braces expanded. In a list, each item may have several parts.

    Raises:
        StorageError: At the call: a pattern is empty, its braces do not match, it names more than 2,000,000 shards, or
            its URL is invalid or has an unsupported scheme.
    """
    items = [shards] if isinstance(shards, str) else shards
    return [_expand_braces(part) for item in items for part in split_parts(item)]


def expand_patterns(shards: str | Sequence[str]) -> Iterator[str]:
    """Return an iterator over the paths, URLs, globs and folders of all parts in order (see `expand_parts`)."""
    return itertools.chain.from_iterable(expand_parts(shards))


def split_parts(item: str) -> list[str]:
    """Return the parts of a text that `::` separates. The name of an existing file is not split. The `::` of an
    IPv6 address in brackets does not separate: `http://[::1]/a.tar` is one part.
    """
    return [item] if "::" in item and os.path.lexists(item) else _JOINT.split(item)


def shown_path(path: str) -> str:
    """Return a path as a user wrote it, perhaps of several parts, without the secrets of its URLs. Raises StorageError
    if a URL is invalid.
    """
    return "::".join(map(shown_url, split_parts(path)))


def _expand_braces(pattern: str) -> Iterator[str]:
    if not pattern:
        raise StorageError("a shard pattern is empty. Name a path, a glob, a brace pattern or a folder.")
    scheme_of(pattern)
    if "{" not in pattern or os.path.lexists(pattern):
        return iter((pattern,))
    try:
        if _count_names(pattern) <= MAX_SHARD_NAMES:
            return braceexpand.braceexpand(pattern)
    except (ValueError, RecursionError) as err:
        msg = f"{pattern}: its braces do not match. Write {{000000..000127}} or {{a,b}}."
        raise StorageError(msg, url=pattern) from err
    msg = f"{pattern}: it names more than {MAX_SHARD_NAMES} shards. Name fewer, or a folder or a glob."
    raise StorageError(msg, url=pattern)


def _count_names(pattern: str) -> int:
    """Return how many names a brace pattern has at most, because braceexpand makes all names of a brace before the
    first. Raises ValueError if the braces do not match.
    """
    count = 1

    def remove(brace: re.Match[str]) -> str:
        nonlocal count
        found = _RANGE.fullmatch(brace[1])
        if found is None:
            count *= brace[1].count(",") + 1
        elif found[1] is None:
            count *= _MAX_LETTERS
        else:
            is_huge = len(found[0]) > _MAX_RANGE_CHARS
            count *= MAX_SHARD_NAMES + 1 if is_huge else abs(int(found[1]) - int(found[2])) + 1
        count = min(count, MAX_SHARD_NAMES + 1)
        return ""

    text, changes = re.sub(r"\\.", "", pattern), 1
    while changes:  # inner braces first
        text, changes = _INNER_BRACES.subn(remove, text)
    if "{" in text or "}" in text:
        raise ValueError("unbalanced braces")
    return count


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


def _check_url(url: str, *, is_folder: bool) -> None:
    """Raise StorageError if a URL has a query, which may be a signature for one file only, but a folder or its index
    is read. Or the URL names a folder of a web server without a slash at the end.
    """
    path, query, _ = url.partition("?")
    if is_folder and query:
        msg = f"{path}: a URL with a query names one shard, not a folder with its index."
        raise StorageError(f"{msg} Leave the query out, or name each shard of a `stream`.", url=path)
    name = split_url(path)[1]
    if is_folder and name and not _FILE_NAME.search(name):
        msg = f"{path}: this is not the name of a shard. A folder of a web server ends with a slash: {path}/"
        raise StorageError(msg, url=path)


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
    """Return the error for the shard `url`: a StorageError if `problem` is `ABSENT`, otherwise a FolderIndexError for a
    shard that does not match its index.
    """
    folder, name = split_url(url)
    if problem != ABSENT:
        msg = f"{join_url(folder, name)}: {problem}."
        if problem != LISTED_ABSENT:
            msg += f"\n  If the shard is right, run `wdskit index {folder or '.'}`."
        return FolderIndexError(msg, folder=folder)
    if url.startswith("~"):
        remedy = "Only a shell expands `~`: write ${HOME} in a configuration, or the whole path."
        return StorageError(f"{url}: {ABSENT}.\n  {remedy}", url=url)
    what = "shard" if url.rstrip("/").endswith(".tar") else "shard or folder"
    return StorageError(f"{url}: {describe_missing(url, what)}", url=url)


def nothing_matches(pattern: str) -> WdskitError:
    """Return the StorageError for a pattern that matches no shard."""
    if is_local(pattern) and not os.path.exists(local_path(pattern)) and not has_wildcards(local_path(pattern)):
        return shard_error(local_path(pattern), ABSENT)
    return StorageError(f"{pattern}: no shard matches.", url=pattern)
