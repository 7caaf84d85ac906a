"""Count in bounded memory. Counts of several shards, merged in order, equal the counts of one pass over all."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from wdskit.codecs.structure import ImageHeader
from wdskit.limits import MAX_LISTED
from wdskit.text import shorten

T = TypeVar("T", bound=Hashable)

MAX_DIFFERENT = 100_000
"""Different values that are counted separately: all widths of images there are, all sizes in most data sets."""

MAX_FIELDS = 1000
MAX_KEYS = 1000
MAX_DEPTH = 4
"""Levels of JSON whose keys are counted."""

MAX_ITEMS = 100
"""Items of a list that are looked at."""

MAX_RESOLUTIONS = 10
NUM_BINS = 40
_IMAGE_NUMBERS = ("widths", "heights", "pixels", "aspects")
_EXACT_BITS = 11
_WORD = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_TYPES: dict[type, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "list",
}


@dataclass(frozen=True)
class NumberStats:
    """Statistics of whole numbers; all are 0 if there is no number.

    Attributes:
        p50: The smallest number that at least half of the numbers do not exceed.
        p99: The smallest number that at least 99 % of the numbers do not exceed.
        is_exact: Whether p50 and p99 are exact; otherwise they are within 0.05 %. The other values are always exact.
        bins: (low, high, count): how many numbers are at least `low` and below `high`; rising, without a gap.
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
class ImageStats:
    """The images of one field whose headers read; sides in pixels.

    Attributes:
        formats: Images per format, `JPEG`, `PNG`, `WebP`, ..., by their first bytes; the most common first.
        modes: Images per mode, `RGB`, `L`, ...: Pillow's names, followed by `;16` for a PNG of 16 bits.
        aspects: Width / height in thousandths, rounded.
        num_resolutions: Number of different (width, height); None over 100,000.
        resolutions: The most common, as (width, height, count); empty over 100,000 different ones.
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
        key: `label`, `box.width`, `objects[].name`; `["a b"]` for a key that is not a plain word. Empty for a document
            that is not an object.
        num_samples: Samples that have it.
        types: Number of values per type: `text`, `integer`, `number`, `boolean`, `null`, `object`, `list`.
        min: The smallest of its numbers, None without numbers.
        max: The largest of its numbers, None without numbers.
    """

    field: str
    key: str
    num_samples: int
    types: dict[str, int]
    min: float | None
    max: float | None


@dataclass(frozen=True)
class BadField:
    """A field whose content does not match its name."""

    shard: str
    key: str
    field: str
    problem: str


def count_values(counts: Counter[T] | None, more: Iterable[T] | None) -> Counter[T] | None:
    """Add values, or the counts of another `Counter`, in place. Return None over `MAX_DIFFERENT` different values."""
    if counts is None or more is None:
        return None
    counts.update(more)
    return counts if len(counts) <= MAX_DIFFERENT else None


def round_number(value: int) -> int:
    """Round to one of 1,024 steps per power of two: at most 0.05 % off, exact below 2,048, and idempotent."""
    shift = value.bit_length() - _EXACT_BITS
    return value if shift <= 0 else (value >> shift << shift) + (1 << shift >> 1)


def _widen(least: Any, most: Any, *values: float | None) -> tuple[Any, Any]:
    """Return the smallest and the largest of the values that are not None; None without any."""
    known = [value for value in (least, most, *values) if value is not None]
    return min(known, default=None), max(known, default=None)


