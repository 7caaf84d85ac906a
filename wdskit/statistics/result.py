"""The result of `wdskit.stats`: plain numbers, and `as_dict` for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NumberStats:
    """Many whole numbers in a few; all are 0 where there are none.

    Attributes:
        p50: The least number so that at least half of them are no greater.
        p99: So for 99 of 100.
        is_exact: Whether p50 and p99 are exact; else they are within 0.05 %. All others always are.
        bins: How many numbers are from `low` to below `high`: (low, high, count) in rising order, without a gap.
    """

    count: int
    total: int
    min: int
    mean: float
    p50: int
    p99: int
    max: int
    is_exact: bool
    bins: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class FieldStats:
    """One field, `jpg`, `json`, ...: how many samples have it, and its bytes without tar headers and padding."""

    name: str
    num_samples: int
    sizes: NumberStats


@dataclass(frozen=True)
class ClassStats:
    """One class: its number in `cls`, and its name in classes.json, or None.

    `num_samples` is 0 for a class that only classes.json names.
    """

    number: int
    name: str | None
    num_samples: int


def choose_classes(classes: Sequence[ClassStats], limit: int) -> list[ClassStats]:
    """All classes in their order where they are few, else the largest and the smallest of them."""
    if len(classes) <= limit:
        return list(classes)
    ranked = sorted(classes, key=lambda one: -one.num_samples)
    return [*ranked[: limit // 2], *ranked[-(limit // 2) :]]


@dataclass(frozen=True)
class ImageStats:
    """The images of one field whose headers read; sides in pixels.

    Attributes:
        formats: How many are `JPEG`, `PNG`, `WebP`, ... by their first bytes, the commonest first.
        modes: How many are `RGB`, `L`, ...: Pillow's names, `;16` after them for a PNG of 16 bits.
        aspects: Width / height in thousandths, rounded.
        num_resolutions: Different (width, height); None over 100,000.
        resolutions: The commonest, as (width, height, count); none over 100,000 different ones.
    """

    field: str
    num_images: int
    formats: dict[str, int]
    modes: dict[str, int]
    widths: NumberStats
    heights: NumberStats
    pixels: NumberStats
    aspects: NumberStats
    num_resolutions: int | None
    resolutions: tuple[tuple[int, int, int], ...]


@dataclass
class JsonKeyStats:
    """One key in the JSON of one field.

    Attributes:
        key: `label`, `box.width`, `objects[].name`; a key that is no plain word as `["a b"]`. Empty for the whole
            value where that is no object.
        num_samples: Samples that have it.
        types: How often it was `text`, `integer`, `number`, `boolean`, `null`, `object`, `list`.
        min: The least of its numbers, None without one.
        max: The most.
    """

    field: str
    key: str
    num_samples: int
    types: dict[str, int]
    min: float | None
    max: float | None


@dataclass(frozen=True)
class BadField:
    """A field that is not what its name promises."""

    shard: str
    key: str
    field: str
    problem: str


@dataclass(frozen=True)
class ShardStats:
    """What `wdskit stats` counted.

    Attributes:
        path: As the user wrote it.
        sample: The share that was read, such as `10%`, chosen by `seed`; None for all.
        num_samples: Samples in all shards.
        num_read: Samples that were read; all other figures except those of shards count only these.
        num_bytes: Bytes of the shards' files.
        num_ignored: Members that belong to no sample; None if only a share was read.
        shard_least: Name of the first shard with the fewest samples.
        shard_most: Name of the first shard with the most samples.
        sample_sizes: Bytes of a sample's fields, without tar headers and padding.
        fields: Sorted by name.
        num_more_fields: Fields beyond the first 1,000 different ones, which are not counted separately.
        classes: Classes of the field `cls`, by number; None if no sample has it, or if there are over 100,000 classes.
        images: Sorted by field.
        json_keys: Sorted by field, then in the order in which they first appear.
        num_more_keys: Keys beyond the first 1,000 different ones of a field, which are not counted separately.
        num_bad: Fields that cannot be read: images without a valid header, invalid JSON or `cls`.
        bad: The first of them.
    """

    path: str
    sample: str | None
    seed: int
    num_shards: int
    num_samples: int
    num_read: int
    num_bytes: int
    num_ignored: int | None
    shard_samples: NumberStats
    shard_bytes: NumberStats
    shard_least: str
    shard_most: str
    sample_sizes: NumberStats
    fields: tuple[FieldStats, ...]
    num_more_fields: int
    classes: tuple[ClassStats, ...] | None
    images: tuple[ImageStats, ...]
    json_keys: tuple[JsonKeyStats, ...]
    num_more_keys: int
    num_bad: int
    bad: tuple[BadField, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, texts and numbers; `wdskit stats --json` prints it."""
        return dataclasses.asdict(self)
