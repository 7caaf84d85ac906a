"""The functions of the built-in transforms, for one image: an array (height, width[, channels]), uint8 or float32.

Masks have any dtype. Results never share memory with a larger image.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import PipelineError

if TYPE_CHECKING:
    import torch

Array: TypeAlias = NDArray[Any]


def image_size(image: Array) -> tuple[int, int]:
    """Return height and width."""
    return image.shape[0], image.shape[1]


def resize(image: Array, size: tuple[int, int], *, nearest: bool = False) -> Array:
    """Return the image at another size (height, width), or the same object if it has the size already.

    The resize is bilinear with antialiasing. The result for uint8 differs from Pillow's by one level of 255, rarely by
    two; with an alpha channel by more, because Pillow multiplies the colours by the alpha. With `nearest`, for masks of
    any dtype, each pixel is a copy of one old pixel.
    """
    if image_size(image) == size:
        return image
    if nearest:
        sides = zip(image_size(image), size, strict=True)
        rows, columns = ((2 * np.arange(into) + 1) * n // (2 * into) for n, into in sides)  # the pixels that are copied
        copied: Array = image[rows[:, None], columns]
        return copied
    pixels: Array = _resize_bilinear(shared_tensor(image).reshape(*image.shape[:2], -1), size).numpy()
    return pixels.reshape(*size, *image.shape[2:])


def crop(image: Array, top: int, left: int, height: int, width: int) -> Array:
    """Return the part of the image that starts at row `top` and column `left` and has `height` rows and `width`
    columns. The part must be inside the image. If the part is the whole image, return the same object.
    """
    full_height, full_width = image_size(image)
    assert 0 <= top <= full_height - height
    assert 0 <= left <= full_width - width
    if (full_height, full_width) == (height, width):
        return image
    part: Array = image[top : top + height, left : left + width].copy()
    return part


def center_crop(image: Array, size: tuple[int, int], *, fill: int = 0) -> Array:
    """Return the middle of the image, `size` = (height, width), or the same object if the image has the size already.

    If the image has fewer rows or columns, pixels with the number `fill` in each channel are added around it. The dtype
    must be able to store `fill`. The crop starts at the same pixel as in torchvision.
    """
    height, width = size
    full_height, full_width = image_size(image)
    top, left = middle(full_height, height), middle(full_width, width)
    inside = crop(image, max(top, 0), max(left, 0), min(height, full_height), min(width, full_width))
    if inside.shape[:2] == size:
        return inside
    canvas = np.full((*size, *image.shape[2:]), fill, image.dtype)
    below, right = max(-top, 0), max(-left, 0)
    canvas[below : below + inside.shape[0], right : right + inside.shape[1]] = inside
    return canvas


def flip(image: Array) -> Array:
    """Return the image with left and right exchanged, in new memory."""
    if image.dtype.name in {"uint8", "float32"}:  # torch takes 0.03 ms, numpy 0.38 ms
        flipped: Array = shared_tensor(image).flip(1).numpy()
        return flipped
    mirrored: Array = image[:, ::-1].copy()
    return mirrored


def normalize(image: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """Return (image - mean) / std as float32, in new memory. The values of uint8 images are first divided by 255.

    Args:
        image: uint8 or float32.
        mean: One value, or one value per channel, for images in 0..1.
        std: One value, or one value per channel, for images in 0..1.

    Raises:
        PipelineError: `mean` or `std` has neither one value nor one value per channel.
    """
    import torch  # here, because processes that change no image do not need it

    channels = 1 if image.ndim == 2 else image.shape[2]
    if {len(mean), len(std)} - {1, channels}:
        raise PipelineError(f"normalize: mean has {len(mean)} values and std {len(std)}, the image {channels} channels")
    # Whole rows at once are 12 times faster than single pixels.
    rows = shared_tensor(image).reshape(image.shape[0], -1)
    scale, shift = _affine(tuple(mean), tuple(std), _unit(image), rows.shape[1])
    # A fused operation rounds the rest after the last full vector differently, so results would depend on threads.
    values = rows * scale if rows.dtype == torch.float32 else rows.to(torch.float32).mul_(scale)
    normalized: Array = values.add_(shift).reshape(image.shape).numpy()
    return normalized


def to_tensor(image: Array) -> torch.Tensor:
    """Return a uint8 or float32 image as a float32 tensor (channels, height, width). uint8 values are divided by 255.

    The result has channels_last memory, as in batches: a pixel's channels are adjacent. It may share the memory of a
    float32 image.
    """
    unit = _unit(image)
    tensor = shared_tensor(image if unit == 1 else np.divide(image, np.float32(unit), dtype=np.float32))
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1)


def shorter_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Return height and width with `size` as the shorter side, in the same aspect ratio, rounded as in torchvision."""
    return (size, int(size * width / height)) if height <= width else (int(size * height / width), size)


def shared_tensor(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of the array; in new memory if the array is read-only, not C-contiguous,
    mirrored (also if it has one column, which is contiguous for numpy) or not in native byte order.
    """
    import torch

    if not (array.flags.carray and array.dtype.isnative) or min(array.strides, default=0) < 0:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def _resize_bilinear(image_hwc: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize a contiguous image (height, width, channels), bilinear with antialiasing, and return a contiguous image.
    `size` is (height, width).
    """
    from torch.nn import functional

    num_channels = image_hwc.shape[2]
    if num_channels == 1 and size[1] == 1:  # torch would repeat the first row of a float grey image
        image_hwc = image_hwc.repeat(1, 1, 3)
    # The batch axis comes before the permutation: added after it, torch does not see channels_last memory, takes three
    # times as long, and fails with an assertion if the result is one pixel.
    images_nchw = image_hwc[None].permute(0, 3, 1, 2)
    blended = functional.interpolate(images_nchw, size, mode="bilinear", align_corners=False, antialias=True)
    return blended[0, :num_channels].permute(1, 2, 0).contiguous()


def middle(full: int, part: int) -> int:
    """Return the start of the middle `part` pixels of a side with `full` pixels, rounded as in torchvision. If `part`
    is larger than `full`, return minus the number of padding pixels before the side.
    """
    return -((part - full) // 2) if part > full else round((full - part) / 2)


def _unit(image: Array) -> float:
    """Return the pixel value of full brightness: 255 for uint8, 1 for float32."""
    return 255.0 if image.dtype == np.uint8 else 1.0


@lru_cache(maxsize=32)
def _affine(
    mean: tuple[float, ...], std: tuple[float, ...], unit: float, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the shift of `affine_numbers` as tensors. Each tensor is repeated to `length` values, the
    number of values in a row of pixels. With `length` 1, nothing is repeated.
    """
    import torch

    numbers = affine_numbers(mean, std, unit)
    scale, shift = (torch.from_numpy(np.tile(row, max(1, length // len(row)))) for row in numbers)
    return scale, shift


def affine_numbers(
    mean: Sequence[float], std: Sequence[float], unit: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return scale and shift that normalize an image: image * scale + shift == (image / unit - mean) / std. Both are
    float32 (channels,), or (1,) if `mean` and `std` have one value.
    """
    exact_mean, exact_std = np.broadcast_arrays(np.asarray(mean), np.asarray(std))
    return (1 / (exact_std * unit)).astype(np.float32), (-exact_mean / exact_std).astype(np.float32)
