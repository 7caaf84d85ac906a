"""What one pass over a shard is asked for, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.index import ShardEntry
from wdskit.limits import MAX_PIXELS
from wdskit.shards.facts import ReaderFacts
from wdskit.shards.findings import Finding, ImageCheck

Fields = tuple[str, ...]

MAX_FIELD_SETS = 100
"""Different sets of fields that are told apart in one shard."""

OTHER_FIELDS: Fields = ("...",)
"""What stands for all field sets beyond that."""


@dataclass(frozen=True)
class ShardJob:
    """One shard to look at. It is sent to a worker process.

    Attributes:
        path: The file.
        entry: Its line in the folder's index; None without one.
        has_offsets: Whether an .idx belongs beside it.
        images: How each image is checked in this pass.
        max_pixels: Most pixels of an image.
        with_facts: Whether to collect what other readers trip over.
        also: What is kept beside the shard for other readers, which is compared with it.
    """

    path: str
    entry: ShardEntry | None = None
    has_offsets: bool = False
    images: ImageCheck = "none"
    max_pixels: int = MAX_PIXELS
    with_facts: bool = False
    also: tuple[str, ...] = ()


@dataclass
class FieldSet:
    """Samples of a shard that have the same fields."""

    count: int = 0
    keys: list[str] = field(default_factory=list)  # the first few


@dataclass(frozen=True)
class ShardReport:
    """What a pass found.

    Attributes:
        path: The file.
        num_samples: Whole samples, in a damaged shard those before the damage.
        num_bytes: Bytes of the file.
        is_whole: Whether it was read to its end marker.
        num_images: Images that were checked.
        num_large: Members over `limits.MAX_CHECKED_BYTES`.
        num_ignored: Members that belong to no sample.
        findings: What is not right.
        starts: Byte offset of each sample, then the end of the last, (num_samples + 1,) uint64; 8 bytes a sample.
        hashes: 64 bits of each sample's key, (num_samples,) uint64; 8 bytes a sample.
        field_sets: Samples by their fields, sorted.
        facts: What other readers trip over, if it was asked for.
    """

    path: str
    num_samples: int
    num_bytes: int
    is_whole: bool
    num_images: int
    num_large: int
    num_ignored: int
    findings: tuple[Finding, ...]
    starts: NDArray[np.uint64]
    hashes: NDArray[np.uint64]
    field_sets: dict[Fields, FieldSet]
    facts: ReaderFacts | None


def sorted_sets(found: dict[Fields, FieldSet]) -> dict[Fields, FieldSet]:
    """The order of the members in a sample says nothing."""
    joined: dict[Fields, FieldSet] = {}
    for names, one in found.items():
        known = joined.setdefault(tuple(sorted(names)), FieldSet())
        known.count += one.count
        known.keys = (known.keys + one.keys)[:3]
    return joined
