"""Map points of an image through resizing, cutting, padding and turning, in exact fractions.

Coordinates are continuous: pixel 0 of a row reaches from 0 to 1. Each coordinate of the new image depends on one
coordinate of the old one, because images are turned by right angles only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.edit.resize import ResizePlan, Size
from wdskit.errors import DecodeError


class AxisMap(NamedTuple):
    """Computes one coordinate (x or y) of a new point from the old point (x, y).

    The new coordinate is (old[source] * num + offset) / den. `source` is 0 for the old x and 1 for the old y.
    """

    source: int
    num: int
    offset: int
    den: int

    def __call__(self, point: tuple[float, float]) -> float:
        """Return the new coordinate of an old point (x, y).

        It is an int if the old coordinate is an int and the division is exact, otherwise a float.
        """
        value = point[self.source] * self.num + self.offset
        if isinstance(value, int) and value % self.den == 0:
            return value // self.den
        return value / self.den


class Move(NamedTuple):
    """A map from points of an old image to points of a new image, and the sizes of both images."""

    x: AxisMap
    y: AxisMap
    before: Size
    after: Size

    def __call__(self, x: float, y: float) -> tuple[float, float]:
        """Return the new (x, y) of the old point (x, y)."""
        return self.x((x, y)), self.y((x, y))

    @property
    def area_ratio(self) -> float:
        """The area of a shape in the new image divided by its area in the old image."""
        return abs(self.x.num * self.y.num) / (self.x.den * self.y.den)

    def then(self, other: Move) -> Move:
        """Return one move with the effect of this move, followed by `other`. `other.before` must equal `self.after`."""
        return Move(_chain(other.x, self), _chain(other.y, self), self.before, other.after)

    def back(self) -> Move:
        """Return the move from the new image to the old image. `self` must only turn or mirror; this is not checked."""
        axes = {
            axis.source: AxisMap(at, axis.num, -axis.num * axis.offset, 1) for at, axis in enumerate((self.x, self.y))
        }
        return Move(axes[0], axes[1], self.after, self.before)

    def nearest(self, pixels: NDArray[Any], fill: int) -> NDArray[Any]:
        """Apply the move to the pixels of the old image, and return the new image. Values are copied and never blended.

        Each new pixel gets the value of the old pixel at the new pixel's centre; `fill` if the centre is outside the
        old image.

        `pixels` is the old image, (height, width) or (height, width, channels). The result has the same dtype and axes.
        """
        columns, rows = (_sources(axis, count) for axis, count in zip((self.x, self.y), self.after, strict=True))
        if self.x.source == 1:
            pixels = pixels.swapaxes(0, 1)
        height, width = pixels.shape[:2]
        moved = pixels[rows.clip(0, height - 1)][:, columns.clip(0, width - 1)]
        moved[(rows < 0) | (rows >= height)] = fill
        moved[:, (columns < 0) | (columns >= width)] = fill
        return np.ascontiguousarray(moved)


def resize_move(before: Size, plan: ResizePlan) -> Move:
    """Return how a resize with this plan, including its padding, moves the points of an image of size `before`."""

    def axis(source: int, first: int, part: int, size: int, canvas: int) -> AxisMap:
        return _reduced(source, size, (canvas - size) // 2 * part - first * size, part)

    x = axis(0, plan.left, plan.part.width, plan.size.width, plan.canvas.width)
    y = axis(1, plan.top, plan.part.height, plan.size.height, plan.canvas.height)
    return Move(x, y, before, plan.canvas)


def turn_move(before: Size, orientation: int) -> Move:
    """Return how applying an EXIF orientation, 1 to 8, moves the points of an image of size `before`."""
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
        orientation: The EXIF orientation of the old image, 1 to 8.
        is_turned: Whether the edit applied the orientation to the pixels.
    """

    move: Move
    is_cut: bool = False
    orientation: int = 1
    is_turned: bool = False

    @property
    def is_same(self) -> bool:
        """True if no point moves."""
        return self.move == turn_move(self.move.before, 1)

    @property
    def upright(self) -> Move:
        """The move from the old upright image to the new upright image. `move` is between the stored images.

        A stored image becomes upright when its EXIF orientation is applied.
        """
        back = turn_move(self.move.before, self.orientation).back()
        move = back.then(self.move)
        return move if self.is_turned else move.then(turn_move(self.move.after, self.orientation))

    def moves(self, size: Size | None) -> set[Move]:
        """Return the moves that annotations of an image of this size may need.

        Annotations describe the stored image or the upright image, and need `move` or `upright`. The set has each of
        these two moves whose old image has this size, and both if `size` is None (unknown).
        """
        return {move for move in (self.move, self.upright) if size in {None, move.before}}


def only_move(geometries: list[Geometry], size: Size | None) -> Move:
    """Return the one possible move for annotations or a mask of this size.

    Args:
        geometries: How the images of the sample were edited.
        size: Size of the image that the annotations describe, or of the mask; None if unknown.

    Raises:
        DecodeError: No image of the sample has this size, or several different moves are possible.
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
    """Return the formula of one coordinate that applies `first` and then `axis`."""
    before = (first.x, first.y)[axis.source]
    offset = before.offset * axis.num + axis.offset * before.den
    return _reduced(before.source, before.num * axis.num, offset, before.den * axis.den)


def _reduced(source: int, num: int, offset: int, den: int) -> AxisMap:
    divisor = math.gcd(num, offset, den)
    return AxisMap(source, num // divisor, offset // divisor, den // divisor)


def _sources(axis: AxisMap, count: int) -> NDArray[np.int64]:
    """Return the index of the old pixel at the centre of each new pixel of an axis: int64 (count,).

    An index may be outside the old image.
    """
    centres = 2 * np.arange(count, dtype=np.int64) + 1
    numbers: NDArray[np.int64] = (centres * axis.den - 2 * axis.offset) * int(math.copysign(1, axis.num))
    return numbers // (2 * abs(axis.num))
