"""What the driver asks a contestant to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """One run of one contestant.

    Args:
        mode: "prepare" writes the data in the contestant's format, "run" measures.
        kind: What the samples are: "bytes" (one field), "small" (bytes and JSON), "images" (JPEG and label).
        folder: Where the samples of this kind are, and the contestant's own copy of them.
        num: Samples of an epoch.
        size: Bytes of the samples' one field; of images, what they came to.
        batch: Samples of a batch, which divides `num` and `num / workers`.
        dtype: Of image batches, "uint8" or "float32" (normalized); else "".
        workers: Worker processes.
        threads: Threads in each, or in the one process; 0 for none beside the consumer's.
        chain: "pillow" or "fast" where a contestant can decode in both ways; "torch" for torch's DataLoader where that
            is not its own.
        seconds: Whole epochs are measured until it took so long.
        launched: time.monotonic() when the process was started.
    """

    mode: str
    kind: str
    folder: str
    num: int
    size: int
    batch: int
    dtype: str = ""
    workers: int = 0
    threads: int = 0
    chain: str = "pillow"
    seconds: float = 1.5
    launched: float = 0.0

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return self.num // self.batch

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))
