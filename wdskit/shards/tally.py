"""Count in bounded memory. Merging the counts of shards in order gives the counts of one pass over all shards."""

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
"""Most different values that are counted separately: enough for all widths of images, and for most sizes of fields."""

MAX_FIELDS = 1000
"""Most fields that are counted separately."""

MAX_KEYS = 1000
"""Most JSON keys of a field that are counted separately."""

MAX_DEPTH = 4
"""Levels of nested JSON whose keys are counted."""

MAX_ITEMS = 100
"""Items of a JSON list that are counted."""

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
    """Statistics of whole numbers of 0 or more. Without numbers, all statistics are 0, and `bins` is empty.

    Attributes:
        p50: The smallest number that at least half of the numbers do not exceed.
        p99: The smallest number that at least 99 % of the numbers do not exceed.
        is_exact: Whether p50, p99 and bins are exact; otherwise they are made from numbers with errors of up to 0.05 %.
            The other values are always exact.
        bins: (low, high, count) of each bin, ascending and without gaps. `count` numbers are at least `low` and below
            `high`.
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
    """Statistics of the images of one field. Images without a valid header do not count. Lengths are in pixels.

    Attributes:
        formats: Number of images by format (`JPEG`, `PNG`, `WebP`, ...), the most common first.
        modes: Number of images by Pillow's mode (`RGB`, `L`, ...), the most common first. `;16` marks a PNG of 16 bits.
        pixels: Width x height.
        aspects: Width / height in thousandths: 1333 for 4:3.
        num_resolutions: Number of different (width, height); None if there are over 100,000.
        resolutions: The most common as (width, height, count), at most 10; empty if there are over 100,000.
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
        key: Path of the key: `label`, `box.width`, `objects[].name`. `["a b"]` is a key that is not a plain word. Empty
            for a document that is not an object.
        num_samples: Samples with the key.
        types: Number of values per type: `text`, `integer`, `number`, `boolean`, `null`, `object`, `list`.
        min: The smallest finite number; None without finite numbers.
        max: The largest finite number; None without finite numbers.
    """

    field: str
    key: str
    num_samples: int
    types: dict[str, int]
    min: float | None
    max: float | None


@dataclass(frozen=True)
class BadField:
    """A field of a sample that cannot be read."""

    shard: str
    key: str
    field: str
    problem: str


def count_values(counts: Counter[T] | None, more: Iterable[T] | None) -> Counter[T] | None:
    """Add values, or the counts of another `Counter`, to `counts` and return `counts`.

    Return None if there are over `MAX_DIFFERENT` different values. None as an argument is the result of an earlier call
    with too many values; the result is then None, too.
    """
    if counts is None or more is None:
        return None
    counts.update(more)
    return counts if len(counts) <= MAX_DIFFERENT else None


def round_number(value: int) -> int:
    """Round an integer of 0 or more within 0.05 %. Integers below 2,048 and rounded integers are not changed."""
    shift = value.bit_length() - _EXACT_BITS
    return value if shift <= 0 else (value >> shift << shift) + (1 << shift >> 1)


def _min_and_max(least: Any, most: Any, *values: float | None) -> tuple[Any, Any]:
    """Return the smallest and the largest argument that is not None; (None, None) if all arguments are None."""
    known = [value for value in (least, most, *values) if value is not None]
    return min(known, default=None), max(known, default=None)


@dataclass
class NumberTally:
    """Counts of whole numbers of 0 or more, in bounded memory.

    Attributes:
        counts: How often each number occurred. If there are over `MAX_DIFFERENT` different numbers, all numbers are
            rounded by `round_number`.
        is_exact: Whether no number was rounded.
        total: The exact sum of the numbers.
        least: The exact minimum; None without numbers.
        most: The exact maximum; None without numbers.
    """

    counts: Counter[int] = field(default_factory=Counter)
    is_exact: bool = True
    total: int = 0
    least: int | None = None
    most: int | None = None

    def add(self, value: int) -> None:
        """Count one number."""
        self.counts[value if self.is_exact else round_number(value)] += 1
        self.total += value
        if self.least is None or self.most is None or not self.least <= value <= self.most:
            self.least, self.most = _min_and_max(self.least, self.most, value)
        if self.is_exact and len(self.counts) > MAX_DIFFERENT:
            self._round()

    def merge(self, other: NumberTally) -> None:
        """Add the counts of another tally."""
        self.counts.update(other.counts)
        self.total += other.total
        self.least, self.most = _min_and_max(self.least, self.most, other.least, other.most)
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
        """Return the smallest number that at least `share` of the numbers do not exceed, such as the median for 1/2; 0
        without numbers. The result is within 0.05 % if numbers were rounded.
        """
        if self.least is None or self.most is None:
            return 0
        values = sorted(self.counts)
        up_to = list(accumulate(self.counts[value] for value in values))
        found = values[bisect_left(up_to, math.ceil(share * up_to[-1]))]
        return min(max(found, self.least), self.most)

    def bins(self) -> tuple[tuple[int, int, int], ...]:
        """Return a histogram of at most `NUM_BINS` (low, high, count): `count` numbers are at least `low` and below
        `high`.

        The bins are ascending and without gaps; () without numbers. All have about the same width, or about the same
        ratio of `high` to `low` if the maximum is over 20 times the minimum.
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
    """Yield (path, value) for each member of each object, such as `objects[].name`, and for each item of each list,
    such as `objects[]`, in a JSON document. An object or a list comes before its content. A document that is not an
    object is yielded too, with the path "".

    Values deeper than `MAX_DEPTH` levels, and items of a list after the first `MAX_ITEMS`, are skipped. `path` and
    `depth` are for recursive calls.
    """
    if path or not isinstance(value, dict):
        yield path, value
    if depth >= MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key, one in value.items():
            yield from json_values(one, _join_path(path, key), depth + 1)
    elif isinstance(value, list):
        for one in value[:MAX_ITEMS]:
            yield from json_values(one, f"{path}[]", depth + 1)


