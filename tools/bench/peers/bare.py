"""The bare loop: pread at known offsets in a random order; for images, the bare chain with known boxes."""

from __future__ import annotations

import os
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import crops
import numpy as np
import orjson
import torch
from make_photos import load_photos, random_view

from peers.common import FIELDS, LABELLED, PHOTO_QUALITY, PHOTO_SIZE, Batch, Epochs, Job

NUM_SHARDS = 8

Piece = tuple[int, int, int]  # file descriptor, offset, bytes


photographs = cache(load_photos)


def write_photo(folder: Path, number: int) -> None:
    """Write a photograph, slightly cropped, lighter or darker, mirrored or not."""
    photo = list(photographs().values())[number % len(photographs())]
    view = random_view(photo, np.random.default_rng([9, number]), size=PHOTO_SIZE, least=0.85)
    view.save(folder / f"{number:06d}.jpg", quality=PHOTO_QUALITY)


def prepare(job: Job, folder: Path) -> None:
    """Write photographs, shards and the place of each field (shard, offset, bytes). All peers start from these."""
    from wdskit import pack

    if job.kind in LABELLED:
        (folder / "photos").mkdir()
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(write_photo, folder / "photos"), range(job.num), chunksize=64))
    rows = ({"__key__": f"{number:08d}", **fields} for number, fields in enumerate(job.samples()))
    num_shards = max(NUM_SHARDS, job.num_bytes // job.shard_bytes)
    pack(rows, folder / "tar", max_samples=-(-job.num // num_shards))
    found: dict[str, list[Piece]] = {field: [] for field in FIELDS[job.kind]}
    for number, path in enumerate(job.shards()):
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                found[member.name.partition(".")[2]].append((number, member.offset_data, member.size))
    np.savez(folder / "pieces.npz", allow_pickle=False, **{name: np.asarray(rows) for name, rows in found.items()})


def open_epochs(job: Job) -> Epochs:
    """Return the loop for the kind of samples."""
    files = [os.open(path, os.O_RDONLY) for path in job.shards()]
    with np.load(job.home / "pieces.npz") as arrays:
        pieces = {name: [(files[row[0]], *row[1:]) for row in arrays[name].tolist()] for name in arrays}
    if job.kind != "images":
        return lambda: read(job, pieces["bin"], pieces.get("json"))
    boxes = [crops.draw(*PHOTO_SIZE[::-1]) for _ in range(job.num)]
    free = deque(crops.new_batch(job.batch, job.dtype) for _ in range(job.threads + 2))
    pool = ThreadPoolExecutor(max(job.threads, 1))

    def fill(batch: torch.Tensor, numbers: list[int]) -> Batch:
        for out, number in zip(batch, numbers, strict=True):
            fd, offset, size = pieces["jpg"][number]
            crops.write(out, crops.decode_and_crop(os.pread(fd, size, offset), boxes[number]))
        return batch, numbers

    def in_this_thread() -> Iterator[Batch]:
        return map(partial(fill, free[0]), orders(job))

    def in_threads() -> Iterator[Batch]:
        """Yield batches in order, and fill free ones ahead. A batch is free when the consumer asks for the next."""
        waiting: deque[Future[Batch]] = deque()
        for numbers in [*orders(job), *[None] * len(free)]:
            if waiting and not (free and numbers):
                batch = waiting.popleft().result()
                yield batch
                free.append(batch[0])
            if numbers:
                waiting.append(pool.submit(fill, free.popleft(), numbers))

    return in_threads if job.threads else in_this_thread


def orders(job: Job) -> list[list[int]]:
    """Return an epoch's batches as lists of sample numbers, in random order."""
    order: list[list[int]] = np.random.default_rng().permutation(job.num).reshape(-1, job.batch).tolist()
    return order


def read(job: Job, values: list[Piece], documents: list[Piece] | None) -> Iterator[Any]:
    """Yield batches of bytes, and of JSON if `documents` is not None, with one read for all fields of a sample."""
    for numbers in orders(job):
        if documents is None:
            yield ([os.pread(fd, size, offset) for fd, offset, size in map(values.__getitem__, numbers)],)
            continue
        batch: tuple[list[bytes], list[Any]] = ([], [])
        for number in numbers:
            fd, start, size = values[number]
            _, json_start, json_size = documents[number]
            span = memoryview(os.pread(fd, json_start + json_size - start, start))
            batch[0].append(bytes(span[:size]))
            batch[1].append(orjson.loads(span[json_start - start :]))
        yield batch
