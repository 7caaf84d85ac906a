"""webdataset as in its own examples: WebDataset, shuffle, decode, batched in the workers, WebLoader."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import crops
import torch
import webdataset as wds

from peers.common import FIELDS, LABELLED, SHUFFLE, Epochs, Job


def same(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def open_epochs(job: Job) -> Epochs:
    """Return a WebLoader; without workers, the pipeline itself."""
    urls = [f"{job.url}/{path.name}" if job.url else str(path) for path in job.shards()]
    kept = {"cache_dir": job.cache} if job.cache else {}
    for folder in kept.values():
        Path(folder).mkdir(exist_ok=True)
    pipe = wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=wds.split_by_node, empty_check=False, **kept)
    pipe = pipe.shuffle(SHUFFLE)
    if job.kind == "small":
        pipe = pipe.decode(only=["json"])
    elif job.kind in LABELLED:
        pipe = pipe.decode(only=["cls"]) if job.chain == "fast" or job.kind == "photos" else pipe.decode("pil")
    pipe = pipe.to_tuple(*FIELDS[job.kind])
    if job.kind == "images":
        crop = crops.by_simplejpeg if job.chain == "fast" else crops.crop_pillow
        pipe = pipe.map_tuple(partial(crop, dtype=job.dtype), same)
    pipe = pipe.batched(job.batch)
    torch.set_num_threads(1)
    if not job.workers:
        return lambda: pipe
    loader = wds.WebLoader(pipe, batch_size=None, num_workers=job.workers, persistent_workers=True)
    return lambda: loader
