"""Counting in bounded memory: parts merged in the order of the shards are what one pass counts."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from itertools import count as count_up
from math import ceil, floor, log10
from typing import Any, Generic, TypeVar

from wdskit.codecs.structure import ImageHeader
from wdskit.limits import MAX_LISTED
from wdskit.statistics.result import BadField, FieldStats, ImageStats, JsonKeyStats, NumberStats
from wdskit.text import shorten

T = TypeVar("T", bound=Hashable)

MAX_DIFFERENT = 100_000
"""Different numbers that are counted separately: all widths of images there are, all sizes in most data sets."""

MAX_FIELDS = 1000
MAX_KEYS = 1000
MAX_DEPTH = 4
"""Levels of JSON whose keys are counted."""

MAX_ITEMS = 100
"""Items of a list that are looked at."""

MAX_RESOLUTIONS = 10
MAX_BINS = 40
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


class Counts(Generic[T]):
    """How often each value came.

    Beyond `limit` different values they are made coarse by a function that is the same when done twice, or not counted
    any more: then `by_value` is empty and `is_exact` false. `total` is always exact.
    """

    def __init__(self, limit: int = MAX_DIFFERENT, coarse: Callable[[T], T] | None = None) -> None:
        self.total = 0
        self.by_value: Counter[T] = Counter()
        self.is_exact = True
        self._limit = limit
        self._coarse = coarse

    def add(self, value: T, times: int = 1) -> None:
        """Count one value."""
        self.total += times
        if not self.is_exact:
            if self._coarse is None:
                return
            value = self._coarse(value)
        self.by_value[value] += times
        if self.is_exact and len(self.by_value) > self._limit:
            self._coarsen()

    def merge(self, other: Counts[T]) -> None:
        """Count what another one did."""
        if self.is_exact and not other.is_exact:
            self._coarsen()
        total = self.total + other.total
        for value, times in other.by_value.items():
            self.add(value, times)
        self.total = total

    def _coarsen(self) -> None:
        fine, self.by_value = self.by_value, Counter()
        self.is_exact = False
        if self._coarse is not None:
            for value, times in fine.items():
                self.by_value[self._coarse(value)] += times

    def ranked(self) -> list[tuple[T, int]]:
        """Values and how often they came, the commonest first; of equally common ones the least."""
        items: list[tuple[Any, int]] = sorted(self.by_value.items())
        return sorted(items, key=lambda item: -item[1])


def round_number(value: int) -> int:
    """The middle of 1,024 steps to the double: at most 0.05 % off; exact below 2,048."""
    shift = value.bit_length() - _EXACT_BITS
    return value if shift <= 0 else (value >> shift << shift) + (1 << shift >> 1)


class Numbers:
    """Whole numbers of 0 or more: exact count, sum, least and most (None without any); quantiles exact up to
    `MAX_DIFFERENT` different numbers, beyond that within 0.05 %.
    """

    def __init__(self) -> None:
        self.counts: Counts[int] = Counts(MAX_DIFFERENT, round_number)
        self.total = 0
        self.least: int | None = None
        self.most: int | None = None

    @classmethod
    def of(cls, values: Iterable[int]) -> Numbers:
        """Count them all."""
        numbers = cls()
        for value in values:
            numbers.add(value)
        return numbers

    def add(self, value: int) -> None:
        """Count one."""
        self.counts.add(value)
        self.total += value
        if self.most is None or value > self.most:
            self.most = value
        if self.least is None or value < self.least:
            self.least = value

    def merge(self, other: Numbers) -> None:
        """Count those of another."""
        self.counts.merge(other.counts)
        self.total += other.total
        self.least, self.most = _range(self.least, self.most, other.least, other.most)

    def result(self) -> NumberStats:
        """The numbers in a few."""
        num = self.counts.total
        p50, p99 = self.quantiles((Fraction(1, 2), Fraction(99, 100)))
        return NumberStats(
            count=num,
            total=self.total,
            min=self.least or 0,
            mean=self.total / num if num else 0.0,
            p50=p50,
            p99=p99,
            max=self.most or 0,
            is_exact=self.counts.is_exact,
            bins=self.bins(),
        )

    def quantiles(self, shares: Iterable[Fraction]) -> list[int]:
        """For each share the least number so that at least this share of all numbers is no greater."""
        if self.least is None or self.most is None:
            return [0 for _ in shares]
        values = sorted(self.counts.by_value)
        behind = list(accumulate(map(self.counts.by_value.__getitem__, values)))
        found = [values[bisect_left(behind, ceil(share * self.counts.total))] for share in shares]
        return [min(max(value, self.least), self.most) for value in found]

    def bins(self) -> tuple[tuple[int, int, int], ...]:
        """(low, high, count): how many are from `low` to below `high`, rising, without a gap.

        Where the most is over 20 times the least the bins widen with their numbers, eight to a factor of ten.
        """
        if self.least is None or self.most is None:
            return ()
        edges = _log_edges(self.least, self.most) if self.most > 20 * self.least else _even_edges(self.least, self.most)
        counts = [0] * (len(edges) - 1)
        for value, times in self.counts.by_value.items():
            value = min(max(value, self.least), self.most)
            counts[bisect_right(edges, value) - 1] += times
        return tuple(zip(edges, edges[1:], counts, strict=False))


def _even_edges(least: int, most: int) -> list[int]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    steps = (digit * 10**power for power in count_up() for digit in (1, 2, 5))
    step = next(step for step in steps if (most - least) // step < MAX_BINS)
    return list(range(least // step * step, (most // step + 1) * step + 1, step))


def _log_edges(least: int, most: int) -> list[int]:
    """Eighths of a factor of ten, rounded; 0 has a bin of its own."""
    first = floor(8 * log10(least)) if least else 0
    edges = dict.fromkeys([] if least else [0])
    for eighth in count_up(first):
        edges[round(10 ** (eighth / 8))] = None
        if round(10 ** (eighth / 8)) > most:
            return list(edges)
    raise AssertionError


def _range(*values: float | None) -> tuple[Any, Any]:
    """The least and the most, None without any."""
    known = [value for value in values if value is not None]
    return min(known, default=None), max(known, default=None)


@dataclass
class KeyTally:
    """One key."""

    num_samples: int = 0
    types: Counter[str] = field(default_factory=Counter)
    least: float | None = None
    most: float | None = None
    last: int = -1  # the document in which it came last

    def note(self, value: Any, document: int) -> None:
        """Count a value."""
        if document != self.last:
            self.num_samples += 1
            self.last = document
        kind = _TYPES[type(value)]
        self.types[kind] += 1
        if kind == "integer" or (kind == "number" and math.isfinite(value)):
            self.least, self.most = _range(self.least, self.most, value)

    def merge(self, other: KeyTally) -> None:
        """Count those of other samples."""
        self.num_samples += other.num_samples
        self.types.update(other.types)
        self.least, self.most = _range(self.least, self.most, other.least, other.most)


class JsonTally:
    """The keys of one JSON field.

    Attributes:
        keys: By path, in the order in which they first came.
        num_more: Values of keys beyond `MAX_KEYS`.
    """

    def __init__(self) -> None:
        self.keys: dict[str, KeyTally] = {}
        self.num_more = 0
        self._num_documents = 0

    def add(self, value: Any) -> None:
        """Count one document."""
        self._num_documents += 1
        if isinstance(value, dict):
            for key, one in value.items():
                self._add(one, _join("", key), 1)
        else:
            self._add(value, "", 1)

    def _add(self, value: Any, path: str, depth: int) -> None:
        known = self.keys.get(path)
        if known is None:
            if len(self.keys) >= MAX_KEYS:
                self.num_more += 1
                return
            known = self.keys[path] = KeyTally()
        known.note(value, self._num_documents)
        if depth >= MAX_DEPTH:
            return
        if isinstance(value, dict):
            for key, one in value.items():
                self._add(one, _join(path, key), depth + 1)
        elif isinstance(value, list):
            for one in value[:MAX_ITEMS]:
                self._add(one, f"{path}[]", depth + 1)

    def merge(self, other: JsonTally) -> None:
        """Count those of the samples that come next."""
        self.num_more += other.num_more
        for path, tally in other.keys.items():
            if path not in self.keys and len(self.keys) >= MAX_KEYS:
                self.num_more += tally.types.total()
                continue
            self.keys.setdefault(path, KeyTally()).merge(tally)

    def result(self, name: str) -> list[JsonKeyStats]:
        """The keys of the field `name`."""
        return [
            JsonKeyStats(name, key, one.num_samples, dict(sorted(one.types.items())), one.least, one.most)
            for key, one in self.keys.items()
        ]


def _join(path: str, key: str) -> str:
    if _WORD.fullmatch(key):
        return f"{path}.{shorten(key)}" if path else shorten(key)
    return f"{path}[{json.dumps(shorten(key))}]"


@dataclass
class ImageTally:
    """The images of one field."""

    formats: Counts[str] = field(default_factory=Counts)
    modes: Counts[str] = field(default_factory=Counts)
    widths: Numbers = field(default_factory=Numbers)
    heights: Numbers = field(default_factory=Numbers)
    pixels: Numbers = field(default_factory=Numbers)
    aspects: Numbers = field(default_factory=Numbers)
    resolutions: Counts[tuple[int, int]] = field(default_factory=Counts)

    def add(self, header: ImageHeader) -> None:
        """Count one image."""
        self.formats.add(header.format)
        self.modes.add(header.mode)
        self.widths.add(header.width)
        self.heights.add(header.height)
        self.pixels.add(header.width * header.height)
        self.aspects.add((2000 * header.width + header.height) // (2 * header.height))
        self.resolutions.add((header.width, header.height))

    def merge(self, other: ImageTally) -> None:
        """Count those of another."""
        for name, one in vars(other).items():
            getattr(self, name).merge(one)

    def result(self, name: str) -> ImageStats:
        """The images of the field `name`."""
        pairs = self.resolutions
        return ImageStats(
            field=name,
            num_images=self.formats.total,
            formats=dict(self.formats.ranked()),
            modes=dict(self.modes.ranked()),
            widths=self.widths.result(),
            heights=self.heights.result(),
            pixels=self.pixels.result(),
            aspects=self.aspects.result(),
            num_resolutions=len(pairs.by_value) if pairs.is_exact else None,
            resolutions=tuple((*pair, times) for pair, times in pairs.ranked()[:MAX_RESOLUTIONS]),
        )


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

    def field_stats(self) -> tuple[FieldStats, ...]:
        """The fields, by name."""
        return tuple(FieldStats(name, one.counts.total, one.result()) for name, one in sorted(self.fields.items()))
