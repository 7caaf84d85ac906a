"""Describe shards and read one field: `wdskit info` and `wdskit cat`."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from wdskit.dataset.classes import CLASS_FIELD, read_classes
from wdskit.dataset.columns import Column, columns
from wdskit.dataset.index import Index, ShardEntry, has_run
from wdskit.dataset.patterns import (
    ShardList,
    any_index,
    check_found,
    expand_patterns,
    files_of,
    find_folders,
    find_shards,
    shown_path,
    split_url,
)
from wdskit.dataset.where import Mask, Where
from wdskit.errors import KeyRuleError, SelectionError, WdskitError, check_whole
from wdskit.shards.lazy_shard import LazyShard, field_size, fields_of
from wdskit.shards.parallel import Progress, file_size, read_shards
from wdskit.storage.urls import LISTED_SCHEMES, is_local, local_path, scheme_of, shown_url
from wdskit.tar.names import split_name
from wdskit.text import shorten

_KINDS = {"b": "bool", "u": "int", "i": "int", "f": "float"}
_MAX_COUNTED = 100  # samples are counted by value if a column, other than labels, has at most this number of values
_COUNTED_BYTES = 2  # and if a value takes at most this number of bytes
_LABEL_BYTES = 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Target:
    """The shards that a user's path names.

    Attributes:
        kind: "shard" if the path names one shard, "folder" if it names a folder, "pattern" for a glob, a brace pattern
            or several paths joined by `::`.
        urls: Path or URL of each shard, in order.
        entries: Index entry of each shard. The sizes of local files match the entries. None if `kind` is "shard", or if
            a shard has no index entry.
        index: The index of the folder; None if `kind` is not "folder", or if the folder has no index.
    """

    kind: Literal["shard", "folder", "pattern"]
    urls: tuple[str, ...]
    entries: tuple[ShardEntry, ...] | None
    index: Index | None = None


def find_target(path: str) -> Target:
    """Find the shards of a user's path: a shard, a folder, a glob or a brace pattern; or several joined by `::`.

    If the path names one shard, the index of its folder is not read.

    Raises:
        StorageError: No shard matches, a local shard is missing, a pattern or a scheme is invalid, or a bucket cannot
            be listed.
        FolderIndexError: An index is invalid or does not match the shards on disk, or a remote folder has no index. Or
            a local folder has no index because a run of `wdskit pack` is unfinished.
    """
    is_plain = [*expand_patterns(path)] == [path]
    is_here = is_local(path) and os.path.isdir(local_path(path))  # noqa: PTH112 (no error)
    is_folder = is_plain and (is_here or not split_url(path)[1])
    is_shard = is_plain and not any(place.is_glob for place in find_folders(path))
    found = find_shards(path, (lambda _: None) if is_shard else any_index)
    check_found(found, with_sizes=True)
    shards = ShardList.of(found)
    entries = [entry for entry in shards.entries if entry is not None]
    return Target(
        "shard" if is_shard else "folder" if is_folder else "pattern",
        shards.urls,
        tuple(entries) if len(entries) == len(shards.urls) else None,
        found[0].index if is_folder else None,
    )


def other_tars(index: Index) -> list[str]:
    """Return the names of the tars in the folder of an index that the index does not list, sorted. They are not part of
    the data. Only a local folder and a folder of a bucket can be listed; for another folder the result is empty.

    Raises:
        StorageError: The folder cannot be listed.
    """
    if index.is_remote and scheme_of(index.folder) not in LISTED_SCHEMES:
        return []
    names = sorted(files_of(index.folder))
    return [name for name in names if name.endswith(".tar") and name[0] != "." and name not in index.by_name]


@dataclass(frozen=True)
class FieldSummary:
    """One field of a shard or of several shards.

    Attributes:
        name: `jpg`, `json`, `cls`, ...
        num_shards: Shards with the field.
        num_samples: Samples with the field; None if only the index was read, which does not store this number.
        num_bytes: Bytes of the field in all samples; None if only the index was read.
    """

    name: str
    num_shards: int
    num_samples: int | None
    num_bytes: int | None


@dataclass(frozen=True)
class ColumnSummary:
    """One column of a folder: a value for each sample.

    Attributes:
        source: What the values come from, as text: a path such as `width` or `json.score`, or a split.
        kind: `bool`, `int`, `float` or `text`.
        values: Number of samples by value; None for float, and for over 100 different values (65,536 for labels).
        limits: The smallest and the largest number; None for bool and text, and without numbers.
    """

    name: str
    source: str
    kind: str
    values: dict[str, int] | None = None
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class ShardRow:
    """One shard. `name` is the file name if a folder is described, otherwise the path or URL."""

    name: str
    num_samples: int
    num_bytes: int
    fields: tuple[str, ...]


@dataclass(frozen=True)
class SampleRow:
    """One sample of a shard.

    Attributes:
        number: Number of the sample in the shard, from 0.
        key: The sample's key.
        offset: Byte offset of the first header.
        fields: Size in bytes of each field, in the order of the members.
    """

    number: int
    key: str
    offset: int
    fields: dict[str, int]


@dataclass(frozen=True)
class Summary:
    """Result of `info`.

    Attributes:
        path: The path or URL that the user wrote, without secrets.
        source: `index` if only the folder's index was read, `scan` if the shards were read.
        num_matching: Samples for which the condition `where` is true; None without a condition.
        num_bytes: Size of the shards' files.
        samples_per_shard: Minimum, median and maximum; (0, 0, 0) without shards.
        fields: All fields, sorted by name.
        num_ignored: Members that belong to no sample; None if only the index was read.
        classes: Class names in the order of the class numbers, from the `classes.json` of the shards' folder; None
            without that file, or if the shards are in several folders.
        class_counts: Number of samples by class name, or by number for a class without a name; only classes with
            samples. None if only the index was read and the folder has no column `cls`, or without labels.
        columns: Columns of an indexed folder, local or in a bucket; empty for anything else.
        shards: The first `num` shards of a folder or pattern, in order; empty for a shard.
        samples: The first `num` samples of a shard, in order; empty for a folder or pattern.
        num_others: Tars beside the index of a local folder or bucket that the index does not list, and that are not
            part of the data.
        is_unfinished: Whether a run of `pack` in this local folder is active or was stopped.
    """

    path: str
    kind: Literal["shard", "folder", "pattern"]
    source: Literal["index", "scan"]
    num_shards: int
    num_samples: int
    num_matching: int | None
    num_bytes: int
    samples_per_shard: tuple[int, float, int]
    fields: tuple[FieldSummary, ...]
    num_ignored: int | None
    classes: tuple[str, ...] | None
    class_counts: dict[str, int] | None
    columns: tuple[ColumnSummary, ...]
    shards: tuple[ShardRow, ...]
    samples: tuple[SampleRow, ...]
    num_others: int
    is_unfinished: bool


def info(
    path: str,
    *,
    num: int = 5,
    where: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Describe a shard, a folder or a pattern: `wdskit info`. If all shards of a folder or pattern are in an index, no
    shard is opened. Otherwise all shards are read.

    Args:
        path: A shard, folder, glob or brace pattern, local or remote; several joined by `::`.
        num: Number of shards of a folder, or of samples of a shard, to list.
        where: A condition on the columns of a folder, such as `width >= 256`: the values of columns and the classes are
            counted only for samples for which it is true.
        workers: Number of processes that read. Default: the number of CPUs, fewer for little data.
        progress: Called after each shard that was read, with the bytes read so far and the bytes of all shards (None if
            unknown).

    Raises:
        ShardError: Shards are invalid; the message lists them.
        StorageError: No shard was found, or a shard cannot be read.
        FolderIndexError: The folder's index is invalid or does not match its files, or `classes.json` is invalid.
        SelectionError: The `columns.json` of the folder is damaged, or the condition is invalid. With a condition: the
            path is not a folder with columns.
        WdskitError: A worker process was killed, or a number is out of range.
    """
    num = check_whole("num", num, WdskitError)
    target = find_target(path)
    is_scan = target.entries is None
    shards: Sequence[ShardEntry | ShardContents] = target.entries or ()
    if is_scan:
        read = partial(read_contents, num=num if target.kind == "shard" else 0)
        sizes_of = [*map(file_size, target.urls)]
        shards = [*read_shards(read, target.urls, sizes_of, workers=workers, progress=progress)]
    counts = [shard.num_samples for shard in shards]
    scanned = [shard for shard in shards if isinstance(shard, ShardContents)]
    num_samples, sizes, labels = Counter[str](), Counter[str](), Counter[str]()
    for shard in scanned:
        num_samples.update(shard.fields)
        sizes.update(shard.sizes)
        labels.update(shard.labels)
    names = [shown_url(url) for url in target.urls[: 0 if target.kind == "shard" else num]]
    names = [name.rpartition("/")[2] for name in names] if target.kind == "folder" else names
    rows = zip(names, shards, strict=False)
    num_shards = Counter(name for shard in shards for name in shard.fields)
    summaries: tuple[ColumnSummary, ...] = ()
    mask: Mask | None = None
    if where is not None and target.index is None:
        raise SelectionError(f"{shown_path(path)}: where: only a folder with an index has columns.")
    if target.index is not None and (where is not None or is_local(path) or scheme_of(path) in LISTED_SCHEMES):
        stored = columns(path)
        mask = None if where is None else Where(where).mask(stored)
        summaries = tuple(_summarize(stored.column(name), mask) for name in stored)
    classes = read_target_classes(target)
    labels.update(next((one.values for one in summaries if one.source == CLASS_FIELD and one.values), {}))
    return Summary(
        path=shown_path(path),
        kind=target.kind,
        source="scan" if is_scan else "index",
        num_shards=len(counts),
        num_samples=sum(counts),
        num_matching=None if mask is None else int(mask.sum()),
        num_bytes=sum(shard.num_bytes for shard in shards),
        samples_per_shard=(min(counts), statistics.median(counts), max(counts)) if counts else (0, 0, 0),
        fields=tuple(
            FieldSummary(name, num_shards[name], num_samples.get(name), sizes.get(name)) for name in sorted(num_shards)
        ),
        num_ignored=sum(shard.num_ignored for shard in scanned) if is_scan else None,
        classes=classes,
        class_counts=_name_classes(labels, classes or ()),
        columns=summaries,
        shards=tuple(ShardRow(name, one.num_samples, one.num_bytes, tuple(one.fields)) for name, one in rows),
        samples=scanned[0].samples if target.kind == "shard" else (),
        num_others=len(other_tars(target.index)) if target.index else 0,
        is_unfinished=target.kind == "folder" and is_local(path) and has_run(local_path(path)),
    )


