"""Decode and resize the wanted part of an image file, into new memory or into a batch.

A JPEG is decoded at a half, a quarter or an eighth of its size, if resizing does not need to enlarge it afterwards. For
other JPEGs and all other formats, the pixels are those of decoding, cropping and resizing one after the other.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.images import STEPS, decode_image, decode_jpeg, jpeg_size
from wdskit.stages.base import Origin
from wdskit.stages.images import geometry

if TYPE_CHECKING:
    import torch

Pixels: TypeAlias = NDArray[np.uint8]

_MAX_KEPT_BYTES = 8 << 20  # 2.8 megapixels; for larger images, allocating is a negligible part of the time

# A crop that starts at pixel 7 starts at 3.5 in an image of half the size, but torch resizes from whole pixels only. So
# the resize starts at a pixel further up or left, so that one of the resized pixels starts at the true start, with an
# error of at most this many pixels. The resized pixels before it are dropped (3.8 % more pixels in the mean). Rounding
# the start instead loses 12 dB: 37.4 instead of 49.5. Pillow's exact boxes give 50.2 and take 0.8 ms longer.
_MAX_SHIFT = 1 / 16
_MAX_EXTRA = 64  # 3 % of the crops for which half size suffices find no such pixel, and use full size; 5 % with 32
_NO_SCALES = (None, None)


class Axis(NamedTuple):
    """How the wanted rows, or the wanted columns, are made of an image: resize a part of the image, and keep a part of
    the result.

    Attributes:
        low: First row or column of the image to resize.
        high: Last row or column of the image to resize, + 1.
        total: Number of rows or columns after the resize.
        skip: Number of resized rows or columns to drop before the first wanted row or column. If negative: minus the
            number of padding pixels before the resized pixels.
        size: Number of wanted rows or columns.
    """

    low: int
    high: int
    total: int
    skip: int
    size: int


class WantedPart(NamedTuple):
    """The wanted part of an image: its rows and its columns."""

    rows: Axis
    columns: Axis


PartChooser: TypeAlias = Callable[[int, int, Origin], WantedPart]
"""Maps height, width and origin of an image to the wanted part of the image."""


class Grid(NamedTuple):
    """The rows, or the columns, to resize in an image that is decoded at a smaller scale.

    `start` may be before the image, and `stop` after the image. The pixels at the border are then repeated.

    Attributes:
        start: First row or column of the decoded image to resize.
        stop: Last row or column of the decoded image to resize, + 1.
        pitch: Number of rows or columns of the decoded image for one row or column after the resize.
        first: Number of the first wanted row or column after the resize.
    """

    start: int
    stop: int
    pitch: float
    first: int


class DecodedImage(NamedTuple):
    """A decoded RGB image. The first height x width x 3 bytes of `flat` are its pixels; `flat` may be longer."""

    flat: Pixels
    height: int
    width: int

    @classmethod
    def of(cls, pixels: Pixels) -> DecodedImage:
        """Return an image that shares the memory of `pixels`: uint8 (height, width, 3), contiguous and writable."""
        return cls(pixels.reshape(-1), *pixels.shape[:2])

    def cut(self, top: int, bottom: int, left: int, right: int) -> torch.Tensor:
        """Return rows `top` to `bottom` - 1 and columns `left` to `right` - 1 of the image as a view, uint8 tensor
        (1, 3, rows, columns).
        """
        import torch

        # One call of numpy replaces four calls of torch. Each call takes 5 us, because the decoder has replaced the
        # contents of the CPU's caches. A call of torch also releases Python's lock and wakes another thread in vain.
        shape = (1, 3, bottom - top, right - left)
        strides = (3 * self.height * self.width, 1, 3 * self.width, 3)
        return torch.from_numpy(np.ndarray(shape, np.uint8, self.flat, 3 * (top * self.width + left), strides))

    def whole(self) -> torch.Tensor:
        """Return the whole image as a view, uint8 (1, 3, height, width)."""
        return self.cut(0, self.height, 0, self.width)


class DecodedPart(NamedTuple):
    """Pixels of a decoded image that are to be resized, and the part of the resized pixels to keep.

    Attributes:
        images_nchw: Tensor (1, 3, height, width), uint8; may be a view of memory that the thread reuses.
        size: Number of rows and columns after resizing.
        scales: Scale of the rows and scale of the columns, new / old pixels. (None, None): computed from `size` and the
            shape of `images_nchw`.
        first: First wanted row and column after resizing.
        wanted: Number of wanted rows and columns.
    """

    images_nchw: torch.Tensor
    size: tuple[int, int]
    scales: tuple[float | None, float | None]
    first: tuple[int, int]
    wanted: tuple[int, int]

    def resize_into(self, out_nchw: torch.Tensor) -> None:
        """Resize the pixels, and write them to a tensor (1, 3, *size), uint8, in channels_last memory."""
        if self.images_nchw.shape[2:] == self.size:
            out_nchw.copy_(self.images_nchw)
            return
        import torch

        # `interpolate` calls this function, but has no `out`, and does not take both size and scales.
        resize: Any = torch._C._nn._upsample_bilinear2d_aa  # noqa: SLF001
        resize(self.images_nchw, self.size, False, *self.scales, out=out_nchw)


def choose_scale(wanted: WantedPart) -> tuple[int, tuple[Grid, Grid] | None]:
    """Return (step, grids) to decode a JPEG at 1/step of its size, with the grids of rows and columns. `step` is the
    largest of 8, 4 and 2 for which the decoded image need not be enlarged and `find_grid` returns both grids. Return
    (1, None) if the JPEG must be decoded at full size, as always for a padded image.
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
    """Return the grid of an axis in an image that is decoded at 1/step of its size. Return None if each possible grid
    shifts the wanted pixels by more than `_MAX_SHIFT` pixels of the decoded image. `axis.skip` is not negative.
    """
    low, high = axis.low / step, axis.high / step
    pitch = (high - low) / axis.total
    wanted = low + axis.skip * pitch
    for first in range(min(axis.skip, 1), _MAX_EXTRA + 1):  # the resize also reads pixels outside of a result pixel
        start = round(wanted - first * pitch)
        if abs(wanted - first * pitch - start) <= _MAX_SHIFT:
            end = start + pitch * (first + axis.size)
            stop = max(math.ceil(end), min(math.ceil(end + pitch / 2), math.ceil(high)))
            return Grid(start, stop, pitch, first)
    return None


