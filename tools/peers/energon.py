"""Megatron energon: the tar shards, prepared by its own command, a crude data set, and its task encoder."""

from __future__ import annotations

import os
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

from peers.common import SHUFFLE, Epochs, Job


def prepare(job: Job, folder: Path) -> None:
    """Link the shards into `folder`, with energon's index and metadata."""
    for path in job.shards():
        os.link(path, folder / path.name)
    words = ["prepare", "--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
    subprocess.run([Path(sys.executable).with_name("energon"), *words, str(folder)], check=True)


@edataclass
class Row(Sample):  # type: ignore[misc]  # untyped
    """A sample whose fields are still bytes."""

    fields: dict[str, Any]


@stateless  # type: ignore[untyped-decorator]
def cook(sample: dict[str, Any]) -> Row:
    """Return a sample of the crude data set as a `Row`."""
    return Row(**basic_sample_keys(sample), fields=sample)


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]  # untyped
    """Decodes, crops and collates in the workers."""

    decoder = None
    cookers = [Cooker(cook)]  # noqa: RUF012  # as in energon's documentation

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: Row) -> Any:
        """Return the decoded fields of a sample."""
        return self.job.decode(sample.fields)

    def batch(self, samples: list[Any]) -> Any:
        """Return a batch of decoded samples."""
        return self.job.collate(samples)


def open_epochs(job: Job) -> Epochs:
    """Return a loader whose epochs end, and which keeps its workers."""
    dataset = get_train_dataset(
        job.home,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
        batch_size=job.batch,
        shuffle_buffer_size=SHUFFLE,
        max_samples_per_sequence=100,
        task_encoder=Encoder(job),
        repeat=False,
    )
    loader = get_loader(dataset)
    return lambda: loader
