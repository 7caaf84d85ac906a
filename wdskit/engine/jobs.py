"""What a planned pipeline is asked for, and what becomes of it: a batch of positions, and that batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from wdskit.stages.timing import Timings


class Job(NamedTuple):
    """One batch to make. Equal jobs give equal batches.

    Attributes:
        start: Where the epoch starts in the order's endless sequence.
        positions: Of the epoch, one a sample.
        num_samples: Positions of the epoch; those at or behind it are padding, for which any sample does.
    """

    start: int
    positions: range
    num_samples: int


class Bad(NamedTuple):
    """A sample that could not be had, and for which another stands."""

    position: int
    shard: str
    key: str
    reason: str


class Made(NamedTuple):
    """What became of a job.

    Attributes:
        value: The batch; without `batched`, a list of samples.
        bad: The samples that were bad.
        raw: Field or place of images that are uint8 as yet, where numbers were to follow (`finish_numbers`).
        timings: What it took to make it.
    """

    value: Any
    bad: tuple[Bad, ...]
    raw: int | str | None = None
    timings: Timings | None = None
