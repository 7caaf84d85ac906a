"""One image file -> the pixels that are wanted of it, as the value that is wanted, in its own memory or in a batch's.

Where a JPEG is decoded whole, and of every other format, the pixels are those of decoding, cropping and resizing one
after the other. JPEGs are decoded at a half, a quarter or an eighth of their size where that covers what is wanted
without enlarging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from wdskit.codecs.images import decode_image
from wdskit.codecs.jpeg import decode_jpeg, jpeg_size
from wdskit.pipeline import geometry
from wdskit.pipeline.scaling import Frame, choose_step, take, take_scaled

Pixels = NDArray[np.uint8]


class Ending(NamedTuple):
    """What becomes of uint8 pixels: an array (height, width, 3) or a tensor (3, height, width), normalized or not.

    Attributes:
        is_array: Whether it is an array until `to_tensor`, or a tensor from the start.
        is_float: Whether it is float32 0..1 where nothing normalizes it.
        to_tensor: Whether an array becomes a float tensor of the same memory.
        normalize: Mean and standard deviation for 0..1.
    """

    is_array: bool
    is_float: bool
    to_tensor: bool = False
    normalize: tuple[Sequence[float], Sequence[float]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the value."""
        return torch.float32 if self.is_float or self.to_tensor or self.normalize else torch.uint8


def decode_frame(data: bytes, frame_of: Callable[[int, int], Frame], *, max_pixels: int) -> Pixels:
    """Decode one image file as far as a frame of it is wanted.

    Args:
        data: The whole file.
        frame_of: Gives the frame for the image's height and width; it may be asked twice.
        max_pixels: As in `decode_image`.

    Returns:
        Array (frame.rows.size, frame.columns.size, 3), uint8; maybe a view with gaps.

    Raises:
        ImageTooLarge, DecodeError: As `decode_image`.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    frame = None
    if size:
        frame = frame_of(*size)
        step, grids = choose_step(frame)
        pixels = decode_jpeg(data, size, step)
        if pixels is not None:
            return take_scaled(pixels, frame, grids) if grids else take(pixels, frame)
    whole: Any = decode_image(data, "rgb8", max_pixels=max_pixels)
    if frame is None or size != whole.shape[:2]:
        frame = frame_of(*whole.shape[:2])
    return take(whole, frame)


def finish(pixels: Pixels, ending: Ending, *, flip: bool) -> NDArray[Any] | torch.Tensor:
    """The value of pixels (height, width, 3), mirrored or not, in memory of its own."""
    image: Any = np.ascontiguousarray(pixels)
    if flip:
        image = geometry.flip(image)
    if ending.normalize:
        image = geometry.normalize(image, *ending.normalize)
    elif ending.dtype == torch.float32:
        image = np.divide(image, np.float32(255), dtype=np.float32)
    if not ending.is_array:
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return geometry.to_tensor(image) if ending.to_tensor else image


def write(pixels: Pixels, ending: Ending, *, flip: bool, out: torch.Tensor) -> None:
    """Write the value of pixels (height, width, 3), mirrored or not, into its place in a batch.

    Args:
        pixels: May be a view.
        ending: Says the dtype of `out`; it is the same whether for arrays or tensors.
        flip: Whether to exchange left and right.
        out: Tensor (3, height, width) of a batch in channels_last memory.
    """
    source = torch.from_numpy(pixels)
    if flip:
        source = source.flip(1)
    out_hwc = out.permute(1, 2, 0)
    assert out_hwc.is_contiguous()
    assert (out_hwc.shape, out.dtype) == (source.shape, ending.dtype)
    if ending.normalize:
        geometry.fill(out_hwc, source, *ending.normalize)
    elif ending.dtype == torch.float32:
        out_hwc.copy_(source).div_(255)
    else:
        out_hwc.copy_(source)


def finish_batch(images: torch.Tensor, ending: Ending) -> torch.Tensor:
    """The numbers of a batch that was written as uint8.

    Args:
        images: (batch, 3, height, width), uint8, on any device.
        ending: What it would have been.

    Returns:
        float32 of the same shape, device and memory layout: on the CPU the same to the bit, on others to the last.
    """
    values = images.to(torch.float32)
    if ending.normalize is None:
        return values.div_(255)
    mean, std = ending.normalize
    scale, shift = geometry.channel_affine(tuple(mean), tuple(std), images.device)
    return values.mul_(scale).add_(shift)