@dataclass
class Numbers:
    """Whole numbers of 0 or more.

    Attributes:
        counts: Occurrences of each number. Over `MAX_DIFFERENT` different numbers, they are rounded by `round_number`.
        is_exact: Whether no number was rounded.
        total: Exact sum.
        least: The exact minimum; None without numbers.
        most: The exact maximum; None without numbers.
    """

    counts: Counter[int] = field(default_factory=Counter)
    is_exact: bool = True
    total: int = 0
    least: int | None = None
    most: int | None = None

    def add(self, value: int) -> None:
        """Count one."""
        self.counts[value if self.is_exact else round_number(value)] += 1
        self.total += value
        if self.least is None or self.most is None or not self.least <= value <= self.most:
            self.least, self.most = _widen(self.least, self.most, value)
        if self.is_exact and len(self.counts) > MAX_DIFFERENT:
            self._round()

    def merge(self, other: Numbers) -> None:
        """Count those of another."""
        self.counts.update(other.counts)
        self.total += other.total
        self.least, self.most = _widen(self.least, self.most, other.least, other.most)
        if not (self.is_exact and other.is_exact and len(self.counts) <= MAX_DIFFERENT):
            self._round()

    def _round(self) -> None:
        self.is_exact = False
        exact, self.counts = self.counts, Counter()
        for value, times in exact.items():
            self.counts[round_number(value)] += times

    def result(self) -> NumberStats:
        """Return the statistics."""
        count = self.counts.total()
        return NumberStats(
            count=count,
            total=self.total,
            min=self.least or 0,
            mean=self.total / count if count else 0.0,
            p50=self.quantile(Fraction(1, 2)),
            p99=self.quantile(Fraction(99, 100)),
            max=self.most or 0,
            is_exact=self.is_exact,
            bins=self.bins(),
        )

    def quantile(self, share: Fraction) -> int:
        """Return the smallest number that at least this share of the numbers do not exceed; 0 without numbers."""
        if self.least is None or self.most is None:
            return 0
        values = sorted(self.counts)
        up_to = list(accumulate(self.counts[value] for value in values))
        found = values[bisect_left(up_to, math.ceil(share * up_to[-1]))]
        return min(max(found, self.least), self.most)

    def bins(self) -> tuple[tuple[int, int, int], ...]:
        """Return (low, high, count): how many numbers are at least `low` and below `high`; rising, without a gap.

        The bins are equally wide, or equally wide on a logarithmic scale if the maximum is over 20 times the minimum.
        """
        if self.least is None or self.most is None:
            return ()
        space = np.geomspace if self.most > 20 * self.least else np.linspace
        inner = space(max(1, self.least), self.most + 1, NUM_BINS + 1)[1:-1].round().tolist()
        edges = sorted({self.least, *map(int, inner), self.most + 1})
        counts = [0] * (len(edges) - 1)
        for value, times in self.counts.items():
            counts[bisect_right(edges, min(max(value, self.least), self.most)) - 1] += times
        return tuple(zip(edges, edges[1:], counts, strict=False))


