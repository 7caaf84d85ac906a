"""array_record files: through Google's grain (MapDataset, shuffle, map, batch, worker processes by mp_prefetch), or
through torch's DataLoader, which can ask for a batch's records at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grain.python as grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from torch.utils.data import DataLoader, Dataset

from peers.data import once, samples
from peers.harness import Batch, Epoch
from peers.job import Job
from peers.recipes import batches, columns, decoded

PACKAGES = ("grain", "array-record", "numpy", "pillow")

WRITER = "group_size:1,uncompressed"  # random access; the samples are not to be compressed
READER = "readahead_buffer_size:0"
HEAD = 4  # bytes in front of a record's first field that hold its size


def prepare(job: Job) -> None:
    """One record a group, as random access wants it. A record is its first field, between its size and its second."""

    def write(folder: Path) -> None:
        out = ArrayRecordWriter(str(folder / "all.array_record"), WRITER)
        for fields in samples(job):
            first, second = [*fields.values(), b""][:2]
            out.write(len(first).to_bytes(HEAD, "little") + first + second)
        out.close()

    once(job.path / "grain", write)


def row(job: Job, record: bytes) -> tuple[Any, ...]:
    """A record to what a batch is made of."""
    end = HEAD + int.from_bytes(record[:HEAD], "little")
    if job.kind == "images":
        image, label = decoded({"jpg": record[HEAD:end], "cls": int(record[end:])}, job)
        return image.numpy(), label
    return decoded({"bin": record[HEAD:end], "json": record[end:]}, job)


def stacked(rows: Any) -> tuple[Any, ...]:
    """Images into one array."""
    images, labels = columns(rows)
    return np.stack(images), np.asarray(labels)


class Rows(Dataset[Any]):
    """For torch's DataLoader: a batch's records in one read."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.reader: Any = None

    def __len__(self) -> int:
        return self.job.num

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        self.reader = self.reader or ArrayRecordReader(str(self.job.path / "grain" / "all.array_record"), READER)
        return [row(self.job, record) for record in self.reader.read(numbers)]


def open_(job: Job) -> Epoch:
    """Grain's own loader, or torch's."""
    if job.chain != "torch":
        return open_grain(job)
    loader = DataLoader(
        Rows(job),
        job.batch,
        shuffle=True,
        num_workers=job.workers,
        collate_fn=columns,
        persistent_workers=job.workers > 0,
    )
    return lambda: batches(loader)


def open_grain(job: Job) -> Epoch:
    """One endless sequence of epochs, so that workers stay."""
    source = grain.ArrayRecordDataSource(str(job.path / "grain" / "all.array_record"))
    dataset = grain.MapDataset.source(source).shuffle(seed=7).repeat().map(partial(row, job))
    dataset = dataset.batch(job.batch, batch_fn=stacked if job.kind == "images" else columns)
    if job.workers:
        parts = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        parts = parts.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers, per_worker_buffer_size=2))
    else:
        parts = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    endless: list[Any] = []

    def epoch() -> Iterator[Batch]:
        if not endless:
            endless.append(iter(parts))
        yield from batches(islice(endless[0], job.steps))

    return epoch
