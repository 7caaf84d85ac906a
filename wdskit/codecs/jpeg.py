"""JPEG at a smaller scale: the header first, then only as many pixels as are wanted of it.

A JPEG stores blocks of 8 x 8 frequencies, of which a decoder can turn the lowest 4 x 4, 2 x 2 or 1 x 1 into as many
pixels. Each of them is the mean of the square of pixels it stands for, but for rounding.
"""

from __future__ import annotations

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from wdskit.codecs.images import JPEG_START, check_pixels
from wdskit.files import Buffer

STEPS = (8, 4, 2)
"""Pixels of the file that become one, along each side, at the scales that pay: of 1600x1200 at q90 these take 2.6, 3.2
and 3.9 ms, the whole 5.4. Scales between them take longer than the next larger one (3/8 4.5 ms, 5/8 7.5, 7/8 12.1):
libjpeg-turbo has vector code for powers of two only."""

_COLOURS = frozenset({"YCbCr", "RGB", "Gray"})
_NUM_COLOURS = frozenset({1, 3})
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # headers of the three common codings
_SEGMENTS = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})  # tables, comments and what programs add
_MIN_SIDE = 8  # from here on every eighth has a size of its own, which names the scale to simplejpeg


def jpeg_size(data: Buffer, *, max_pixels: int) -> tuple[int, int] | None:
    """Height and width in the header of a JPEG that `decode_jpeg` may take, else None. No pixel is decoded.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: It promises no pixels at all.
    """
    if bytes(data[:2]) != JPEG_START:
        return None
    height, width, num_colours = _frame_header(data) or (0, 0, 0)
    if 0 < height * width <= max_pixels and num_colours in _NUM_COLOURS:
        return height, width
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    check_pixels(int(width), int(height), max_pixels=max_pixels)
    return (int(height), int(width)) if colours in _COLOURS else None


def _frame_header(data: Buffer) -> tuple[int, int, int] | None:
    """Height, width and number of colours, from segment to segment; None where anything is unusual.

    A third of what simplejpeg takes, which sets a decoder up.
    """
    at = 2
    try:
        while data[at] == 0xFF and (code := data[at + 1]) not in _FRAMES:
            if code not in _SEGMENTS:
                return None
            at += 2 + (data[at + 2] << 8 | data[at + 3])
        *_, high, low, left, right, num_colours = data[at : at + 10]
    except (IndexError, ValueError):  # it stops before
        return None
    return high << 8 | low, left << 8 | right, num_colours


def decode_jpeg(
    data: Buffer, size: tuple[int, int], step: int, *, buffer: NDArray[np.uint8] | None = None
) -> NDArray[np.uint8] | None:
    """Pixels of a JPEG at 1/step of its height and width, rounded up.

    Pixel (row, column) stands for the file's rows row * step to (row + 1) * step and columns likewise, whatever the
    rounding; those of the last row and column may reach beyond the image.

    Args:
        data: The whole file.
        size: Height and width, as `jpeg_size` gave them.
        step: 1 or one of `STEPS`.
        buffer: Where to write the pixels, from its start on; of as many bytes or more.

    Returns:
        Array (height, width, 3), uint8, C-contiguous, in `buffer` or owned by the caller; None where the image is too
        small for this scale, or the decoder refuses the file: `decode_image` then finds out whether it is bad.
    """
    if step > 1 and max(size) < _MIN_SIDE:
        return None
    height, width = (-(-side // step) for side in size)
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data, "RGB", min_height=height, min_width=width, buffer=buffer
        )
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == (height, width) else None
