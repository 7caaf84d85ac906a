"""wdskit through its public face."""

from __future__ import annotations

import torch  # noqa: F401  # its import is no part of the first batch, here as with the others

import wdskit.loader.planned  # noqa: F401  # 0.3 s with pydantic: wdskit imports it when a loader is built
from peers.harness import Epoch
from peers.job import Job
from peers.recipes import batches
from wdskit import Pipeline

PACKAGES = ("wdskit", "simplejpeg", "torch")


def pipeline(job: Job) -> Pipeline:
    """`exact`, the default for training."""
    source = Pipeline().exact(str(job.path / "tar" / "s-*.tar"), seed=7)
    if job.kind == "bytes":
        return source.to_tuple("bin").batched(job.batch)
    if job.kind == "small":
        return source.decode(only="json").to_tuple("bin", "json").batched(job.batch)
    images = source.decode("rgb8").random_resized_crop(224)
    if job.dtype == "float32":
        images = images.normalize("imagenet")
    return images.to_tuple("jpg", "cls").batched(job.batch)


def open_(job: Job) -> Epoch:
    """A loader that goes on to the next epoch by itself."""
    loader = pipeline(job).loader(workers=job.workers, threads=max(job.threads, 1))
    return lambda: batches(loader)
