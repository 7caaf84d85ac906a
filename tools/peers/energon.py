"""Megatron energon: the tar shards, prepared by its own command, a crude data set, and its task encoder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)

from peers.data import once, shards
from peers.harness import Epoch
from peers.job import Job
from peers.recipes import batches, collate, decoded

PACKAGES = ("megatron-energon", "torch", "pillow")

SHUFFLE = 1000
SEQUENCE = 100


def prepare(job: Job) -> None:
    """The shards once more, as links, with energon's index and metadata."""

    def write(folder: Path) -> None:
        for path in shards(job):
            os.link(path, folder / path.name)
        command = [shutil.which("energon", path=str(Path(sys.executable).parent)) or "energon", "prepare"]
        words = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
        done = subprocess.run([*command, *words, str(folder)], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)

    once(job.path / "energon", write)


@edataclass
class Row(Sample):  # type: ignore[misc]  # untyped
    """A sample whose fields are still bytes."""

    fields: dict[str, Any]


@stateless  # type: ignore[untyped-decorator]
def cook(sample: dict[str, Any]) -> Row:
    """What the crude data set gives, as a sample."""
    return Row(**basic_sample_keys(sample), fields=sample)


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]  # untyped
    """Decodes, crops and collates in the workers."""

    decoder = None
    cookers = [Cooker(cook)]  # noqa: RUF012  # as its documentation has it

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: Row) -> Any:
        """One sample."""
        fields = sample.fields
        if self.job.kind == "images":
            fields = {"jpg": fields["jpg"], "cls": int(fields["cls"])}
        return decoded(fields, self.job)

    def batch(self, samples: list[Any]) -> Any:
        """A batch."""
        return collate(self.job)(samples)


def open_(job: Job) -> Epoch:
    """An epoch that ends; its loader keeps the workers."""
    dataset = get_train_dataset(
        job.path / "energon",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
        batch_size=job.batch,
        shuffle_buffer_size=SHUFFLE,
        max_samples_per_sequence=SEQUENCE,
        task_encoder=Encoder(job),
        repeat=False,
    )
    loader = get_loader(dataset)
    return lambda: batches(loader)
