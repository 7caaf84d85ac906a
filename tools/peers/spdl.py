"""SPDL: a Pipeline of threads, as in its ImageNet example: image files, FFmpeg's decode, crop and scale. Bytes are read
from the tar shards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import spdl.io
import torch
from crops import SCALE, SHIFT, TARGET, draw
from spdl.pipeline import PipelineBuilder

from peers.common import Batch, Epochs, Job


def endless(items: list[Any]) -> Iterator[Any]:
    """Yield the items of endless epochs, each in a new random order."""
    while True:
        random.shuffle(items)
        yield from items


def decode(job: Job, numbers: list[int]) -> Batch:
    """Return a batch of photographs, decoded and cropped."""
    frames = []
    for number in numbers:
        packets = spdl.io.demux_image(str(job.photo(number)))
        top, left, height, width = draw(packets.height, packets.width)
        chain = f"crop={width}:{height}:{left}:{top},scale={TARGET}:{TARGET}:flags=bilinear,format=pix_fmts=rgb24"
        frames.append(spdl.io.decode_packets(packets, filter_desc=chain))
    images = torch.from_numpy(spdl.io.to_numpy(spdl.io.convert_frames(frames))).permute(0, 3, 1, 2)
    return images if job.dtype == "uint8" else images.to(torch.float32).mul_(SCALE).add_(SHIFT), numbers


def read(job: Job, path: Path) -> list[Any]:
    """Return the batches of a shard."""
    samples: dict[str, dict[str, Any]] = {}
    for name, data in spdl.io.iter_tarfile(path.read_bytes()):
        key, _, field = name.partition(".")
        samples.setdefault(key, {})[field] = data
    rows = list(map(job.decode, samples.values()))
    random.shuffle(rows)
    return [job.collate(rows[start : start + job.batch]) for start in range(0, len(rows), job.batch)]


def open_epochs(job: Job) -> Epochs:
    """Return epochs of one endless pipeline."""
    threads = max(job.threads, 1)
    builder = PipelineBuilder()
    if job.kind == "images":
        spdl.io.demux_image(str(job.photo(0)))  # raises if FFmpeg is missing; in a thread it would hang
        builder = builder.add_source(endless(list(range(job.num)))).aggregate(job.batch)
        builder = builder.pipe(partial(decode, job), concurrency=threads)
    else:
        builder = builder.add_source(endless(job.shards()))
        builder = builder.pipe(partial(read, job), concurrency=threads).disaggregate()
    pipeline = builder.add_sink(2).build(num_threads=threads)
    pipeline.start()
    batches = iter(pipeline)
    return lambda: islice(batches, job.steps)
