"""The loader of planned pipelines: batches made by stateless workers, counted in the main process."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from wdskit.loader.budget import Budget
from wdskit.loader.failures import Failure, sendable
from wdskit.loader.loader import Loader
from wdskit.loader.passes import Pass, Passes
from wdskit.loader.workers import Workers
from wdskit.pipeline.planned import Bad, Job, Made, PlannedPipeline
from wdskit.pipeline.specs import ErrorsSpec, LoaderSpec

STEPS_A_JOB = 64
"""Steps that are made together where an item is a sample: one by one, the way between processes costs 0.2 ms each."""


class _Jobs(Dataset[Any]):
    """Makes the batch of a job; in a worker, what goes wrong comes out as a `Failure`."""

    def __init__(self, pipeline: PlannedPipeline) -> None:
        self.pipeline = pipeline

    def __getitem__(self, job: Job) -> Any:
        info = get_worker_info()
        if info is None:
            return self.pipeline.make(job)
        try:
            return self.pipeline.make(job)
        except (Exception, SystemExit) as err:  # noqa: BLE001 (every error of a worker is the consumer's to see)
            return Failure(sendable(err), traceback.format_exc(), info.id)


class _Schedule:
    """The jobs of the pass that runs now, in order; torch's DataLoader takes them as a sampler's indices."""

    def __init__(self, rank: int, steps_a_job: int) -> None:
        self.rank = rank
        self.steps_a_job = steps_a_job
        self.running: Pass | None = None

    def __iter__(self) -> Iterator[Job]:
        """The jobs of `running`."""
        assert self.running is not None
        _, start, steps = self.running
        for first in range(0, len(steps), self.steps_a_job):
            several = range(first, min(first + self.steps_a_job, len(steps)))
            positions = np.concatenate([steps.positions(self.rank, step) for step in several])
            yield Job(start, positions, steps.num_samples)


class PlannedLoader(Loader):
    """Iterate it once an epoch: the same number of items on every rank, whatever the workers.

    `len(loader)` is the number of items of a whole epoch. `state_dict` says what the consumer has received, and is the
    same on every rank; loaded on any number of ranks, workers and threads, the sequence of samples goes on where it
    stopped.

    Args:
        pipeline: Built for this rank.
        spec: Workers, prefetch and the rest.
        errors: How many bad samples an epoch may have.
        name: Of the pipeline, for reports.
        process_group: The group that the rank came from, to compare with at the first item.
        told: Whether rank and world size were the caller's word, which no process group overrules.

    Raises:
        PipelineError: The pipeline cannot be run with these workers.
    """

    def __init__(
        self,
        pipeline: PlannedPipeline,
        spec: LoaderSpec,
        errors: ErrorsSpec | None = None,
        *,
        name: str = "pipeline",
        process_group: Any = None,
        told: bool = False,
    ) -> None:
        capacity = spec.prefetch * spec.workers
        super().__init__(pipeline.run.place, spec, capacity=capacity, name=name, process_group=process_group, told=told)
        self.pipeline = pipeline
        plan = pipeline.plan
        self._passes = Passes(
            epoch_samples=plan.epoch_samples,
            batch=plan.batch,
            world_size=self._place.world_size,
            tail=plan.tail,
            fingerprint=plan.fingerprint,
        )
        num_samples = len(self._passes) * plan.batch
        self._budget = Budget(errors or ErrorsSpec(), rank=self._place.rank, num_samples=num_samples)
        self._schedule = _Schedule(self._place.rank, 1 if plan.is_batched else STEPS_A_JOB)
        self._workers = Workers(_Jobs(pipeline), spec, stages=pipeline.pipeline, sampler=self._schedule)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration runs, or the one that runs now."""
        return self._passes.epoch

    @property
    def remaining(self) -> int:
        """Items between what the consumer has received and the end of the epoch."""
        return self._passes.remaining

    def __len__(self) -> int:
        """Items of a whole epoch, on every rank alike."""
        return len(self._passes)

    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        self._passes.set_epoch(epoch, is_counted_elsewhere=is_counted_elsewhere)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands: small plain JSON, the same on every rank but for the number of its bad samples."""
        return {**self._passes.state_dict(), "bad": self._budget.count}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where a state says, with the next iteration.

        Args:
            state: From `state_dict`, on any number of ranks, workers and threads.
            strict: Whether a state of another sequence of samples is refused, or logged and taken.

        Raises:
            StateError: It is no state, or one of another sequence; the field is named.
        """
        self._passes.load_state_dict(state, strict=strict)
        self._budget.count = state["bad"]

    def _items(self) -> Any:
        running = self._schedule.running = self._passes.begin()
        if not running.steps.consumed:
            self._budget.count = 0
        step = 0
        self._stats.begin(running.epoch)
        for made in self._workers if len(running.steps) else ():
            self._check_rank()
            self._count(running, step, made)
            for item, bad in self._of_steps(running, step, made):
                self._budget.spend(running.epoch, bad)
                self._passes.received(running, step)
                step += 1
                if step == len(running.steps):
                    self._budget.count = 0
                yield item
            self._stats.asked(self._workers.ready())
        assert step == len(running.steps)

    def _count(self, running: Pass, step: int, made: Made) -> None:
        """Count the items of a job, the first of which is that of `step`."""
        num_steps = 1 if self.pipeline.plan.is_batched else len(made.value)
        positions = [running.steps.positions(self._place.rank, step + number) for number in range(num_steps)]
        samples = sum(int((each < running.steps.num_samples).sum()) for each in positions)
        self._note_received(samples, steps=num_steps, replaced=len(made.bad))

    def _of_steps(self, running: Pass, step: int, made: Made) -> Iterator[tuple[Any, Sequence[Bad]]]:
        """The items of a job, each with its bad samples; the first is that of `step`."""
        if self.pipeline.plan.is_batched:
            yield made.value, made.bad
            return
        bad = {each.position: each for each in made.bad}
        for number, item in enumerate(made.value):
            position = int(running.steps.positions(self._place.rank, step + number)[0]) if bad else -1
            yield item, [bad[position]] if position in bad else []
