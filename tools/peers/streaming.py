"""MosaicML streaming: MDS shards, StreamingDataset, torch's DataLoader."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from peers.data import once, samples
from peers.harness import Epoch
from peers.job import Job
from peers.recipes import batches, collate, decoded

# Its package imports torchvision for one class that stands in nobody's way here; see install.KEPT_OUT.
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

PACKAGES = ("mosaicml-streaming", "torch", "pillow")

COLUMNS = {
    "images": {"jpg": "bytes", "cls": "int"},
    "small": {"bin": "bytes", "json": "json"},
    "bytes": {"bin": "bytes"},
}


def prepare(job: Job) -> None:
    """In 64 MB shards, the default, without hashes."""

    def write(folder: Path) -> None:
        import orjson

        with MDSWriter(out=str(folder / "mds"), columns=COLUMNS[job.kind]) as out:
            for fields in samples(job):
                row: dict[str, Any] = dict(fields)
                if job.kind == "images":
                    row["cls"] = int(fields["cls"])
                if job.kind == "small":
                    row["json"] = orjson.loads(fields["json"])
                out.write(row)

    once(job.path / "streaming", write)


class Decoded(StreamingDataset):  # type: ignore[misc]  # untyped
    """With the crop, as its examples do it."""

    def __init__(self, job: Job) -> None:
        super().__init__(local=str(job.path / "streaming" / "mds"), shuffle=True, batch_size=job.batch)
        self.job = job

    def __getitem__(self, at: int) -> Any:
        row = super().__getitem__(at)
        return (row["bin"], row["json"]) if self.job.kind == "small" else decoded(row, self.job)


def open_(job: Job) -> Epoch:
    """Workers that stay."""
    clean_stale_shared_memory()
    loader: DataLoader[Any] = DataLoader(
        Decoded(job),
        batch_size=job.batch,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
        collate_fn=collate(job),
    )
    return lambda: batches(loader)
