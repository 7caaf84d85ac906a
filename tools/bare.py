"""The bare chain: what decode, crop and batch cost when nothing else is done. The benches hold everything up to it.

simplejpeg at the smallest DCT scale that still covers the crop, torch's antialiased resize in uint8, and a copy into
memory that is used again and again. No sample, no draw, no order: the boxes are known before.
"""

from __future__ import annotations

import simplejpeg
import torch
from torch.nn import functional

TARGET = 224
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
Box = tuple[int, int, int, int]  # top, left, height, width

_SCALE = torch.tensor([1 / (255 * std) for std in STD]).repeat(TARGET)
_SHIFT = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)]).repeat(TARGET)


def new_batch(num: int, dtype: torch.dtype) -> torch.Tensor:
    """A batch's memory, (num, 3, TARGET, TARGET) in channels_last; not filled."""
    return torch.empty((num, 3, TARGET, TARGET), dtype=dtype).contiguous(memory_format=torch.channels_last)


def decode_and_crop(data: bytes, box: Box) -> torch.Tensor:
    """The box of a JPEG file, resized: (3, TARGET, TARGET), uint8, channels_last."""
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
    """The pixels into one image of a batch; normalized when the batch is float32."""
    if out.dtype == torch.uint8:
        out.copy_(pixels)
        return
    rows = out.permute(1, 2, 0).copy_(pixels.permute(1, 2, 0)).view(TARGET, -1)
    rows.mul_(_SCALE).add_(_SHIFT)