def class_name(label: str, classes: Sequence[str]) -> str:
    """Return the name of a class: the name in `classes` whose number is `label`, or else `label`."""
    label = label.strip()
    is_known = label.isascii() and label.isdecimal() and int(label) < len(classes)
    return classes[int(label)] if is_known else label


def _name_classes(labels: Counter[str], classes: Sequence[str]) -> dict[str, int] | None:
    """Return the number of samples by class, in the order of the numbers; None without labels."""
    counts: Counter[str] = Counter()
    for label in sorted(labels, key=lambda label: (len(label), label)):
        counts[class_name(label, classes)] += labels[label]
    return dict(counts) or None


def _summarize(column: Column, mask: Mask | None) -> ColumnSummary:
    """Return the summary of a column, whose whole file is read, for the samples of the mask."""
    kind = "text" if column.values is not None else _KINDS[np.dtype(column.dtype).kind]
    source = ", ".join(str(value) if key == "path" else f"{key} {value}" for key, value in column.source.items())
    counts: Counter[int] = Counter()
    low, high = math.inf, -math.inf
    first = 0
    for chunk in column.chunks(_PIECE_BYTES):
        part = chunk if mask is None else chunk[mask[first : first + len(chunk)]]
        first += len(chunk)
        if not len(part):
            continue
        low, high = min(low, np.fmin.reduce(part).item()), max(high, np.fmax.reduce(part).item())
        if part.dtype.itemsize <= _COUNTED_BYTES:
            found, numbers = np.unique(part, return_counts=True)
            counts.update(dict(zip(found.tolist(), numbers.tolist(), strict=True)))
    limits = (low, high) if kind in {"int", "float"} and low <= high else None
    if not counts or (len(counts) > _MAX_COUNTED and source != CLASS_FIELD):
        return ColumnSummary(column.name, source, kind, limits=limits)
    names = column.values or (("false", "true") if kind == "bool" else None)
    values = {names[at] if names else str(at): number for at, number in sorted(counts.items())}
    return ColumnSummary(column.name, source, kind, values, limits)


