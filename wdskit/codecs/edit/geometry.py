"""Map points of an image through resizing, cutting, padding and turning, in exact fractions.

Coordinates are continuous: pixel 0 of a row reaches from 0 to 1. Each coordinate of the new image depends on one
coordinate of the old one, because images are turned by right angles only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.edit.resize import Fit, Size
from wdskit.errors import DecodeError


class AxisMap(NamedTuple):
    """One new coordinate: (old[source] * num + offset) / den, where `source` is 0 for x and 1 for y."""

    source: int
    num: int
    offset: int
    den: int

    def __call__(self, point: tuple[float, float]) -> float:
        """The new coordinate of an old point; whole numbers stay whole where the result is whole."""
        value = point[self.source] * self.num + self.offset
        if isinstance(value, int) and value % self.den == 0:
            return value // self.den
        return value / self.den


class Move(NamedTuple):
    """A map of points: both new coordinates, and the sizes of the old and the new image."""

    x: AxisMap
    y: AxisMap
    before: Size
    after: Size

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        """The new place of a point."""
        return self.x((x, y)), self.y((x, y))

    @property
    def area_ratio(self) -> float:
        """The factor by which an area grows."""
        return abs(self.x.num * self.y.num) / (self.x.den * self.y.den)

    def then(self, other: Move) -> Move:
        """This move, and then another."""
        return Move(_chain(other.x, self), _chain(other.y, self), self.before, other.after)

    def back(self) -> Move:
        """The opposite of a turn."""
        axes = {
            axis.source: AxisMap(at, axis.num, -axis.num * axis.offset, 1) for at, axis in enumerate((self.x, self.y))
        }
        return Move(axes[0], axes[1], self.after, self.before)

    def nearest(self, pixels: NDArray[Any], fill: int) -> NDArray[Any]:
        """The moved pixels, each the old pixel at its centre; `fill` where the old image has no pixel."""
        columns, rows = (_sources(axis, count) for axis, count in zip((self.x, self.y), self.after, strict=True))
        if self.x.source == 1:
            pixels = pixels.swapaxes(0, 1)
        height, width = pixels.shape[:2]
        moved = pixels[rows.clip(0, height - 1)][:, columns.clip(0, width - 1)]
        moved[(rows < 0) | (rows >= height)] = fill
        moved[:, (columns < 0) | (columns >= width)] = fill
        return np.ascontiguousarray(moved)


def fitted(before: Size, to: Fit) -> Move:
    """The move of `resize.resize_part` and `resize.pad`."""

    def axis(source: int, first: int, part: int, size: int, canvas: int) -> AxisMap:
        return _reduced(source, size, (canvas - size) // 2 * part - first * size, part)

    x = axis(0, to.left, to.part.width, to.size.width, to.canvas.width)
    y = axis(1, to.top, to.part.height, to.size.height, to.canvas.height)
    return Move(x, y, before, to.canvas)


def turned(before: Size, orientation: int) -> Move:
    """The move of `resize.turn`."""
    after, sources = before, (0, 1)
    if orientation in {5, 6, 7, 8}:
        after, sources = Size(before.height, before.width), (1, 0)
    x = AxisMap(sources[0], -1, after.width, 1) if orientation in {2, 3, 6, 7} else AxisMap(sources[0], 1, 0, 1)
    y = AxisMap(sources[1], -1, after.height, 1) if orientation in {3, 4, 7, 8} else AxisMap(sources[1], 1, 0, 1)
    return Move(x, y, before, after)


class Geometry(NamedTuple):
    """How an edit moved the points of one image.

    Attributes:
        move: The move from the old stored image to the new stored image.
        is_cut: Whether a part of the image was cut off.
        orientation: The EXIF orientation before, 1 to 8.
        is_turned: Whether the orientation was applied to the pixels.
    """

    move: Move
    is_cut: bool = False
    orientation: int = 1
    is_turned: bool = False

    @property
    def is_same(self) -> bool:
        """Whether no point moves."""
        return self.move == fitted(self.move.before, Fit(0, 0, *[self.move.before] * 3))

    @property
    def upright(self) -> Move:
        """The move for annotations of the image as its EXIF orientation shows it."""
        back = turned(self.move.before, self.orientation).back()
        move = back.then(self.move)
        return move if self.is_turned else move.then(turned(self.move.after, self.orientation))

    def moves(self, size: Size | None) -> set[Move]:
        """Return the possible moves for annotations of an image of this size, None for an unknown size.

        Annotations describe the stored image, or the image as its EXIF orientation shows it. If the size fits
        both, both moves are returned.
        """
        return {move for move in (self.move, self.upright) if size in {None, move.before}}


def only_move(geometries: list[Geometry], size: Size | None) -> Move:
    """The move that a description of an image of this size needs, None for an unknown size.

    Raises:
        DecodeError: No image of the sample has this size, or the images and their EXIF leave several moves.
    """
    moves = {move for geometry in geometries for move in geometry.moves(size)}
    if len(moves) == 1:
        return moves.pop()
    if not moves:
        sizes = ", ".join(f"{one.move.before.width} x {one.move.before.height}" for one in geometries)
        assert size is not None
        raise DecodeError(f"it is for an image of {size.width} x {size.height} pixels, but the image has {sizes}")
    if any(geometry.orientation > 1 for geometry in geometries):
        raise DecodeError(
            "the image has an EXIF orientation, and nothing shows whether this describes the pixels before or after it "
            "is applied. Apply it to all files before you pack them"
        )
    raise DecodeError("the sample has several images, and nothing shows which of them this describes")


def _chain(axis: AxisMap, first: Move) -> AxisMap:
    before = (first.x, first.y)[axis.source]
    offset = before.offset * axis.num + axis.offset * before.den
    return _reduced(before.source, before.num * axis.num, offset, before.den * axis.den)


def _reduced(source: int, num: int, offset: int, den: int) -> AxisMap:
    by = math.gcd(num, offset, den)
    return AxisMap(source, num // by, offset // by, den // by)


def _sources(axis: AxisMap, count: int) -> NDArray[np.int64]:
    """The old pixel at the centre of each of `count` new ones."""
    centres = 2 * np.arange(count, dtype=np.int64) + 1
    numbers: NDArray[np.int64] = (centres * axis.den - 2 * axis.offset) * int(math.copysign(1, axis.num))
    return numbers // (2 * abs(axis.num))
