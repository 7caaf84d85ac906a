"""Which scale of a JPEG covers what is wanted of it, and where the wanted pixels lie at that scale."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from wdskit.codecs.jpeg import STEPS
from wdskit.pipeline import geometry

Pixels = NDArray[np.uint8]

# A crop that starts at pixel 7 starts at 3.5 in an image of half the size, and torch resizes from whole pixels on only.
# So it resizes from a pixel further up or left, from which a whole number of results leads to the true place within
# this many pixels; those before it are thrown away (3.4 % more pixels in the mean). Rounding to the nearest pixel
# instead costs 12 dB (37.4 against 49.5, of 50.2 with Pillow's exact boxes, which take 0.8 ms more).
_MAX_SHIFT = 1 / 16
_MAX_EXTRA = 32  # 5 % of the crops that a half covers find no such pixel and are decoded whole; 9 % with 16
_ABOVE_ONE = 1 + 1e-12  # so that 224 pixels do not become 223.99999999999997


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


def choose_step(frame: Frame) -> tuple[int, tuple[Grid, Grid] | None]:
    """The largest step of a JPEG that covers a frame without enlarging, and the grids of rows and columns; 1 and none
    where only the whole image does.
    """
    largest = min((axis.high - axis.low) / axis.total if axis.skip >= 0 else 0 for axis in frame)
    for step in STEPS:
        if step <= largest:
            rows, columns = (find_grid(axis, step) for axis in frame)
            if rows and columns:
                return step, (rows, columns)
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


def take(whole: Pixels, frame: Frame) -> Pixels:
    """The wanted pixels of an image: those of geometry's crop, resize and center_crop."""
    rows, columns = frame
    part: Any = whole[rows.low : rows.high, columns.low : columns.high].copy()
    if part.shape[:2] != (rows.total, columns.total):
        part = _interpolated(part, size=(rows.total, columns.total))
    if part.shape[:2] != (rows.size, columns.size):
        part = geometry.center_crop(part, (rows.size, columns.size))
    return part  # type: ignore[no-any-return]  # an array in, an array out


def take_scaled(pixels: Pixels, frame: Frame, grids: tuple[Grid, Grid]) -> Pixels:
    """The wanted pixels of an image that was decoded at a smaller scale; a view with gaps."""
    rows, columns = grids
    factors = (_ABOVE_ONE / rows.pitch, _ABOVE_ONE / columns.pitch)
    resized = _interpolated(_cut(pixels, rows, columns), scale_factor=factors)
    return resized[rows.first : rows.first + frame.rows.size, columns.first : columns.first + frame.columns.size]


def _interpolated(pixels: Pixels, **target: Any) -> Pixels:
    images_nchw = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = functional.interpolate(images_nchw, mode="bilinear", antialias=True, **target)
    found: Pixels = resized[0].permute(1, 2, 0).numpy()
    return found


def _cut(pixels: Pixels, rows: Grid, columns: Grid) -> Pixels:
    """Pixels of the grids, those at the border repeated beyond it; a copy without gaps, as torch wants it."""
    height, width = pixels.shape[:2]
    inside = pixels[max(rows.start, 0) : rows.stop, max(columns.start, 0) : columns.stop]
    beyond = [(max(-grid.start, 0), max(grid.stop - side, 0)) for grid, side in ((rows, height), (columns, width))]
    cut: Pixels = np.pad(inside, [*beyond, (0, 0)], mode="edge") if any(map(any, beyond)) else inside.copy()
    return cut
