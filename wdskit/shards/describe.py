"""What shards hold, in a few numbers: `wdskit info`."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wdskit.dataset.binary import BinaryIndex
from wdskit.dataset.classes import read_classes
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.selection_head import list_selections, read_head
from wdskit.dataset.unfinished import find_unfinished
from wdskit.errors import FolderIndexError, SelectionError, WdskitError
from wdskit.shards.contents import Progress, ShardContents, Target, find_shards, join_faults, read_all
from wdskit.storage.urls import is_local, local_path


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
        workers: Processes that read; default as for `shards.indexing.index_folder`.
        progress: Called while shards are read.

    Raises:
        ShardError: A shard is not right; where several are read, all that are not are listed.
        StorageError: There is nothing, or it cannot be read.
        FolderIndexError: The folder's index does not match its files.
    """
    target = find_shards(path)
    classes = _read_classes(target)
    if target.entries is not None:
        return _summarize_entries(target, target.entries, classes)
    contents: list[ShardContents] = []
    faults: list[WdskitError] = []
    for result in read_all(target.urls, workers, progress):
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
    found = [field for shard in contents for field in shard.fields]
    num_shards = Counter(field.name for field in found)
    samples: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for field in found:
        samples[field.name] += field.num_samples
        sizes[field.name] += field.num_bytes
    fields = tuple(FieldSummary(name, num_shards[name], samples[name], sizes[name]) for name in sorted(num_shards))
    counts = [shard.num_samples for shard in contents]
    num_bytes = sum(shard.num_bytes for shard in contents)
    num_ignored = sum(shard.num_ignored for shard in contents)
    return _summary(target, "scan", counts, num_bytes, fields, num_ignored, classes)


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
