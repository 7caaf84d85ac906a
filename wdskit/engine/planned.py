"""A planned pipeline: samples by position, batches by step. Stateless, so any process can make any batch.

What stands at a position follows from integers (`order`), so epochs, ranks and resume points are the loader's
arithmetic; here a job, which is the positions of one batch, becomes that batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import webdataset

from wdskit.engine.by_columns import begin
from wdskit.engine.columns import columns_of
from wdskit.engine.jobs import Job, Made
from wdskit.engine.sample import Each
from wdskit.engine.shards import OpenShards
from wdskit.errors import PipelineError
from wdskit.order.base import Order
from wdskit.order.steps import Steps, Tail
from wdskit.stages.base import Run, Step
from wdskit.stages.batching import Batcher
from wdskit.stages.collate import FRESH, Collate, Memory
from wdskit.stages.fields import Rename, ToDict, ToTuple
from wdskit.stages.images.fused import FusedStep
from wdskit.stages.images.jpeg_crop import Ending
from wdskit.stages.timing import Pace


@dataclass(frozen=True)
class Plan:
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


class PlannedPipeline(webdataset.DataPipeline):  # type: ignore[misc]  # webdataset ships no annotations that mypy can use
    """The running form of a `Pipeline` with a planned source.

    `make` turns a job into a batch, in any process and any order. Iterated, it yields one epoch of its rank, and the
    next time the next one.

    Args:
        shards: Where samples are read.
        each: What is done to each sample.
        batched: What makes batches of them, None without.
        behind: What is done to each batch, None without.
        run: Seed, rank, threads.
        plan: For the loader.
    """

    def __init__(
        self, shards: OpenShards, each: Each, batched: Batcher | None, behind: Each | None, run: Run, plan: Plan
    ) -> None:
        super().__init__(*(stage for stage in (shards, each, batched, behind) if stage is not None))
        self.shards, self.each, self.batched, self.behind = shards, each, batched, behind
        self.run = run
        self.plan = plan
        first = each.steps[0].function if each.steps and not each.parts else None
        each.first = first if isinstance(first, FusedStep) else None
        if batched is not None and isinstance(batched.collate, Collate):
            each.writer = _writer(each.steps)
        self.chunk_pace, self.batch_pace = Pace(), Pace()
        self.columns = columns_of(shards, each, batched)
        self._pool: ThreadPoolExecutor | None = None
        self._next_epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def leave_numbers(self) -> Ending | None:
        """Have batches of images made as uint8 where that is possible, `Made.raw` says in which: what is left to do to
        them, in `jpeg_crop.finish_batch`. None where nothing is.
        """
        writer = self.each.writer
        if writer is None or self.behind is not None or writer.ending.dtype == torch.uint8:
            return None
        writer.write_uint8()
        return writer.ending

    def make(self, job: Job, memory: Memory = FRESH) -> Made:
        """The batch of a job, with its mask if the tail is padded.

        Raises:
            ShardError: A shard is not right.
            SampleError: A stage failed on a sample, and that is not forgiven.
        """
        making = begin(self, job, memory)
        chunks = range(making.prepare())
        try:
            if self.run.num_threads > 1:
                self._pool = self._pool or ThreadPoolExecutor(self.run.num_threads, thread_name_prefix="wdskit")
                list(self._pool.map(making.run, chunks))
            else:
                for chunk in chunks:
                    making.run(chunk)
        except BaseException:
            making.drop()  # threads of the pool may be at work on it
            raise
        return making.finish()

    def __iter__(self) -> Iterator[Any]:
        """One epoch in this process: what `make_loader` gives, without worker processes, resume and error budget.

        Raises:
            PipelineError: It runs in a worker of another loader, which would read everything in each; or it forgives
                bad samples, which only a loader counts.
        """
        from torch.utils.data import get_worker_info

        if self.plan.forgives:
            msg = "errors: nobody counts and lists bad samples where a built pipeline is iterated."
            raise PipelineError(f"{msg}\n  Use pipe.loader(errors=...), or leave `errors` out.")

        if get_worker_info() is not None:
            msg = "a planned pipeline is not shared by the workers of another loader."
            raise PipelineError(f"{msg}\n  Use pipe.loader(workers=...), or wdskit.make_loader.")
        plan, place = self.plan, self.run.place
        start = self._next_epoch * plan.epoch_samples
        steps = Steps(plan.epoch_samples, plan.batch, place.world_size, plan.tail)
        for step in range(len(steps)):
            made = self.make(Job(start, steps.range(place.rank, step, step + 1), plan.epoch_samples))
            yield from [made.value] if plan.is_batched else made.value
        self._next_epoch += 1


def _writer(steps: Sequence[Step]) -> FusedStep | None:
    """The step whose image nobody touches before it is batched, so that it can be written into the batch at once."""
    for number, step in enumerate(steps):
        if isinstance(step.function, FusedStep) and step.function.out_shape is not None:
            behind = [later.function for later in steps[number + 1 :]]
            moves = all(isinstance(each, _MOVES) for each in behind)
            return step.function if moves else None
    return None


_MOVES = (Rename, ToDict, ToTuple)
