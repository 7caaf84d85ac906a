"""JPEG at a smaller scale: the header first, then only as many pixels as are wanted of it.

A JPEG stores blocks of 8 x 8 frequencies, of which a decoder can turn the lowest 4 x 4, 2 x 2 or 1 x 1 into as many
pixels. Each of them is the mean of the square of pixels it stands for, but for rounding.
"""

from __future__ import annotations

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from wdskit.codecs.formats import JPEG_START
from wdskit.codecs.structure import check_pixels, jpeg_header
from wdskit.errors import DecodeError
from wdskit.files import Buffer

STEPS = (8, 4, 2)
"""Pixels of the file that become one, along each side, at the scales that pay: of 1600x1200 at q90 these take 2.6, 3.2
and 3.9 ms, the whole 5.4. Scales between them take longer than the next larger one (3/8 4.5 ms, 5/8 7.5, 7/8 12.1):
libjpeg-turbo has vector code for powers of two only."""

_COLOURS = frozenset({"YCbCr", "RGB", "Gray"})
_MODES = frozenset({"L", "RGB"})
_MIN_SIDE = 8  # from here on every eighth has a size of its own, which names the scale to simplejpeg


def jpeg_size(data: Buffer, *, max_pixels: int) -> tuple[int, int] | None:
    """Height and width in the header of a JPEG that `decode_jpeg` may take, else None. No pixel is decoded.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: It promises no pixels at all.
    """
    if bytes(data[:2]) != JPEG_START:
        return None
    try:
        _, width, height, mode = jpeg_header(data)
        if mode in _MODES and 0 < height * width <= max_pixels:
            return height, width
    except DecodeError:
        pass  # the decoder may think otherwise
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    check_pixels(int(width), int(height), max_pixels=max_pixels)
    return (int(height), int(width)) if colours in _COLOURS else None


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
