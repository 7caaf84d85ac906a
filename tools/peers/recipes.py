"""Decode and random resized crop for the contestants that leave it to the user's code.

`pillow` is what the common examples do, without torchvision: the same calls that its RandomResizedCrop, PILToTensor,
ToTensor and Normalize make. `fast` is the bare chain with a draw and fresh memory.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import bare
import numpy as np
import orjson
import torch
from bare import MEAN, STD, TARGET, Box
from PIL import Image

from peers.job import Job

_MEAN = torch.tensor(MEAN).view(3, 1, 1)
_STD = torch.tensor(STD).view(3, 1, 1)


def draw(height: int, width: int) -> Box:
    """The box of a random resized crop: 8 to 100 % of the area, 3:4 to 4:3, ten tries."""
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(low, high))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            return random.randint(0, height - rows), random.randint(0, width - columns), rows, columns
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def crop_pillow(image: Image.Image, dtype: str) -> torch.Tensor:
    """A decoded photograph to a tensor (3, TARGET, TARGET)."""
    top, left, height, width = draw(image.height, image.width)
    part = image.crop((left, top, left + width, top + height)).resize((TARGET, TARGET), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1)
    if dtype == "uint8":
        return pixels
    return pixels.contiguous().to(torch.float32).div(255).sub_(_MEAN).div_(_STD)


def pillow(data: Any, dtype: str) -> torch.Tensor:
    """A JPEG file to a tensor by Pillow."""
    return crop_pillow(Image.open(io.BytesIO(data)).convert("RGB"), dtype)


def fast(data: Any, dtype: str) -> torch.Tensor:
    """The same by simplejpeg and torch."""
    import simplejpeg

    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    pixels = bare.decode_and_crop(data, draw(height, width))
    if dtype == "uint8":
        return pixels
    out = bare.new_batch(1, torch.float32)[0]
    bare.write(out, pixels)
    return out


CHAINS: dict[str, Callable[[Any, str], torch.Tensor]] = {"pillow": pillow, "fast": fast}


def columns(rows: Any) -> tuple[list[Any], ...]:
    """Rows of fields as lists of one field each: the batch of what is no tensor."""
    return tuple(map(list, zip(*rows, strict=True)))


def images_and_labels(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of (tensor, number) as torch's collate makes them a batch."""
    batch: tuple[torch.Tensor, torch.Tensor] = torch.utils.data.default_collate(rows)
    return batch


def decoded(row: dict[str, Any], job: Job) -> tuple[Any, ...]:
    """A sample of bytes under `jpg` (with a number under `cls`) or `bin` (and `json`) to what a batch is made of."""
    if job.kind == "images":
        return CHAINS[job.chain](row["jpg"], job.dtype), row["cls"]
    if job.kind == "small":
        return row["bin"], orjson.loads(row["json"])
    return (row["bin"],)


def collate(job: Job) -> Callable[[Any], Any]:
    """The batch of such rows."""
    return images_and_labels if job.kind == "images" else columns


def batches(loader: Any) -> Iterator[tuple[Any, Any]]:
    """Of a torch DataLoader with that collate."""
    for batch in loader:
        yield batch if len(batch) == 2 else (batch[0], None)
