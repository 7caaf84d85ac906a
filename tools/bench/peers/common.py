"""The job of a peer, the samples that all peers read, and the code that peers with torch's DataLoader share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crops
import numpy as np
import orjson
import torch

Batch = tuple[Any, Any]
"""Images and labels, or a list of bytes and, for samples with JSON, a list of documents."""

Epochs = Callable[[], Iterable[Any]]
"""The result of a peer's `open_epochs`: each call returns the batches of the next epoch."""

FIELDS = {"images": ["jpg", "cls"], "photos": ["jpg", "cls"], "small": ["bin", "json"], "bytes": ["bin"]}
LABELLED = ("images", "photos")
PHOTO_SIZE, PHOTO_QUALITY = (455, 385), 95
SHUFFLE = 1000
"""Samples in the shuffle buffer of a peer that has one."""


@dataclass(frozen=True)
class Job:
    """One run of one peer.

    Args:
        kind: Kind of the samples: "bytes" (one field), "small" (bytes and JSON), "images" (JPEG and label, decoded and
            cropped), "photos" (JPEG and label, not decoded).
        folder: Folder of the samples of this kind, with a folder for each format.
        num: Samples in an epoch.
        size: Bytes of each sample's `bin`; 0 for images.
        batch: Samples in a batch. It divides `num` and `num / workers`.
        dtype: Type of image batches, "uint8" or "float32" (normalized).
        seconds: Whole epochs are measured until at least this time has passed.
        peer: Name of the peer's module in this folder.
        workers: Worker processes.
        threads: Threads in each worker, or in the only process; 0 for no thread besides the consumer's.
        chain: "fast" for the bare chain if a peer leaves decoding to the user; "torch" for torch's DataLoader in place
            of the peer's own.
        launched: time.monotonic() when the process was started.
        shard_bytes: Approximate bytes of a file of each format.
        url: URL of the peer's format in a store; empty for the disk.
        cache: Folder of this node for downloaded parts.
        homes: Setting of wdskit's `exact`; 0 leaves it out.
    """

    kind: str
    folder: str
    num: int
    size: int
    batch: int
    dtype: str = "uint8"
    seconds: float = 1.5
    peer: str = ""
    workers: int = 0
    threads: int = 0
    chain: str = ""
    launched: float = 0.0
    shard_bytes: int = 64_000_000
    url: str = ""
    cache: str = ""
    homes: int = 0

    @property
    def home(self) -> Path:
        """The folder of the peer's own format."""
        return Path(self.folder, self.peer)

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return self.num // self.batch

    def photo(self, number: int) -> Path:
        """Return the path of a photograph."""
        return Path(self.folder, "bare", "photos", f"{number:06d}.jpg")

    def shards(self) -> list[Path]:
        """Return the paths of the tar shards, which several peers read."""
        return sorted(Path(self.folder, "bare", "tar").glob("*.tar"))

    def sample(self, number: int) -> dict[str, bytes]:
        """Return a sample's fields. `bin` begins with its number, `json` has it as `id`, `cls` is the number."""
        if self.kind in LABELLED:
            return {"jpg": self.photo(number).read_bytes(), "cls": b"%d" % number}
        noise = np.random.default_rng([self.size, number]).bytes(self.size - 4)
        fields = {"bin": number.to_bytes(4, "little") + noise}
        if self.kind == "small":
            document = {"id": number, "label": number % 1000, "caption": f"a few words about number {number}"}
            fields["json"] = json.dumps(document).encode()
        return fields

    def values(self, number: int) -> dict[str, Any]:
        """Return the fields of a sample with the label as an int, for formats that store integers."""
        return self.sample(number) | ({"cls": number} if self.kind in LABELLED else {})

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples, without the bytes that a format adds."""
        if self.kind in LABELLED:
            return sum(self.photo(number).stat().st_size for number in range(self.num))
        return self.num * self.size

    def samples(self) -> Iterator[dict[str, bytes]]:
        """Yield the fields of all samples, in the order of their numbers."""
        return map(self.sample, range(self.num))

    def decode(self, fields: dict[str, Any]) -> tuple[Any, ...]:
        """Return the fields as user code gives them to a DataLoader: decoded, cropped, the label as an int."""
        if self.kind == "images":
            crop = crops.by_simplejpeg if self.chain == "fast" else crops.by_pillow
            return crop(fields["jpg"], self.dtype), int(fields["cls"])
        if self.kind == "photos":
            return fields["jpg"], int(fields["cls"])
        return (fields["bin"], orjson.loads(fields["json"])) if self.kind == "small" else (fields["bin"],)

    def collate(self, rows: Any) -> Any:
        """Return a batch of results of `decode`: tensors of images, lists of other fields."""
        return torch.utils.data.default_collate(rows) if self.kind == "images" else columns(rows)


def columns(rows: Any) -> tuple[list[Any], ...]:
    """Return rows of fields as one list for each field."""
    return tuple(map(list, zip(*rows, strict=True)))
