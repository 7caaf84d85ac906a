"""The functions of the built-in transforms, for one image.

An image is a numpy array (height, width[, channels]), a torch tensor ([channels, ]height, width) or a PIL image. A
function returns the kind of image that it takes, unless its docstring names another kind. Results never share memory
with a larger image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.images import PillowImage, Resampling, Transpose
from wdskit.errors import PipelineError, WdskitError
from wdskit.stages.collate import is_tensor

if TYPE_CHECKING:
    import torch

Array: TypeAlias = NDArray[Any]
Image: TypeAlias = "Array | torch.Tensor | PillowImage"

_CROP_TRIES = 10  # the number in torchvision


def is_image(value: object) -> bool:
    """Return whether a value is an image: an array or a tensor of 2 or 3 axes, or a PIL image."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        return value.ndim in {2, 3}
    return isinstance(value, PillowImage)


def image_size(image: Image) -> tuple[int, int]:
    """Return height and width. PipelineError: The image does not have 2 or 3 axes."""
    if isinstance(image, PillowImage):
        return image.height, image.width
    _check_axes(image)
    height, width = image.shape[:2] if isinstance(image, np.ndarray) else image.shape[-2:]
    return int(height), int(width)


def resize(image: Image, size: tuple[int, int], *, nearest: bool = False) -> Image:
    """Return the image at another size (height, width), or the same object if it has the size already.

    The image is an array (height, width[, channels]), a tensor ([channels, ]height, width) or an image of Pillow; the
    result is of the same kind. The resize is bilinear with antialiasing. The result for an array or tensor of uint8
    differs from Pillow's by one level of 255, rarely by two; with an alpha channel by more, because Pillow multiplies
    the colours by the alpha. With `nearest`, for masks of any dtype, each pixel is a copy of one old pixel.

    Raises:
        PipelineError: An array or tensor is neither uint8 nor float and `nearest` is not set, or it does not have 2 or
            3 axes.
    """
    if image_size(image) == size:
        return image
    height, width = size
    if isinstance(image, PillowImage):
        return image.resize((width, height), Resampling.NEAREST if nearest else Resampling.BILINEAR)
    if nearest:
        rows, columns = (_nearest_pixels(n, into) for n, into in zip(image_size(image), size, strict=True))
        if isinstance(image, np.ndarray):
            return image[rows[:, None], columns]
        import torch

        return image[..., torch.from_numpy(rows)[:, None], torch.from_numpy(columns)]
    if is_tensor(image):
        blended = _resize_bilinear(_at_least_3d(image).permute(1, 2, 0).contiguous(), size).permute(2, 0, 1)
        return blended.reshape(*image.shape[:-2], height, width).contiguous()
    pixels: Array = _resize_bilinear(_tensor(image).reshape(*image.shape[:2], -1), size).numpy()
    return pixels.reshape(height, width, *image.shape[2:])


def crop(image: Image, top: int, left: int, height: int, width: int) -> Image:
    """Return the part of the image that starts at row `top` and column `left` and has `height` rows and `width`
    columns. The part must be inside the image. If the part is the whole image, return the same object. PipelineError:
    The image does not have 2 or 3 axes.
    """
    full_height, full_width = image_size(image)
    assert 0 <= top <= full_height - height
    assert 0 <= left <= full_width - width
    if (full_height, full_width) == (height, width):
        return image
    if isinstance(image, PillowImage):
        return image.crop((left, top, left + width, top + height))
    if isinstance(image, np.ndarray):
        part: Array = image[top : top + height, left : left + width].copy()
        return part
    import torch

    return image[..., top : top + height, left : left + width].clone(memory_format=torch.contiguous_format)


def center_crop(image: Image, size: tuple[int, int], *, fill: int = 0, is_unit: bool = False) -> Image:
    """Return the middle of the image, `size` = (height, width), or the same object if the image has the size already.

    If the image has fewer rows or columns, pixels with the number `fill` in each channel are added around it. The crop
    starts at the same pixel as in torchvision.

    Raises:
        PipelineError: The image does not have 2 or 3 axes.
        WdskitError: Pixels are added, and `fill` is larger than the dtype of the image can store, such as 256 for
            uint8. A floating-point image takes any `fill`, but with `is_unit` only 0 and 1.
    """
    height, width = size
    full_height, full_width = image_size(image)
    top, left = middle(full_height, height), middle(full_width, width)
    if height <= full_height and width <= full_width:
        return crop(image, top, left, height, width)
    if isinstance(image, PillowImage):
        padded = image.crop((left, top, left + width, top + height))
        if fill:
            _check_fill(fill, 255)
            padded.paste((fill,) * len(image.getbands()), (0, 0, width, height))
            padded.paste(image, (-left, -top))
        return padded
    inside = crop(image, max(top, 0), max(left, 0), min(height, full_height), min(width, full_width))
    rows = slice(max(-top, 0), max(-top, 0) + min(height, full_height))
    columns = slice(max(-left, 0), max(-left, 0) + min(width, full_width))
    if is_tensor(inside):
        import torch

        is_float = inside.dtype.is_floating_point
        if is_unit or not is_float:
            _check_fill(fill, 1 if is_float or inside.dtype == torch.bool else torch.iinfo(inside.dtype).max)
        filled = inside.new_full((*inside.shape[:-2], height, width), fill)
        filled[..., rows, columns] = inside
        return filled
    assert isinstance(inside, np.ndarray)
    if inside.dtype.kind in "biu" or (is_unit and inside.dtype.kind == "f"):
        _check_fill(fill, 1 if inside.dtype.kind in "bf" else np.iinfo(inside.dtype).max)
    canvas = np.full((height, width, *inside.shape[2:]), fill, inside.dtype)
    canvas[rows, columns] = inside
    return canvas


