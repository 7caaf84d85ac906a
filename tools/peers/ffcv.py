"""FFCV: a .beton file with JPEGs, its compiled decoder and crop, random order, the file in the page cache."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from bare import MEAN, STD, TARGET
from ffcv.fields import BytesField, IntField, JSONField, RGBImageField
from ffcv.fields.bytes import BytesDecoder
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, Squeeze, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image

from peers.data import PHOTO_QUALITY, once, sample
from peers.harness import Batch, Epoch
from peers.job import Job

PACKAGES = ("ffcv", "torch", "numba")


class Rows:
    """What its writer asks for, by number."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        return self.job.num

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        fields = sample(self.job, int(number))
        if self.job.kind == "images":
            return Image.open(io.BytesIO(fields["jpg"])).convert("RGB"), number
        row = (np.frombuffer(fields["bin"], np.uint8),)
        return (*row, orjson.loads(fields["json"])) if self.job.kind == "small" else row


def prepare(job: Job) -> None:
    """Photographs are encoded once more, at the same quality: it takes pixels."""
    fields = {
        "images": {
            "image": RGBImageField(write_mode="jpg", jpeg_quality=PHOTO_QUALITY),
            "label": IntField(),
        },
        "small": {"bin": BytesField(), "json": JSONField()},
        "bytes": {"bin": BytesField()},
    }

    def write(folder: Path) -> None:
        DatasetWriter(str(folder / "all.beton"), fields[job.kind], num_workers=1).from_indexed_dataset(Rows(job))

    once(job.path / "ffcv", write)


def pipelines(job: Job) -> dict[str, list[Any]]:
    """From bytes to tensors, for each field."""
    if job.kind == "images":
        image: list[Any] = [RandomResizedCropRGBImageDecoder((TARGET, TARGET))]
        if job.dtype == "float32":
            mean, std = (255 * np.asarray(values) for values in (MEAN, STD))
            image.append(NormalizeImage(mean, std, np.float32))
        return {
            "image": [*image, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        }
    return {name: [BytesDecoder()] for name in (["bin", "json"] if job.kind == "small" else ["bin"])}


def open_(job: Job) -> Epoch:
    """Its threads; with one, they are one."""
    loader = Loader(
        str(job.path / "ffcv" / "all.beton"),
        batch_size=job.batch,
        num_workers=max(job.threads, 1),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines=pipelines(job),
    )

    def epoch() -> Iterator[Batch]:
        for batch in loader:
            if job.kind == "images":
                yield batch[0], batch[1]
            elif job.kind == "bytes":
                yield list(batch[0]), None
            else:
                yield list(batch[0]), JSONField.unpack(batch[1])

    return epoch