def _join_path(path: str, key: str) -> str:
    if _WORD.fullmatch(key):
        return f"{path}.{shorten(key)}" if path else shorten(key)
    return f"{path}[{json.dumps(shorten(key))}]"


@dataclass
class FieldTally:
    """Counts of one field: its bytes, its images, and the keys of its JSON.

    Attributes:
        sizes: Bytes of the field in each sample.
        formats: Number of images by format.
        modes: Number of images by Pillow's mode.
        resolutions: Number of images by (width, height); None if there are over `MAX_DIFFERENT`.
        numbers: `widths`, `heights`, `pixels` and `aspects` of the images, as in `ImageStats`.
        keys: Statistics of the first `MAX_KEYS` JSON keys, by path.
        num_more_keys: Number of values of all other keys.
    """

    sizes: NumberTally = field(default_factory=NumberTally)
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    resolutions: Counter[tuple[int, int]] | None = field(default_factory=Counter)
    numbers: dict[str, NumberTally] = field(default_factory=lambda: {name: NumberTally() for name in _IMAGE_NUMBERS})
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
        """Count the keys of one JSON document."""
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
            known.min, known.max = _min_and_max(known.min, known.max, more.min, more.max)

    def merge(self, other: FieldTally) -> None:
        """Add the counts of the same field in the next shard."""
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
        """Return the statistics of the images of this field, which is called `name`."""
        pairs = _sort_by_count(self.resolutions or Counter())[:MAX_RESOLUTIONS]
        return ImageStats(
            field=name,
            num_images=self.formats.total(),
            formats=dict(_sort_by_count(self.formats)),
            modes=dict(_sort_by_count(self.modes)),
            num_resolutions=None if self.resolutions is None else len(self.resolutions),
            resolutions=tuple((*pair, times) for pair, times in pairs),
            **{key: numbers.result() for key, numbers in self.numbers.items()},
        )


def _sort_by_count(counts: Counter[Any]) -> list[tuple[Any, int]]:
    """Return (value, count) pairs, the most common value first. Equally common values are sorted ascending."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


@dataclass
class Tally:
    """The counts of one shard, or of several shards merged in order.

    Attributes:
        sizes: Size of each sample: the bytes of all its fields.
        fields: Counts of each field, by name, for at most `MAX_FIELDS` fields.
        num_more_fields: Number of pairs of a sample and a field that is not in `fields`.
        classes: Number of samples by class number; None if there are over `MAX_DIFFERENT` classes.
        bad: The first `MAX_LISTED` of the `num_bad` fields that cannot be read.
        shown: Random number, shard number and byte offset of each sample to show. The caller keeps the smallest random
            numbers.
    """

    num_samples: int = 0
    num_ignored: int = 0
    sizes: NumberTally = field(default_factory=NumberTally)
    fields: dict[str, FieldTally] = field(default_factory=dict)
    num_more_fields: int = 0
    classes: Counter[int] | None = field(default_factory=Counter)
    num_bad: int = 0
    bad: list[BadField] = field(default_factory=list)
    shown: list[tuple[int, int, int]] = field(default_factory=list)

    def find_field(self, name: str) -> FieldTally | None:
        """Return the counts of a field. For a new field, add empty counts and return them; or return None if already
        `MAX_FIELDS` fields have counts.
        """
        if name not in self.fields and len(self.fields) >= MAX_FIELDS:
            return None
        return self.fields.setdefault(name, FieldTally())

    def merge(self, other: Tally) -> None:
        """Add the counts of the next shard, but not its `shown`."""
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
