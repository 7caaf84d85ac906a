"""Check the index, structure and content of shards, and report all faults: `wdskit verify`.

`shards.verify_shard` finds the faults of one shard. This module finds all others: a damaged index, missing shards,
repeated keys, and samples with other fields.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from wdskit.codecs.checks import IMAGE_CHECKS, ImageCheck
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASSES_NAME, read_classes
from wdskit.dataset.columns import COLUMNS_NAME, columns
from wdskit.dataset.index import INDEX_NAME, Index, ShardEntry, has_run, join_url, unfinished
from wdskit.dataset.keys import find_repeated
from wdskit.dataset.patterns import UNLISTED, any_index, find_shards, shard_error, shown_path, split_url
from wdskit.errors import ConfigError, FolderIndexError, StorageError, WdskitError
from wdskit.limits import MAX_LISTED
from wdskit.shards.info import other_tars
from wdskit.shards.parallel import Progress, file_size, read_shards
from wdskit.shards.verify_shard import NOTES, CheckJob, Fields, Finding, Kind, ShardReport, check_shard
from wdskit.storage.urls import ABSENT_STATUSES, is_local, open_ranges, shown_url
from wdskit.tar.names import split_name
from wdskit.tar.walk import TarWalk
from wdskit.text import plural, shorten


@dataclass(frozen=True)
class VerifyResult:
    """Result of `verify`.

    Attributes:
        path: The path that the user named, without secrets.
        num_shards: Shards that were checked, including shards that cannot be read.
        num_samples: Whole samples that were read; in a damaged shard, the samples before the damage.
        num_bytes: Bytes that were read.
        num_images: Images that were checked.
        num_large: Members that were not checked because they are too large.
        num_ignored: Members that belong to no sample.
        is_indexed: Whether at least one folder has an index. The shards of such a folder were compared with the index,
            if the index is valid.
        findings: Faults and notes: of the indexes, then of columns, then of each shard in order, then of all shards
            together.
    """

    path: str
    num_shards: int
    num_samples: int
    num_bytes: int
    num_images: int
    num_large: int
    num_ignored: int
    is_indexed: bool
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        """Return one line: path, samples, shards, and whether they are clean."""
        read = f"{plural(self.num_samples, 'sample')} in {plural(self.num_shards, 'shard')}"
        return f"VerifyResult({self.path}: {read}, {'clean' if self.is_clean else 'not clean'})"

    @property
    def is_clean(self) -> bool:
        """True if no fault was found. Notes (`NOTES`) are not faults."""
        return all(finding.kind in NOTES for finding in self.findings)


def verify(
    path: str | Path,
    *,
    images: ImageCheck = "structure",
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Read every shard from end to end and report all faults: `wdskit verify`.

    Every field that a loader decodes is decoded. Memory: 24 bytes per sample, and in each process up to 32 MiB of one
    member.

    Args:
        path: A shard, folder, glob or brace pattern, local or remote; several joined by `::`. If a folder has an index,
            the shards are compared with it. A remote folder or glob needs an index.
        images: `none`, `structure` (compare the format with the name, JPEG markers up to the end marker, PNG checksums)
            or `decode` (decode all pixels too).
        workers: Number of processes that read. Default: the number of CPUs, fewer for little data.
        progress: Called after each shard with the bytes read so far and the bytes of all shards (None if unknown).

    Raises:
        StorageError: No shard was found, or a folder or remote index cannot be read.
        FolderIndexError: A remote folder has no index.
        ConfigError: `images` has an invalid value.
        WdskitError: A worker process was killed, or a number is out of range.
    """
    if images not in IMAGE_CHECKS:
        raise ConfigError(f"images are checked as {', '.join(IMAGE_CHECKS)}, not {images!r}.")
    target = find_targets(str(path))
    shown = shown_path(str(path))
    classes: dict[str, tuple[str, ...] | None] = {}
    for folder in sorted({split_url(name)[0] for name in target.shards}):
        try:
            classes[folder] = read_classes(folder)
        except WdskitError as err:
            target.add(join_url(folder, CLASSES_NAME), err)
    for folder in sorted(folder for folder, index in target.indexes.items() if index is not None):
        check_columns(folder, target)
    jobs = [
        CheckJob(
            path=name,
            entry=entry,
            images=images,
            num_classes=None if (names := classes.get(split_url(name)[0])) is None else len(names),
        )
        for name, entry in target.shards.items()
    ]
    sizes = [job.entry.num_bytes if job.entry and not is_local(job.path) else file_size(job.path) for job in jobs]
    reports = list(read_shards(check_shard, jobs, sizes, workers=workers, progress=progress))
    findings = [*target.findings, *(found for one in reports for found in one.findings)]
    findings += [*find_repeats(reports), *find_odd(reports)]
    if reports and all(one.is_whole and not one.num_samples for one in reports):
        findings.append(Finding("samples", shown, "there are no samples in these shards"))
    return VerifyResult(
        path=shown,
        num_shards=len(jobs),
        num_samples=sum(one.num_samples for one in reports),
        num_bytes=sum(one.num_bytes for one in reports),
        num_images=sum(one.num_images for one in reports),
        num_large=sum(one.num_large for one in reports),
        num_ignored=sum(one.num_ignored for one in reports),
        is_indexed=bool(target.indexes),
        findings=tuple(findings),
    )


