"""array_record files, read by Google's grain (MapDataset, shuffle, map, batch, worker processes by mp_prefetch) or by
torch's DataLoader, which can read all records of a batch in one call.
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
HEAD = 4  # bytes at the start of a record: the size of its first field


def prepare(job: Job, folder: Path) -> None:
    """Write one record per group, best for random access. A record is the first field's size, both fields' bytes."""
    out = ArrayRecordWriter(str(folder / FILE), "group_size:1,uncompressed")
    for fields in job.samples():
        first, second = [*fields.values(), b""][:2]
        out.write(len(first).to_bytes(HEAD, "little") + first + second)
    out.close()


def row(job: Job, record: bytes) -> tuple[Any, ...]:
    """Return the decoded fields of a record."""
    end = HEAD + int.from_bytes(record[:HEAD], "little")
    values = job.decode(dict(zip(FIELDS[job.kind], (record[HEAD:end], record[end:]), strict=False)))
    return (values[0].numpy(), values[1]) if job.kind == "images" else values


def stacked(rows: Any) -> tuple[Any, ...]:
    """Return one array of images and one of labels."""
    images, labels = columns(rows)
    return np.stack(images), np.asarray(labels)


class Rows(Dataset[Any]):
    """A dataset for torch's DataLoader, which reads a batch's records in one call."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.reader: Any = None

    def __len__(self) -> int:
        return self.job.num

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        self.reader = self.reader or ArrayRecordReader(str(self.job.home / FILE), "readahead_buffer_size:0")
        return [row(self.job, record) for record in self.reader.read(numbers)]


def open_epochs(job: Job) -> Epochs:
    """Return torch's DataLoader, or epochs of grain's endless sequence, which keeps its workers."""
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
