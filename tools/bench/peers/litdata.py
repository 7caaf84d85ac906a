"""litdata: chunks written by `optimize`, StreamingDataset with its transform, StreamingDataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset, optimize
from litdata.streaming import downloader

from peers.common import Epochs, Job

# Without this, litdata reads chunks by https even if the endpoint is http.
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001


def prepare(job: Job, folder: Path) -> None:
    """Write chunks of `shard_bytes` (by default 64 MB, as litdata does)."""
    chunks = str(folder / "chunks")
    optimize(job.values, list(range(job.num)), output_dir=chunks, chunk_bytes=job.shard_bytes, num_workers=1)


def open_epochs(job: Job) -> Epochs:
    """Return a StreamingDataLoader that keeps its workers between epochs, as torch's can."""
    chunks = job.url or str(job.home / "chunks")
    dataset = StreamingDataset(chunks, cache_dir=job.cache or None, shuffle=True, drop_last=False, transform=job.decode)
    stay: dict[str, Any] = {"persistent_workers": True} if job.workers else {}
    loader = StreamingDataLoader(dataset, batch_size=job.batch, num_workers=job.workers, collate_fn=job.collate, **stay)
    return lambda: loader