@dataclass
class Targets:
    """The shards to verify.

    Attributes:
        shards: Maps the path or URL of each existing shard to its index entry; None if no index lists the shard. Shards
            of a folder have the order of its index; without an index, they are sorted by name.
        findings: Faults and notes of the indexes, and shards that are missing or not listed.
        indexes: The index of each folder that has an index; None if the index cannot be read.
    """

    shards: dict[str, ShardEntry | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    indexes: dict[str, Index | None] = field(default_factory=dict)

    def add(self, path: str, err: WdskitError, kind: Kind = "index") -> None:
        """Add the first line of an error as a finding of the file `path`."""
        problem = str(err).removeprefix(f"{shown_url(path)}: ").partition("\n")[0].rstrip(".")
        self.findings.append(Finding(kind, shown_url(path), shorten(problem)))


def find_targets(path: str) -> Targets:
    """Find the shards and read the indexes of their folders. A missing or unlisted shard is a finding, not an error.

    Args:
        path: A shard, folder, glob or brace pattern; several joined by `::`.

    Raises:
        StorageError: No shard was found, or a folder or remote index cannot be read.
        FolderIndexError: A remote folder has no index, or a local folder has no index because a run of `wdskit pack` is
            unfinished.
    """
    targets = Targets()
    found = find_shards(path, partial(_open_index, targets))
    for one in found:
        problems = dict(one.problems())
        for at in range(len(one.names)):
            problem = problems.get(at, "")
            if problem:
                kind: Kind = "unlisted" if problem == UNLISTED else "missing"
                targets.findings.append(Finding(kind, shown_url(one.url(at)), problem))
            if problem in ("", UNLISTED):
                targets.shards[one.url(at)] = one.entry(at)
    if not targets.shards and not targets.indexes:
        raise shard_error(found[0].url(0), next(found[0].problems())[1])
    return targets


def _open_index(targets: Targets, folder: str) -> Index | None:
    """Return the index of a folder; None if it is missing or invalid. Add it and its findings to `targets`.

    Raises:
        StorageError: The index or bucket cannot be read.
    """
    path = join_url(folder, INDEX_NAME)
    if is_local(folder) and has_run(folder):
        targets.add(folder or ".", unfinished(folder), "unfinished")
    try:
        index = any_index(folder)
    except FolderIndexError as err:
        targets.indexes[folder] = None
        targets.add(path, err)
        return None
    if index is None:
        return None
    targets.indexes[folder] = index
    if others := other_tars(index):
        problem = f"{plural(len(others), 'other tar')} beside the index, not part of the data, first {others[0]}"
        targets.findings.append(Finding("beside", shown_url(path), problem))
    return index


def check_columns(folder: str, targets: Targets) -> None:
    """Compare the columns of an indexed folder with their digests and with the index. Add a finding to `targets` if
    they are damaged or cannot be read.
    """
    try:
        found = columns(folder)
        for name in found:
            found.column(name).check()
    except WdskitError as err:
        is_unread = isinstance(err, StorageError) and err.status not in ABSENT_STATUSES
        targets.add(join_url(folder, COLUMNS_NAME), err, "unchecked" if is_unread else "index")


def find_odd(reports: Sequence[ShardReport]) -> list[Finding]:
    """Find samples whose fields differ from the most common set of fields. Return one finding for each other set.

    The most frequent of the other sets comes first. `more` of the last finding is the number of sets after the first
    `MAX_LISTED`. All image formats count as one field: samples with `jpg` and with `png` have the same fields.

    `reports` are the reports of all shards.
    """
    counts: Counter[Fields] = Counter()
    first: dict[Fields, tuple[str, str]] = {}  # path and key of the first sample
    for report in reports:
        for names, (count, key) in report.field_sets.items():
            kinds = tuple(sorted(map(_kind_of, names)))
            counts[kinds] += count
            first.setdefault(kinds, (shown_url(report.path), key))
    (most, _), *others = counts.most_common() or [((), 0)]
    found = []
    for kinds, count in others[:MAX_LISTED]:
        path, key = first[kinds]
        problem = f"its fields are {shorten(', '.join(kinds))}; most have {shorten(', '.join(most))}"
        found.append(Finding("odd", path, f"{problem} ({plural(count, 'sample')}; this is the first)", key=key))
    return _limited(found, len(others))


def _limited(found: list[Finding], num: int) -> list[Finding]:
    """Return the findings `found`, of `num` that there are: `more` of the last one is the number of the others."""
    return [*found[:-1], replace(found[-1], more=max(0, num - MAX_LISTED))] if found else []


def _kind_of(name: str) -> str:
    """Return the field's name with `image` in place of an image format. Other names are not changed."""
    return f"{name.rpartition('.')[0]}.image".lstrip(".") if is_image_field(name) else name


def find_repeats(reports: Sequence[ShardReport]) -> list[Finding]:
    """Return one finding for each key that several samples have, but only for `MAX_LISTED` repeated key hashes. `more`
    of the last finding is the number of further repeated hashes. Keys with equal hashes are read and compared; a key
    that cannot be read again counts as repeated.

    `reports` are the reports of all shards.
    """
    repeated = find_repeated(*(one.hashes for one in reports))
    found: dict[int, Finding] = {}
    known: dict[str, ShardReport] = {}
    for report in reports:
        for number in np.flatnonzero(np.isin(report.hashes, repeated[:MAX_LISTED])).tolist():
            digest = int(report.hashes[number])
            if digest in found:
                continue
            key = read_key(report, number)
            if key is not None and key not in known:
                known[key] = report
                continue
            where = "in two places that are not side by side"
            if key is not None and known[key] is not report:
                where = f"also in {shown_url(known[key].path)}"
            start, shown = int(report.starts[number]), shown_url(report.path)
            found[digest] = Finding("repeated", shown, f"it is {where}", start, key and shorten(key))
    return _limited([*found.values()], len(repeated))


def read_key(report: ShardReport, number: int) -> str | None:
    """Return the key of sample `number` of a shard, read from the file; None if the headers cannot be read any more."""
    start = int(report.starts[number])
    try:
        with contextlib.closing(open_ranges(report.path)) as file:
            members = TarWalk(file.read_at, file.num_bytes, shard=report.path, start=start)
            return next(split[0] for name, _, _ in members if (split := split_name(name)))
    except (WdskitError, StopIteration):
        return None