def select_part(whole: DecodedImage, wanted: WantedPart) -> DecodedPart:
    """Return the wanted part of a full-size image. Resizing the part, and keeping its wanted pixels, gives the result
    of `geometry.crop`, `geometry.resize` and `geometry.center_crop` one after the other. The part may be a view of
    `whole`.
    """
    rows, columns = wanted
    part = whole.cut(rows.low, rows.high, columns.low, columns.high)
    totals = (rows.total, columns.total)
    if rows.skip >= 0 and columns.skip >= 0:
        return DecodedPart(part, totals, _NO_SCALES, (rows.skip, columns.skip), (rows.size, columns.size))
    resized = _memory.fresh(totals)
    DecodedPart(part, totals, _NO_SCALES, (0, 0), totals).resize_into(resized)
    padded: Any = geometry.center_crop(resized[0].permute(1, 2, 0).numpy(), (rows.size, columns.size))
    sizes = (rows.size, columns.size)
    return DecodedPart(DecodedImage.of(padded).whole(), sizes, _NO_SCALES, (0, 0), sizes)


def select_scaled_part(image: DecodedImage, wanted: WantedPart, grids: tuple[Grid, Grid]) -> DecodedPart:
    """Return the wanted part of an image decoded at a smaller scale, before it is resized. The part may be a view of
    `image`.

    `grids` are the ranges of rows and of columns of `image` that the part needs. Where a range reaches beyond the
    image, the pixels at the border are repeated.
    """
    rows, columns = grids
    sizes = (wanted.rows.size, wanted.columns.size)
    totals = (rows.first + sizes[0], columns.first + sizes[1])
    top, left = max(rows.start, 0), max(columns.start, 0)
    bottom, right = min(rows.stop, image.height), min(columns.stop, image.width)
    part = image.cut(top, bottom, left, right)
    beyond = [(top - rows.start, rows.stop - bottom), (left - columns.start, columns.stop - right)]
    if any(map(any, beyond)):
        part = DecodedImage.of(np.pad(part[0].permute(1, 2, 0).numpy(), [*beyond, (0, 0)], mode="edge")).whole()
    return DecodedPart(part, totals, (1 / rows.pitch, 1 / columns.pitch), (rows.first, columns.first), sizes)


