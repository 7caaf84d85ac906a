"""The loader of planned pipelines: stateless workers make batches, and the main process counts them."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.engine.batch import BatchMaker
from wdskit.engine.program import Job, Program
from wdskit.errors import PipelineError, RankError
from wdskit.loader.base import Loader
from wdskit.loader.budget import Budget
from wdskit.loader.device import make_mover, move_ahead
from wdskit.loader.pools import Pool, make_pool
from wdskit.loader.prefetch import Prefetch, jobs_ahead
from wdskit.loader.start_method import start_method_of
from wdskit.loader.state import EpochCounter, Pass, plain_state
from wdskit.loader.watch import Watch
from wdskit.order.steps import Steps
from wdskit.pipeline.ranks import group_store
from wdskit.pipeline.settings import ErrorsSpec, LoaderSpec

logger = logging.getLogger(__name__)

_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of this process's loaders of each name


class PlannedLoader(Loader):
    """The loader of a planned source. Each iteration is one epoch, with the same number of items on every rank.

    `state_dict` is the position of the consumer, the same on every rank except the count of bad samples. A loader with
    any number of ranks, workers and threads can load this state, and then continues the sequence of samples there.

    Args:
        program: The pipeline, built for this rank.
        spec: The settings: workers, prefetch and so on.
        errors: The settings `errors`: how many bad samples an epoch may have. None for the defaults.
        origin: Keyword arguments for the constructor of `Loader`: `name`, `stages` and so on.

    Attributes:
        most_ahead: Largest number of batches that are made before the consumer asks for them.

    Raises:
        PipelineError: A stage cannot be sent to the workers, `start_method` is "fork" and forking is impossible, Ray is
            not installed and `on` is set, `device` does not exist, or `errors.dir` is not a folder.
    """

    def __init__(
        self,
        program: Program,
        spec: LoaderSpec,
        errors: ErrorsSpec | None = None,
        **origin: Any,
    ) -> None:
        super().__init__(program.run.rank_info, spec, **origin)
        self._mover, self.program = make_mover(spec), program
        self.dataset = self.program
        layout = program.epoch
        self._counter = EpochCounter(layout, world_size=self._rank_info.world_size)
        logs_dropped = self._rank_info.rank == 0 and layout.fingerprint.get("source") != "resampled"
        if logs_dropped and (dropped := layout.steps(self._rank_info.world_size).describe_dropped()):
            logger.warning("%s: %s", self._meter.name, dropped)
        self._last: tuple[Pass, int] | None = None
        self._number, self._num_iterations = next(_numbers[self._meter.name]), 0
        self._own_rank = [self._rank_info.rank, self._rank_info.world_size]
        self._steps_per_job, num_ahead = jobs_ahead(spec, self.program)
        steps = layout.steps(self._rank_info.world_size)
        num_samples = steps.num_samples - (steps.num_dropped if isinstance(steps, Steps) else 0)
        num_samples //= self._rank_info.world_size
        self._budget = Budget(
            errors or ErrorsSpec(), name=self._meter.name, rank=self._rank_info.rank, num_samples=num_samples
        )
        self._prefetch = Prefetch(self._make_pool(), num_ahead)
        self.most_ahead = num_ahead * self._steps_per_job + self._steps_per_job - 1

    def _make_pool(self) -> Pool:
        program, spec = self.program, self.spec
        if spec.on is not None:
            from wdskit.loader.ray import RayPool

            return RayPool(program, BatchMaker, spec.workers, spec.on, Watch(program.describe, spec.timeout or 0.0))
        start_method = functools.partial(
            start_method_of,
            program.parts,
            spec.start_method,
            reads_store=program.reader.is_remote,
            needs_torch=program.needs_torch,
        )
        return make_pool(program, BatchMaker, spec.workers, start_method, spec.timeout)

    @property
    def epoch(self) -> int:
        """Number of the running epoch. Between two iterations: number of the epoch that the next iteration runs. The
        number of the next epoch is set just before the last item is yielded, or when an iteration is left early.
        """
        return self._counter.epoch

    @property
    def remaining(self) -> int:
        """Number of items of the running or next epoch (see `epoch`) that the consumer has not received yet."""
        return self._counter.remaining

    def __len__(self) -> int:
        """Return the number of items of a whole epoch on this rank. Every rank has as many."""
        return len(self._counter)

    @property
    def positions(self) -> NDArray[np.int64]:
        """The positions in the epoch of the rows of the last yielded batch: int64 (batch,), ascending. The position of
        a padded row is the number of samples in the epoch.

        Raises:
            PipelineError: No batch was yielded yet.
        """
        if self._last is None:
            raise PipelineError("loader.positions: these belong to a batch, and no batch was yielded yet.")
        running, step = self._last
        return self.program.locate(Job(running.start, running.steps, step, step + 1)).positions

    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        self._counter.set_epoch(epoch, is_counted_elsewhere=is_counted_elsewhere)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer as plain JSON, the same on every rank except `bad` and `bad_rank`.

        - `version`: version of this format.
        - `epoch`: number of the running or next epoch.
        - `consumed`: number of samples of this epoch that all ranks together have received.
        - `start`: position of the epoch's start in the endless sequence.
        - `epoch_samples`: number of samples of the epoch.
        - `bad`: number of bad samples of this rank in the epoch. Only this rank continues to count from it.
        - `bad_rank`: rank and world size if `bad` is not 0, otherwise null.
        - `fingerprint`: the settings that decide the order.
        """
        bad = self._budget.count
        return {**self._counter.state_dict(), "bad": bad, "bad_rank": self._own_rank if bad else None}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Let the next iteration start at the position of a saved state.

        Args:
            state: Result of `state_dict`, on any number of ranks, workers and threads.
            strict: If True, refuse a state of another sequence of samples. If False, load this state too and log the
                difference.

        Raises:
            StateError: `state` is not a state of a planned source, or `strict` is True and the state belongs to another
                sequence of samples. The message names the difference.
        """
        self._counter.load_state_dict(state, strict=strict)
        state = plain_state(state)
        self._is_in_epoch = False
        self._budget = copy.copy(self._budget)  # a running iteration keeps the old budget
        self._budget.count = state["bad"] if state.get("bad_rank") == self._own_rank else 0

    def _items(self) -> Any:
        running, budget = self._counter.begin(), self._budget
        self._compare_ranks(running)
        self.program.run.epoch = running.epoch  # workers that start now seed their generators with it
        if not running.steps.consumed:
            budget.count = 0
        num_steps = len(running.steps)
        batches = self._prefetch.take(self._jobs(running), -(-num_steps // self._steps_per_job))
        self._meter.begin(running.epoch)
        step = 0
        try:
            for batch in batches if self._mover is None else move_ahead(batches, self._mover, self._prefetch.is_ready):
                budget.spend(running.epoch, batch.bad)
                self._meter.received(batch.num_samples, replaced=len(batch.bad), timings=batch.timings)
                self._counter.received(running, step)
                self._last = running, step
                step += 1
                if step == num_steps:
                    budget.count = 0
                    self._end_epoch()
                value = batch.value
                del batch
                yield value
                del value
                self._meter.asked()
        finally:
            self._counter.end(running)
            if not self.spec.persistent_workers:
                self._prefetch.close()
            self._prefetch.free_memory(is_left_early=step < num_steps)
        assert step == num_steps

    def _compare_ranks(self, running: Pass) -> None:
        """Raise RankError if a rank of the process group that began its iteration earlier reads other samples.

        There is no collective call: a rank writes what it reads into the store of the group, and goes on. It compares
        the first value of the same iteration of this loader, and the last value of the same epoch if it belongs to a
        later iteration: that rank has begun to read alone.
        """
        store = None if self._is_rank_given else group_store(self._process_group)
        if store is None:
            return
        layout, steps = self.program.epoch, running.steps
        self._num_iterations += 1
        own = {
            **layout.fingerprint,
            "epoch": running.epoch,
            "start": running.start,
            "consumed": steps.consumed,
            "batch": layout.batch,
            "tail": layout.tail,
            "steps": len(steps),
            "iteration": self._num_iterations,
        }
        loader = f"{self._meter.name}/{self._number}"
        for key in (f"{loader}/iteration/{self._num_iterations}", f"{loader}/epoch/{running.epoch}"):
            found = own
            with contextlib.suppress(RuntimeError):  # the rank that has the store has ended
                found = json.loads(store.compare_set(key, "", json.dumps(own)))
                if found["iteration"] < self._num_iterations:
                    store.set(key, json.dumps(own))
                    continue
            names = [name for name in own if name != "iteration" and own[name] != found.get(name)]
            if names:
                differing = "; ".join(f"{name} is {own[name]!r} here and {found.get(name)!r} there" for name in names)
                msg = f"{self._meter.name}: this rank and another one read different samples: {differing}."
                raise RankError(f"{msg}\n  Give all ranks the same settings, data, epoch and state.")

    def _close_pool(self) -> None:
        self._prefetch.close()

    def _jobs(self, running: Pass) -> Iterator[Job]:
        """Yield the jobs of a pass. If the workers stay alive between epochs, the jobs of the next pass follow."""
        next_passes = [self._counter.following(running)] if self.spec.persistent_workers else []
        for epoch, start, steps in (running, *next_passes):
            for first in range(0, len(steps), self._steps_per_job):
                stop = min(first + self._steps_per_job, len(steps))
                yield Job(start, steps, first, stop, epoch)
