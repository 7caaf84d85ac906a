"""The loader of planned pipelines: batches made by stateless workers, counted in the main process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wdskit.engine.jobs import Bad, Job, Made
from wdskit.engine.planned import PlannedPipeline
from wdskit.loader.budget import Budget
from wdskit.loader.handover import hand_over, make_mover
from wdskit.loader.loader import Loader
from wdskit.loader.makers import Ahead, InThisThread, make_maker
from wdskit.loader.passes import Pass, Passes
from wdskit.loader.starting import start_method_of
from wdskit.pipeline.settings import ErrorsSpec, LoaderSpec

STEPS_A_JOB = 64
"""Steps that are made together where an item is a sample: one by one, the way between processes costs 0.2 ms each."""


class PlannedLoader(Loader):
    """Iterate it once an epoch: the same number of items on every rank, whatever the workers.

    `len(loader)` is the number of items of a whole epoch. `state_dict` says what the consumer has received, and is the
    same on every rank; loaded on any number of ranks, workers and threads, the sequence of samples goes on where it
    stopped.

    Args:
        pipeline: Built for this rank.
        spec: Workers, prefetch and the rest.
        errors: How many bad samples an epoch may have.
        origin: Name of the pipeline, where the rank comes from, and the rest that `Loader` takes.

    Raises:
        PipelineError: The pipeline cannot be run with these workers.
    """

    def __init__(
        self,
        pipeline: PlannedPipeline,
        spec: LoaderSpec,
        errors: ErrorsSpec | None = None,
        **origin: Any,
    ) -> None:
        num_ahead = _num_ahead(spec, pipeline.run.num_threads)
        super().__init__(pipeline.run, spec, prefetch=num_ahead, capacity=num_ahead, **origin)
        self.pipeline = pipeline
        plan = pipeline.plan
        self._passes = Passes(
            epoch_samples=plan.epoch_samples,
            batch=plan.batch,
            world_size=self._place.world_size,
            tail=plan.tail,
            fingerprint=plan.fingerprint,
        )
        self._steps_a_job = 1 if plan.is_batched else STEPS_A_JOB
        num_samples = len(self._passes) * plan.batch
        self._budget = Budget(errors or ErrorsSpec(), rank=self._place.rank, num_samples=num_samples)
        start_method = functools.partial(start_method_of, pipeline.pipeline, spec.start_method)
        if spec.workers:
            start_method()
        self._mover = make_mover(pipeline, spec)
        maker = make_maker(pipeline, spec.workers, start_method)
        self._ahead = Ahead(maker, max(num_ahead, maker.num_ahead) if isinstance(maker, InThisThread) else num_ahead)

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
        self._is_inside = False
        self._budget = copy.copy(self._budget)  # an iteration that runs has the other one
        self._budget.count = state["bad"]

    def _items(self) -> Any:
        running, budget = self._passes.begin(), self._budget
        if not running.steps.consumed:
            budget.count = 0
        num_steps = len(running.steps)
        step = 0
        taken = self._ahead.take(self._jobs(running), -(-num_steps // self._steps_a_job))
        self._meter.begin(running.epoch)
        try:
            for made in taken if self._mover is None else hand_over(taken, self._mover):
                self._count(running, step, made)
                for item, bad in self._of_steps(running, step, made):
                    budget.spend(running.epoch, bad)
                    self._passes.received(running, step)
                    step += 1
                    if step == num_steps:
                        budget.count = 0
                        self._leave()
                    yield item
                    del item
                del made
                self._meter.asked()
        finally:
            if not self.spec.persistent_workers:
                self._ahead.close()
        assert step == num_steps

    def _jobs(self, running: Pass) -> Iterator[Job]:
        """The jobs of a pass, and those of the next one if there will be someone to make them."""
        following = [self._passes.following(running)] if self.spec.persistent_workers else []
        for _, start, steps in (running, *following):
            for first in range(0, len(steps), self._steps_a_job):
                stop = min(first + self._steps_a_job, len(steps))
                yield Job(start, steps.range(self._place.rank, first, stop), steps.num_samples)

    def _count(self, running: Pass, step: int, made: Made) -> None:
        """Count the items of a job, the first of which is that of `step`."""
        num_steps = 1 if self.pipeline.plan.is_batched else len(made.value)
        positions = running.steps.range(self._place.rank, step, step + num_steps)
        num_samples = len(range(positions.start, min(positions.stop, running.steps.num_samples), positions.step))
        ready = self._ahead.num_ready
        self._meter.received(num_samples, steps=num_steps, ready=ready, replaced=len(made.bad), timings=made.timings)

    def _of_steps(self, running: Pass, step: int, made: Made) -> Iterator[tuple[Any, Sequence[Bad]]]:
        """The items of a job, each with its bad samples; the first is that of `step`."""
        if self.pipeline.plan.is_batched:
            yield made.value, made.bad
            return
        bad = {each.position: each for each in made.bad}
        for number, item in enumerate(made.value):
            position = int(running.steps.positions(self._place.rank, step + number)[0]) if bad else -1
            yield item, [bad[position]] if position in bad else []


def _num_ahead(spec: LoaderSpec, num_threads: int) -> int:
    """Jobs at work or ready ahead of the consumer: none in its own thread, and each process has work to go on with."""
    if not spec.workers and num_threads == 1:
        return 0
    return max(spec.prefetch, 2 * spec.workers)
