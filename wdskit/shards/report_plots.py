"""The plots of a report as plain shapes: where bars, dots and labels stand, in the units of their drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, sqrt

from wdskit.shards.statistics_types import ClassStats, ImageStats, NumberStats

WIDTH = 480
HEIGHT = 200
LEFT, RIGHT, TOP, BOTTOM = 8, 8, 12, 24
_LABEL_EVERY = 80  # least distance of two labels
_SIDES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Shape:
    """A bar from its upper left corner, or a dot around it with `width` for its radius."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Label:
    """A text below or beside an axis."""

    at: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True)
class Plot:
    """One drawing.

    Attributes:
        what: What it shows, for those who do not see it.
        shapes: Bars or dots.
        labels: Below the horizontal axis.
        side_labels: Beside the vertical axis.
        height: Of the drawing.
    """

    what: str
    shapes: tuple[Shape, ...]
    labels: tuple[Label, ...] = ()
    side_labels: tuple[Label, ...] = ()
    height: float = HEIGHT


def histogram(numbers: NumberStats, what: str, show: Callable[[float], str]) -> Plot:
    """The bins of many numbers, each as wide as the next: where bins widen, the axis is logarithmic."""
    bins = numbers.bins
    most = max(count for _, _, count in bins)
    step = (WIDTH - LEFT - RIGHT) / len(bins)
    floor = HEIGHT - BOTTOM
    shapes = []
    for place, (low, high, count) in enumerate(bins):
        height = (floor - TOP) * count / most
        title = f"{show(low)} to below {show(high)}: {count:,}" if high - low > 1 else f"{show(low)}: {count:,}"
        shapes.append(Shape(LEFT + place * step + 0.5, floor - height, max(step - 1, 0.5), height, title))
    edges = [low for low, _, _ in bins] + [bins[-1][1]]
    return Plot(
        f"{what}: {numbers.count:,} from {show(numbers.min)} to {show(numbers.max)}",
        tuple(shapes),
        _edge_labels(edges, step, show),
    )


def _edge_labels(edges: Sequence[int], step: float, show: Callable[[float], str]) -> tuple[Label, ...]:
    """As many edges as have room; round ones first."""
    every = max(1, -(-_LABEL_EVERY // step))
    round_ones = [at for at, edge in enumerate(edges) if str(edge).strip("0") == "1" and edge]
    if len(round_ones) >= 2 and edges[-1] > 50 * max(1, edges[0]):
        chosen = [at for at in round_ones if step * 8 >= _LABEL_EVERY or at % 2]
    else:
        chosen = list(range(0, len(edges), int(every)))
    labels = []
    for at in chosen:
        x = LEFT + at * step
        anchor = "start" if x < LEFT + 20 else "end" if x > WIDTH - RIGHT - 30 else "middle"
        labels.append(Label(x, show(edges[at]), anchor))
    return tuple(labels)


@dataclass(frozen=True)
class ClassBar:
    """One class of a few."""

    name: str
    number: int
    count: int
    share: float
    y: float
    width: float


def class_bars(classes: Sequence[ClassStats]) -> tuple[ClassBar, ...]:
    """One bar a class, in the order of their numbers."""
    most = max((one.num_samples for one in classes), default=0) or 1
    total = sum(one.num_samples for one in classes) or 1
    return tuple(
        ClassBar(
            str(one.number) if one.name is None else one.name,
            one.number,
            one.num_samples,
            one.num_samples / total,
            place * 20.0,
            200.0 * one.num_samples / most,
        )
        for place, one in enumerate(classes)
    )


def ranked_classes(classes: Sequence[ClassStats]) -> Plot:
    """Many classes as one falling line of bars, the largest first; neighbours share a bar where there are too many."""
    counts = sorted((one.num_samples for one in classes), reverse=True)
    num = min(len(counts), WIDTH // 2)
    edges = [round(at * len(counts) / num) for at in range(num + 1)]
    step = (WIDTH - LEFT - RIGHT) / num
    floor = HEIGHT - BOTTOM
    most = counts[0] or 1
    shapes = []
    for place in range(num):
        part = counts[edges[place] : edges[place + 1]]
        height = (floor - TOP) * sum(part) / len(part) / most
        ranks = f"class {edges[place] + 1:,}" + (f" to {edges[place + 1]:,}" if len(part) > 1 else "")
        title = f"{ranks} by size: {part[-1]:,}" + (f" to {part[0]:,}" if part[0] > part[-1] else "")
        shapes.append(Shape(LEFT + place * step, floor - height, step if step < 4 else step - 1, height, title))
    labels = (Label(LEFT, "largest class", "start"), Label(WIDTH - RIGHT, "smallest class", "end"))
    what = f"samples of {len(counts):,} classes, the largest first: {counts[0]:,} to {counts[-1]:,}"
    return Plot(what, tuple(shapes), labels)


def resolutions(images: ImageStats) -> Plot:
    """A dot for each width and height, its area that of the count; both axes logarithmic and alike."""
    low = min(images.widths.min, images.heights.min) / 1.15
    high = max(images.widths.max, images.heights.max) * 1.15
    size = 400
    left, floor = 44, size - 30
    span = floor - TOP

    def place(side: float) -> float:
        return span * log(side / low) / log(high / low)

    most = max(count for _, _, count in images.grid)
    dots = sorted(images.grid, key=lambda dot: -dot[2])
    largest = 14 if len(dots) < 100 else 9 if len(dots) < 300 else 6
    shapes = tuple(
        Shape(
            left + place(width),
            floor - place(height),
            max(1.2, largest * sqrt(count / most)),
            0,
            f"{width:,} x {height:,}: {count:,}",
        )
        for width, height, count in dots
    )
    sides = [side for side in _SIDES if low <= side <= high]
    if len(sides) < 2:
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if (high - low) / step < 8)
        sides = [side for side in range(0, int(high) + 1, step) if low <= side]
    labels = tuple(Label(left + place(side), f"{side:,}") for side in sides)
    beside = tuple(Label(floor - place(side), f"{side:,}", "end") for side in sides)
    what = f"width and height of {images.num_images:,} images in field {images.field}"
    return Plot(what, shapes, labels, beside, size)
