"""Draw the pictures of README.md and docs/, for tools/dev/generate.py.

Each picture is an SVG in two versions, for light and for dark pages. It uses the reader's fonts and has no scripts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import numpy as np

from wdskit.order.exact import ExactOrder
from wdskit.order.steps import Steps, rank_positions


@dataclass(frozen=True)
class Colours:
    """The colours of one version of a picture."""

    ink: str
    soft: str
    line: str
    box: str
    ranks: tuple[str, str, str]
    on_rank: str
    """Text on the colour of a rank."""
    page: str
    """Background, which keeps the picture readable if the page does not follow the browser's colour scheme."""


LIGHT = Colours("#1f2328", "#59636e", "#8c959f", "#f6f8fa", ("#0969da", "#bc4c00", "#8250df"), "#ffffff", "#ffffff")
DARK = Colours("#f0f6fc", "#9198a1", "#656c76", "#151b23", ("#4493f8", "#f0883e", "#ab7df8"), "#0d1117", "#0d1117")
FONT = 'font-family="system-ui, sans-serif" font-size="14"'


class Drawing:
    """Collects shapes, and writes them as one SVG. `title` says what the picture shows, `desc` how to read it."""

    def __init__(self, width: int, height: int, title: str, desc: str, colours: Colours) -> None:
        self.colours = colours
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {FONT}>',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(desc)}</desc>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{colours.page}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, *, stroke: str) -> None:
        """Add a rounded box."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
        self.parts.append(f'<rect {size} fill="{self.colours.box}" stroke="{stroke}"/>')

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Add a plain rectangle."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>')

    def text(
        self, x: float, y: float, text: str, *, soft: bool = False, anchor: str = "middle", size: int = 14
    ) -> None:
        """Add one line of text; `y` is its base line."""
        colour = self.colours.soft if soft else self.colours.ink
        where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
        self.parts.append(f"<text {where}>{escape(text)}</text>")

    def label(self, x: float, y: float, text: str, *, size: int) -> None:
        """Add text in the middle of a shape that has the colour of a rank."""
        where = f'x="{x:g}" y="{y:g}" text-anchor="middle" font-size="{size}" fill="{self.colours.on_rank}"'
        self.parts.append(f"<text {where}>{escape(text)}</text>")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Add a straight line with a head at (`to_x`, `to_y`)."""
        line = f'stroke="{self.colours.line}" stroke-width="1.5" fill="none"'
        length = np.hypot(to_x - x, to_y - y)
        along = np.array([to_x - x, to_y - y]) / length
        left, right = (
            np.array([to_x, to_y]) - 8 * along + side * 4 * np.array([-along[1], along[0]]) for side in (1, -1)
        )
        head = f"M{left[0]:.1f} {left[1]:.1f} L{to_x:g} {to_y:g} L{right[0]:.1f} {right[1]:.1f}"
        self.parts.append(f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g} {head}" {line}/>')

    def svg(self) -> str:
        """Return the whole file."""
        return "\n".join([*self.parts, "</svg>", ""])


def pipeline(colours: Colours) -> str:
    """Draw the path from a shard with its index to the batches of two ranks."""
    title = "A shard and its index; every rank reads its own samples of it, decodes, crops and batches them."
    desc = "In the shard, the colour of a sample is that of the rank that reads it. An arrow leads from stage to stage."
    drawing = Drawing(760, 236, title, desc, colours)
    line, first, second = colours.line, *colours.ranks[:2]
    drawing.text(85, 24, "train-000000.tar")
    drawing.box(10, 36, 150, 150, stroke=line)
    owners = [first, second, second, first, second, first]
    for at, owner in enumerate(owners):
        y = 44 + 23 * at
        drawing.rect(18, y, 134, 19, owner)
        drawing.label(85, y + 14, f"{at:06d}.jpg  {at:06d}.cls", size=11)
    drawing.text(85, 206, "index.json: where", soft=True, size=12)
    drawing.text(85, 222, "each sample starts", soft=True, size=12)
    for rank, (y, colour) in enumerate(((50, first), (144, second))):
        drawing.arrow(164, 111, 206, y + 20)
        for x, width, name in ((210, 88, "exact"), (326, 88, "decode"), (442, 88, "crop"), (558, 92, "batched")):
            drawing.box(x, y, width, 40, stroke=colour)
            drawing.text(x + width / 2, y + 25, name)
            if x < 558:
                drawing.arrow(x + width + 3, y + 20, x + width + 25, y + 20)
        drawing.arrow(653, y + 20, 681, y + 20)
        drawing.text(720, y + 25, f"rank {rank}")
    drawing.text(430, 118, "each sample once an epoch, the same number of batches on every rank", soft=True, size=13)
    return drawing.svg()


