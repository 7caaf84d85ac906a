"""`verify --sample 1%`: the images of an exact share of the samples, chosen by a seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.keys import split_name
from wdskit.errors import ConfigError, DecodeError, ShardError, StorageError
from wdskit.limits import MAX_CHECKED_BYTES
from wdskit.order.keys import permutation
from wdskit.shards.checking import field_check
from wdskit.shards.findings import Finding, FindingList, ImageCheck
from wdskit.shards.reports import ShardReport
from wdskit.storage.urls import LocalFile
from wdskit.tar.reader import locate_members

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?) ?%")


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


def parse_share(text: str) -> Fraction:
    """`1%`, `0.5 %`, `100%` as an exact fraction.

    Raises:
        ConfigError: It is no percentage over 0 and up to 100.
    """
    match = _SHARE.fullmatch(text.strip())
    share = Fraction(match[1]) / 100 if match else Fraction(0)
    if not 0 < share <= 1:
        raise ConfigError(f"a share of the samples is a percentage such as 1% or 0.5%, not {text!r}.")
    return share


def choose_samples(counts: Sequence[int], share: Fraction, seed: int) -> list[NDArray[np.int64]]:
    """Numbers of the chosen samples of each shard, rising: of all samples exactly the share, rounded up; of each shard
    its own share, within one.

    Args:
        counts: Samples of each shard.
        share: Over 0 and up to 1.
        seed: 0 <= seed < 2**64.
    """
    chosen = []
    total = 0
    for shard, count in enumerate(counts):
        quota = ceil(share * (total + count)) - ceil(share * total)
        chosen.append(np.sort(permutation(count, "verify", seed, shard)[:quota]))
        total += count
    return chosen


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
