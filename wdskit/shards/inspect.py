"""What shards hold, in a few numbers: `wdskit info`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from wdskit.dataset.binary import BinaryIndex
from wdskit.dataset.classes import read_classes
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.patterns import Target, find_shards
from wdskit.dataset.selection import list_selections, read_head
from wdskit.dataset.unfinished import find_unfinished
from wdskit.errors import ConfigError, FolderIndexError, SelectionError, WdskitError
from wdskit.limits import MAX_HELD_BYTES
from wdskit.shards.parallel import Progress, file_sizes, join_faults, read_shards
from wdskit.shards.payloads import Payloads, payload_size
from wdskit.storage.urls import is_local, local_path, open_stream
from wdskit.tar.reader import TarReader
from wdskit.tar.window import size_of


@dataclass(frozen=True)
class FieldSummary:
    """One field over all shards.

    Attributes:
        name: `jpg`, `json`, `cls`, ...
        num_shards: Shards in which it occurs.
        num_samples: Samples that have it; None from an index, which does not say.
        num_bytes: Its bytes in all samples; None from an index.
    """

    name: str
    num_shards: int
    num_samples: int | None
    num_bytes: int | None


@dataclass(frozen=True)
class SelectionSummary:
    """One selection of a folder.

    Attributes:
        name: `train`, `val`, ...
        num_samples: Samples in it; None where it is damaged.
        recipe: How it was made: a command of wdskit with its arguments, the folder left out.
        problem: Why it cannot be used, None where it can.
    """

    name: str
    num_samples: int | None
    recipe: str
    problem: str | None


@dataclass(frozen=True)
class Summary:
    """What `wdskit info` tells.

    Attributes:
        path: As the user wrote it.
        kind: `shard`, `folder` or `pattern`.
        source: `index` where the folder's index told it all, `scan` where the shards were read.
        num_shards: Shards.
        num_samples: Samples in all of them.
        num_bytes: Size of the files.
        samples_per_shard: The least, the median and the most.
        fields: All fields, sorted by name.
        num_ignored: Members that belong to no sample; None from an index.
        classes: Names by class number, from `classes.json` beside the shards; None where there is none.
        selections: Those of a local folder, sorted by name.
        unfinished: What a run of `pack` that has begun in this folder has come to, and how it goes on; None where all
            runs have finished.
    """

    path: str
    kind: Literal["shard", "folder", "pattern"]
    source: Literal["index", "scan"]
    num_shards: int
    num_samples: int
    num_bytes: int
    samples_per_shard: tuple[int, float, int]
    fields: tuple[FieldSummary, ...]
    num_ignored: int | None
    classes: tuple[str, ...] | None
    selections: tuple[SelectionSummary, ...]
    unfinished: str | None


def info(path: str, *, workers: int | None = None, progress: Progress | None = None) -> Summary:
    """Tell what a shard, a folder or a pattern holds: `wdskit info`.

    A folder with an index is told from it, without opening a shard. A single shard is always read, and so are shards
    without an index.

    Args:
        path: As `find_shards` takes it.
        workers: Processes that read; default as for `shards.index.index_folder`.
        progress: Called while shards are read.

    Raises:
        ShardError: A shard is invalid; where several are read, all that are not are listed.
        StorageError: There is nothing, or it cannot be read.
        FolderIndexError: The folder's index does not match its files.
    """
    target = find_shards(path)
    classes = _read_classes(target)
    if target.entries is not None:
        return _summarize_entries(target, target.entries, classes)
    contents: list[ShardContents] = []
    faults: list[WdskitError] = []
    for result in _read_all(target.urls, workers, progress):
        if isinstance(result, WdskitError):
            faults.append(result)
        else:
            contents.append(result)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise join_faults(path, faults, len(target.urls)) from faults[0]
    return _summarize_contents(target, contents, classes)


def _summarize_entries(target: Target, entries: tuple[ShardEntry, ...], classes: tuple[str, ...] | None) -> Summary:
    num_shards = Counter(name for entry in entries for name in entry.fields)
    fields = tuple(FieldSummary(name, num_shards[name], None, None) for name in sorted(num_shards))
    counts = [entry.num_samples for entry in entries]
    num_bytes = sum(entry.num_bytes for entry in entries)
    return _summary(target, "index", counts, num_bytes, fields, None, classes)


def _summarize_contents(target: Target, contents: list[ShardContents], classes: tuple[str, ...] | None) -> Summary:
    num_shards: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, (num_samples, num_bytes) in (item for shard in contents for item in shard.fields.items()):
        num_shards[name] += 1
        samples[name] += num_samples
        sizes[name] += num_bytes
    fields = tuple(FieldSummary(name, num_shards[name], samples[name], sizes[name]) for name in sorted(num_shards))
    counts = [shard.num_samples for shard in contents]
    total = sum(shard.num_bytes for shard in contents)
    num_ignored = sum(shard.num_ignored for shard in contents)
    return _summary(target, "scan", counts, total, fields, num_ignored, classes)


def _summary(
    target: Target,
    source: Literal["index", "scan"],
    counts: list[int],
    num_bytes: int,
    fields: tuple[FieldSummary, ...],
    num_ignored: int | None,
    classes: tuple[str, ...] | None,
) -> Summary:
    spread = (min(counts), statistics.median(counts), max(counts)) if counts else (0, 0, 0)
    return Summary(
        path=target.path,
        kind=target.kind,
        source=source,
        num_shards=len(counts),
        num_samples=sum(counts),
        num_bytes=num_bytes,
        samples_per_shard=spread,
        fields=fields,
        num_ignored=num_ignored,
        classes=classes,
        selections=_read_selections(target),
        unfinished=_read_record(target),
    )


def _read_record(target: Target) -> str | None:
    if target.kind != "folder" or not is_local(target.path):
        return None
    found = find_unfinished(Path(local_path(target.path)))
    return f"{found.problem}. {found.remedy}" if found else None


def _read_selections(target: Target) -> tuple[SelectionSummary, ...]:
    """What the selections of a local folder say of themselves."""
    if target.kind != "folder" or not is_local(target.path):
        return ()
    folder = Path(local_path(target.path))
    names = list_selections(folder)
    try:
        shards = BinaryIndex(folder).digest if names else b""
    except FolderIndexError:
        shards = b""
    return tuple(_read_selection(folder, name, shards) for name in names)


def _read_selection(folder: Path, name: str, shards: bytes) -> SelectionSummary:
    try:
        head = read_head(folder, name)
    except SelectionError:
        return SelectionSummary(name, None, "", "damaged, split again")
    problem = None if head.shards == shards else "made for other shards, split again"
    return SelectionSummary(name, head.num_samples, head.recipe, problem)


def _read_classes(target: Target) -> tuple[str, ...] | None:
    """The class names beside local shards that stand in one folder."""
    folders = {Path(local_path(url)).parent.resolve() for url in target.urls if is_local(url)}
    return read_classes(folders.pop()) if len(folders) == 1 else None


@dataclass(frozen=True)
class ShardRow:
    """One shard in a listing: `name` is the file name in a folder, the path or URL elsewhere."""

    name: str
    num_samples: int
    num_bytes: int
    fields: tuple[str, ...]


@dataclass(frozen=True)
class SampleRow:
    """One sample in a listing.

    Attributes:
        number: Its place in the shard, from 0.
        key: Its key.
        offset: Byte offset of its first header.
        fields: Name and size in bytes of each field, in the order of the members.
    """

    number: int
    key: str
    offset: int
    fields: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class MemberRow:
    """One member in a listing: `offset` is that of its first header, `num_bytes` the size of its data."""

    name: str
    offset: int
    num_bytes: int


def ls(path: str, *, limit: int | None = None, members: bool = False) -> Iterator[ShardRow | SampleRow | MemberRow]:
    """The shards of a folder or pattern, the samples of a shard, or its members: `wdskit ls`.

    Args:
        path: As `find_shards` takes it.
        limit: Stop after so many.
        members: List a shard's members.

    Yields:
        Rows of one kind.

    Raises:
        ConfigError: `members` of what is not one shard.
        ShardError: A shard is invalid; what is right has been yielded, of several shards those behind it too.
        StorageError: There is nothing, or it cannot be read.
        FolderIndexError: The folder's index does not match its files.
    """
    target = find_shards(path)
    if target.kind != "shard":
        if members:
            raise ConfigError(f"{path} is a {target.kind}, but members are those of one shard.")
        yield from list_right_shards(target, limit=limit)
    elif members:
        yield from islice(list_members(target.urls[0]), limit)
    else:
        yield from islice(list_samples(target.urls[0]), limit)


def list_right_shards(target: Target, *, limit: int | None = None) -> Iterator[ShardRow]:
    """The rows of the shards that are right; then an error that lists the others, if there are any."""
    faults: list[WdskitError] = []
    for row in list_shard_rows(target, limit=limit):
        if isinstance(row, WdskitError):
            faults.append(row)
        else:
            yield row
    if faults:
        raise join_faults(target.path, faults, len(target.urls[:limit])) from faults[0]


def list_shard_rows(
    target: Target, *, limit: int | None = None, workers: int | None = None
) -> Iterator[ShardRow | WdskitError]:
    """One row a shard, in order: `wdskit ls FOLDER`.

    Args:
        target: What `find_shards` found.
        limit: Stop after so many shards.
        workers: Processes that read where there is no index; default as for `shards.index.index_folder`.

    Yields:
        A row, or the error of a shard that is not right.
    """
    if target.entries is not None:
        for url, entry in zip(target.urls[:limit], target.entries, strict=False):
            yield ShardRow(_name(target, url), entry.num_samples, entry.num_bytes, entry.fields)
        return
    for result in _read_all(target.urls[:limit], workers, None):
        if isinstance(result, WdskitError):
            yield result
        else:
            yield ShardRow(_name(target, result.url), result.num_samples, result.num_bytes, tuple(result.fields))


def list_samples(url: str) -> Iterator[SampleRow]:
    """One row a sample of a shard, while it is read: `wdskit ls SHARD`.

    Raises:
        ShardError: The shard is invalid; the whole samples before the fault have been yielded.
        StorageError: It cannot be read.
    """
    with Payloads(url) as shard:
        for number, sample in enumerate(shard):
            fields = tuple((name, payload_size(data)) for name, data in sample.items() if not name.startswith("__"))
            yield SampleRow(number, sample["__key__"], shard.reader.starts[-1], fields)


def list_members(url: str) -> Iterator[MemberRow]:
    """One row a member of a tar, those of no sample included: `wdskit ls SHARD --members`. Raises as `list_samples`."""
    stream = open_stream(url)
    try:
        for name, offset, data in TarReader(stream.read, shard=url, hold_bytes=MAX_HELD_BYTES):
            yield MemberRow(name, offset, size_of(data))
    finally:
        stream.close()


def _name(target: Target, url: str) -> str:
    """What a listing calls a shard."""
    return url.rpartition("/")[2] if target.kind == "folder" else url


_TELL_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardContents:
    """What was found in a shard.

    Attributes:
        url: Path or URL of the shard.
        num_samples: Samples in it.
        num_bytes: Size of the file.
        num_ignored: Members that belong to no sample.
        fields: For each of its fields, sorted by name, the samples that have it and its bytes in all of them, tar
            headers and padding not counted.
    """

    url: str
    num_samples: int
    num_bytes: int
    num_ignored: int
    fields: dict[str, tuple[int, int]]


def read_contents(url: str, *, on_read: Callable[[int], None] | None = None) -> ShardContents:
    """Read a shard's headers and count what it holds; of a remote one all that lies between is read too.

    Args:
        url: Path or http(s) URL.
        on_read: Called now and then with the number of bytes that are behind since the last call.

    Raises:
        ShardError: The shard is invalid.
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
    fields = {name: (counts[name], sizes[name]) for name in sorted(counts)}
    return ShardContents(url, shard.reader.num_samples, num_bytes, shard.reader.num_ignored, fields)


def _read_all(
    urls: Sequence[str], workers: int | None, progress: Progress | None
) -> Iterator[ShardContents | WdskitError]:
    return read_shards(read_contents, urls, file_sizes(urls), workers=workers, progress=progress, counts_reads=True)