def flip(image: Image) -> Image:
    """Return the image with left and right exchanged, in new memory. PipelineError: The image does not have 2 or 3
    axes.
    """
    if isinstance(image, PillowImage):
        return image.transpose(Transpose.FLIP_LEFT_RIGHT)
    _check_axes(image)
    if is_tensor(image):
        return image.flip(-1)
    if image.dtype.name in {"uint8", "float32"}:  # torch takes 0.03 ms, numpy 0.38 ms
        flipped: Array = _tensor(image).flip(1).numpy()
        return flipped
    mirrored: Array = image[:, ::-1].copy()
    return mirrored


def normalize(image: Image, mean: Sequence[float], std: Sequence[float]) -> Array | torch.Tensor:
    """Return (image - mean) / std as float32, in new memory. The values of uint8 images are first divided by 255.

    Args:
        image: A PIL image becomes an array (height, width[, channels]).
        mean: One value, or one value per channel, for images in 0..1.
        std: One value, or one value per channel, for images in 0..1.

    Raises:
        PipelineError: The image is neither uint8 nor float, or does not have 2 or 3 axes. Or `mean` or `std` has
            neither one value nor one value per channel.
    """
    pixels = np.asarray(image) if isinstance(image, PillowImage) else image
    unit = _unit(pixels, "normalize")
    channels = 1 if pixels.ndim == 2 else pixels.shape[2 if isinstance(pixels, np.ndarray) else 0]
    if {len(mean), len(std)} - {1, channels}:
        raise PipelineError(f"normalize: mean has {len(mean)} values and std {len(std)}, the image {channels} channels")
    factors = (tuple(mean), tuple(std), unit)
    if isinstance(pixels, np.ndarray):
        normalized: Array = _normalize_rows(_tensor(pixels), *factors).numpy()
        return normalized
    if pixels.ndim == 3 and pixels.permute(1, 2, 0).is_contiguous():  # the memory layout of `to_tensor`
        return _normalize_rows(pixels.permute(1, 2, 0), *factors).permute(2, 0, 1)
    scale, shift = (row.view(-1, 1, 1) for row in _affine(*factors, 1))
    return (pixels.float() * scale).add_(shift).reshape(pixels.shape)


