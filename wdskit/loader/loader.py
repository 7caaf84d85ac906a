"""The loaders. `Loader` has the rules of iterations, which loaders share. `PlannedLoader` runs planned pipelines."""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import json
import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from wdskit.engine.batch import Batch
from wdskit.engine.program import Job, Program
from wdskit.errors import PipelineError, RankError, check_whole
from wdskit.loader.budget import Budget
from wdskit.loader.device import make_mover, move_ahead
from wdskit.loader.memory import keep_freed_memory
from wdskit.loader.pools import LocalPool, Pool, ProcessPool
from wdskit.loader.state import EpochCounter, Pass, differences
from wdskit.loader.stats import LoaderStats, Meter
from wdskit.pipeline.ranks import group_rank, group_store, initialised_rank
from wdskit.pipeline.settings import DEFAULT_PREFETCH, ErrorsSpec, LoaderSpec
from wdskit.stages.run import RankInfo
from wdskit.text import plural

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_ENDED = "this iteration has ended: the loader was closed, or a new iteration began. Two at a time need two loaders."
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of this process's loaders of each name
_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()  # those that have run


@atexit.register
def _end_iterations() -> None:
    """End all iterations when Python exits. Wait up to a second for those that daemon threads run: Python would stop
    such a thread in the midst of torch's C++ code, which aborts the process.
    """
    running = [loader._running for loader in _loaders]  # noqa: SLF001 (of this module)
    for loader in [*_loaders]:
        loader.close()
    for _ in range(100):
        if any(getattr(each, "gi_running", False) for each in running):
            time.sleep(0.01)


