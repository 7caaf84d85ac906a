"""litdata: chunks written by `optimize`, StreamingDataset with its transform, StreamingDataLoader."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset, optimize

from peers.data import once, sample
from peers.harness import Epoch
from peers.job import Job
from peers.recipes import batches, collate, decoded

PACKAGES = ("litdata", "torch", "pillow")


def prepare(job: Job) -> None:
    """In 64 MB chunks, the default."""

    def write(folder: Path) -> None:
        optimize(
            partial(row, job),
            list(range(job.num)),
            output_dir=str(folder / "chunks"),
            chunk_bytes="64MB",
            num_workers=1,
        )

    once(job.path / "litdata", write)


def row(job: Job, number: int) -> dict[str, Any]:
    """The fields as they are, the label as a number."""
    fields: dict[str, Any] = dict(sample(job, number))
    return fields | {"cls": number} if job.kind == "images" else fields


def open_(job: Job) -> Epoch:
    """Workers that stay, as in all that follow torch."""
    dataset = StreamingDataset(
        str(job.path / "litdata" / "chunks"), shuffle=True, drop_last=False, transform=partial(decoded, job=job)
    )
    more = {"persistent_workers": True} if job.workers else {}
    loader = StreamingDataLoader(
        dataset, batch_size=job.batch, num_workers=job.workers, collate_fn=collate(job), **more
    )
    return lambda: batches(loader)
