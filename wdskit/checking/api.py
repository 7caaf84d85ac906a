"""`wdskit verify`: every shard against its index, its structure and what stands in it; all faults, not the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.checking.dataset import find_odd, find_repeats, find_skew, find_targets
from wdskit.checking.findings import Finding, FindingList, VerifyResult
from wdskit.checking.readers import ReaderInput, choose_readers, judge
from wdskit.checking.shard import ShardJob, ShardReport, check_shard
from wdskit.codecs.checks import IMAGE_CHECKS, ImageCheck, field_check
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.keys import split_name
from wdskit.errors import ConfigError, DecodeError, ShardError, StorageError, WdskitError
from wdskit.export.api import check_folder_exports
from wdskit.limits import MAX_CHECKED_BYTES, MAX_PIXELS
from wdskit.shards.parallel import Progress, file_sizes, read_shards
from wdskit.shards.sampling import choose_samples, parse_share
from wdskit.storage.urls import LocalFile
from wdskit.tar.reader import locate_members


@dataclass(frozen=True)
class ImageJob:
    """The samples of a shard whose images are to be checked. It is sent to a worker process.

    Attributes:
        path: The shard.
        starts: Offset of each of them.
        stops: Where each ends.
        images: How.
        max_pixels: Most pixels of an image.
    """

    path: str
    starts: NDArray[np.uint64]
    stops: NDArray[np.uint64]
    images: ImageCheck
    max_pixels: int


@dataclass(frozen=True)
class ImageReport:
    """What the check of a job found."""

    findings: tuple[Finding, ...]
    num_images: int
    num_large: int


def verify(
    path: str | Path,
    *,
    images: ImageCheck = "structure",
    sample: str | None = None,
    seed: int = 0,
    readers: Sequence[str] = (),
    world_size: int | None = None,
    loader_workers: int = 1,
    workers: int | None = None,
    max_pixels: int = MAX_PIXELS,
    progress: Progress | None = None,
) -> VerifyResult:
    """Read every shard from end to end and tell all that is invalid: `wdskit verify`.

    Memory: 24 bytes a sample, and what one member takes, up to 32 MiB of it, in each process.

    Args:
        path: A local shard, folder, glob or brace pattern; several joined by `::`. Where a folder has an index, the
            shards are compared with it.
        images: `none`, `structure` (the first bytes against the name, JPEG markers to the end mark, PNG checksums) or
            `decode` (all pixels too).
        sample: Look at the images of this share of the samples only, such as `1%`; exact, and chosen by `seed`.
        seed: Of the choice.
        readers: Other readers to judge for: `hf`, `dali`, `energon`, `wids`, `open_clip`, `timm`, or `all`.
        world_size: Ranks that are to share the shards of a stream alike.
        loader_workers: Worker processes of each rank's loader.
        workers: Processes that read; default: the CPUs, fewer for little data.
        max_pixels: Most pixels of an image; one that promises more is a finding.
        progress: Called while shards are read.

    Raises:
        StorageError: There is nothing to look at, or it is not local.
        ConfigError: An option has no such value.
    """
    if images not in IMAGE_CHECKS:
        raise ConfigError(f"images are checked as {', '.join(IMAGE_CHECKS)}, not {images!r}.")
    share = parse_share(sample) if sample else None
    chosen = choose_readers(readers)
    target = find_targets(str(path))
    now: ImageCheck = "none" if share else images
    jobs = [
        ShardJob(name, entry, target.has_offsets(name), now, max_pixels, bool(readers), target.beside(name, entry))
        for name, entry in target.shards.items()
    ]
    reports, failed = _read_all(jobs, workers, progress)
    plan = plan_images(reports, share, seed=seed, images=images, max_pixels=max_pixels) if share else []
    looked = _look_at_share(plan, workers) if images != "none" else []
    beside = [Finding(*problem) for index in target.indexes for problem in check_folder_exports(index)]
    findings = [*target.findings, *failed, *beside, *(found for one in reports for found in one.findings)]
    findings += [found for one in looked for found in one.findings]
    findings += [*find_repeats(str(path), reports), *find_odd(str(path), reports)]
    if world_size is not None:
        findings += find_skew(str(path), reports, world_size, loader_workers)
    verdicts, rules_broken = judge(chosen, ReaderInput(reports, findings, bool(target.indexed)))
    findings += rules_broken
    return VerifyResult(
        path=str(path),
        num_shards=len(jobs),
        num_samples=sum(one.num_samples for one in reports),
        num_bytes=sum(one.num_bytes for one in reports),
        num_images=sum(one.num_images for one in reports) + sum(one.num_images for one in looked),
        num_large=sum(one.num_large for one in reports) + sum(one.num_large for one in looked),
        num_ignored=sum(one.num_ignored for one in reports),
        is_indexed=bool(target.indexed),
        findings=tuple(findings),
        verdicts=verdicts,
    )


def _read_all(
    jobs: Sequence[ShardJob], workers: int | None, progress: Progress | None
) -> tuple[list[ShardReport], list[Finding]]:
    """The pass over every shard."""
    sizes = [size or 0 for size in file_sizes(job.path for job in jobs)]
    results = read_shards(check_shard, jobs, sizes, workers=workers, progress=progress, counts_reads=True)
    reports: list[ShardReport] = []
    failed: list[Finding] = []
    for job, result in zip(jobs, results, strict=True):
        if isinstance(result, WdskitError):
            failed.append(Finding("unreadable", job.path, str(result)))
        else:
            reports.append(result)
    return reports, failed


def _look_at_share(plan: Sequence[ImageJob], workers: int | None) -> list[ImageReport]:
    """The second pass, over the images of a share of the samples."""
    sizes = [int((job.stops - job.starts).sum()) for job in plan]
    results = zip(plan, read_shards(check_images, plan, sizes, workers=workers, progress=None), strict=True)
    return [
        ImageReport((Finding("unreadable", job.path, str(one)),), 0, 0) if isinstance(one, WdskitError) else one
        for job, one in results
    ]


def plan_images(
    reports: Sequence[ShardReport], share: Fraction, *, seed: int, images: ImageCheck, max_pixels: int
) -> list[ImageJob]:
    """The jobs that check a share of the samples, shards without a chosen one left out."""
    jobs = []
    chosen = choose_samples([one.num_samples for one in reports], share, seed)
    for report, numbers in zip(reports, chosen, strict=True):
        if len(numbers):
            starts, stops = report.starts[numbers], report.starts[numbers + 1]
            jobs.append(ImageJob(report.path, starts, stops, images, max_pixels))
    return jobs


def check_images(job: ImageJob) -> ImageReport:
    """Read the samples of a job and check their images.

    Raises:
        StorageError: The shard cannot be read any more.
    """
    found = FindingList(job.path)
    num_images = num_large = 0
    file = LocalFile(f"./{job.path}" if job.path.lower().startswith("file:") else job.path)
    try:
        for start, stop in zip(job.starts.tolist(), job.stops.tolist(), strict=True):
            if stop - start > 2 * MAX_CHECKED_BYTES:
                num_large += 1
                continue
            data = file.read_at(start, stop - start)
            try:
                for name, first, last in locate_members(data, shard=job.path, offset=start, stop=len(data)):
                    split = split_name(name)
                    if split is None or not is_image_field(split[1]):
                        continue
                    num_images += 1
                    _check(found, job, split, memoryview(data)[first:last], start)
            except ShardError as err:
                found.add("structure", f"{err.problem}: it changed while it was verified", offset=err.offset)
    except StorageError as err:
        found.add("unreadable", str(err))
    finally:
        file.close()
    return ImageReport(found.listed(), num_images, num_large)


def _check(found: FindingList, job: ImageJob, name: tuple[str, str], data: memoryview, start: int) -> None:
    check = field_check(name[1], job.images, job.max_pixels)
    assert check is not None
    try:
        check(data)
    except DecodeError as err:
        found.add("image", f"{name[1]}: {err}", offset=start, key=name[0])
