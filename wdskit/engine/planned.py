"""A planned pipeline that is iterated without a loader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from wdskit.engine.batch import Batch, make_batches
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Job, Program
from wdskit.errors import PipelineError
from wdskit.order.steps import Steps
from wdskit.stages.base import Run


class PlannedPipeline(IterableDataset[Any]):
    """The running form of a `Pipeline` with a planned source. Iterated, it yields one epoch of its rank in this thread,
    and the next time the next one: what `make_loader` gives, without workers, resume and error budget.

    Args:
        program: What makes its batches.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._next_epoch = 0

    @property
    def run(self) -> Run:
        """Seed, rank, number of threads."""
        return self.program.run

    @property
    def num_threads(self) -> int:
        """Threads of each process that make its batches."""
        return self.program.run.num_threads

    @property
    def pipeline(self) -> list[Any]:
        """What its workers get."""
        program = self.program
        found = (program.shards, program.stages, program.batched, program.behind)
        return [part for part in found if part is not None]

    def start(self, worker: int, num_workers: int) -> Callable[..., Outcome[list[Batch]]]:  # noqa: ARG002 (all are alike)
        """What makes the batches of jobs in one worker, called with (Job, memory, task)."""
        return functools.partial(make_batches, self.program)

    def __iter__(self) -> Iterator[Any]:
        """One epoch.

        Raises:
            PipelineError: It runs in a worker of another loader, which would read everything in each; or it forgives
                bad samples, which only a loader counts.
        """
        plan, place = self.program.plan, self.program.run.place
        if plan.forgives:
            msg = "errors: nobody counts and lists bad samples where a built pipeline is iterated."
            raise PipelineError(f"{msg}\n  Use pipe.loader(errors=...), or leave `errors` out.")
        if get_worker_info() is not None:
            msg = "a planned pipeline is not shared by the workers of another loader."
            raise PipelineError(f"{msg}\n  Use pipe.loader(workers=...), or wdskit.make_loader.")
        start = self._next_epoch * plan.epoch_samples
        steps = Steps(plan.epoch_samples, plan.batch, place.world_size, plan.tail)
        for step in range(len(steps)):
            made = make_batches(self.program, Job(start, steps.range(place.rank, step, step + 1), plan.epoch_samples))
            for batch in made.result() or ():
                yield batch.value
        self._next_epoch += 1
