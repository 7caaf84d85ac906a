"""Check the index, structure and content of shards, and report all faults: `wdskit verify`.

`shards.verify_shard` finds the faults of one shard. This module finds all others: a damaged index, missing shards,
repeated keys, samples with other fields, and uneven shards.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from wdskit.codecs.checks import IMAGE_CHECKS, ImageCheck
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASSES_NAME, read_classes
from wdskit.dataset.columns import COLUMNS_NAME, columns
from wdskit.dataset.index import INDEX_NAME, Index, ShardEntry, has_index, has_run, join_url, read_index
from wdskit.dataset.keys import find_repeated, is_among
from wdskit.dataset.patterns import UNLISTED, find_shards, shard_error, split_parts, split_url
from wdskit.dataset.shard import offsets_path
from wdskit.errors import ConfigError, FolderIndexError, SelectionError, StorageError, WdskitError
from wdskit.limits import MAX_INDEX_BYTES, MAX_LISTED, MAX_PIXELS
from wdskit.shards.listing import other_tars
from wdskit.shards.parallel import Progress, file_sizes, read_shards
from wdskit.shards.sampling import check_seed, parse_share
from wdskit.shards.verify_shard import NOTES, CheckJob, Fields, Finding, Kind, ShardReport, check_shard
from wdskit.storage.urls import (
    ABSENT_STATUSES,
    NO_RANGES,
    is_local,
    open_ranges,
    read_bytes,
    shown_url,
)
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
        num_large: Members, or whole samples of a share, that were not checked because they are too large.
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
        """Return one line: path, samples, shards, and the number of faults."""
        num_faults = sum(1 + finding.more for finding in self.findings if finding.kind not in NOTES)
        read = f"{plural(self.num_samples, 'sample')} in {plural(self.num_shards, 'shard')}"
        return f"VerifyResult({self.path}: {read}, {'clean' if self.is_clean else plural(num_faults, 'fault')})"

    @property
    def is_clean(self) -> bool:
        """True if no fault was found. Notes (`NOTES`) are not faults."""
        return all(finding.kind in NOTES for finding in self.findings)


def verify(
    path: str | Path,
    *,
    images: ImageCheck = "structure",
    sample: str | None = None,
    seed: int = 0,
    world_size: int | None = None,
    loader_workers: int = 1,
    workers: int | None = None,
    max_pixels: int = MAX_PIXELS,
    progress: Progress | None = None,
) -> VerifyResult:
    """Read every shard from end to end and report all faults: `wdskit verify`.

    Memory: 24 bytes per sample, and in each process up to 32 MiB of one member.

    Args:
        path: A shard, folder, glob or brace pattern, local or remote; several joined by `::`. If a folder has an index,
            the shards are compared with it. A remote folder or glob needs an index.
        images: `none`, `structure` (compare the format with the name, JPEG markers up to the end marker, PNG checksums)
            or `decode` (decode all pixels too).
        sample: Share of each shard's samples whose images are checked, such as `1%`; None checks the images of all
            samples.
        seed: Chooses the samples of the share; 0 <= seed < 2**64.
        world_size: Number of ranks. If set, all workers of all ranks must get the same number of samples.
        loader_workers: Worker processes of each rank's loader, for the check of `world_size`.
        workers: Number of processes that read. Default: the number of CPUs, fewer for little data.
        max_pixels: Limit for the pixels of an image. An image whose header gives more pixels is a finding.
        progress: Called after each shard with the bytes read so far and the bytes of all shards (None if unknown).

    Raises:
        StorageError: No shard was found, or a folder or remote index cannot be read.
        FolderIndexError: A remote folder has no index.
        ConfigError: An option has an invalid value.
        WdskitError: A worker process was killed.
    """
    if images not in IMAGE_CHECKS:
        raise ConfigError(f"images are checked as {', '.join(IMAGE_CHECKS)}, not {images!r}.")
    share = None if sample is None else parse_share(sample)
    check_seed(seed)
    target = find_targets(str(path))
    shown = "::".join(map(shown_url, split_parts(str(path))))
    folders = {split_url(name)[0] for name in target.shards}
    classes = {folder: read_classes_of(folder, target.findings) for folder in sorted(folders)}
    jobs = [
        CheckJob(
            path=name,
            number=number,
            entry=entry,
            has_offsets=(folder in target.indexes and shown_url(name) == name)  # no query hides the end of the name
            or (is_local(name) and offsets_path(name).exists()),
            images=images,
            share=share,
            seed=seed,
            max_pixels=max_pixels,
            num_classes=None if (names := classes[folder]) is None else len(names),
        )
        for number, (name, entry) in enumerate(target.shards.items())
        for folder in [split_url(name)[0]]
    ]
    sizes = file_sizes((job.path for job in jobs), [job.entry for job in jobs])
    reports = list(read_shards(check_shard, jobs, sizes, path=shown, workers=workers, progress=progress))
    findings = [*target.findings]
    for folder in sorted(target.indexes):
        if target.indexes[folder] is not None:
            findings += check_columns(folder)
    findings += [found for one in reports for found in one.findings]
    findings += [*find_repeats(reports), *find_odd(shown, reports)]
    if world_size is not None:
        findings += find_skew(shown, reports, world_size, loader_workers)
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
    seen: set[tuple[str, str]] = set()
    found = find_shards(path, partial(_open_index, targets))
    for one in found:
        folder, problems = one.real_folder, dict(one.problems())
        for at, name in enumerate(one.names):
            if (folder, name) in seen:
                continue
            seen.add((folder, name))
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
        problem = "a run of `wdskit pack` here is unfinished. Run the same command again: it continues"
        targets.findings.append(Finding("unfinished", folder or ".", problem))
    if is_local(folder) and not has_index(folder):
        return None
    try:
        index = targets.indexes[folder] = read_index(folder)
    except FolderIndexError as err:
        cause = err.__cause__
        if not is_local(folder) and isinstance(cause, StorageError):
            if cause.status in ABSENT_STATUSES:
                return None
            raise cause from None
        targets.indexes[folder] = None
        targets.findings.append(Finding("index", shown_url(path), _summary(err, path)))
        return None
    if others := other_tars(index):
        what = "other tar is" if len(others) == 1 else "other tars are"
        problem = f"{len(others):,} {what} beside the index and not part of the data, first {others[0]}"
        targets.findings.append(Finding("beside", shown_url(path), problem))
    return index


def check_columns(folder: str) -> list[Finding]:
    """Compare the columns of an indexed folder with their digests and with the index. Return a list of one finding, or
    an empty list if the columns are valid, if the folder has no columns, or if its index is damaged.
    """
    path = join_url(folder, COLUMNS_NAME)
    if is_local(folder) and not (Path(folder) / COLUMNS_NAME).is_file():
        return []
    try:
        if not is_local(folder):
            read_bytes(path, limit=MAX_INDEX_BYTES)
    except StorageError as err:
        return [] if err.status in ABSENT_STATUSES else [Finding("index", shown_url(path), _summary(err, path))]
    try:
        found = columns(folder)
        for name in found:
            found.column(name).check()
    except StorageError as err:
        is_here = isinstance(err.__cause__, OSError)  # no copy can be written here
        problem = f"the columns could not be checked: {_summary(err, path)}"
        kind: Kind = "unchecked" if is_here or NO_RANGES in str(err) else "index"
        return [Finding(kind, shown_url(path), problem)]
    except FolderIndexError:
        return []  # `find_targets` reports a damaged index
    except SelectionError as err:
        return [Finding("index", shown_url(path), _summary(err, path))]
    return []


def read_classes_of(folder: str, findings: list[Finding]) -> tuple[str, ...] | None:
    """Return the class names of a folder; None if it has no `classes.json`. If the file is invalid or cannot be read,
    append a finding to `findings` and return None.
    """
    try:
        return read_classes(folder)
    except (FolderIndexError, StorageError) as err:
        path = join_url(folder, CLASSES_NAME)
        findings.append(Finding("index", shown_url(path), _summary(err, path)))
        return None


def _summary(err: WdskitError, path: str) -> str:
    """Return the first line of an error's message, shortened, without a full stop. `path` is the path or URL of the
    finding; if the message begins with `path`, this prefix is left out.
    """
    return shorten(str(err).removeprefix(f"{shown_url(path)}: ").partition("\n")[0].rstrip("."))


def find_odd(folder: str, reports: Sequence[ShardReport]) -> tuple[Finding, ...]:
    """Find samples whose fields differ from the most common set of fields. Return one finding for each other set.

    The most frequent of the other sets comes first. After `MAX_LISTED` findings, a last finding gives the number of
    further sets. All image formats count as one field: samples with `jpg` and with `png` have the same fields.

    Args:
        folder: The path in that last finding.
        reports: The reports of all shards.
    """
    counts: Counter[Fields] = Counter()
    first: dict[Fields, tuple[str, str]] = {}  # path and key of the first sample
    spellings: dict[str, set[str]] = {}  # field names by kind: all extensions of an image
    for report in reports:
        for names, one in report.field_sets.items():
            kinds = tuple(sorted(map(_kind_of, names)))
            counts[kinds] += one.count
            first.setdefault(kinds, (shown_url(report.path), one.key))
            for name in names:
                spellings.setdefault(_kind_of(name), set()).add(name)

    def listed(kinds: Iterable[str]) -> str:
        return ", ".join(sorted(" or ".join(sorted(spellings[kind])) for kind in kinds))

    (most, _), *others = counts.most_common() or [((), 0)]
    found = []
    for kinds, count in others[:MAX_LISTED]:
        path, key = first[kinds]
        less, more = Counter(most) - Counter(kinds), Counter(kinds) - Counter(most)
        parts = [f"it has no {listed(less)}"] * bool(less) + [f"it also has {listed(more)}"] * bool(more)
        problem = f"{shorten(', '.join(parts))}, most have {shorten(listed(most))}"
        problem += f" ({plural(count, 'sample')}; this is the first)"
        found.append(Finding("odd", path, problem, key=key))
    if len(others) > MAX_LISTED:
        problem = f"samples have {len(others) - MAX_LISTED:,} more sets of fields, all different"
        found.append(Finding("odd", folder, problem))
    return tuple(found)


def _kind_of(name: str) -> str:
    """Return the field's name without the image format: `left.<image>` for `left.jpg`. Other names are not changed."""
    return f"{name.rpartition('.')[0]}.<image>" if is_image_field(name) else name


