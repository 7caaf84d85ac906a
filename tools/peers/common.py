"""What the driver asks of a peer, the samples that all of them read, and what those that follow torch share."""

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
"""Images and labels, or a list of bytes and a list of JSON documents (left out where there are none)."""

Epochs = Callable[[], Iterable[Any]]
"""What `open_epochs` of a peer returns: each call gives the batches of one more epoch."""

FIELDS = {"images": ["jpg", "cls"], "photos": ["jpg", "cls"], "small": ["bin", "json"], "bytes": ["bin"]}
LABELLED = ("images", "photos")
PHOTO_SIZE, PHOTO_QUALITY = (455, 385), 95
SHUFFLE = 1000
"""Samples of a shuffle buffer, where a peer has one."""


@dataclass(frozen=True)
class Job:
    """One run of one peer.

    Args:
        kind: What the samples are: "bytes" (one field), "small" (bytes and JSON), "images" (JPEG and label, decoded and
            cropped), "photos" (the same, as they are).
        folder: Where the samples of this kind are, each format in a folder of its own.
        num: Samples of an epoch.
        size: Bytes of the samples' `bin`; 0 for images.
        batch: Samples of a batch, which divides `num` and `num / workers`.
        dtype: Of image batches, "uint8" or "float32" (normalized).
        seconds: Whole epochs are measured until it took so long.
        peer: Its module in this folder.
        workers: Worker processes.
        threads: Threads in each, or in the one process; 0 for none beside the consumer's.
        chain: "fast" for the bare chain where a peer leaves decoding to the user; "torch" for torch's DataLoader where
            that is not its own.
        launched: time.monotonic() when the process was started.
        shard_bytes: About so many in a file of each format.
        url: The folder of the peer's format in a store; empty for the disk.
        cache: The folder of this node where parts of it are kept.
        homes: Of wdskit's `exact`, where it is not 0.
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
        """Batches of an epoch."""
        return self.num // self.batch

    def photo(self, number: int) -> Path:
        """The file of a photograph."""
        return Path(self.folder, "bare", "photos", f"{number:06d}.jpg")

    def shards(self) -> list[Path]:
        """The tar shards, which several peers read."""
        return sorted(Path(self.folder, "bare", "tar").glob("*.tar"))

    def sample(self, number: int) -> dict[str, bytes]:
        """The fields of a sample: `bin` begins with its number, `json` holds it as `id`, and `cls` is it."""
        if self.kind in LABELLED:
            return {"jpg": self.photo(number).read_bytes(), "cls": b"%d" % number}
        noise = np.random.default_rng([self.size, number]).bytes(self.size - 4)
        fields = {"bin": number.to_bytes(4, "little") + noise}
        if self.kind == "small":
            document = {"id": number, "label": number % 1000, "caption": f"a few words about number {number}"}
            fields["json"] = json.dumps(document).encode()
        return fields

    def values(self, number: int) -> dict[str, Any]:
        """The same with the label as a number, for formats that store one."""
        return self.sample(number) | ({"cls": number} if self.kind in LABELLED else {})

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples, without those that a format adds."""
        if self.kind in LABELLED:
            return sum(self.photo(number).stat().st_size for number in range(self.num))
        return self.num * self.size

    def samples(self) -> Iterator[dict[str, bytes]]:
        """All of them, in the order of their numbers."""
        return map(self.sample, range(self.num))

    def decode(self, fields: dict[str, Any]) -> tuple[Any, ...]:
        """The fields of a sample as user code gives them to a DataLoader: decoded, cropped, the label as a number."""
        if self.kind == "images":
            crop = crops.by_simplejpeg if self.chain == "fast" else crops.by_pillow
            return crop(fields["jpg"], self.dtype), int(fields["cls"])
        if self.kind == "photos":
            return fields["jpg"], int(fields["cls"])
        return (fields["bin"], orjson.loads(fields["json"])) if self.kind == "small" else (fields["bin"],)

    def collate(self, rows: Any) -> Any:
        """A batch of what `decode` gave: tensors of images, lists of all else."""
        return torch.utils.data.default_collate(rows) if self.kind == "images" else columns(rows)


def columns(rows: Any) -> tuple[list[Any], ...]:
    """Rows of fields as lists of one field each."""
    return tuple(map(list, zip(*rows, strict=True)))