def read_target_classes(target: Target) -> tuple[str, ...] | None:
    """Return the class names in the shards' folder; None without classes.json, or for shards in several folders.

    Raises FolderIndexError if classes.json is invalid, and StorageError if it cannot be read.
    """
    folders = {Path(local_path(url)).parent.resolve() if is_local(url) else split_url(url)[0] for url in target.urls}
    return read_classes(folders.pop()) if len(folders) == 1 else None


@dataclass(frozen=True)
class ShardContents:
    """Counts and sizes of the samples and fields of a shard.

    Attributes:
        num_ignored: Members that belong to no sample.
        fields: Number of samples with each field, sorted by name.
        sizes: Bytes of each field in all samples, without tar headers and padding.
        labels: Number of samples by the text of the field `cls`.
        samples: The first samples.
    """

    num_samples: int
    num_bytes: int
    num_ignored: int
    fields: dict[str, int]
    sizes: dict[str, int]
    labels: dict[str, int]
    samples: tuple[SampleRow, ...]


def read_contents(url: str, *, num: int) -> ShardContents:
    """Count the samples and fields of a shard, and list its first `num` samples. Of a local shard only headers and
    labels are read, of a remote shard all bytes.

    Raises:
        ShardError: The shard is invalid.
        StorageError: The shard cannot be read.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    samples: list[SampleRow] = []
    with LazyShard(url) as shard:
        for number, sample in enumerate(shard):
            fields = {name: field_size(data) for name, data in fields_of(sample)}
            counts.update(fields.keys())
            sizes.update(fields)
            if CLASS_FIELD in fields:
                labels[shard.part(sample[CLASS_FIELD], _LABEL_BYTES).decode(errors="replace").strip()] += 1
            if number < num:
                samples.append(SampleRow(number, sample["__key__"], shard.reader.starts[-1], fields))
        read, fields = shard.reader, dict(sorted(counts.items()))
        num_bytes, num_ignored = shard.num_bytes, read.num_ignored
    return ShardContents(read.num_samples, num_bytes, num_ignored, fields, sizes, labels, tuple(samples))


def cat(url: str, name: str) -> bytes:
    """Read one field of one sample: `wdskit cat`.

    Args:
        url: Path or URL of a shard.
        name: Key and field as in the shard: `photos/cat/000003.json`.

    Raises:
        KeyRuleError: The name is not a key and a field, or the shard has no such sample or field.
        ShardError: The shard is invalid before the end of the sample.
        StorageError: The shard cannot be read.
    """
    return b"".join(cat_pieces(url, name))


def cat_pieces(url: str, name: str) -> Iterator[bytes]:
    """Yield the field that `cat` returns, in pieces. The headers of the whole sample are checked before the first piece
    is yielded. `cat` lists the errors.
    """
    split = split_name(name)
    if split is None:
        raise KeyRuleError(f"{name!r} is not KEY.FIELD. Write both, such as photos/cat/000003.json.", name=name)
    key, wanted = split
    shown = shown_url(url)
    with LazyShard(url) as shard:
        for sample in shard:
            if sample["__key__"] == key:
                if wanted in sample:
                    for start in range(0, field_size(sample[wanted]), _PIECE_BYTES):
                        yield shard.part(sample[wanted], _PIECE_BYTES, start)
                    return
                known = shorten(", ".join(name for name, _ in fields_of(sample)))
                raise KeyRuleError(f"{shown}: sample {key!r} has no field {wanted!r}. It has: {known}.", name=name)
    raise KeyRuleError(f"{shown}: none of its {shard.reader.num_samples} samples has the key {key!r}.", name=name)