class Loader(ABC):
    """The loader that `make_loader` returns. Each iteration is one epoch and yields the items of the pipeline.

    An item is a batch, or a sample if the pipeline has no stage `batched`. Each iteration that yielded an item is an
    epoch, as with a DataLoader: the next iteration runs the next epoch, also after a `break`. The loader makes no
    collective call.

    Args:
        rank_info: The rank and world size for which the pipeline reads.
        spec: The settings: workers, prefetch and so on.
        name: Name of the pipeline, for reports.
        stages: The stages of the pipeline, its source first; for `repr` and `batch_size`.
        process_group: The group with which each iteration compares rank and world size; None for the default group.
        is_rank_given: True if rank and world size come only from the caller's arguments. They are then not compared.
    """

    _counter: Any  # of the epochs

    batch_sampler = None
    """Always None. Lightning reads this attribute of each loader that has a `sampler`."""

    dataset: Any = None
    """An object whose length is the number of samples of an epoch, on all ranks together; trainers read this length.
    None for a stream, whose samples are not counted before they are read.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        spec: LoaderSpec,
        *,
        name: str = "pipeline",
        stages: Sequence[Any] = (),
        process_group: Any = None,
        is_rank_given: bool = False,
    ) -> None:
        self.spec = spec
        self._stages = stages
        self._rank_info = rank_info
        self._process_group = process_group
        self._is_rank_given = is_rank_given
        self._running: Any = None  # the generator of the running iteration
        self._is_in_epoch = False  # False once a state is loaded during the running iteration
        self._next_epoch: int | None = None  # from `set_epoch` during the running iteration
        self._meter = Meter(name=name, rank=rank_info.rank)
        self._number, self._iterations, self._num_items = next(_numbers[name]), itertools.count(), 0

    def __repr__(self) -> str:
        """Return one line: name of the pipeline, batch size, rank, workers and threads."""
        rank, world_size, _ = self._rank_info
        where = f"{self._meter.name}, batch {self.batch_size or 'none'}, rank {rank} of {world_size}"
        ways = f"{plural(self.spec.workers, 'worker')} x {plural(self.spec.threads or 1, 'thread')}"
        return f"{type(self).__name__}({where}, {ways})"

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a whole batch of this rank; None if the pipeline has no stage `batched`."""
        stages = (stage for stage in self._stages if getattr(stage, "name", "") == "batched")
        sizes: Iterator[int] = (stage.size_on(self._rank_info.world_size) for stage in stages)
        return next(sizes, None)

    @property
    def epoch(self) -> int:
        """Number of the running epoch. Between two iterations: number of the epoch that the next iteration runs.

        The number of the next epoch is set just before the last item is yielded, or when an iteration is left early. If
        a stream has no known length, the number is set after the last item.
        """
        return int(self._counter.epoch)

    @property
    def remaining(self) -> int:
        """Number of items of the running or next epoch (see `epoch`) that the consumer has not received yet.

        Raises:
            TypeError: The stages of a stream do not define the length of an epoch.
        """
        return int(self._counter.remaining)

    def __len__(self) -> int:
        """Return the number of items of a whole epoch on this rank. Every rank has as many.

        Raises:
            TypeError: The stages of a stream do not define the length of an epoch.
        """
        return len(self._counter)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer for `load_state_dict`, as a dict of plain JSON values. After an iteration
        that was left early, until the next one begins, it is the position in the epoch that was left.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Let the next iteration start at the position of a saved state.

        Args:
            state: Result of `state_dict`. The numbers of ranks, workers and threads may differ from those of the saved
                run.
            strict: If True, refuse a state that belongs to another order of samples. If False, load this state too and
                log the difference.

        Raises:
            StateError: `state` is not a state of this kind of loader, or `strict` is True and the state belongs to
                another order of samples. The message names the difference.
        """

    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        self._counter.set_epoch(epoch, is_counted_elsewhere=is_counted_elsewhere)

    @abstractmethod
    def _close_pool(self) -> None:
        """End the threads and worker processes. The next iteration starts new threads and processes."""

    @abstractmethod
    def _items(self) -> Any:
        """Return a generator of the items of one epoch. The generator does nothing before its first `next()`."""

    def close(self) -> None:
        """End the running iteration, the threads and the worker processes, within a second even if a worker hangs.

        The next `next()` of the ended iteration raises PipelineError. A new iteration starts new workers. A `with`
        statement closes the loader at its end: `with wdskit.make_loader("train.yaml") as loader: ...`.
        """
        self._end_running()
        self._close_pool()

    def _end_running(self) -> None:
        """End the running iteration, if there is one; its next `next()` then raises a PipelineError."""
        running, self._running = self._running, None
        if running is not None and not running.gi_running:  # a signal handler or another thread may call this
            running.close()
        self._end_epoch()

    def __reduce_ex__(self, _: object) -> Any:
        """Raise PipelineError: a copy would share the position of this loader."""
        raise PipelineError("a loader cannot be copied or pickled.\n  Copy its Pipeline, and make another loader.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> LoaderStats:
        """Return speed, waits and times of the stages in the running epoch; between two epochs, in the last epoch.

        `print(loader.stats())` shows a table, and `.to_dict()` is for wandb or TensorBoard. At the end of each whole
        epoch, the loader logs a summary in one line, at level INFO.
        """
        return self._meter.stats()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (>= 0) that the next iteration runs. A loaded state of the same epoch keeps its position.

        A call during an iteration takes effect when the running epoch ends; until then `epoch`, `remaining` and
        `state_dict` describe the running epoch. A call with the number of the running epoch cancels earlier calls in
        this iteration, and has no other effect.

        Raises:
            PipelineError: `epoch` is not a whole number from 0 to 10**9.
            StateError: A state of another epoch was loaded, and no iteration has started from it yet.
        """
        self._set_next(epoch, is_counted_elsewhere=False)

    def _set_next(self, epoch: Any, *, is_counted_elsewhere: bool) -> None:
        epoch = check_whole("epoch", epoch, PipelineError)
        if self._is_in_epoch:
            self._next_epoch = None if epoch == self.epoch else epoch
        else:
            self._set_epoch(epoch, is_counted_elsewhere=is_counted_elsewhere)

    def _end_epoch(self) -> None:
        """Mark the running epoch as ended. If `set_epoch` was called during the epoch, apply its last call now."""
        was_in_epoch, self._is_in_epoch = self._is_in_epoch, False
        if was_in_epoch and self._next_epoch is not None:
            self._set_epoch(self._next_epoch, is_counted_elsewhere=False)

    @property
    def sampler(self) -> _Sampler:
        """A stand-in for a DistributedSampler: frameworks call its method `set_epoch` before each epoch."""
        return _Sampler(self)  # not stored, because that would be a reference cycle

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the items of one epoch. The iterator does nothing before its first `next()`.

        Raises:
            PipelineError: At the first `next()`: a worker of torch's DataLoader runs the loader, or another thread
                waits for an item of it. At any `next()`: the loader was closed or a new iteration began during this
                iteration, a worker died, or a wait lasted for the `timeout`.
            RankError: At the first `next()`: the process group has another rank or world size than this loader, or the
                loaders of other ranks read another sequence of samples.
            SampleError, ShardError, StorageError: An item cannot be made. All items before this item were yielded.
        """
        return self._run()

    def _run(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and not isinstance(info.dataset, Program):  # not a worker of wdskit
            msg = "a loader in a worker of torch's DataLoader: each of these workers would yield every sample."
            raise PipelineError(f"{msg}\n  Use the loader in place of the DataLoader, with `workers`.")
        if self._running is not None and self._running.gi_running:
            raise PipelineError("another thread waits for an item of this loader. Make a second loader.")
        self._end_running()
        self._check_rank()
        items = self._running = self._items()
        _loaders.add(self)
        self._is_in_epoch, self._next_epoch = True, None
        try:
            for item in items:
                if self._running is not items:
                    break
                self._num_items += 1
                yield item
                del item
            if self._running is not items:
                raise PipelineError(_ENDED)  # noqa: TRY301
        except Exception as err:
            if threading.current_thread().daemon and not threading.main_thread().is_alive():
                raise SystemExit from err  # the program ends: its workers have ended, and Python ends such a thread
            if self._running is items:
                self._close_pool()
                raise
            raise PipelineError(_ENDED) from None  # the pool was closed during a wait
        finally:
            if self._running is items:
                self._end_running()
            elif not items.gi_running:  # otherwise `close` in another thread is ending it
                items.close()
        logger.info("%s", self._meter.stats().line())

    def _check_rank(self) -> None:
        """Raise RankError if the process group that exists now has another rank or world size than this loader.

        Nothing is checked if no process group exists, or if the caller passed rank and world size as arguments.
        """
        if self._is_rank_given or initialised_rank() is None:
            return
        now, own = group_rank(self._process_group), self._rank_info
        if now[:2] != own[:2]:
            msg = f"this loader reads for rank {own.rank} of {own.world_size}, but the process group has rank "
            raise RankError(f"{msg}{now.rank} of {now.world_size}.\n  Make the loader after init_process_group.")

    def _compare_ranks(self, state: Callable[[], dict[str, Any]], **settings: Any) -> None:
        """Raise RankError if the state or the settings of this rank differ from those of the rank of the process group
        that was first in this iteration. They decide the samples. So do the steps that a rank took before, because a
        rank that took more is in another epoch; only all samples of `sequential` are the same in each epoch.

        There is no collective call: the first rank writes its values into the group's store, and does not wait.
        """
        store = None if self._is_rank_given else group_store(self._process_group)
        if store is None:
            return
        found = own = {**state(), **settings}
        own |= own.pop("fingerprint", {}) | {"digest": None}  # it would differ with each other field
        if own["source"] != "sequential" or own.get("with_epoch") or own.get("buckets"):
            own["number of steps so far"] = self._num_items
        with contextlib.suppress(RuntimeError):  # the rank that has the store has ended
            key = f"{self._meter.name}/{self._number}/{next(self._iterations)}"
            found = json.loads(store.compare_set(key, "", json.dumps(own)))
        if differing := differences(own, found):
            msg = f"{self._meter.name}: this rank and another one read different samples: {'; '.join(differing)}."
            raise RankError(f"{msg}\n  Give all ranks the same settings, data, epoch, state and steps.")


class _Sampler:
    """A stand-in for a DistributedSampler, on which frameworks call `set_epoch`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch as `Loader.set_epoch` does, for a framework that counts epochs itself, such as Lightning.

        After a state was loaded, `epoch` may differ by one from the epoch of the state:
        - `epoch` is one less if the framework saved the state before it counted the finished epoch. The loader keeps
          the epoch of the state.
        - `epoch` is one more if the framework ended the epoch early (`limit_train_batches`). The loader takes `epoch`.

        Raises:
            PipelineError: `epoch` is not a whole number from 0 to 10**9.
            StateError: `epoch` differs from the epoch of the state in another way.
        """
        self._loader._set_next(epoch, is_counted_elsewhere=True)  # noqa: SLF001 (a part of the loader)


class PlannedLoader(Loader):
    """The loader of a planned source. Each iteration is one epoch, with the same number of items on every rank.

    `state_dict` is the position of the consumer, the same on every rank except the count of bad samples. A loader with
    any number of ranks, workers and threads can load this state, and then continues the sequence of samples there.

    Args:
        program: The pipeline, built for this rank.
        spec: The settings: workers, prefetch and so on.
        errors: The settings `errors`: how many bad samples an epoch may have.
        origin: Keyword arguments for the constructor of `Loader`: `name`, `stages` and so on.

    Attributes:
        most_ahead: Largest number of batches that are made before the consumer asks for them.

    Raises:
        PipelineError: A stage cannot be sent to the workers, `start_method` is "fork" and forking is impossible, Ray is
            not installed and `on` is set, or `device` does not exist.
        OSError: The folder `errors.dir` cannot be made.
    """

    def __init__(self, program: Program, spec: LoaderSpec, errors: ErrorsSpec, **origin: Any) -> None:
        super().__init__(program.run.rank_info, spec, **origin)
        self._mover, self.program, self.dataset = make_mover(spec), program, program
        layout, (rank, world_size, _) = program.epoch, self._rank_info
        self._counter = EpochCounter(layout, world_size=world_size)
        logs_dropped = rank == 0 and layout.fingerprint.get("source") != "resampled"
        if logs_dropped and (dropped := layout.steps(world_size).describe_dropped()):
            logger.warning("%s: %s", self._meter.name, dropped)
        num_samples = layout.num_samples // world_size
        self._budget = Budget(errors, name=self._meter.name, rank=rank, num_samples=num_samples)
        keep_freed_memory()
        pool: type[Pool] = ProcessPool if spec.workers else LocalPool
        if spec.on is not None:
            from wdskit.loader.ray import RayPool

            pool = RayPool
        self._pool = pool(program, spec)
        self._steps_per_job, self._num_ahead = jobs_ahead(spec, program)
        self._waiting: deque[tuple[Job, Any]] = deque()  # started jobs and their tickets
        self._made: deque[Batch] = deque()  # of the current job, not yielded yet
        self.most_ahead = self._num_ahead * self._steps_per_job + self._steps_per_job - 1

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
        return {**self._counter.state_dict(), "bad": bad, "bad_rank": [*self._rank_info[:2]] if bad else None}

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
        state = self._counter.load_state_dict(state, strict=strict)
        self._is_in_epoch = False
        self._budget = copy.copy(self._budget)  # a running iteration keeps the old budget
        self._budget.count = state["bad"] if state.get("bad_rank") == [*self._rank_info[:2]] else 0

    def _items(self) -> Any:
        running, budget, layout = self._counter.begin(), self._budget, self.program.epoch
        self._compare_ranks(self._counter.state_dict, batch=layout.batch, tail=layout.tail)
        self.program.run.epoch = running.epoch  # workers that start now seed their generators with it
        if not running.steps.consumed:
            budget.count = 0
        num_steps, step = len(running.steps), 0
        self._meter.begin(running.epoch)
        batches = self._batches(running)
        try:
            for batch in batches if self._mover is None else move_ahead(batches, self._mover, self._is_ready):
                budget.spend(running.epoch, batch.bad)
                self._meter.received(batch.num_samples, replaced=len(batch.bad), timings=batch.timings)
                self._counter.received(running, step)
                step += 1
                if step == num_steps:
                    budget.count = 0
                    self._end_epoch()
                value = batch.value
                del batch
                yield value
                del value
                self._meter.asked()
        except GeneratorExit:  # the consumer has left the epoch
            raise
        except BaseException:
            self._close_pool()
            raise
        finally:
            self._counter.end(running)
            if not self.spec.persistent_workers:
                self._close_pool()
            self._forget(self._waiting if step < num_steps else deque())

    def _batches(self, running: Pass) -> Generator[Batch, None, None]:
        """Yield the batches of a pass. Jobs are started ahead of the consumer, at the end also jobs of the next pass.

        Raises:
            BaseException: The error of a batch, after the batches before it. Or an error of the pool.
        """
        jobs = self._jobs(running)
        started = [job for job, _ in self._waiting]
        if started != list(itertools.islice(jobs, len(started))):
            self._forget(self._waiting)
            jobs = self._jobs(running)
        for left in reversed(range(-(-len(running.steps) // self._steps_per_job))):
            self._start_jobs(jobs, 1)
            _, ticket = self._waiting.popleft()
            # At the end of an epoch, two jobs of the next epoch are made, and kept while other loaders run.
            self._start_jobs(jobs, min(self._num_ahead, left + 2))
            outcome = self._pool.take(ticket)
            self._made, outcome.value = deque(outcome.value or ()), None
            while self._made:
                yield self._made.popleft().with_tensors()  # no reference is kept here
            outcome.result()

    def _jobs(self, running: Pass) -> Iterator[Job]:
        """Yield the jobs of a pass. If the workers stay alive between epochs, the jobs of the next pass follow."""
        next_passes = [self._counter.following(running)] if self.spec.persistent_workers else []
        for epoch, start, steps in (running, *next_passes):
            for first in range(0, len(steps), self._steps_per_job):
                stop = min(first + self._steps_per_job, len(steps))
                yield Job(start, steps, first, stop, epoch)

    def _start_jobs(self, jobs: Iterator[Job], number: int) -> None:
        """Start the next jobs of `jobs`, until `number` started jobs wait for the consumer or `jobs` ends."""
        for job in itertools.islice(jobs, max(0, number - len(self._waiting))):
            self._waiting.append((job, self._pool.submit(job)))

    def _is_ready(self) -> bool:
        """Return True if the next batch comes without a wait."""
        return bool(self._made) or (bool(self._waiting) and self._pool.is_ready(self._waiting[0][1]))

    def _forget(self, waiting: deque[tuple[Job, Any]]) -> None:
        """Drop batches that were not yielded, cancel started jobs, and let the pool free its memory."""
        self._made.clear()
        self._pool.forget([ticket for _, ticket in waiting])
        waiting.clear()

    def _close_pool(self) -> None:
        self._pool.close()
        self._waiting.clear()


def jobs_ahead(spec: LoaderSpec, program: Program) -> tuple[int, int]:
    """Return (number of batches in a job, number of jobs that are made before the consumer asks for them).

    Without workers, with one thread and local shards, the number of jobs is 0. Otherwise, if `spec.prefetch` is set,
    all these jobs together have at most `spec.prefetch` batches, or two per worker if this is more. If `spec.prefetch`
    is None, a job has several batches if the batches are small and the epoch has many, and the number of jobs is
    `DEFAULT_PREFETCH`, or two per worker if this is more.
    """
    size, workers, num_threads = program.batches_a_job, max(1, spec.workers), program.run.num_threads
    if not spec.workers and num_threads == 1 and not program.reader.is_remote:
        return size, 0
    if not program.reader.is_remote:  # jobs with fewer samples would request some bytes of a store several times
        num_steps = len(program.epoch.steps(program.run.rank_info.world_size))
        # At least four jobs a worker, if the epoch has enough batches, so that all have work up to its end.
        size = max(1, min(size, num_steps // (4 * workers)))
    most = max(spec.prefetch or max(DEFAULT_PREFETCH, workers * (num_threads + 1)), 2 * spec.workers)
    if spec.prefetch is None:
        return size, most
    size = min(size, max(1, most // (2 * workers + 1)))  # the consumer has one more job
    return size, (most + 1 - size) // size