@dataclass(frozen=True)
class OutputFormat:
    """The form of the resulting image: an array (height, width, 3) or a tensor (3, height, width), normalized or not.

    Attributes:
        is_array: Whether `decode` makes an array; otherwise a tensor.
        is_float: Whether `decode` makes float32 0..1; otherwise uint8.
        to_tensor: Whether `to_tensor` makes a float tensor of the array.
        normalize: Mean and standard deviation of `normalize`, for values 0..1; None without `normalize`.
    """

    is_array: bool
    is_float: bool
    to_tensor: bool = False
    normalize: tuple[Sequence[float], Sequence[float]] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the resulting image, float32 or uint8."""
        return np.dtype(np.float32 if self.is_float or self.to_tensor or self.normalize else np.uint8)


class JpegPlan(NamedTuple):
    """The plan to decode one JPEG, made from its header.

    Attributes:
        size: Height and width of the full-size image.
        wanted: The wanted part of the full-size image.
        step: The JPEG is decoded at 1/step of its size.
        grids: Grids of rows and columns; None at full size.
    """

    size: tuple[int, int]
    wanted: WantedPart
    step: int
    grids: tuple[Grid, Grid] | None


def plan_jpeg(data: bytes, choose_part: PartChooser, origin: Origin, *, max_pixels: int) -> JpegPlan | None:
    """Return the plan to decode a JPEG: the part that `choose_part` returns for the JPEG's size and `origin`, and the
    scale. Only the header is read. Return None for a file that is not a grey or RGB JPEG.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The header promises 0 pixels.
    """
    size = jpeg_size(data, max_pixels=max_pixels)
    if size is None:
        return None
    wanted = choose_part(*size, origin)
    return JpegPlan(size, wanted, *choose_scale(wanted))


def decode_part(
    data: bytes, plan: JpegPlan | None, choose_part: PartChooser, origin: Origin, *, max_pixels: int
) -> DecodedPart:
    """Decode the wanted part of one image file.

    Args:
        data: The whole file.
        plan: Result of `plan_jpeg` for `data`, perhaps None.
        choose_part: Maps height, width and `origin` to the wanted part. Called if `plan` is None, or if the decoded
            image has another size than `plan.size`.
        origin: Origin of the sample.
        max_pixels: Compared with width x height in the file's header.

    Returns:
        The part. Its pixels are valid until the next call in this thread.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The bytes are not one complete image of a known format.
    """
    if plan:
        size, wanted, step, grids = plan
        height, width = size if step == 1 else (-(-size[0] // step), -(-size[1] // step))
        buffer = _memory.decoded(3 * height * width)
        if decode_jpeg(data, size, step, buffer=buffer) is not None:
            image = DecodedImage(buffer, height, width)
            return select_scaled_part(image, wanted, grids) if grids else select_part(image, wanted)
    whole: Any = decode_image(data, "rgb8", max_pixels=max_pixels)
    height, width = whole.shape[:2]
    is_known = plan and plan.size == (height, width)
    wanted = plan.wanted if plan and is_known else choose_part(height, width, origin)
    return select_part(DecodedImage.of(whole), wanted)


def finish(part: DecodedPart, output_format: OutputFormat, *, flip: bool) -> NDArray[Any] | torch.Tensor:
    """Return the resulting image of a part, in new memory: an array (height, width, 3) or a tensor (3, height, width),
    as `output_format` says. With `flip`, left and right are exchanged.
    """
    written = np.empty((1, *part.wanted, 3), output_format.dtype).transpose(0, 3, 1, 2)
    write(part, output_format, flip=flip, out=written)
    return as_value(written, output_format, output_format)


def write(part: DecodedPart, output_format: OutputFormat, *, flip: bool, out: NDArray[Any]) -> None:
    """Write the resulting image of a part into a batch.

    Args:
        part: Result of `decode_part`.
        output_format: Decides dtype and values. `is_array` has no effect.
        flip: Whether to exchange left and right.
        out: Array (1, 3, height, width) of `output_format.dtype`, one image of a batch in channels_last memory.
    """
    import torch

    assert out.shape[2:] == part.wanted
    assert out.dtype == output_format.dtype
    out_nchw = torch.from_numpy(out)
    if out.dtype == np.uint8 and part.size == part.wanted and not flip:
        part.resize_into(out_nchw)
        return
    resized = _memory.resized(part.size)
    part.resize_into(resized)
    (top, left), (rows, columns) = part.first, part.wanted
    pixels = resized[0, :, top : top + rows, left : left + columns].permute(1, 2, 0)
    if flip:
        pixels = pixels.flip(1)
    out_hwc = out_nchw[0].permute(1, 2, 0)
    if output_format.normalize:
        geometry.normalize_into(out_hwc, pixels, *output_format.normalize)
    elif output_format.dtype == np.float32:
        out_hwc.copy_(pixels).div_(255)
    else:
        out_hwc.copy_(pixels)


def write_numbers_as(output_format: OutputFormat) -> bytes | None:
    """Return the argument with which the C code writes the same values as `write`. None: the values are uint8. Empty
    bytes: value / 255. Otherwise value * scale + shift, with three scales and three shifts as bytes of float32.
    """
    if output_format.dtype == np.uint8:
        return None
    if output_format.normalize is None:
        return b""
    mean, std = output_format.normalize
    factors = np.concatenate(geometry.affine_numbers(tuple(mean), tuple(std), 255.0))
    return np.repeat(factors, 6 // len(factors)).tobytes()


def as_value(
    written: NDArray[Any], batch_format: OutputFormat, output_format: OutputFormat
) -> NDArray[Any] | torch.Tensor:
    """Return an image of a batch in the form in which `finish` returns it for `output_format`.

    `written`, (1, 3, height, width), is the image that `write` has written with `batch_format`. `batch_format` is
    `output_format` or its uint8 form. The result has no batch axis, and may be a view of `written`.
    """
    if batch_format == output_format and output_format.is_array and not output_format.to_tensor:
        image: NDArray[Any] = written[0].transpose(1, 2, 0)
        return image
    import torch

    images = torch.from_numpy(written)
    image_hwc = (images if batch_format == output_format else finish_batch(images, output_format))[0].permute(1, 2, 0)
    if not output_format.is_array:
        return image_hwc.permute(2, 0, 1).contiguous()
    return geometry.to_tensor(image_hwc.numpy()) if output_format.to_tensor else image_hwc.numpy()


def finish_batch(images: torch.Tensor, output_format: OutputFormat) -> torch.Tensor:
    """Convert a batch of images that was written as uint8 to float32 values.

    Args:
        images: (batch, 3, height, width), uint8, on any device.
        output_format: The form of the result; a form of float32.

    Returns:
        float32 of the same shape, device and memory layout. On the CPU the bits are equal to those of images written
        with `output_format`; on other devices the last bit may differ.
    """
    values = images.float()
    if output_format.normalize is None:
        return values.div_(255)
    mean, std = output_format.normalize
    scale, shift = geometry.channel_affine(tuple(mean), tuple(std), images.device)
    return values.mul_(scale).add_(shift)


class _Memory(threading.local):
    """The memory of one thread for one image, reused for the next image. The values in it are undefined. Memory of more
    than `_MAX_KEPT_BYTES` is allocated anew for each image.
    """

    def __init__(self) -> None:
        self._decoded = np.empty(0, np.uint8)
        self._resized: torch.Tensor | None = None

    def decoded(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an array of at least `num_bytes`, uint8 (n,), valid until the next call in this thread."""
        if num_bytes <= len(self._decoded):
            return self._decoded
        decoded = np.empty(num_bytes, np.uint8)
        if num_bytes <= _MAX_KEPT_BYTES:
            self._decoded = decoded
        return decoded

    def resized(self, size: tuple[int, int]) -> torch.Tensor:
        """Return a tensor (1, 3, *size), uint8, in channels_last memory, valid until the next call in this thread."""
        if self._resized is not None and self._resized.shape[2:] == size:
            return self._resized
        resized = self.fresh(size)
        if resized.numel() <= _MAX_KEPT_BYTES:
            self._resized = resized
        return resized

    @staticmethod
    def fresh(size: tuple[int, int]) -> torch.Tensor:
        """Return a new tensor (1, 3, *size), uint8, in channels_last memory, which the caller may keep."""
        import torch

        return torch.empty((1, 3, *size), dtype=torch.uint8, memory_format=torch.channels_last)


_memory = _Memory()
