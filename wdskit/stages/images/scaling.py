"""Which scale of a JPEG covers what is wanted of it, and where the wanted pixels lie at that scale."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from wdskit.codecs.images import STEPS
from wdskit.stages.images import geometry

Pixels = NDArray[np.uint8]

# A crop that starts at pixel 7 starts at 3.5 in an image of half the size, and torch resizes from whole pixels on only.
# So it resizes from a pixel further up or left, from which a whole number of results leads to the true place within
# this many pixels; those before it are thrown away (3.8 % more pixels in the mean). Rounding to the nearest pixel
# instead costs 12 dB (37.4 against 49.5, of 50.2 with Pillow's exact boxes, which take 0.8 ms more).
_MAX_SHIFT = 1 / 16
_MAX_EXTRA = 64  # 3 % of the crops that a half covers find no such pixel and are decoded whole; 5 % with 32
_NO_SCALES = (None, None)

# What torch's `interpolate` calls. Here it gets a place for the result, and size and scales apart; 15 us less than by
# way of torch.ops.
_resize: Any = torch._C._nn._upsample_bilinear2d_aa  # noqa: SLF001


class Axis(NamedTuple):
    """What is wanted along one side: pixels `low` to `high` resized to `total`, and of these `size` from `skip` on."""

    low: int
    high: int
    total: int
    skip: int
    size: int


class Frame(NamedTuple):
    """What is wanted of an image."""

    rows: Axis
    columns: Axis


class Grid(NamedTuple):
    """Pixels `start` to `stop` of a decoded image, resized by 1 / pitch; the wanted ones stand from `first` on.

    `start` may lie before the image and `stop` behind it, by pixels that are then repeated.
    """

    start: int
    stop: int
    pitch: float
    first: int


class Decoded(NamedTuple):
    """A decoded image: array of uint8, in which its pixels (height, width, 3) stand from the start on."""

    flat: Pixels
    height: int
    width: int

    @classmethod
    def of(cls, pixels: Pixels) -> Decoded:
        """An array (height, width, 3), contiguous and writable."""
        return cls(pixels.reshape(-1), *pixels.shape[:2])

    def cut(self, top: int, bottom: int, left: int, right: int) -> torch.Tensor:
        """A part of it as a view (1, 3, rows, columns).

        One call in place of four: each runs with cold caches, after a decoder that has filled them, and takes 5 us. And
        it is numpy's: each of torch's lets go of Python's lock, and wakes another thread in vain.
        """
        shape = (1, 3, bottom - top, right - left)
        strides = (3 * self.height * self.width, 1, 3 * self.width, 3)
        return torch.from_numpy(np.ndarray(shape, np.uint8, self.flat, 3 * (top * self.width + left), strides))

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.cut(0, self.height, 0, self.width)


@lru_cache(maxsize=4096)
def resizes_evenly(width: int, total: int) -> bool:
    """Whether mirrored pixels resized are certain to be the resized ones mirrored, to the bit.

    torch computes weights in float64 and rounds them to 15 bits or more. Mirrored ones are the same numbers but for
    some 1e-13, which is lost unless one lies half-way between two levels. A weight is t / u, where u is the sum of the
    t of all pixels that make one, so with u below 2**15 that cannot be. (Nor did it happen in 20,000 pairs up to 2048.)
    """
    common = math.gcd(width, total)
    per_pixel = 2 * max(width, total) // common
    num_pixels = 2 * max(1, width / total) + 2
    return per_pixel * num_pixels < 1 << 15


class Part(NamedTuple):
    """Pixels of a decoded image and what is wanted of them once they are resized.

    Attributes:
        images_nchw: Tensor (1, 3, height, width), uint8; may be a view of memory that is used again.
        size: Rows and columns that it is resized to.
        scales: Of rows and columns, where size / shape does not give them.
        first: Row and column of the resized at which the wanted ones start.
        wanted: How many rows and columns.
    """

    images_nchw: torch.Tensor
    size: tuple[int, int]
    scales: tuple[float | None, float | None]
    first: tuple[int, int]
    wanted: tuple[int, int]

    def mirrored(self) -> Part | None:
        """Left and right exchanged before it is resized, not behind: the pixels are the same and fewer copies are made.

        None where not all of the resized is wanted, or where it has not been shown that they are the same.
        """
        width, total = self.images_nchw.shape[3], self.size[1]
        if self.size != self.wanted or self.scales is not _NO_SCALES or not resizes_evenly(width, total):
            return None
        return self._replace(images_nchw=self.images_nchw.flip(3))

    def resize_into(self, out_nchw: torch.Tensor) -> None:
        """Write all of the resized into a tensor (1, 3, *size) of channels_last memory."""
        if self.images_nchw.shape[2:] == self.size:
            out_nchw.copy_(self.images_nchw)
        else:
            _resize(self.images_nchw, self.size, False, *self.scales, out=out_nchw)


def choose_step(frame: Frame) -> tuple[int, tuple[Grid, Grid] | None]:
    """The largest step of a JPEG that covers a frame without enlarging, and the grids of rows and columns; 1 and none
    where only the whole image does.
    """
    rows, columns = frame
    largest = min((rows.high - rows.low) / rows.total, (columns.high - columns.low) / columns.total)
    if largest < STEPS[-1] or rows.skip < 0 or columns.skip < 0:
        return 1, None
    for step in STEPS:
        if step <= largest:
            grids = (find_grid(rows, step), find_grid(columns, step))
            if grids[0] and grids[1]:
                return step, (grids[0], grids[1])
    return 1, None


def find_grid(axis: Axis, step: int) -> Grid | None:
    """Where an axis lies in an image of 1/step of the size; None where no grid comes close."""
    low, high = axis.low / step, axis.high / step
    pitch = (high - low) / axis.total
    wanted = low + axis.skip * pitch
    for first in range(min(axis.skip, 1), _MAX_EXTRA + 1):  # not at the crop's edge: resizing looks beyond the pixel
        start = round(wanted - first * pitch)
        if abs(wanted - first * pitch - start) <= _MAX_SHIFT:
            end = start + pitch * (first + axis.size)
            stop = max(math.ceil(end), min(math.ceil(end + pitch / 2), math.ceil(high)))
            return Grid(start, stop, pitch, first)
    return None


def take(whole: Decoded, frame: Frame) -> Part:
    """The wanted pixels of an image: those of geometry's crop, resize and center_crop."""
    rows, columns = frame
    part = whole.cut(rows.low, rows.high, columns.low, columns.high)
    totals = (rows.total, columns.total)
    if rows.skip >= 0 and columns.skip >= 0:
        return Part(part, totals, _NO_SCALES, (rows.skip, columns.skip), (rows.size, columns.size))
    resized = torch.empty((1, 3, *totals), dtype=torch.uint8, memory_format=torch.channels_last)
    Part(part, totals, _NO_SCALES, (0, 0), totals).resize_into(resized)
    padded: Any = geometry.center_crop(resized[0].permute(1, 2, 0).numpy(), (rows.size, columns.size))
    sizes = (rows.size, columns.size)
    return Part(Decoded.of(padded).whole(), sizes, _NO_SCALES, (0, 0), sizes)


def take_scaled(image: Decoded, frame: Frame, grids: tuple[Grid, Grid]) -> Part:
    """The wanted pixels of an image that was decoded at a smaller scale; those at its border are repeated beyond it."""
    rows, columns = grids
    sizes = (frame.rows.size, frame.columns.size)
    totals = (rows.first + sizes[0], columns.first + sizes[1])
    scales = (1 / rows.pitch, 1 / columns.pitch)
    return Part(_cut(image, rows, columns), totals, scales, (rows.first, columns.first), sizes)


def _cut(image: Decoded, rows: Grid, columns: Grid) -> torch.Tensor:
    """Pixels of the grids, those at the border repeated beyond it."""
    top, left = max(rows.start, 0), max(columns.start, 0)
    bottom, right = min(rows.stop, image.height), min(columns.stop, image.width)
    inside = image.cut(top, bottom, left, right)
    beyond = [(top - rows.start, rows.stop - bottom), (left - columns.start, columns.stop - right)]
    if not any(map(any, beyond)):
        return inside
    padded = np.pad(inside[0].permute(1, 2, 0).numpy(), [*beyond, (0, 0)], mode="edge")
    return Decoded.of(padded).whole()
