"""A built pipeline with a planned source: frozen, stateless, the same in every process that makes its batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from wdskit.engine.columns import Columns, columns_of
from wdskit.engine.sample import SampleStages
from wdskit.engine.shard_cache import ShardCache
from wdskit.order.base import Ints, Order
from wdskit.order.deal import dealt
from wdskit.order.steps import Steps, Tail
from wdskit.stages.base import Run, Step
from wdskit.stages.batching import Batcher
from wdskit.stages.collate import Collate
from wdskit.stages.fields import Rename, ToDict, ToTuple
from wdskit.stages.images.fused import FusedStep
from wdskit.stages.images.jpeg_crop import Ending
from wdskit.stages.timing import Pace

_SAMPLES_A_JOB = 256
"""Samples that are made together where that is cheaper: bytes of 3 kB in batches of 64 take half the time a sample. Of
JSON more would be so many dicts at a time that Python's garbage collector takes 5 % of the time.
"""

_MOST_BATCHES_A_JOB = 16
_UNBATCHED_A_JOB = 64  # one by one, the way between processes costs 0.2 ms each


@dataclass(frozen=True)
class EpochLayout:
    """What the loader must know to count through a planned pipeline.

    Attributes:
        order: The endless sequence.
        tail: What becomes of the positions behind the last full global batch.
        batch: Samples of a batch of a rank.
        epoch_samples: Positions of an epoch.
        is_batched: Whether items are batches; without `batched` they are samples.
        fingerprint: What the order follows from, as plain JSON, for the state.
        forgives: Whether bad samples are replaced, and
        forgives_functions: those too on which a transform or a user's function fails.
    """

    order: Order
    tail: Tail
    batch: int
    epoch_samples: int
    is_batched: bool
    fingerprint: dict[str, Any]
    forgives: bool = False
    forgives_functions: bool = False


@dataclass(frozen=True)
class Job:
    """Consecutive batches of a rank to make. Equal jobs give equal batches.

    Attributes:
        start: Where the epoch starts in the order's endless sequence.
        steps: Of the epoch.
        first: The first step.
        stop: The step behind the last.
    """

    start: int
    steps: Steps
    first: int
    stop: int


class Places(NamedTuple):
    """The samples of a job, (n,) each: `batch` for each batch.

    Attributes:
        positions: Of the epoch; those of padding are its number of samples.
        numbers: Positions in the order's endless sequence; any for padding.
        is_sample: Whether it is no padding.
        shards: Shard of each, as the order numbers them, and
        samples: its number in there.
    """

    positions: Ints
    numbers: Ints
    is_sample: NDArray[np.bool_]
    shards: Ints
    samples: Ints

    def part(self, rows: slice) -> Places:
        """Some of them."""
        columns: Any = self
        return Places(*(column[rows] for column in columns))


@dataclass(frozen=True)
class Program:
    """What makes batches: `engine.batch.make_batches`.

    Attributes:
        shards: Where samples are read.
        stages: What is done to each sample.
        batched: What makes a batch of them; None without.
        behind: What is done to each batch; None without.
        run: Seed, rank, number of threads.
        plan: Which sample stands where, and how the epoch is counted.
        ahead: Positions of all ranks in front of a job whose samples' parts are fetched.
        columns: What makes batches by columns, where the stages and the samples allow it.
        first: The first stage, if it is one that decodes an image in two halves.
        writer: The stage whose image can be written into the batch at once.
        pace: Which jobs are timed, and
        chunk_pace: which chunks of samples.
    """

    shards: ShardCache
    stages: SampleStages
    batched: Batcher | None
    behind: SampleStages | None
    run: Run
    plan: EpochLayout
    ahead: int = 0
    columns: Columns | None = field(init=False)
    first: FusedStep | None = field(init=False)
    writer: FusedStep | None = field(init=False)
    chunk_pace: Pace = field(init=False, default_factory=Pace)
    pace: Pace = field(init=False, default_factory=Pace)

    def __post_init__(self) -> None:
        steps = self.stages.steps
        collates = self.batched is not None and isinstance(self.batched.collate, Collate)
        first = steps[0].function if steps and not self.stages.parts else None
        found = {
            "columns": columns_of(self.stages, self.batched),
            "first": first if isinstance(first, FusedStep) else None,
            "writer": _writer(steps) if collates else None,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def places(self, job: Job) -> Places:
        """Which samples a job is made of."""
        rank, _, ranks_per_node = self.run.place
        order, steps = self.plan.order, job.steps
        numbers = range(job.first, job.stop)
        dealt_to = functools.partial(dealt, order, job.start, steps, rank=rank, ranks_per_node=ranks_per_node)
        positions = np.concatenate([dealt_to(step) for step in numbers])
        places = np.minimum(positions, steps.num_samples - 1) + job.start
        return Places(positions, places, positions < steps.num_samples, *order.take(places))

    @property
    def batches_a_job(self) -> int:
        """How many batches, or samples without `batched`, are best made together."""
        if self.batched is None:
            return _UNBATCHED_A_JOB
        if self.columns is None or self.behind is not None or self.shards.has_large_samples():
            return 1
        return max(1, min(_MOST_BATCHES_A_JOB, _SAMPLES_A_JOB // self.plan.batch))

    def without_numbers(self) -> tuple[Program, Ending | None]:
        """One whose images stay uint8 where that is possible, and what is left to do to them (`finish_batch`)."""
        writer = self.writer
        if writer is None or self.behind is not None or writer.ending.dtype == torch.uint8:
            return self, None
        changed = copy.copy(writer)
        changed.write_uint8()
        steps = [replace(step, function=changed) if step.function is writer else step for step in self.stages.steps]
        return replace(self, stages=SampleStages(tuple(steps), self.stages.parts)), writer.ending


def _writer(steps: Sequence[Step]) -> FusedStep | None:
    """The step whose image nobody touches before it is batched."""
    for number, step in enumerate(steps):
        if isinstance(step.function, FusedStep) and step.function.out_shape is not None:
            behind = [later.function for later in steps[number + 1 :]]
            moves = all(isinstance(each, _MOVES) for each in behind)
            return step.function if moves else None
    return None


_MOVES = (Rename, ToDict, ToTuple)
