"""wdskit through its public API."""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  # the time of its import does not count, as for the other peers

import wdskit.loader.loader  # noqa: F401  # 0.3 s with pydantic: wdskit imports it when a loader is built
from peers.common import FIELDS, Epochs, Job
from wdskit import Pipeline


def open_epochs(job: Job) -> Epochs:
    """Return a loader of `exact`, the default for training; each iteration over it is the next epoch."""
    settings: dict[str, Any] = {"homes": job.homes} if job.homes else {}
    pipe = Pipeline().exact(f"{job.url or job.shards()[0].parent}/tar-*.tar", seed=7, **settings)
    if job.kind == "images":
        pipe = pipe.decode("rgb8").random_resized_crop(224)
    elif job.kind == "small":
        pipe = pipe.decode(only="json")
    elif job.kind == "photos":
        pipe = pipe.decode(only="cls")
    if job.dtype == "float32":
        pipe = pipe.normalize("imagenet")
    pipe = pipe.to_tuple(*FIELDS[job.kind]).batched(job.batch)
    kept = {"dir": job.cache, "size": "1TB"} if job.cache else None
    loader = pipe.loader(workers=job.workers, threads=max(job.threads, 1), cache=kept)
    return lambda: loader
