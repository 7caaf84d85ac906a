"""How large an image becomes: pure arithmetic of whole numbers."""

from __future__ import annotations

from typing import Literal, NamedTuple

ResizeMode = Literal["shorter", "longer", "crop", "pad"]
RESIZE_MODES: tuple[ResizeMode, ...] = ("shorter", "longer", "crop", "pad")


class Size(NamedTuple):
    """Of an image or a part of it."""

    width: int
    height: int


class Fit(NamedTuple):
    """What is done to an image: a part of it is taken, resized, and laid in the middle of a canvas.

    Attributes:
        left: First column of the part.
        top: First row of it.
        part: Its size.
        size: What it is resized to.
        canvas: Size of the result, `size` unless it is padded.
    """

    left: int
    top: int
    part: Size
    size: Size
    canvas: Size


def fit(width: int, height: int, size: int, mode: ResizeMode, *, upscale: bool) -> Fit:
    """Fit an image to a size. It keeps its shape, to the pixel; what is cut off or added is so on both sides alike.

    Args:
        width: Of the image, 1 or more.
        height: Of the image.
        size: 1 or more.
        mode: "shorter" and "longer" make that side `size`. "crop" makes the shorter one `size` and cuts the other to
            `size`, "pad" makes the longer one `size` and fills the other up to `size`.
        upscale: Otherwise no pixel is made larger: an image whose side is `size` or less keeps its pixels, and is only
            cut where a side is larger, or padded.
    """
    whole = Size(width, height)
    side = max(whole) if mode in {"longer", "pad"} else min(whole)
    is_resized = upscale or side > size
    if mode == "crop":
        part = Size(side, side) if is_resized else Size(min(width, size), min(height, size))
        resized = Size(size, size) if is_resized else part
        return Fit((width - part.width) // 2, (height - part.height) // 2, part, resized, resized)
    resized = Size(_scaled(width, size, side), _scaled(height, size, side)) if is_resized else whole
    return Fit(0, 0, whole, resized, Size(size, size) if mode == "pad" else resized)


def _scaled(side: int, size: int, by: int) -> int:
    """Side * size / by, to the nearest, halves up, 1 at least."""
    return max(1, (2 * side * size + by) // (2 * by))
