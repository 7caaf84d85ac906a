"""What `wdskit stats` counts, in one shard or in several together."""

from __future__ import annotations

from dataclasses import dataclass, field

from wdskit.limits import MAX_LISTED
from wdskit.shards.statistics_counts import Counts, Numbers, round_pair
from wdskit.shards.statistics_json import JsonTally
from wdskit.shards.statistics_types import BadField

MAX_FIELDS = 1000


@dataclass
class ImageTally:
    """The images of one field."""

    formats: Counts[str] = field(default_factory=Counts)
    modes: Counts[str] = field(default_factory=Counts)
    widths: Numbers = field(default_factory=Numbers)
    heights: Numbers = field(default_factory=Numbers)
    pixels: Numbers = field(default_factory=Numbers)
    aspects: Numbers = field(default_factory=Numbers)
    resolutions: Counts[tuple[int, int]] = field(default_factory=lambda: Counts(coarse=round_pair))

    def merge(self, other: ImageTally) -> None:
        """Count those of another."""
        for name, one in vars(other).items():
            getattr(self, name).merge(one)


@dataclass
class Tally:
    """What was counted, in one shard or, merged in the order of the shards, in several."""

    num_samples: int = 0
    num_read: int = 0
    num_ignored: int | None = 0
    sizes: Numbers = field(default_factory=Numbers)
    fields: dict[str, Numbers] = field(default_factory=dict)
    num_more_fields: int = 0
    classes: Counts[int] = field(default_factory=Counts)
    images: dict[str, ImageTally] = field(default_factory=dict)
    json: dict[str, JsonTally] = field(default_factory=dict)
    num_bad: int = 0
    bad: list[BadField] = field(default_factory=list)
    shown: list[tuple[int, int, int]] = field(default_factory=list)  # draw, shard, start of the sample

    def merge(self, other: Tally) -> None:
        """Count those of the shard that comes next."""
        self.num_samples += other.num_samples
        self.num_read += other.num_read
        ignored = self.num_ignored, other.num_ignored
        self.num_ignored = None if ignored[0] is None or ignored[1] is None else ignored[0] + ignored[1]
        self.sizes.merge(other.sizes)
        self.num_more_fields += other.num_more_fields
        for name, numbers in other.fields.items():
            if name not in self.fields and len(self.fields) >= MAX_FIELDS:
                self.num_more_fields += numbers.counts.total
                continue
            self.fields.setdefault(name, Numbers()).merge(numbers)
        self.classes.merge(other.classes)
        for name, images in other.images.items():
            if name in self.fields:
                self.images.setdefault(name, ImageTally()).merge(images)
        for name, keys in other.json.items():
            if name in self.fields:
                self.json.setdefault(name, JsonTally()).merge(keys)
        self.num_bad += other.num_bad
        self.bad = (self.bad + other.bad)[:MAX_LISTED]
