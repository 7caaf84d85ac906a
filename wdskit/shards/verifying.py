"""`wdskit verify`: every shard against its index, its structure and what stands in it; all faults, not the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from wdskit.errors import ConfigError, WdskitError
from wdskit.export.api import check_folder_exports
from wdskit.limits import MAX_PIXELS
from wdskit.shards.checking import check_shard
from wdskit.shards.findings import IMAGE_CHECKS, Finding, ImageCheck, VerifyResult
from wdskit.shards.objections import Judged
from wdskit.shards.parallel import choose_workers, map_shards
from wdskit.shards.readers import choose_readers, judge
from wdskit.shards.reports import ShardJob, ShardReport
from wdskit.shards.sampling import ImageJob, ImageReport, check_images, parse_share, plan_images
from wdskit.shards.spread import find_odd, find_skew
from wdskit.shards.targets import find_targets
from wdskit.shards.uniqueness import find_repeats

Progress = Callable[[int, int | None], None]
"""Told while shards are read: bytes so far, bytes in all."""


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
    """Read every shard from end to end and tell all that is not right: `wdskit verify`.

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
    verdicts, objections = judge(chosen, Judged(reports, findings, bool(target.indexed)))
    findings += objections
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
    num_bytes = sum(_size_of(job.path) for job in jobs)
    num_workers = choose_workers(len(jobs), num_bytes) if workers is None else workers
    num_done = 0

    def add(num: int) -> None:
        nonlocal num_done
        num_done += num
        if progress:
            progress(num_done, num_bytes)

    alone = num_workers == 1 or len(jobs) == 1
    check = partial(check_shard, on_read=add) if alone else check_shard
    reports: list[ShardReport] = []
    failed: list[Finding] = []
    for job, result in zip(jobs, map_shards(check, jobs, workers=num_workers), strict=True):
        if isinstance(result, WdskitError):
            failed.append(Finding("unreadable", job.path, str(result)))
            continue
        reports.append(result)
        if not alone:
            add(result.num_bytes)
    return reports, failed


def _look_at_share(plan: Sequence[ImageJob], workers: int | None) -> list[ImageReport]:
    """The second pass, over the images of a share of the samples."""
    num_bytes = sum(int((job.stops - job.starts).sum()) for job in plan)
    num_workers = choose_workers(len(plan), num_bytes) if workers is None else workers
    results = zip(plan, map_shards(check_images, plan, workers=num_workers), strict=True)
    return [
        ImageReport((Finding("unreadable", job.path, str(one)),), 0, 0) if isinstance(one, WdskitError) else one
        for job, one in results
    ]


def _size_of(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0  # reading it says what is wrong
