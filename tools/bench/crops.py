"""Decode a JPEG file and crop it to 224 x 224, in the two ways that the benchmarks compare with wdskit.

The bare chain (`decode_and_crop`, `write`) is the minimum for decode, crop and batch: simplejpeg decodes at the
smallest DCT scale that still covers the crop, torch resizes in uint8 with antialiasing, and the pixels are copied into
memory that is used again. `crop_pillow` is the common recipe, without torchvision: it makes the calls of torchvision's
RandomResizedCrop, ToTensor and Normalize.
"""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.nn import functional

TARGET = 224
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
Box = tuple[int, int, int, int]  # top, left, height, width

SCALE = torch.tensor([1 / (255 * std) for std in STD]).view(3, 1, 1)
SHIFT = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)]).view(3, 1, 1)
_MEAN, _STD = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
_ROW_SCALE, _ROW_SHIFT = (values.ravel().repeat(TARGET) for values in (SCALE, SHIFT))


def draw(height: int, width: int) -> Box:
    """Return the box of a random resized crop: 8 to 100 % of the area, with an aspect ratio of 3:4 to 4:3.

    If ten random boxes do not fit, return the largest square in the middle.
    """
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(low, high))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            return random.randint(0, height - rows), random.randint(0, width - columns), rows, columns
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def new_batch(num: int, dtype: str) -> torch.Tensor:
    """Return uninitialized memory for a batch: (num, 3, TARGET, TARGET), channels_last."""
    shape = (num, 3, TARGET, TARGET)
    return torch.empty(shape, dtype=getattr(torch, dtype)).contiguous(memory_format=torch.channels_last)


def decode_and_crop(data: bytes, box: Box) -> torch.Tensor:
    """Decode `box` of a JPEG file and return it resized: (3, TARGET, TARGET), uint8, channels_last."""
    top, left, height, width = box
    full = simplejpeg.decode_jpeg_header(data)[:2]
    covers = min(height, width) / TARGET
    step = next((step for step in (8, 4, 2) if step <= covers), 1)
    least = [-(-side // step) for side in full]
    pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1])
    part = pixels[top // step : (top + height) // step, left // step : (left + width) // step]
    images = torch.from_numpy(part)[None].permute(0, 3, 1, 2)
    return functional.interpolate(images, (TARGET, TARGET), mode="bilinear", antialias=True)[0]


def write(out: torch.Tensor, pixels: torch.Tensor) -> None:
    """Write uint8 pixels into `out`, one image of a batch; normalize them if the batch is float32."""
    if out.dtype == torch.uint8:
        out.copy_(pixels)
        return
    rows = out.permute(1, 2, 0).copy_(pixels.permute(1, 2, 0)).view(TARGET, -1)
    rows.mul_(_ROW_SCALE).add_(_ROW_SHIFT)


def crop_pillow(image: Image.Image, dtype: str) -> torch.Tensor:
    """Return a random crop of a decoded photograph: (3, TARGET, TARGET), uint8 or normalized float32."""
    top, left, height, width = draw(image.height, image.width)
    part = image.crop((left, top, left + width, top + height)).resize((TARGET, TARGET), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1)
    if dtype == "uint8":
        return pixels
    return pixels.contiguous().to(torch.float32).div(255).sub_(_MEAN).div_(_STD)


def by_pillow(data: Any, dtype: str) -> torch.Tensor:
    """Return a random crop of a JPEG file, made by Pillow."""
    return crop_pillow(Image.open(io.BytesIO(data)).convert("RGB"), dtype)


def by_simplejpeg(data: Any, dtype: str) -> torch.Tensor:
    """Return a random crop of a JPEG file, made by the bare chain in new memory."""
    pixels = decode_and_crop(data, draw(*simplejpeg.decode_jpeg_header(data)[:2]))
    if dtype == "uint8":
        return pixels
    out = new_batch(1, dtype)[0]
    write(out, pixels)
    return out
