"""Decode and resize the wanted part of an image file, into new memory or into a batch.

A JPEG is decoded at a half, a quarter or an eighth of its size if the wanted part is then not enlarged. For other JPEGs
and all other formats, the pixels are equal to those of decoding, cropping and resizing one after the other.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.images import STEPS, decode_image, decode_jpeg, jpeg_size
from wdskit.stages.base import Origin
from wdskit.stages.images import geometry

if TYPE_CHECKING:
    import torch

Pixels: TypeAlias = NDArray[np.uint8]

_MAX_KEPT_BYTES = 8 << 20  # 2.8 megapixels: larger ones take so long that the memory's share is lost in it

# A crop that starts at pixel 7 starts at 3.5 in an image of half the size, and torch resizes from whole pixels on only.
# So it resizes from a pixel further up or left, from which a whole number of results leads to the true place within
# this many pixels; those before it are thrown away (3.8 % more pixels in the mean). Rounding to the nearest pixel
# instead costs 12 dB (37.4 against 49.5, of 50.2 with Pillow's exact boxes, which take 0.8 ms more).
_MAX_SHIFT = 1 / 16
_MAX_EXTRA = 64  # 3 % of the crops that a half covers find no such pixel and are decoded whole; 5 % with 32
_NO_SCALES = (None, None)


class Axis(NamedTuple):
    """One side of the wanted part: `low` to `high` are resized to `total`; `size` pixels from `skip` on are kept."""

    low: int
    high: int
    total: int
    skip: int
    size: int


class Wanted(NamedTuple):
    """The wanted part of an image."""

    rows: Axis
    columns: Axis


WantedOf: TypeAlias = Callable[[int, int, Origin], Wanted]
"""Returns the wanted part of an image from its height, its width and its position."""


class Grid(NamedTuple):
    """Pixels `start` to `stop` of a decoded image, resized by 1 / pitch. The wanted pixels begin at `first`.

    `start` may be before the image and `stop` after it. The pixels at the border are then repeated.
    """

    start: int
    stop: int
    pitch: float
    first: int


class Decoded(NamedTuple):
    """A decoded image. The first height x width x 3 bytes of the uint8 array are its pixels; it may be longer."""

    flat: Pixels
    height: int
    width: int

    @classmethod
    def of(cls, pixels: Pixels) -> Decoded:
        """An array (height, width, 3), contiguous and writable."""
        return cls(pixels.reshape(-1), *pixels.shape[:2])

    def cut(self, top: int, bottom: int, left: int, right: int) -> torch.Tensor:
        """Return a part of it as a view (1, 3, rows, columns).

        One call in place of four: each runs with cold caches, after a decoder that has filled them, and takes 5 us. And
        it is numpy's: each of torch's lets go of Python's lock, and wakes another thread in vain.
        """
        import torch

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


class DecodedPart(NamedTuple):
    """Pixels of a decoded image, and the part of them to keep after resizing.

    Attributes:
        images_nchw: Tensor (1, 3, height, width), uint8; may be a view of memory that is used again.
        size: Rows and columns that it is resized to.
        scales: Scales of rows and columns; None if size / shape gives them.
        first: First wanted row and column after resizing.
        wanted: Number of wanted rows and columns.
    """

    images_nchw: torch.Tensor
    size: tuple[int, int]
    scales: tuple[float | None, float | None]
    first: tuple[int, int]
    wanted: tuple[int, int]

    def mirrored(self) -> DecodedPart | None:
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
            return
        import torch

        # What torch's `interpolate` calls: with a place for the result, and with size and scales apart.
        resize: Any = torch._C._nn._upsample_bilinear2d_aa  # noqa: SLF001
        resize(self.images_nchw, self.size, False, *self.scales, out=out_nchw)


def choose_scale(wanted: Wanted) -> tuple[int, tuple[Grid, Grid] | None]:
    """Return the smallest scale of a JPEG, as 1/step, that enlarges no wanted pixel, and the grids of rows and columns.
    If only the whole image will do, return 1 and None.
    """
    rows, columns = wanted
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
    """Return the grid of an axis in an image of 1/step of the size; None if no grid is close enough."""
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


def take(whole: Decoded, wanted: Wanted) -> DecodedPart:
    """The wanted pixels of an image: those of geometry's crop, resize and center_crop."""
    rows, columns = wanted
    part = whole.cut(rows.low, rows.high, columns.low, columns.high)
    totals = (rows.total, columns.total)
    if rows.skip >= 0 and columns.skip >= 0:
        return DecodedPart(part, totals, _NO_SCALES, (rows.skip, columns.skip), (rows.size, columns.size))
    resized = _memory.fresh(totals)
    DecodedPart(part, totals, _NO_SCALES, (0, 0), totals).resize_into(resized)
    padded: Any = geometry.center_crop(resized[0].permute(1, 2, 0).numpy(), (rows.size, columns.size))
    sizes = (rows.size, columns.size)
    return DecodedPart(Decoded.of(padded).whole(), sizes, _NO_SCALES, (0, 0), sizes)


