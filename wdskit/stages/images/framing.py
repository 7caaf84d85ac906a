"""One image file -> the pixels that are wanted of it, as the value that is wanted, in its own memory or in a batch's.

Where a JPEG is decoded whole, and of every other format, the pixels are those of decoding, cropping and resizing one
after the other. JPEGs are decoded at a half, a quarter or an eighth of their size where that covers what is wanted
without enlarging.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from wdskit.codecs.images import decode_image, decode_jpeg, jpeg_size
from wdskit.stages.base import Origin
from wdskit.stages.images import geometry
from wdskit.stages.images.scaling import Decoded, Frame, Grid, Part, choose_step, take, take_scaled

FrameOf: TypeAlias = Callable[[int, int, Origin], Frame]

_MAX_KEPT_BYTES = 8 << 20  # 2.8 megapixels: larger ones take so long that the memory's share is lost in it


@dataclass(frozen=True)
class Ending:
    """What becomes of uint8 pixels: an array (height, width, 3) or a tensor (3, height, width), normalized or not.

    Attributes:
        is_array: Whether it is an array until `to_tensor`, or a tensor from the start.
        is_float: Whether it is float32 0..1 where nothing normalizes it.
        to_tensor: Whether an array becomes a float tensor of the same memory.
        normalize: Mean and standard deviation for 0..1.
        dtype: Of the value.
    """

    is_array: bool
    is_float: bool
    to_tensor: bool = False
    normalize: tuple[Sequence[float], Sequence[float]] | None = None

    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        is_float = self.is_float or self.to_tensor or self.normalize
        object.__setattr__(self, "dtype", torch.float32 if is_float else torch.uint8)


class Plan(NamedTuple):
    """How one JPEG is to be decoded, known from its header: height and width, what is wanted, the scale, the grids."""

    size: tuple[int, int]
    frame: Frame
    step: int
    grids: tuple[Grid, Grid] | None


def plan_jpeg(data: bytes, frame_of: FrameOf, origin: Origin, *, max_pixels: int) -> Plan | None:
    """Read the header of an image file, and choose the frame and the scale; None where there is no such choice.

    Raises:
        ImageTooLarge, DecodeError: As `jpeg_size`.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    if size is None:
        return None
    frame = frame_of(*size, origin)
    return Plan(size, frame, *choose_step(frame))


def decode_part(data: bytes, plan: Plan | None, frame_of: FrameOf, origin: Origin, *, max_pixels: int) -> Part:
    """Decode one image file as far as a frame of it is wanted.

    Args:
        data: The whole file.
        plan: Of `plan_jpeg`.
        frame_of: Gives the frame for the image's height, its width, and `origin`, where the plan does not.
        origin: Position of the sample.
        max_pixels: As in `decode_image`.

    Returns:
        The part; its pixels are valid until this thread's next call.

    Raises:
        ImageTooLarge, DecodeError: As `decode_image`.
    """
    if plan:
        size, frame, step, grids = plan
        height, width = size if step == 1 else (-(-size[0] // step), -(-size[1] // step))
        buffer = _memory.decoded(3 * height * width)
        if decode_jpeg(data, size, step, buffer=buffer) is not None:
            image = Decoded(buffer, height, width)
            return take_scaled(image, frame, grids) if grids else take(image, frame)
    whole: Any = decode_image(data, "rgb8", max_pixels=max_pixels)
    height, width = whole.shape[:2]
    is_known = plan and plan.size == (height, width)
    return take(Decoded.of(whole), plan.frame if plan and is_known else frame_of(height, width, origin))


def finish(part: Part, ending: Ending, *, flip: bool) -> NDArray[Any] | torch.Tensor:
    """The value of a part, mirrored or not, in memory of its own."""
    mirrored = part.mirrored() if flip else None
    pixels = _wanted(mirrored or part, _memory.fresh(part.size))
    image: Any = (pixels.flip(1) if flip and not mirrored else pixels.contiguous()).numpy()
    if ending.normalize:
        image = geometry.normalize(image, *ending.normalize)
    elif ending.dtype == torch.float32:
        image = np.divide(image, np.float32(255), dtype=np.float32)
    if not ending.is_array:
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return geometry.to_tensor(image) if ending.to_tensor else image


def write(part: Part, ending: Ending, *, flip: bool, out: torch.Tensor) -> None:
    """Write the value of a part, mirrored or not, into its place in a batch.

    Args:
        part: As `decode_part` gives it.
        ending: Says the dtype of `out`; it is the same whether for arrays or tensors.
        flip: Whether to exchange left and right.
        out: Tensor (1, 3, height, width), one image of a batch in channels_last memory.
    """
    assert out.shape[2:] == part.wanted
    assert out.dtype == ending.dtype
    mirrored = part.mirrored() if flip else None
    if mirrored:
        part, flip = mirrored, False
    if out.dtype == torch.uint8 and part.size == part.wanted and not flip:
        part.resize_into(out)
        return
    pixels = _wanted(part, _memory.resized(part.size))
    if flip:
        pixels = pixels.flip(1)
    out_hwc = out[0].permute(1, 2, 0)
    if ending.normalize:
        geometry.fill(out_hwc, pixels, *ending.normalize)
    elif ending.dtype == torch.float32:
        out_hwc.copy_(pixels).div_(255)
    else:
        out_hwc.copy_(pixels)


def as_value(written: torch.Tensor, out_ending: Ending, ending: Ending) -> NDArray[Any] | torch.Tensor:
    """What `finish` gives for an image that `write` has written with `out_ending`: the same numbers and kind."""
    image_hwc = (written if out_ending == ending else finish_batch(written, ending))[0].permute(1, 2, 0)
    if not ending.is_array:
        return image_hwc.permute(2, 0, 1).contiguous()
    return geometry.to_tensor(image_hwc.numpy()) if ending.to_tensor else image_hwc.numpy()


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


def _wanted(part: Part, resized_nchw: torch.Tensor) -> torch.Tensor:
    """Resize a part there. Returns a view of what is wanted, (rows, columns, 3)."""
    part.resize_into(resized_nchw)
    resized_hwc = resized_nchw[0].permute(1, 2, 0)
    if part.size == part.wanted:
        return resized_hwc
    (top, left), (rows, columns) = part.first, part.wanted
    return resized_hwc[top : top + rows, left : left + columns]


class _Memory(threading.local):
    """What one thread uses again for each image, up to a size."""

    def __init__(self) -> None:
        self._decoded = np.empty(0, np.uint8)
        self._resized = self.fresh((1, 1))

    def decoded(self, num_bytes: int) -> NDArray[np.uint8]:
        """As many bytes or more."""
        if num_bytes <= len(self._decoded):
            return self._decoded
        decoded = np.empty(num_bytes, np.uint8)
        if num_bytes <= _MAX_KEPT_BYTES:
            self._decoded = decoded
        return decoded

    def resized(self, size: tuple[int, int]) -> torch.Tensor:
        """Tensor (1, 3, *size) of channels_last memory."""
        if self._resized.shape[2:] == size:
            return self._resized
        resized = self.fresh(size)
        if resized.numel() <= _MAX_KEPT_BYTES:
            self._resized = resized
        return resized

    @staticmethod
    def fresh(size: tuple[int, int]) -> torch.Tensor:
        """As `resized`, for the caller to keep."""
        return torch.empty((1, 3, *size), dtype=torch.uint8, memory_format=torch.channels_last)


_memory = _Memory()
