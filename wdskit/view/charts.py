"""The charts of the page of `wdskit view` and of the report of `wdskit stats --html`, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wdskit.shards.tally import NumberStats
from wdskit.text import format_count


@dataclass(frozen=True)
class Histogram:
    """A bar chart that shows how often numbers occur.

    Attributes:
        title: Name and unit of the numbers.
        label: The chart in one sentence, for screen readers.
        bars: (height in percent of the highest bar, range and count as text) of each bar, from left to right.
        ends: Minimum, median and maximum, as text.
    """

    title: str
    label: str
    bars: tuple[tuple[int, str], ...]
    ends: tuple[str, str, str]


def make_histogram(title: str, numbers: NumberStats, show: Callable[[float], str] = format_count) -> Histogram:
    """Return the histogram of `numbers`. `title` is their name and unit. `show` formats one number as text."""
    least, median, most = show(numbers.min), show(numbers.p50), show(numbers.max)
    levels = bar_levels(count for _, _, count in numbers.bins)
    texts = [f"{show(low)} to below {show(high)}: {format_count(count)}" for low, high, count in numbers.bins]
    label = f"{title}: {format_count(numbers.count)} from {least} to {most}, median {median}"
    return Histogram(title, label, tuple(zip(levels, texts, strict=True)), (least, f"median {median}", most))


def bar_levels(counts: Iterable[int]) -> list[int]:
    """Return the length of each bar in percent of the longest bar; 0 only for the count 0."""
    known = list(counts)
    most = max(known, default=0)
    return [max(1, round(100 * count / most)) if count else 0 for count in known]