def take_scaled(image: Decoded, wanted: Wanted, grids: tuple[Grid, Grid]) -> DecodedPart:
    """The wanted pixels of an image that was decoded at a smaller scale; those at its border are repeated beyond it."""
    rows, columns = grids
    sizes = (wanted.rows.size, wanted.columns.size)
    totals = (rows.first + sizes[0], columns.first + sizes[1])
    top, left = max(rows.start, 0), max(columns.start, 0)
    bottom, right = min(rows.stop, image.height), min(columns.stop, image.width)
    part = image.cut(top, bottom, left, right)
    beyond = [(top - rows.start, rows.stop - bottom), (left - columns.start, columns.stop - right)]
    if any(map(any, beyond)):
        part = Decoded.of(np.pad(part[0].permute(1, 2, 0).numpy(), [*beyond, (0, 0)], mode="edge")).whole()
    return DecodedPart(part, totals, (1 / rows.pitch, 1 / columns.pitch), (rows.first, columns.first), sizes)


@dataclass(frozen=True)
class Ending:
    """The form of the result: an array (height, width, 3) or a tensor (3, height, width), normalized or not.

    Attributes:
        is_array: Whether `decode` gives an array; otherwise a tensor.
        is_float: Whether the values are float32 0..1 if they are not normalized.
        to_tensor: Whether an array becomes a float tensor of the same memory.
        normalize: Mean and standard deviation for 0..1.
        dtype: Dtype of the value.
    """

    is_array: bool
    is_float: bool
    to_tensor: bool = False
    normalize: tuple[Sequence[float], Sequence[float]] | None = None

    dtype: np.dtype[Any] = field(init=False)

    def __post_init__(self) -> None:
        is_float = self.is_float or self.to_tensor or self.normalize
        object.__setattr__(self, "dtype", np.dtype(np.float32 if is_float else np.uint8))


class JpegPlan(NamedTuple):
    """How to decode one JPEG, from its header: height and width, the wanted part, the scale and the grids."""

    size: tuple[int, int]
    wanted: Wanted
    step: int
    grids: tuple[Grid, Grid] | None


