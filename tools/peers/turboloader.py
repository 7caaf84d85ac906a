"""turboloader: its fused random crop over one tar of JPEGs; float32 in new memory for each batch."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import turboloader
from crops import TARGET

from peers.common import Batch, Epochs, Job


def prepare(job: Job, folder: Path) -> None:
    """Write the JPEGs in the order of their numbers into one tar: turboloader reads only one."""
    with tarfile.open(folder / "photos.tar", "w") as tar:
        for number in range(job.num):
            data = job.photo(number).read_bytes()
            member = tarfile.TarInfo(f"{number:06d}.jpg")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def open_epochs(job: Job) -> Epochs:
    """Use `train_aug`, as in its documentation: it decodes only the crop. Raises ValueError for uint8."""
    if job.dtype != "float32":
        raise ValueError("it makes float32 of JPEGs, and nothing else")
    epochs = count()
    loader = turboloader.DataLoader(
        str(job.home / "photos.tar"),
        batch_size=job.batch,
        num_workers=job.threads,
        shuffle=True,
        image_size=TARGET,
        output_format="pytorch",
        train_aug=True,
        hflip_prob=0.0,
        antialias=True,
        transform=turboloader.ImageNetNormalize(),
    )

    def run() -> Iterator[Batch]:
        loader.set_epoch(next(epochs))
        for images, about in loader:
            yield torch.from_numpy(images), about["indices"]

    return run
