"""FFCV: a .beton file with JPEGs, its compiled decoder and crop, random order, the file in the page cache."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from crops import MEAN, STD, TARGET
from ffcv.fields import BytesField, IntField, JSONField, RGBImageField
from ffcv.fields.bytes import BytesDecoder
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, Squeeze, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from PIL import Image

from peers.common import FIELDS, PHOTO_QUALITY, Batch, Epochs, Job

FILE = "all.beton"


class Rows:
    """The samples by number, for FFCV's writer."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        return self.job.num

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        fields = self.job.sample(int(number))
        if self.job.kind == "images":
            return Image.open(io.BytesIO(fields["jpg"])).convert("RGB"), number
        row = (np.frombuffer(fields["bin"], np.uint8),)
        return (*row, orjson.loads(fields["json"])) if self.job.kind == "small" else row


def prepare(job: Job, folder: Path) -> None:
    """Write a .beton file. FFCV takes pixels, so photographs are encoded again, at the same quality."""
    makers: dict[str, Any] = {
        "jpg": lambda: RGBImageField(write_mode="jpg", jpeg_quality=PHOTO_QUALITY),
        "cls": IntField,
        "bin": BytesField,
        "json": JSONField,
    }
    fields = {name: makers[name]() for name in FIELDS[job.kind]}
    DatasetWriter(str(folder / FILE), fields, num_workers=1).from_indexed_dataset(Rows(job))


def open_epochs(job: Job) -> Epochs:
    """Return FFCV's loader with `job.threads` threads, at least one."""
    pipelines: dict[str, list[Any]] = {name: [BytesDecoder()] for name in FIELDS[job.kind]}
    if job.kind == "images":
        mean, std = (255 * np.asarray(values) for values in (MEAN, STD))
        normalize = [NormalizeImage(mean, std, np.float32)] if job.dtype == "float32" else []
        crop = RandomResizedCropRGBImageDecoder((TARGET, TARGET))
        pipelines["jpg"] = [crop, *normalize, ToTensor(), ToTorchImage()]
        pipelines["cls"] = [IntDecoder(), ToTensor(), Squeeze()]
    loader = Loader(
        str(job.home / FILE),
        batch_size=job.batch,
        num_workers=min(max(job.threads, 1), os.cpu_count() or 1),  # FFCV allows no more
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines=pipelines,
    )

    def epoch() -> Iterator[Batch]:
        for values, *rest in loader:
            if job.kind == "images":
                yield values, rest[0]
            else:
                yield list(values), JSONField.unpack(rest[0]) if rest else []

    return epoch