def plan_jpeg(data: bytes, wanted_of: WantedOf, origin: Origin, *, max_pixels: int) -> JpegPlan | None:
    """Read the header of an image file, and choose the crop and the scale. Return None for other formats than JPEG.

    Raises:
        ImageTooLarge, DecodeError: As `jpeg_size`.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    if size is None:
        return None
    wanted = wanted_of(*size, origin)
    return JpegPlan(size, wanted, *choose_scale(wanted))


def decode_part(
    data: bytes, plan: JpegPlan | None, wanted_of: WantedOf, origin: Origin, *, max_pixels: int
) -> DecodedPart:
    """Decode the wanted part of one image file.

    Args:
        data: The whole file.
        plan: Result of `plan_jpeg`.
        wanted_of: Returns the wanted part if `plan` is None or has another size.
        origin: Position of the sample.
        max_pixels: As in `decode_image`.

    Returns:
        The part; its pixels are valid until this thread's next call.

    Raises:
        ImageTooLarge, DecodeError: As `decode_image`.
    """
    if plan:
        size, wanted, step, grids = plan
        height, width = size if step == 1 else (-(-size[0] // step), -(-size[1] // step))
        buffer = _memory.decoded(3 * height * width)
        if decode_jpeg(data, size, step, buffer=buffer) is not None:
            image = Decoded(buffer, height, width)
            return take_scaled(image, wanted, grids) if grids else take(image, wanted)
    whole: Any = decode_image(data, "rgb8", max_pixels=max_pixels)
    height, width = whole.shape[:2]
    is_known = plan and plan.size == (height, width)
    return take(Decoded.of(whole), plan.wanted if plan and is_known else wanted_of(height, width, origin))


def finish(part: DecodedPart, ending: Ending, *, flip: bool) -> NDArray[Any] | torch.Tensor:
    """Return the value of a part, mirrored or not, in memory of its own."""
    import torch

    mirrored = part.mirrored() if flip else None
    pixels = _wanted(mirrored or part, _memory.fresh(part.size))
    image: Any = (pixels.flip(1) if flip and not mirrored else pixels.contiguous()).numpy()
    if ending.normalize:
        image = geometry.normalize(image, *ending.normalize)
    elif ending.dtype == np.float32:
        image = np.divide(image, np.float32(255), dtype=np.float32)
    if not ending.is_array:
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return geometry.to_tensor(image) if ending.to_tensor else image


def write(part: DecodedPart, ending: Ending, *, flip: bool, out: NDArray[Any]) -> None:
    """Write the value of a part, mirrored or not, into its place in a batch.

    Args:
        part: As `decode_part` gives it.
        ending: Says the dtype of `out`; it is the same whether for arrays or tensors.
        flip: Whether to exchange left and right.
        out: Array (1, 3, height, width), one image of a batch in channels_last memory.
    """
    import torch

    assert out.shape[2:] == part.wanted
    assert out.dtype == ending.dtype
    out_nchw = torch.from_numpy(out)
    mirrored = part.mirrored() if flip else None
    if mirrored:
        part, flip = mirrored, False
    if out.dtype == np.uint8 and part.size == part.wanted and not flip:
        part.resize_into(out_nchw)
        return
    pixels = _wanted(part, _memory.resized(part.size))
    if flip:
        pixels = pixels.flip(1)
    out_hwc = out_nchw[0].permute(1, 2, 0)
    if ending.normalize:
        geometry.fill(out_hwc, pixels, *ending.normalize)
    elif ending.dtype == np.float32:
        out_hwc.copy_(pixels).div_(255)
    else:
        out_hwc.copy_(pixels)


def write_numbers_as(ending: Ending) -> bytes | None:
    """How wdskit-native writes what `write` writes: None as uint8, empty for value / 255, else the three scales and the
    three shifts of value * scale + shift, as float32.
    """
    if ending.dtype == np.uint8:
        return None
    if ending.normalize is None:
        return b""
    mean, std = ending.normalize
    factors = np.concatenate(geometry.affine_numbers(tuple(mean), tuple(std), 255.0))
    return np.repeat(factors, 6 // len(factors)).tobytes()


def as_value(written: NDArray[Any], out_ending: Ending, ending: Ending) -> NDArray[Any] | torch.Tensor:
    """Return what `finish` gives for an image that `write` has written with `out_ending`: the same numbers and kind."""
    if out_ending == ending and ending.is_array and not ending.to_tensor:
        image: NDArray[Any] = written[0].transpose(1, 2, 0)
        return image
    import torch

    images = torch.from_numpy(written)
    image_hwc = (images if out_ending == ending else finish_batch(images, ending))[0].permute(1, 2, 0)
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
    values = images.float()
    if ending.normalize is None:
        return values.div_(255)
    mean, std = ending.normalize
    scale, shift = geometry.channel_affine(tuple(mean), tuple(std), images.device)
    return values.mul_(scale).add_(shift)


def _wanted(part: DecodedPart, resized_nchw: torch.Tensor) -> torch.Tensor:
    """Resize a part into `resized_nchw`, and return a view of the wanted pixels, (rows, columns, 3)."""
    part.resize_into(resized_nchw)
    resized_hwc = resized_nchw[0].permute(1, 2, 0)
    if part.size == part.wanted:
        return resized_hwc
    (top, left), (rows, columns) = part.first, part.wanted
    return resized_hwc[top : top + rows, left : left + columns]


class _Memory(threading.local):
    """Memory that one thread reuses for each image, up to `_MAX_KEPT_BYTES`."""

    def __init__(self) -> None:
        self._decoded = np.empty(0, np.uint8)
        self._resized: torch.Tensor | None = None

    def decoded(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an array of at least `num_bytes`."""
        if num_bytes <= len(self._decoded):
            return self._decoded
        decoded = np.empty(num_bytes, np.uint8)
        if num_bytes <= _MAX_KEPT_BYTES:
            self._decoded = decoded
        return decoded

    def resized(self, size: tuple[int, int]) -> torch.Tensor:
        """Return a tensor (1, 3, *size) of channels_last memory."""
        if self._resized is not None and self._resized.shape[2:] == size:
            return self._resized
        resized = self.fresh(size)
        if resized.numel() <= _MAX_KEPT_BYTES:
            self._resized = resized
        return resized

    @staticmethod
    def fresh(size: tuple[int, int]) -> torch.Tensor:
        """Return a new tensor like `resized`, which the caller may keep."""
        import torch

        return torch.empty((1, 3, *size), dtype=torch.uint8, memory_format=torch.channels_last)


_memory = _Memory()
