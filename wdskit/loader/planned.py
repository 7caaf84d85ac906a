"""The loader of planned pipelines: batches made by stateless workers, counted in the main process."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from wdskit.errors import PipelineError
from wdskit.loader.failures import Failure, sendable
from wdskit.loader.passes import Pass, Passes
from wdskit.pipeline.planned import Job, PlannedPipeline
from wdskit.pipeline.specs import LoaderSpec

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
        except Exception as err:  # noqa: BLE001 (every error of a worker is the consumer's to see)
            return Failure(sendable(err), traceback.format_exc(), info.id)


class _Schedule:
    """The jobs of the pass that runs now, in order; the DataLoader takes them as a sampler's indices."""

    def __init__(self, rank: int, steps_a_job: int) -> None:
        self.rank = rank
        self.steps_a_job = steps_a_job
        self.running: Pass | None = None

    def __iter__(self) -> Iterator[Job]:
        """The jobs of `running`."""
        assert self.running is not None
        epoch, start, steps = self.running
        for first in range(0, len(steps), self.steps_a_job):
            several = range(first, min(first + self.steps_a_job, len(steps)))
            positions = np.concatenate([steps.positions(self.rank, step) for step in several])
            yield Job(epoch, start, positions, steps.num_samples)


class PlannedLoader:
    """Iterate it once an epoch: the same number of batches on every rank, whatever the workers.

    `len(loader)` is the number of batches of a whole epoch. `state_dict` says what the consumer has received, and is
    the same on every rank; loaded on any number of ranks, workers and threads, the sequence of samples goes on where it
    stopped. It makes no collective call.

    Args:
        pipeline: Built for this rank.
        spec: Workers, prefetch and the rest.

    Raises:
        PipelineError: The pipeline cannot be run with these workers.
    """

    def __init__(self, pipeline: PlannedPipeline, spec: LoaderSpec) -> None:
        self.pipeline = pipeline
        self.spec = spec
        plan, place = pipeline.plan, pipeline.run.place
        self._passes = Passes(
            epoch_samples=plan.epoch_samples,
            batch=plan.batch,
            world_size=place.world_size,
            tail=plan.tail,
            fingerprint=plan.fingerprint,
        )
        self._steps_a_job = 1 if plan.is_batched else STEPS_A_JOB
        self._schedule = _Schedule(place.rank, self._steps_a_job)
        self._running: weakref.ref[Any] | None = None
        self._torch_loader: DataLoader[Any] = DataLoader(
            _Jobs(pipeline),
            sampler=self._schedule,  # type: ignore[arg-type]  # any iterable of what __getitem__ takes
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=spec.workers,
            persistent_workers=spec.persistent_workers and spec.workers > 0,
            prefetch_factor=spec.prefetch if spec.workers else None,
            multiprocessing_context=spec.start_method if spec.workers else None,
            pin_memory=spec.pin_memory and torch.cuda.is_available(),
        )

    @property
    def epoch(self) -> int:
        """The epoch that the next pass runs, or the one that runs now."""
        return self._passes.epoch

    @property
    def remaining(self) -> int:
        """Batches between what the consumer has received and the end of the epoch."""
        return self._passes.remaining

    def __len__(self) -> int:
        """Batches of a whole epoch, on every rank alike."""
        return len(self._passes)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` >= 0 the one that the next pass runs; a loaded one keeps its position.

        Raises:
            StateError: A state of another epoch has been loaded and not used.
        """
        if type(epoch) is not int or epoch < 0:
            raise PipelineError(f"set_epoch({epoch!r}): an epoch is a whole number, 0 or more.")
        self._passes.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands: small plain JSON, the same on every rank."""
        return self._passes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where a state says, with the next pass.

        Args:
            state: From `state_dict`, on any number of ranks, workers and threads.
            strict: Whether a state of another sequence of samples is refused, or logged and taken.

        Raises:
            StateError: It is no state, or one of another sequence; the field is named.
        """
        self._passes.load_state_dict(state, strict=strict)

    def __iter__(self) -> Iterator[Any]:
        """Start a pass; nothing happens before the first batch is asked for.

        Raises:
            PipelineError: Another pass of this loader is still running.
        """
        running = self._running() if self._running is not None else None
        if running is not None and running.gi_frame is not None:
            raise PipelineError(
                "this loader is being iterated already. Finish or drop that iterator, or make a second loader."
            )
        items: Iterator[Any] = self._items()
        self._running = weakref.ref(items)
        return items

    def _items(self) -> Any:
        running = self._schedule.running = self._passes.begin()
        step = 0
        for made in self._torch_loader if len(running.steps) else ():
            if isinstance(made, Failure):
                made.throw()
            for item in [made] if self.pipeline.plan.is_batched else made:
                self._passes.received(running, step)
                step += 1
                yield item
        assert step == len(running.steps)


def _as_it_is(item: Any) -> Any:
    """Leave batches alone."""
    return item
