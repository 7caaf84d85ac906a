"""litdata: chunks written by `optimize`, StreamingDataset with its transform, StreamingDataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset, optimize

from peers.common import Epochs, Job


def prepare(job: Job, folder: Path) -> None:
    """In 64 MB chunks, the default."""
    optimize(job.values, list(range(job.num)), output_dir=str(folder / "chunks"), chunk_bytes="64MB", num_workers=1)


def open_epochs(job: Job) -> Epochs:
    """Workers that stay, as in all that follow torch."""
    dataset = StreamingDataset(str(job.home / "chunks"), shuffle=True, drop_last=False, transform=job.decode)
    stay: dict[str, Any] = {"persistent_workers": True} if job.workers else {}
    loader = StreamingDataLoader(dataset, batch_size=job.batch, num_workers=job.workers, collate_fn=job.collate, **stay)
    return lambda: loader
