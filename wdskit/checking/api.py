"""`wdskit verify`: every shard against its index, its structure and what stands in it; all faults, not the first."""

from __future__ import annotations

from pathlib import Path

from wdskit.checking.dataset import find_odd, find_repeats, find_skew, find_targets, read_classes_of
from wdskit.checking.findings import Finding, VerifyResult
from wdskit.checking.shard import ShardJob, check_shard
from wdskit.codecs.checks import IMAGE_CHECKS, ImageCheck
from wdskit.dataset.braces import split_parts
from wdskit.dataset.patterns import split_url
from wdskit.dataset.shard import offsets_path
from wdskit.errors import ConfigError
from wdskit.limits import MAX_PIXELS
from wdskit.shards.export import export_problems
from wdskit.shards.parallel import Progress, file_sizes, read_shards
from wdskit.shards.shares import parse_share
from wdskit.storage.urls import is_local, local_path, shown_url


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
    """Read every shard from end to end and report all that is invalid: `wdskit verify`.

    Memory: 24 bytes per sample, and in each process up to 32 MiB of one member.

    Args:
        path: A shard, folder, glob or brace pattern, local or remote; several joined by `::`. Where a folder has an
            index, the shards are compared with it; a remote folder or glob needs one.
        images: `none`, `structure` (the format against the name, JPEG markers up to the end marker, PNG checksums) or
            `decode` (all pixels too).
        sample: Check only the images of this share of each shard's samples, such as `1%`. It is exact within one sample
            per shard, and exact in total for shards of equal size.
        seed: Chooses the share; 0 <= seed < 2**64.
        world_size: Ranks of a stream, to check that each gets the same share.
        loader_workers: Worker processes of each rank's loader.
        workers: Processes that read. Default: the CPUs, fewer for little data.
        max_pixels: Most pixels of an image; an image whose header gives more is a finding.
        progress: Called after each shard.

    Raises:
        StorageError: There is nothing to read.
        ConfigError: An option has an unknown value.
    """
    if images not in IMAGE_CHECKS:
        raise ConfigError(f"images are checked as {', '.join(IMAGE_CHECKS)}, not {images!r}.")
    share = parse_share(sample) if sample else None
    target = find_targets(str(path))
    shown = "::".join(map(shown_url, split_parts(str(path))))
    folders = {split_url(name)[0] for name in target.shards}
    classes = {folder: read_classes_of(folder, target.findings) for folder in sorted(folders)}
    jobs = [
        ShardJob(
            path=name,
            number=number,
            entry=entry,
            has_offsets=(folder in target.indexes and shown_url(name) == name)  # else a query hides the end of the name
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
        if is_local(folder):
            problems = export_problems(Path(local_path(folder)))
            findings += [Finding("outdated", file, problem) for file, problem in problems]
    findings += [found for one in reports for found in one.findings]
    findings += [*find_repeats(shown, reports), *find_odd(shown, reports)]
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