@lru_cache(maxsize=32)
def channel_affine(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and shift, float32 tensors (channels, 1, 1) on `device`; (1, 1, 1) if `mean` and `std` have one
    value. For uint8 pixels (channels, height, width), pixels * scale + shift is the result of `normalize`.
    """
    scale, shift = _affine(mean, std, 255.0, 1)
    return scale.to(device)[:, None, None], shift.to(device)[:, None, None]


def to_tensor(image: Image) -> torch.Tensor:
    """Return the image as a float32 tensor (channels, height, width). uint8 values are divided by 255.

    For an array or a PIL image the result has channels_last memory, as in batches: a pixel's channels are adjacent. The
    result may share the memory of a float32 image.

    Raises:
        PipelineError: The image is neither uint8 nor float, or does not have 2 or 3 axes.
    """
    pixels = np.asarray(image) if isinstance(image, PillowImage) else image
    unit = _unit(pixels, "to_tensor")
    if is_tensor(pixels):
        values = pixels.float()
        return _at_least_3d(values.div_(unit) if unit != 1 else values)
    if unit == 1:
        tensor = _tensor(pixels.astype(np.float32, copy=False))
    else:
        tensor = _tensor(np.divide(pixels, np.float32(unit), dtype=np.float32))
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1)


def shorter_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Return height and width with `size` as the shorter side, in the same aspect ratio, rounded as in torchvision."""
    if height <= width:
        return size, int(size * width / height)
    return int(size * height / width), size


def draw_crop(
    rng: np.random.Generator, height: int, width: int, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[int, int, int, int]:
    """Draw a random part of an image, as torchvision's RandomResizedCrop does.

    Args:
        rng: Each try takes four numbers from `rng.random`.
        height: Height of the image.
        width: Width of the image.
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest width / height. The logarithm of the ratio is drawn uniformly.

    Returns:
        top, left, height and width of the part in pixels. If ten tries give no part that fits into the image: the
        largest part in the middle of the image with an allowed ratio.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_CROP_TRIES):
        # `random` is the method of numpy that is least likely to change.
        for_area, for_shape, for_top, for_left = rng.random(4).tolist()
        area = height * width * (scale[0] + for_area * (scale[1] - scale[0]))
        shape = math.exp(low + for_shape * (high - low))
        crop_height, crop_width = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            top, left = int(for_top * (height - crop_height + 1)), int(for_left * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    crop_height, crop_width = height, width
    if width / height < ratio[0]:
        crop_height = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        crop_width = max(1, round(height * ratio[1]))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def _check_fill(fill: int, largest: int) -> None:
    if fill > largest:
        msg = (
            f"{fill} does not fit in this image, whose largest number is {largest}. Set a smaller `fill` or `mask_fill`"
        )
        raise WdskitError(msg)


def _check_axes(image: Array | torch.Tensor) -> None:
    if image.ndim not in {2, 3}:
        raise PipelineError(f"an image has 2 or 3 axes, this {type(image).__name__} has the shape {tuple(image.shape)}")


def _at_least_3d(image: torch.Tensor) -> torch.Tensor:
    return image[None] if image.ndim == 2 else image


def _tensor(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of the array. If the array is read-only, not C-contiguous or not in native
    byte order, return a tensor in new memory.
    """
    import torch

    if not (array.flags.writeable and array.flags.c_contiguous and array.dtype.isnative):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def _resize_bilinear(image_hwc: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize a contiguous image (height, width, channels), bilinear with antialiasing, and return a contiguous image.
    `size` is (height, width). PipelineError: The dtype is neither uint8 nor float.
    """
    import torch
    from torch.nn import functional

    dtype = image_hwc.dtype
    if dtype != torch.uint8 and not dtype.is_floating_point:
        raise PipelineError(f"resize: {dtype} values cannot be blended, only uint8 and float. Name a mask in `masks`")
    if dtype in {torch.float16, torch.bfloat16}:  # torch resizes uint8, float32 and float64 only
        image_hwc = image_hwc.float()
    num_channels = image_hwc.shape[2]
    if num_channels == 1 and size[1] == 1:  # torch would repeat the first row of a float grey image
        image_hwc = image_hwc.repeat(1, 1, 3)
    # The batch axis comes before the permutation: added after it, torch does not see channels_last memory, takes three
    # times as long, and fails with an assertion if the result is one pixel.
    images_nchw = image_hwc[None].permute(0, 3, 1, 2)
    blended = functional.interpolate(images_nchw, size, mode="bilinear", align_corners=False, antialias=True)
    return blended[0, :num_channels].permute(1, 2, 0).to(dtype).contiguous()


def _nearest_pixels(n: int, into: int) -> NDArray[np.int64]:
    """Return the indices of the pixels that a resize by nearest neighbour copies along one side, int64 (into,). The
    side has `n` pixels before the resize and `into` pixels after it.
    """
    return (2 * np.arange(into) + 1) * n // (2 * into)


def middle(full: int, part: int) -> int:
    """Return the start of the middle `part` pixels of a side with `full` pixels, rounded as in torchvision. If `part`
    is larger than `full`, return minus the number of padding pixels before the side.
    """
    return -((part - full) // 2) if part > full else round((full - part) / 2)


def _unit(pixels: Array | torch.Tensor, function: str) -> float:
    """Return the pixel value of full brightness: 255 for uint8, 1 for float. PipelineError: The image has another
    dtype, or does not have 2 or 3 axes. The message starts with `function`.
    """
    _check_axes(pixels)
    if isinstance(pixels, np.ndarray):
        is_uint8, is_float = pixels.dtype == np.uint8, pixels.dtype.kind == "f" and pixels.itemsize <= 8
    else:
        is_uint8, is_float = str(pixels.dtype) == "torch.uint8", pixels.dtype.is_floating_point
    if not (is_uint8 or is_float):
        raise PipelineError(f"{function}: an image is uint8 or float, this one is {pixels.dtype}")
    return 255.0 if is_uint8 else 1.0


def _normalize_rows(image: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...], unit: float) -> torch.Tensor:
    """Return `normalize` of a contiguous image (height, width[, channels]), float32 of the same shape. `unit` is the
    result of `_unit`.
    """
    # Whole rows at once are 12 times faster than single pixels.
    rows = image.reshape(image.shape[0], -1)
    scale, shift = _affine(mean, std, unit, rows.shape[1])
    import torch

    # A fused operation rounds the rest after the last full vector differently, so results would depend on threads.
    values = rows * scale if rows.dtype == torch.float32 else rows.to(torch.float32).mul_(scale)
    return values.add_(shift).reshape(image.shape)


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
    mean: tuple[float, ...], std: tuple[float, ...], unit: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return scale and shift that normalize an image: image * scale + shift == (image / unit - mean) / std. Both are
    float32 (channels,), or (1,) if `mean` and `std` have one value.
    """
    exact_mean, exact_std = np.broadcast_arrays(np.asarray(mean), np.asarray(std))
    return (1 / (exact_std * unit)).astype(np.float32), (-exact_mean / exact_std).astype(np.float32)