def find_skew(folder: str, reports: Sequence[ShardReport], world_size: int, loader_workers: int) -> tuple[Finding, ...]:
    """Check that shards can be divided evenly among the workers of all ranks. Return () or one finding.

    The finding says that workers get different numbers of shards, or that the sizes of the shards differ by more than
    one sample.

    Args:
        folder: The path that the finding names.
        reports: The reports of the shards, in order.
        world_size: Number of ranks, 1 or more.
        loader_workers: Number of workers of each rank, 1 or more.

    Raises:
        ConfigError: `world_size` or `loader_workers` is less than 1.
    """
    if world_size < 1 or loader_workers < 1:
        raise ConfigError(f"world_size and loader_workers are 1 or more, not {world_size} and {loader_workers}.")
    num = world_size * loader_workers
    counts = [one.num_samples for one in reports]
    who = f"{plural(world_size, 'rank')} x {plural(loader_workers, 'worker')}"
    shards = f"{plural(len(counts), 'shard')} for {who}"
    if len(counts) < num:
        problem = f"{shards}: {num - len(counts):,} of {num:,} workers get none"
    elif len(counts) % num:
        problem = f"{shards}: some workers get {plural(len(counts) // num, 'shard')}, others {len(counts) // num + 1}"
    elif max(counts) - min(counts) <= 1:  # samples cannot be divided more evenly
        return ()
    else:
        ascending, each = sorted(counts), len(counts) // num
        least, most = sum(ascending[:each]), sum(ascending[-each:])  # which shards a worker gets depends on the epoch
        problem = f"{who}: {least:,} to {most:,} samples per worker"
        problem += f", shards of {min(counts):,} to {max(counts):,} samples"
    return (Finding("skew", folder, problem),)


