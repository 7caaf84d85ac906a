"""What the consumer does with a batch, the same for everybody: touch all of it, and note what it was."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = 4096


class Tally:
    """What came in one epoch.

    A sample is known by its number: the label of an image, the first four bytes and the JSON's `id` otherwise. With
    `digests` the crc32 of every value is taken too; that costs time, so only an epoch that is not measured does it.
    """

    def __init__(self, kind: str, num: int, *, digests: bool = False) -> None:
        self.kind = kind
        self.digests = digests
        self.seen: NDArray[np.int64] = np.zeros(num, dtype=np.int64)
        self.order = 0
        self.digest = 0
        self.samples = self.mixed = self.num_bytes = self.pixels = 0
        self.sum = self.squares = 0.0
        self.shapes: set[str] = set()

    def take(self, values: Any, labels: Any) -> None:
        """A batch of images with their labels, or of bytes with their JSON (None without)."""
        numbers = self._images(values, labels) if self.kind == "images" else self._fields(values, labels)
        self.samples += len(numbers)
        self.order += int(np.count_nonzero(np.diff(numbers) == 1))
        np.add.at(self.seen, numbers, 1)

    def _images(self, values: Any, labels: Any) -> NDArray[np.int64]:
        pixels = np.asarray(values)
        self.shapes.add(f"{pixels.dtype} {pixels.shape}")
        part = pixels.ravel(order="K")[:: PAGE // pixels.itemsize].astype(np.float64)
        self.pixels += part.size
        self.sum += float(part.sum())
        self.squares += float(part @ part)
        return np.asarray(labels, dtype=np.int64).ravel()

    def _fields(self, values: Any, documents: Any) -> NDArray[np.int64]:
        numbers = [int.from_bytes(value[:4], "little") for value in values]
        for value in values:
            value[::PAGE]
            if self.digests:
                self.digest ^= zlib.crc32(value)
            self.num_bytes += len(value)
        if documents is not None:
            self.mixed += sum(document["id"] != number for document, number in zip(documents, numbers, strict=True))
        self.shapes.add(f"{len(numbers)}")
        return np.asarray(numbers)

    def found(self) -> dict[str, Any]:
        """As JSON: what the driver compares."""
        mean = self.sum / max(self.pixels, 1)
        return {
            "samples": self.samples,
            "distinct": int(np.count_nonzero(self.seen)),
            "most": int(self.seen.max(initial=0)),
            "in_order": self.order / max(self.samples, 1),
            "mixed": self.mixed,
            "num_bytes": self.num_bytes,
            "digest": self.digest,
            "mean": mean,
            "deviation": (self.squares / max(self.pixels, 1) - mean * mean) ** 0.5,
            "shapes": sorted(self.shapes),
        }
