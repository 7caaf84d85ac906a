"""The bare loop: pread at known offsets in a random order, and of images the bare chain with known boxes."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import bare
import numpy as np
import orjson
import torch

from peers.data import make_photos, make_shards, shards
from peers.harness import Batch, Epoch
from peers.job import Job
from peers.recipes import draw

PACKAGES = ("simplejpeg", "torch", "numpy", "orjson")

Piece = tuple[int, int, int]  # file descriptor, offset, bytes


def prepare(job: Job) -> None:
    """Photographs and shards, which others start from."""
    if job.kind == "images":
        make_photos(job)
    make_shards(job)
    find_pieces(job)


def find_pieces(job: Job) -> dict[str, np.ndarray[Any, Any]]:
    """Where each field of each sample is: rows of shard, offset, bytes. Walked once, by Python's own tar reader."""
    kept = job.path / "tar" / "pieces.npz"
    if not kept.exists():
        found: dict[str, list[tuple[int, int, int]]] = {}
        for number, path in enumerate(shards(job)):
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    place = (number, member.offset_data, member.size)
                    found.setdefault(member.name.partition(".")[2], []).append(place)
        np.savez(kept, allow_pickle=False, **{name: np.asarray(rows) for name, rows in found.items()})
    with np.load(kept) as arrays:
        return dict(arrays)


def open_(job: Job) -> Epoch:
    """The loop for the kind."""
    files = [os.open(path, os.O_RDONLY) for path in shards(job)]
    places = {
        name: [(files[shard], offset, size) for shard, offset, size in rows.tolist()]
        for name, rows in find_pieces(job).items()
    }
    if job.kind == "images":
        images = Images(job, places["jpg"])
        return images.threaded if job.threads else images.plain
    return lambda: read(job, places)


def orders(job: Job) -> list[list[int]]:
    """An epoch's batches of sample numbers."""
    order: list[list[int]] = np.random.default_rng().permutation(job.num).reshape(-1, job.batch).tolist()
    return order


def read(job: Job, places: dict[str, list[Piece]]) -> Iterator[Batch]:
    """Bytes, and JSON where there is any: one read a sample, from the first field's data to the last one's."""
    values, documents = places["bin"], places.get("json")
    for numbers in orders(job):
        if documents is None:
            yield [os.pread(fd, size, offset) for fd, offset, size in map(values.__getitem__, numbers)], None
            continue
        batch: tuple[list[bytes], list[Any]] = ([], [])
        for number in numbers:
            fd, start, size = values[number]
            _, json_start, json_size = documents[number]
            span = memoryview(os.pread(fd, json_start + json_size - start, start))
            batch[0].append(bytes(span[:size]))
            batch[1].append(orjson.loads(span[json_start - start :]))
        yield batch


class Images:
    """Decoded into batches that are used again, a batch a thread."""

    def __init__(self, job: Job, places: list[Piece]) -> None:
        self.job, self.places = job, places
        height, width = 385, 455
        self.boxes = [draw(height, width) for _ in range(job.num)]
        dtype = getattr(torch, job.dtype)
        self.free = [bare.new_batch(job.batch, dtype) for _ in range(job.threads + 2)]
        self.pool = ThreadPoolExecutor(max(job.threads, 1))

    def fill(self, batch: torch.Tensor, numbers: list[int]) -> Batch:
        """One batch."""
        for out, number in zip(batch, numbers, strict=True):
            fd, offset, size = self.places[number]
            bare.write(out, bare.decode_and_crop(os.pread(fd, size, offset), self.boxes[number]))
        return batch, numbers

    def plain(self) -> Iterator[Batch]:
        """In the consumer's thread."""
        for numbers in orders(self.job):
            yield self.fill(self.free[0], numbers)

    def threaded(self) -> Iterator[Batch]:
        """In order, as many ahead as there are batches to fill."""
        waiting: list[Future[Batch]] = []
        for numbers in orders(self.job):
            if not self.free:
                yield from self.take(waiting)
            waiting.append(self.pool.submit(self.fill, self.free.pop(), numbers))
        while waiting:
            yield from self.take(waiting)

    def take(self, waiting: list[Future[Batch]]) -> Iterator[Batch]:
        """The oldest batch, whose memory is free once the consumer comes back."""
        batch = waiting.pop(0).result()
        yield batch
        self.free.append(batch[0])
