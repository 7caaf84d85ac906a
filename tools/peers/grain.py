"""array_record files: through Google's grain (MapDataset, shuffle, map, batch, worker processes by mp_prefetch), or
through torch's DataLoader, which can ask for a batch's records at once.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grain.python as grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from torch.utils.data import DataLoader, Dataset

from peers.common import FIELDS, Epochs, Job, columns

FILE = "all.array_record"
HEAD = 4  # bytes in front of a record's first field that hold its size


def prepare(job: Job, folder: Path) -> None:
    """One record a group, as random access wants it. A record is its first field, between its size and its second."""
    out = ArrayRecordWriter(str(folder / FILE), "group_size:1,uncompressed")
    for fields in job.samples():
        first, second = [*fields.values(), b""][:2]
        out.write(len(first).to_bytes(HEAD, "little") + first + second)
    out.close()


def row(job: Job, record: bytes) -> tuple[Any, ...]:
    """A record to what a batch is made of."""
    end = HEAD + int.from_bytes(record[:HEAD], "little")
    values = job.decode(dict(zip(FIELDS[job.kind], (record[HEAD:end], record[end:]), strict=False)))
    return (values[0].numpy(), values[1]) if job.kind == "images" else values


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
        self.reader = self.reader or ArrayRecordReader(str(self.job.home / FILE), "readahead_buffer_size:0")
        return [row(self.job, record) for record in self.reader.read(numbers)]


def open_epochs(job: Job) -> Epochs:
    """Torch's DataLoader, or grain's endless sequence of epochs, whose workers stay."""
    if job.chain == "torch":
        loader: DataLoader[Any] = DataLoader(Rows(job), job.batch, shuffle=True, collate_fn=columns)
        return lambda: loader
    source = grain.ArrayRecordDataSource(str(job.home / FILE))
    dataset = grain.MapDataset.source(source).shuffle(seed=7).repeat().map(partial(row, job))
    dataset = dataset.batch(job.batch, batch_fn=stacked if job.kind == "images" else columns)
    if job.workers:
        parts = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        parts = parts.mp_prefetch(grain.MultiprocessingOptions(num_workers=job.workers, per_worker_buffer_size=2))
    else:
        parts = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    endless = iter(parts)
    return lambda: islice(endless, job.steps)
