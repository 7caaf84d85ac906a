"""MosaicML streaming: MDS shards, StreamingDataset, torch's DataLoader."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
from torch.utils.data import DataLoader

from peers.common import FIELDS, Epochs, Job

# streaming imports torchvision, which the environments lack, for a class that is not used here.
for name, attributes in {
    "torchvision": (),
    "torchvision.datasets": ("VisionDataset",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": ("to_tensor",),
}.items():
    module: Any = sys.modules.setdefault(name, ModuleType(name))
    module.__spec__ = ModuleSpec(name, None)
    for attribute in attributes:
        setattr(module, attribute, type(attribute, (), {}))

from streaming import MDSWriter, StreamingDataset  # noqa: E402  # after torchvision's stand-in
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

TYPES = {"jpg": "bytes", "cls": "int", "bin": "bytes", "json": "json"}


def prepare(job: Job, folder: Path) -> None:
    """Write shards of `shard_bytes` (by default 64 MB, as streaming does), without hashes."""
    columns = {field: TYPES[field] for field in FIELDS[job.kind]}
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=job.shard_bytes) as out:
        for number in range(job.num):
            row = job.values(number)
            out.write(row | ({"json": orjson.loads(row["json"])} if job.kind == "small" else {}))


class Decoded(StreamingDataset):  # type: ignore[misc]  # untyped
    """A StreamingDataset that decodes and crops, as in its examples."""

    def __init__(self, job: Job) -> None:
        local = job.cache or str(job.home / "mds")
        super().__init__(remote=job.url or None, local=local, shuffle=True, batch_size=job.batch)
        self.job = job

    def __getitem__(self, at: int) -> Any:
        row = super().__getitem__(at)
        return (row["bin"], row["json"]) if self.job.kind == "small" else self.job.decode(row)


def open_epochs(job: Job) -> Epochs:
    """Return a DataLoader that keeps its workers between epochs."""
    clean_stale_shared_memory()
    loader: DataLoader[Any] = DataLoader(
        Decoded(job), job.batch, num_workers=job.workers, persistent_workers=job.workers > 0, collate_fn=job.collate
    )
    return lambda: loader