MAX_PLACES = 3
"""Most samples with the same key hash whose keys are read and compared."""


def find_repeats(reports: Sequence[ShardReport]) -> tuple[Finding, ...]:
    """Return one finding for each key that several samples have, but only for the first `MAX_LISTED` repeated key
    hashes. `more` of the last finding is the number of further repeated hashes. The keys of at most `MAX_PLACES`
    samples with one hash are read and compared.

    `reports` are the reports of all shards.
    """
    repeated = find_repeated(*(one.hashes for one in reports))
    if not len(repeated):
        return ()
    places: dict[int, list[tuple[ShardReport, int]]] = {}
    for report in reports:
        for number in np.flatnonzero(is_among(report.hashes, repeated)).tolist():
            digest = int(report.hashes[number])
            if digest in places or len(places) < MAX_LISTED:
                known = places.setdefault(digest, [])
                if len(known) < MAX_PLACES:
                    known.append((report, number))
    found = [finding for known in places.values() if (finding := _compare_keys(known))]
    if found:
        found[-1] = replace(found[-1], more=len(repeated) - len(places))
    return tuple(found)


def _compare_keys(places: Sequence[tuple[ShardReport, int]]) -> Finding | None:
    """Read the keys of samples that have the same key hash. Return a finding for the first repeated key; None if all
    keys differ.

    `places` has the report and the sample number of each sample. A key that cannot be read again counts as repeated.
    """
    seen: dict[str, ShardReport] = {}
    for report, number in places:
        key, path = read_key(report, number), shown_url(report.path)
        if key is None:
            problem = f"sample {number} has the key of another sample and cannot be read again"
            return Finding("repeated", path, problem, int(report.starts[number]))
        if key in seen:
            where = (
                "in two places that are not side by side"
                if seen[key] is report
                else f"also in {shown_url(seen[key].path)}"
            )
            return Finding("repeated", path, f"it is {where}", int(report.starts[number]), shorten(key))
        seen[key] = report
    return None


def read_key(report: ShardReport, number: int) -> str | None:
    """Return the key of sample `number` of a shard, read from the file; None if the headers cannot be read any more."""
    start = int(report.starts[number])
    try:
        with contextlib.closing(open_ranges(report.path)) as file:
            members = TarWalk(file.read_at, file.num_bytes, shard=report.path, start=start)
            return next(split[0] for name, _, _ in members if (split := split_name(name)))
    except (WdskitError, StopIteration):
        return None