def lanes(colours: Colours) -> str:
    """Draw which samples each step of an epoch reads: the real order of 8 shards, for two ranks."""
    counts, batch, num_lanes = [40] * 8, 8, 8
    order, steps = ExactOrder(counts, seed=7, lanes=num_lanes, window=40), Steps(sum(counts), batch, 2, "drop")
    title = "Each step of an epoch takes samples from all shards; the two ranks share no sample."
    desc = "A dot is a sample: its column is the step, its row the place in the data, its colour the rank."
    drawing = Drawing(760, 330, title, desc, colours)
    left, top, width, height = 76, 20, 660, 260
    for shard in range(len(counts)):
        y = top + height * shard / len(counts)
        drawing.box(left, y, width, height / len(counts), stroke=colours.line)
        drawing.text(left - 8, y + 21, f"shard {shard}", soft=True, anchor="end", size=12)
    starts = np.cumsum([0, *counts[:-1]])
    for step in range(len(steps)):
        for rank in range(2):
            shards, samples = order.take(rank_positions(order, 0, steps, step, rank=rank, ranks_per_node=2))
            for place in np.sort(starts[shards] + samples).tolist():
                x = left + width * (step + 0.25 + 0.3 * rank) / len(steps)
                y = top + height * (place + 0.5) / sum(counts)
                fill = colours.ranks[rank]
                drawing.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{fill}"/>')
    for step in range(0, len(steps), 4):
        drawing.text(left + width * (step + 0.4) / len(steps), top + height + 18, str(step), soft=True, size=12)
    drawing.text(left + width / 2, top + height + 38, "step of the epoch", soft=True, size=12)
    for rank in range(2):
        drawing.rect(left + 160 * rank, top + height + 28, 10, 10, colours.ranks[rank])
        drawing.text(left + 16 + 160 * rank, top + height + 38, f"rank {rank}", anchor="start", size=12)
    return drawing.svg()


def resume(colours: Colours) -> str:
    """Draw which rank reads each position of an epoch: two ranks, and three ranks after a stop at position 12."""
    title = "Two ranks stop after 12 samples; three ranks continue at position 12 of the same sequence."
    desc = "A square is a position of the epoch. Its colour is the rank that reads it."
    drawing = Drawing(760, 176, title, desc, colours)
    left, size = 20, 30
    drawing.text(left, 22, "2 ranks, batches of 3", anchor="start", size=13)
    drawing.text(left + 12 * size + 14, 22, "3 ranks, batches of 2", anchor="start", size=13)
    order = ExactOrder([40] * 8, seed=7)
    rank_of: dict[int, int] = {}
    for world, consumed, batch in ((2, 0, 3), (3, 12, 2)):
        steps = Steps(320, batch, world, "drop", consumed)
        for step, rank in itertools.product(range(2), range(world)):
            taken = rank_positions(order, 0, steps, step, rank=rank, ranks_per_node=world)
            rank_of |= dict.fromkeys(taken.tolist(), rank)
    for position in range(24):
        since = 0 if position < 12 else 12
        x = left + position * size + (14 if position >= 12 else 0)
        fill = colours.ranks[rank_of[position]]
        drawing.rect(x, 34, size - 3, size - 3, fill)
        drawing.label(x + 13.5, 53, str(position), size=12)
        if (position - since) % 6 == 0:
            drawing.text(x, 84, f"step {position // 6}", soft=True, anchor="start", size=12)
    for rank, fill in enumerate(colours.ranks):
        drawing.rect(left + 90 * rank, 104, 10, 10, fill)
        drawing.text(left + 16 + 90 * rank, 114, f"rank {rank}", anchor="start", size=12)
    lines = (
        "A number is a position of the epoch. Seed, epoch and position decide which sample it is",
        "and how the sample is cropped. The state of the loader is the epoch and the position.",
    )
    for at, line in enumerate(lines):
        drawing.text(left, 144 + 20 * at, line, soft=True, anchor="start", size=13)
    return drawing.svg()


DRAWN: dict[str, Callable[[Colours], str]] = {"pipeline": pipeline, "lanes": lanes, "resume": resume}
PICTURES: dict[str, Callable[[], str]] = {
    f"docs/images/{name}-{scheme}.svg": functools.partial(draw, colours)
    for name, draw in DRAWN.items()
    for scheme, colours in (("light", LIGHT), ("dark", DARK))
}
