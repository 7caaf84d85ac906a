"""Finding the shards that a path names, and reading what each one holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from wdskit.dataset.index import ShardEntry, read_index
from wdskit.dataset.patterns import list_shards
from wdskit.errors import ShardError, WdskitError
from wdskit.shards.parallel import choose_workers, map_shards
from wdskit.shards.payloads import Payloads, payload_size
from wdskit.storage.urls import is_local, local_path

_TELL_BYTES = 1 << 20

Progress = Callable[[int, int | None], None]
"""Told while shards are read: bytes read so far, bytes in all or None where that is unknown (http)."""


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


@dataclass(frozen=True)
class FieldContents:
    """One field in one shard.

    Attributes:
        name: `jpg`, `json`, `cls`, ...
        num_samples: Samples that have it.
        num_bytes: Its bytes in all of them, tar headers and padding not counted.
    """

    name: str
    num_samples: int
    num_bytes: int


@dataclass(frozen=True)
class ShardContents:
    """What was found in a shard.

    Attributes:
        url: Path or URL of the shard.
        num_samples: Samples in it.
        num_bytes: Size of the file.
        num_ignored: Members that belong to no sample.
        fields: Its fields, sorted by name.
    """

    url: str
    num_samples: int
    num_bytes: int
    num_ignored: int
    fields: tuple[FieldContents, ...]


def find_shards(path: str) -> Target:
    """Find out what a path is, and the shards it names.

    Args:
        path: A shard, a folder, or a pattern as `dataset.patterns.list_shards` takes it; local or http(s). A file that
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


def read_contents(url: str, *, on_read: Callable[[int], None] | None = None) -> ShardContents:
    """Read a shard's headers and count what it holds; of a remote one all that lies between is read too.

    Args:
        url: Path or http(s) URL.
        on_read: Called now and then with the number of bytes that are behind since the last call.

    Raises:
        ShardError: The shard is not right.
        StorageError: It cannot be read.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    behind = 0
    with Payloads(url) as shard:
        for sample in shard:
            for name, data in sample.items():
                if not name.startswith("__"):
                    counts[name] += 1
                    sizes[name] += payload_size(data)
            start = shard.reader.starts[-1]
            if on_read and start - behind >= _TELL_BYTES:
                on_read(start - behind)
                behind = start
        num_bytes = shard.num_bytes
    if on_read:
        on_read(num_bytes - behind)
    fields = tuple(FieldContents(name, counts[name], sizes[name]) for name in sorted(counts))
    return ShardContents(url, shard.reader.num_samples, num_bytes, shard.reader.num_ignored, fields)


def read_all(
    urls: tuple[str, ...], workers: int | None, progress: Progress | None
) -> Iterator[ShardContents | WdskitError]:
    """Yield the contents of shards in order, or the error of one that is not right.

    Args:
        urls: The shards.
        workers: Processes that read; default as `shards.parallel.choose_workers` says.
        progress: Called while they are read.
    """
    num_bytes = _total_bytes(urls)
    num_workers = choose_workers(len(urls), num_bytes) if workers is None else workers
    num_bytes_done = 0

    def add(num: int) -> None:
        nonlocal num_bytes_done
        num_bytes_done += num
        if progress:
            progress(num_bytes_done, num_bytes)

    if num_workers == 1 or len(urls) == 1:
        yield from map_shards(partial(read_contents, on_read=add), urls, workers=1)
        return
    for result in map_shards(read_contents, urls, workers=num_workers):
        if isinstance(result, ShardContents):
            add(result.num_bytes)
        yield result


def _total_bytes(urls: tuple[str, ...]) -> int | None:
    """Size of local files; None where one is remote or cannot be asked."""
    try:
        return sum(Path(local_path(url)).stat().st_size for url in urls) if all(map(is_local, urls)) else None
    except OSError:
        return None  # reading the shard says what is wrong


def join_faults(path: str, faults: Iterable[WdskitError], num_shards: int) -> ShardError:
    """One error that lists those of several shards."""
    faults = list(faults)
    head = f"{path}: {len(faults)} of {num_shards} shards are not right.\n"
    return ShardError(head + "\n".join(map(str, faults)), shard=path)
