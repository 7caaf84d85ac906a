"""webdataset as its own examples use it: WebDataset, shuffle, decode, batched in the workers, WebLoader."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import webdataset as wds

from peers.data import shards
from peers.harness import Epoch
from peers.job import Job
from peers.recipes import batches, crop_pillow, fast

PACKAGES = ("webdataset", "torch", "pillow")

SHUFFLE = 1000


def pipeline(job: Job) -> Any:
    """The samples in batches."""
    urls = [str(path) for path in shards(job)]
    source = wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=wds.split_by_node, empty_check=False)
    source = source.shuffle(SHUFFLE)
    if job.kind == "bytes":
        return source.to_tuple("bin").batched(job.batch)
    if job.kind == "small":
        return source.decode(only=["json"]).to_tuple("bin", "json").batched(job.batch)
    if job.chain == "fast":
        images = source.decode(only=["cls"]).to_tuple("jpg", "cls").map_tuple(partial(fast, dtype=job.dtype), same)
    else:
        images = source.decode("pil").to_tuple("jpg", "cls").map_tuple(partial(crop_pillow, dtype=job.dtype), same)
    return images.batched(job.batch)


def same(value: Any) -> Any:
    """For fields that stay."""
    return value


def open_(job: Job) -> Epoch:
    """Without workers the pipeline itself."""
    source = pipeline(job)
    loader = (
        wds.WebLoader(source, batch_size=None, num_workers=job.workers, persistent_workers=True)
        if job.workers
        else source
    )
    torch.set_num_threads(1)
    return lambda: batches(loader)