def json_values(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each key in a document, `MAX_DEPTH` levels deep."""
    if path or not isinstance(value, dict):
        yield path, value
    if depth >= MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key, one in value.items():
            yield from json_values(one, _join(path, key), depth + 1)
    elif isinstance(value, list):
        for one in value[:MAX_ITEMS]:
            yield from json_values(one, f"{path}[]", depth + 1)


def _join(path: str, key: str) -> str:
    if _WORD.fullmatch(key):
        return f"{path}.{shorten(key)}" if path else shorten(key)
    return f"{path}[{json.dumps(shorten(key))}]"


@dataclass
class FieldTally:
    """One field: its bytes, its images, and the keys of its JSON.

    Attributes:
        sizes: Bytes.
        formats: Images by format.
        modes: Images by Pillow's mode.
        resolutions: Images by width and height.
        numbers: Of images the sides in pixels, their product, and their ratio in thousandths.
        keys: By path, in the order in which they first came.
        num_more_keys: Values of keys beyond `MAX_KEYS`.
    """

    sizes: Numbers = field(default_factory=Numbers)
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    resolutions: Counter[tuple[int, int]] | None = field(default_factory=Counter)
    numbers: dict[str, Numbers] = field(default_factory=lambda: {name: Numbers() for name in _IMAGE_NUMBERS})
    keys: dict[str, JsonKeyStats] = field(default_factory=dict)
    num_more_keys: int = 0

    def add_image(self, header: ImageHeader) -> None:
        """Count one image."""
        width, height = header.width, header.height
        self.formats[header.format] += 1
        self.modes[header.mode] += 1
        self.resolutions = count_values(self.resolutions, [(width, height)])
        ratio = (2000 * width + height) // (2 * height)
        for name, value in zip(_IMAGE_NUMBERS, (width, height, width * height, ratio), strict=True):
            self.numbers[name].add(value)

    def add_json(self, document: Any) -> None:
        """Count one document."""
        seen: set[str] = set()
        for path, value in json_values(document):
            kind = _TYPES[type(value)]
            is_number = kind == "integer" or (kind == "number" and math.isfinite(value))
            limits = (value, value) if is_number else (None, None)
            self._add_key(JsonKeyStats("", path, int(path not in seen), {kind: 1}, *limits))
            seen.add(path)

    def _add_key(self, more: JsonKeyStats) -> None:
        known = self.keys.get(more.key)
        if known is None and len(self.keys) >= MAX_KEYS:
            self.num_more_keys += sum(more.types.values())
        elif known is None:
            self.keys[more.key] = more
        else:
            known.num_samples += more.num_samples
            for kind, times in more.types.items():
                known.types[kind] = known.types.get(kind, 0) + times
            known.min, known.max = _widen(known.min, known.max, more.min, more.max)

    def merge(self, other: FieldTally) -> None:
        """Add the counts of the samples that come next."""
        self.sizes.merge(other.sizes)
        self.formats.update(other.formats)
        self.modes.update(other.modes)
        self.resolutions = count_values(self.resolutions, other.resolutions)
        for name, numbers in self.numbers.items():
            numbers.merge(other.numbers[name])
        for key in other.keys.values():
            self._add_key(key)
        self.num_more_keys += other.num_more_keys

    def images(self, name: str) -> ImageStats:
        """The images of the field `name`."""
        pairs = _ranked(self.resolutions or Counter())[:MAX_RESOLUTIONS]
        return ImageStats(
            field=name,
            num_images=self.formats.total(),
            formats=dict(_ranked(self.formats)),
            modes=dict(_ranked(self.modes)),
            num_resolutions=None if self.resolutions is None else len(self.resolutions),
            resolutions=tuple((*pair, times) for pair, times in pairs),
            **{key: numbers.result() for key, numbers in self.numbers.items()},
        )


def _ranked(counts: Counter[Any]) -> list[tuple[Any, int]]:
    """Return values and their counts, the most common first; of equally common values the smallest."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


@dataclass
class Tally:
    """The counts of one shard or, merged in order, of several."""

    num_samples: int = 0
    num_ignored: int = 0
    sizes: Numbers = field(default_factory=Numbers)
    fields: dict[str, FieldTally] = field(default_factory=dict)
    num_more_fields: int = 0
    classes: Counter[int] | None = field(default_factory=Counter)
    num_bad: int = 0
    bad: list[BadField] = field(default_factory=list)
    shown: list[tuple[int, int, int]] = field(default_factory=list)  # draw, shard, start of the sample

    def find_field(self, name: str) -> FieldTally | None:
        """Return the counts of a field; None if there are already `MAX_FIELDS` other fields."""
        if name not in self.fields and len(self.fields) >= MAX_FIELDS:
            return None
        return self.fields.setdefault(name, FieldTally())

    def merge(self, other: Tally) -> None:
        """Add the counts of the shard that comes next."""
        self.num_samples += other.num_samples
        self.num_ignored += other.num_ignored
        self.sizes.merge(other.sizes)
        self.num_more_fields += other.num_more_fields
        for name, theirs in other.fields.items():
            if mine := self.find_field(name):
                mine.merge(theirs)
            else:
                self.num_more_fields += theirs.sizes.counts.total()
        self.classes = count_values(self.classes, other.classes)
        self.num_bad += other.num_bad
        self.bad = (self.bad + other.bad)[:MAX_LISTED]
