"""NVIDIA DALI on the CPU: its webdataset reader over the tar shards, fused decode and crop, its iterator for torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from crops import MEAN, STD, TARGET
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from peers.common import FIELDS, SHUFFLE, Batch, Epochs, Job


def prepare(job: Job, folder: Path) -> None:
    """Write DALI's index of each shard, as its wds2idx does."""
    from wds2idx import IndexCreator

    for path in job.shards():
        with IndexCreator(str(path), str(folder / f"{path.stem}.idx")) as creator:
            creator.create_index()


@pipeline_def  # type: ignore[untyped-decorator]
def pipeline(job: Job) -> Any:
    """Return the outputs of DALI's graph."""
    found = fn.readers.webdataset(
        paths=[str(path) for path in job.shards()],
        index_paths=[str(job.home / f"{path.stem}.idx") for path in job.shards()],
        ext=FIELDS[job.kind],
        random_shuffle=True,
        initial_fill=SHUFFLE,
        name="reader",
        dont_use_mmap=False,
    )
    if job.kind == "bytes":
        return found
    values, texts = found[0], fn.pad(found[1], fill_value=ord(" "))
    if job.kind == "small":
        return values, texts
    images = fn.decoders.image_random_crop(
        values, device="cpu", random_aspect_ratio=[3 / 4, 4 / 3], random_area=[0.08, 1.0]
    )
    images = fn.resize(images, resize_x=TARGET, resize_y=TARGET, interp_type=types.INTERP_LINEAR, antialias=True)
    if job.dtype == "float32":
        mean, std = ([255 * value for value in values] for values in (MEAN, STD))
        images = fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std)
    return images, texts


def open_epochs(job: Job) -> Epochs:
    """Return DALI's iterator, with DALI's own threads and without a GPU."""
    graph = pipeline(job, batch_size=job.batch, num_threads=max(job.threads, 1), device_id=None, seed=7)
    loader = DALIGenericIterator(
        [graph], FIELDS[job.kind], reader_name="reader", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )

    def epoch() -> Iterator[Batch]:
        for (batch,) in loader:
            first, *rest = (batch[name] for name in FIELDS[job.kind])
            texts = [orjson.loads(bytes(row)) for row in rest[0].numpy()] if rest else []  # a label is JSON too
            if job.kind == "images":
                yield first.permute(0, 3, 1, 2) if job.dtype == "uint8" else first, texts
            else:
                yield list(first.numpy()), texts

    return epoch
