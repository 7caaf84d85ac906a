"""`wdskit stats`: counts, classes, sizes, resolutions and JSON keys of a data set, in bounded memory."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from wdskit.dataset.classes import read_classes
from wdskit.dataset.patterns import Target, find_shards
from wdskit.errors import StorageError, WdskitError
from wdskit.shards.parallel import choose_workers, join_faults, map_shards
from wdskit.shards.report import NUM_SHOWN, check_report, write_report
from wdskit.shards.sampling import parse_share
from wdskit.shards.statistics_counts import Counts, Numbers, round_pair
from wdskit.shards.statistics_repeats import find_duplicates
from wdskit.shards.statistics_sums import ImageTally, Tally
from wdskit.shards.statistics_tally import ShardTally, StatsJob, tally_shard
from wdskit.shards.statistics_types import (
    ClassStats,
    FieldStats,
    ImageStats,
    JsonKeyStats,
    NumberStats,
    ShardStats,
)
from wdskit.storage.urls import is_local, local_path

Progress = Callable[[int, int | None], None]
"""Told while shards are read: bytes so far, bytes in all."""

MAX_RESOLUTIONS = 10
MAX_DOTS = 1500


@dataclass(frozen=True)
class Found:
    """The statistics, and where the samples of a contact sheet stand.

    Attributes:
        stats: What is told.
        shown: Shard and offset of each, drawn by the seed.
    """

    stats: ShardStats
    shown: tuple[tuple[str, int], ...]


def stats(
    path: str | Path,
    *,
    sample: str | None = None,
    seed: int = 0,
    digests: bool = False,
    html: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ShardStats:
    """Tell what local shards hold: `wdskit stats`.

    Headers are read, and labels and JSON; of an image no more than its own header, so that most of the bytes stay on
    the disk unless digests are asked for. The result does not depend on `workers`.

    Memory: a few MB, whatever the number of samples; in each process 16 bytes a sample of one shard, and with `digests`
    16 bytes for each sample in all.

    Args:
        path: A shard, a folder, or a pattern; several joined by `::`.
        sample: Read this share of the samples of each shard only, such as `10%`.
        seed: Chooses them, and the images of the report.
        digests: Digest the images, and find samples whose images are the same bytes.
        html: Write a report to this file, with plots and some of the images; needs jinja2.
        workers: Processes that read; default: the CPUs, fewer for little data.
        progress: Called while shards are read.

    Raises:
        ShardError: A shard is not right; where several are not, all are listed. Bad fields are counted instead.
        StorageError: There is nothing, it is not local, or it cannot be read; or the report cannot be written.
        FolderIndexError: The folder's index does not match its files.
        ConfigError: `sample` is no share, or jinja2 is missing.
    """
    if html is not None:
        check_report(html)
    num_shown = NUM_SHOWN if html is not None else 0
    found = collect(
        path, sample=sample, seed=seed, digests=digests, num_shown=num_shown, workers=workers, progress=progress
    )
    if html is not None:
        write_report(found.stats, found.shown, html)
    return found.stats


def collect(
    path: str | Path,
    *,
    sample: str | None,
    seed: int,
    digests: bool,
    num_shown: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Found:
    """`stats`, and the samples of a contact sheet chosen."""
    share = parse_share(sample) if sample else None
    target = find_shards(str(path))
    for url in target.urls:
        if not is_local(url):
            raise StorageError(f"{url}: only local shards can be counted. Run this where the files are.", url=url)
    shas = [entry.idx_sha256 for entry in target.entries] if target.entries else [None] * len(target.urls)
    jobs = [
        StatsJob(number, url, share, seed, digests, num_shown, sha)
        for number, (url, sha) in enumerate(zip(target.urls, shas, strict=True))
    ]
    sizes = [Path(local_path(url)).stat().st_size for url in target.urls]
    tally, counts = Tally(), []
    parts: list[ShardTally] = []
    for found in _tally_all(str(path), jobs, sizes, workers, progress):
        counts.append(found.tally.num_samples)
        tally.merge(found.tally)
        tally.shown = heapq.nsmallest(num_shown, (*tally.shown, *found.tally.shown))
        if digests:
            parts.append(replace(found, tally=Tally()))
    told = _told(target, sample, seed, sizes, counts, tally)
    if digests:
        told = replace(told, duplicates=find_duplicates(target.urls, parts))
    return Found(told, tuple((target.urls[shard], start) for _, shard, start in tally.shown))


def _tally_all(
    path: str, jobs: Sequence[StatsJob], sizes: Sequence[int], workers: int | None, progress: Progress | None
) -> Iterator[ShardTally]:
    """The pass over every shard, in order.

    Raises:
        WdskitError: That of the shard that is not right, or one that lists all.
    """
    num_bytes, num_done = sum(sizes), 0
    num_workers = choose_workers(len(jobs), num_bytes) if workers is None else workers

    def add(num: int) -> None:
        nonlocal num_done
        num_done += num
        if progress:
            progress(num_done, num_bytes)

    alone = num_workers == 1 or len(jobs) == 1
    function = partial(tally_shard, on_read=add) if alone else tally_shard
    faults: list[WdskitError] = []
    for size, result in zip(sizes, map_shards(function, jobs, workers=num_workers), strict=True):
        if isinstance(result, WdskitError):
            faults.append(result)
        elif not faults:
            yield result
        if not alone:
            add(size)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise join_faults(path, faults, len(jobs)) from faults[0]


def _told(
    target: Target, sample: str | None, seed: int, sizes: Sequence[int], counts: Sequence[int], tally: Tally
) -> ShardStats:
    order = np.argsort(np.array(counts), kind="stable").tolist()
    most = counts.index(max(counts))
    return ShardStats(
        path=target.path,
        sample=sample,
        seed=seed,
        num_shards=len(counts),
        num_samples=tally.num_samples,
        num_read=tally.num_read,
        num_bytes=sum(sizes),
        num_ignored=tally.num_ignored,
        shard_samples=_of_all(counts),
        shard_bytes=_of_all(sizes),
        shard_least=Path(target.urls[order[0]]).name,
        shard_most=Path(target.urls[most]).name,
        sample_sizes=_numbers(tally.sizes),
        fields=tuple(FieldStats(name, one.counts.total, _numbers(one)) for name, one in sorted(tally.fields.items())),
        num_more_fields=tally.num_more_fields,
        classes=_classes(target, tally.classes),
        images=tuple(_images(name, one) for name, one in sorted(tally.images.items())),
        json_keys=tuple(
            JsonKeyStats(name, key, one.num_samples, dict(sorted(one.types.items())), one.least, one.most)
            for name, keys in sorted(tally.json.items())
            for key, one in keys.keys.items()
        ),
        num_more_keys=sum(keys.num_more for keys in tally.json.values()),
        num_bad=tally.num_bad,
        bad=tuple(tally.bad),
        duplicates=None,
    )


def _of_all(values: Sequence[int]) -> NumberStats:
    numbers = Numbers()
    for value in values:
        numbers.add(value)
    return _numbers(numbers)


def _numbers(found: Numbers) -> NumberStats:
    count = found.counts.total
    p50, p99 = found.quantiles((Fraction(1, 2), Fraction(99, 100)))
    return NumberStats(
        count=count,
        total=found.total,
        min=found.least or 0,
        mean=found.total / count if count else 0.0,
        p50=p50,
        p99=p99,
        max=found.most or 0,
        is_exact=found.counts.is_exact,
        bins=found.bins(),
    )


def _classes(target: Target, counts: Counts[int]) -> tuple[ClassStats, ...] | None:
    """The classes that samples have, and those that only classes.json names."""
    if not counts.total or not counts.is_exact:
        return None
    folders = {Path(local_path(url)).parent.resolve() for url in target.urls}
    names = (read_classes(folders.pop()) if len(folders) == 1 else None) or ()
    numbers = sorted({*counts.by_value, *range(len(names))})
    return tuple(
        ClassStats(number, names[number] if 0 <= number < len(names) else None, counts.by_value.get(number, 0))
        for number in numbers
    )


def _images(name: str, tally: ImageTally) -> ImageStats:
    pairs = tally.resolutions
    grid: Counts[tuple[int, int]] = Counts(MAX_DOTS, round_pair)
    grid.merge(pairs)
    return ImageStats(
        field=name,
        num_images=tally.formats.total,
        formats=dict(tally.formats.ranked()),
        modes=dict(tally.modes.ranked()),
        widths=_numbers(tally.widths),
        heights=_numbers(tally.heights),
        pixels=_numbers(tally.pixels),
        aspects=_numbers(tally.aspects),
        num_resolutions=len(pairs.by_value) if pairs.is_exact else None,
        resolutions=tuple((*pair, times) for pair, times in pairs.ranked()[:MAX_RESOLUTIONS]) if pairs.is_exact else (),
        grid=tuple((*pair, times) for pair, times in sorted(grid.by_value.items())),
    )
