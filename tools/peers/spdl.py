"""SPDL: a Pipeline of threads, as in its ImageNet example: files, FFmpeg's decode, crop and scale. Bytes come from the
tar shards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import spdl.io
import torch
from bare import MEAN, STD, TARGET
from spdl.pipeline import PipelineBuilder

from peers.data import photo_path, shards
from peers.harness import Batch, Epoch
from peers.job import Job
from peers.recipes import draw

PACKAGES = ("spdl", "torch")

SINK = 2
_SCALE = torch.tensor([1 / (255 * std) for std in STD]).view(3, 1, 1)
_SHIFT = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)]).view(3, 1, 1)


def endless(items: list[Any]) -> Iterator[Any]:
    """Epoch after epoch, each in another order."""
    while True:
        random.shuffle(items)
        yield from items


def decode(job: Job, numbers: list[int]) -> Batch:
    """A batch of photographs."""
    frames = []
    for number in numbers:
        packets = spdl.io.demux_image(str(photo_path(job, number)))
        top, left, height, width = draw(packets.height, packets.width)
        chain = f"crop={width}:{height}:{left}:{top},scale={TARGET}:{TARGET}:flags=bilinear,format=pix_fmts=rgb24"
        frames.append(spdl.io.decode_packets(packets, filter_desc=chain))
    images = torch.from_numpy(spdl.io.to_numpy(spdl.io.convert_frames(frames))).permute(0, 3, 1, 2)
    if job.dtype == "float32":
        images = images.to(torch.float32).mul_(_SCALE).add_(_SHIFT)
    return images, numbers


def read(job: Job, path: Path) -> list[Batch]:
    """The batches of a shard."""
    names: dict[str, dict[str, Any]] = {}
    for name, data in spdl.io.iter_tarfile(path.read_bytes()):
        key, _, field = name.partition(".")
        names.setdefault(key, {})[field] = data
    rows = list(names.values())
    random.shuffle(rows)
    parts = [rows[start : start + job.batch] for start in range(0, len(rows), job.batch)]
    if job.kind == "bytes":
        return [([row["bin"] for row in part], None) for part in parts]
    return [([row["bin"] for row in part], [orjson.loads(row["json"]) for row in part]) for part in parts]


def open_(job: Job) -> Epoch:
    """One pipeline without an end."""
    threads = max(job.threads, 1)
    if job.kind == "images":
        spdl.io.demux_image(str(photo_path(job, 0)))  # where FFmpeg is missing, say so: in a thread it would only wait
        builder = PipelineBuilder().add_source(endless(list(range(job.num)))).aggregate(job.batch)
        builder = builder.pipe(partial(decode, job), concurrency=threads)
    else:
        builder = PipelineBuilder().add_source(endless(shards(job)))
        builder = builder.pipe(partial(read, job), concurrency=threads).disaggregate()
    pipeline = builder.add_sink(SINK).build(num_threads=threads)
    batches: list[Any] = []

    def epoch() -> Iterator[Batch]:
        if not batches:
            pipeline.start()
            batches.append(iter(pipeline))
        yield from islice(batches[0], job.steps)

    return epoch
