"""The samples: the same for everybody, made of their numbers, written once for each format."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from peers.job import Job

NUM_SHARDS = 8
PHOTO_SIZE = (455, 385)
PHOTO_QUALITY = 95
DONE = "done"


def once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Fill a folder unless it was filled before; one that was left half done is made again."""
    if not (folder / DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(folder)
        (folder / DONE).touch()
    return folder


def samples(job: Job) -> Iterator[dict[str, bytes]]:
    """All of them, in the order of their numbers: `jpg` and `cls`, `bin` and `json`, or `bin`."""
    return (sample(job, number) for number in range(job.num))


def sample(job: Job, number: int) -> dict[str, bytes]:
    """One of them."""
    if job.kind == "images":
        return {"jpg": photo_path(job, number).read_bytes(), "cls": str(number).encode()}
    return small(job, number)


def small(job: Job, number: int) -> dict[str, bytes]:
    """Bytes that begin with the sample's number, and JSON where the kind has it."""
    noise = np.random.default_rng([job.size, number]).bytes(job.size - 4)
    fields = {"bin": number.to_bytes(4, "little") + noise}
    if job.kind == "small":
        document = {"id": number, "label": number % 1000, "caption": f"a few words about number {number}"}
        fields["json"] = json.dumps(document).encode()
    return fields


def photo_path(job: Job, number: int) -> Path:
    """Where a photograph is."""
    return job.path / "photos" / f"{number:06d}.jpg"


def make_photos(job: Job) -> None:
    """All photographs as files."""

    def write(folder: Path) -> None:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            parts = [range(start, min(start + 64, job.num)) for start in range(0, job.num, 64)]
            list(pool.map(partial(write_photos, folder), parts))

    once(job.path / "photos", write)


def write_photos(folder: Path, numbers: range) -> None:
    """Photographs of make_photos.py: nearly the whole of one each, lighter or darker, mirrored or not."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from make_photos import load_photos
    from PIL import Image, ImageEnhance

    photos = list(load_photos().values())
    for number in numbers:
        rng = np.random.default_rng([9, number])
        photo = photos[number % len(photos)]
        width, height = photo.width * rng.uniform(0.85, 1), photo.height * rng.uniform(0.85, 1)
        left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
        view = photo.resize(PHOTO_SIZE, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
        if rng.random() < 0.5:
            view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        stream = io.BytesIO()
        ImageEnhance.Brightness(view).enhance(rng.uniform(0.8, 1.2)).save(stream, "JPEG", quality=PHOTO_QUALITY)
        (folder / f"{number:06d}.jpg").write_bytes(stream.getvalue())


def shards(job: Job) -> list[Path]:
    """The tar shards, which several contestants read."""
    return sorted((job.path / "tar").glob("*.tar"))


def make_shards(job: Job) -> Path:
    """Write them, as `wdskit pack` does."""
    from wdskit import pack

    def write(folder: Path) -> None:
        rows = ({"__key__": f"{number:08d}", **fields} for number, fields in enumerate(samples(job)))
        pack(rows, folder, pattern="s-%03d.tar", max_samples=-(-job.num // NUM_SHARDS))

    return once(job.path / "tar", write)
