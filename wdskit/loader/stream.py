"""The loader of streams: torch's DataLoader runs the pipeline.

`StreamPipeline.check` in engine/stream.py refuses a stream whose ranks would end at different steps.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from wdskit.engine.stream import StreamPipeline
from wdskit.errors import PipelineError, StateError
from wdskit.loader.budget import Budget
from wdskit.loader.loader import MAX_EPOCH, Loader
from wdskit.loader.start_method import StartMethod, check_guard, prepare_start
from wdskit.loader.state import plain_state, unused_state
from wdskit.loader.worker import seed_worker
from wdskit.pipeline.settings import DEFAULT_PREFETCH, ErrorsSpec, LoaderSpec
from wdskit.processes import Outcome, block_sigint, end_with_parent
from wdskit.stages.run import RejectedSample
from wdskit.storage.urls import is_local
from wdskit.text import plural

_END = object()
STATE_VERSION = 1
_PATIENCE_S = 0.5  # for workers to finish their sample


class StreamLoader(Loader):
    """The loader of a stream. Each iteration is one epoch of the items that its worker processes yield.

    An epoch of `with_epoch` continues the stream where the last epoch ended, if the workers are persistent and the
    consumer received all of the last epoch. Otherwise the stream starts anew, with shards and random numbers that
    depend on the seed and the number of the epoch. The state is only the number of the epoch.

    Args:
        pipeline: The pipeline, built for this rank.
        spec: The settings: workers, prefetch and so on.
        errors: The settings `errors`: how many bad samples an epoch may have; None for the defaults. Bad samples are
            skipped.
        origin: Keyword arguments for the constructor of `Loader`: `name`, `stages` and so on.

    Raises:
        PipelineError: The splits or the length do not fit the ranks and workers, a stage cannot be sent to the workers,
            `start_method` is "fork" and forking is impossible, or a setting is not for streams.
        OSError: The folder `errors.dir` cannot be made.
    """

    def __init__(
        self, pipeline: StreamPipeline, spec: LoaderSpec, errors: ErrorsSpec | None = None, **origin: Any
    ) -> None:
        super().__init__(pipeline.run.rank_info, spec, **origin)
        self.pipeline = pipeline
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None  # of `_loader`; it has the workers
        self._epoch = 0
        self._is_loaded = False  # a loaded state has not been used yet
        self._is_left = False  # the consumer has left the epoch early
        self._next_whole = -1  # the epoch after the last one, if the consumer received all of that
        self._num_received = 0  # items of the running epoch
        self._budget = Budget(errors or ErrorsSpec(), name=self._meter.name, rank=self._rank_info.rank, num_samples=0)
        pipeline.check(max(1, spec.workers))
        if spec.device is not None:
            raise PipelineError("device: a stream's batches stay in this machine's memory. Move them in your loop.")
        if spec.timeout and not spec.workers:
            raise PipelineError("timeout: without workers, nothing watches a stream. Set `workers`.")
        self._prepare_start()

    @property
    def epoch(self) -> int:
        """Number of the running epoch. Between two iterations: number of the epoch that the next iteration runs.

        The number of the next epoch is set just before the last item is yielded, or when an iteration is left early. If
        the number of items is unknown, the number is set after the last item.
        """
        return self._epoch + self._is_left

    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        if self._is_loaded and epoch != self._epoch:
            # A framework's own count is one less than a state that was saved with the last batch of an epoch, and one
            # more than a state that was saved in an epoch which the framework ended early.
            if not is_counted_elsewhere or abs(epoch - self._epoch) > 1:
                raise unused_state(epoch, self._epoch)
            if epoch < self._epoch:
                return
        self._epoch, self._is_left = epoch, False

    def __len__(self) -> int:
        """Return the number of items of a whole epoch on this rank, which `with_length` or `with_epoch` sets.

        Raises:
            TypeError: The pipeline has neither `with_length` nor `with_epoch`.
        """
        length = self.pipeline.fixed_length or self.pipeline.num_items
        if length is None:
            raise TypeError("the stages of this pipeline do not define its length. Add with_epoch or with_length.")
        return length

    @property
    def remaining(self) -> int:
        """Number of items of the running or next epoch (see `epoch`) that the consumer has not received yet; 0 if the
        epoch has more items than `with_length` says.

        Raises:
            TypeError: The stages do not define the length of an epoch.
        """
        return max(0, len(self) - self._num_received)

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the number of the epoch, as plain JSON, the same on every rank.

        A run that loads the state starts this epoch from its beginning. With `with_epoch`, the samples may differ
        from the samples of this run.
        """
        return {"version": STATE_VERSION, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:  # noqa: ARG002
        """Let the next iteration start the epoch of a saved state, from its beginning.

        Args:
            state: Result of `state_dict`, on any number of ranks and workers.
            strict: Has no effect: the state of a stream is only the number of an epoch.

        Raises:
            StateError: `state` is not the state of a stream.
        """
        given = plain_state(state)
        if "consumed" in given:
            raise StateError("this is the state of a planned source, such as `exact`, not of a stream.")
        version, epoch = given.get("version"), given.get("epoch")
        if version != STATE_VERSION or type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH:
            raise StateError(f"this is not the state of a stream: version is {version!r}, epoch is {epoch!r}.")
        self._epoch, self._is_loaded, self._is_left = epoch, True, False
        self._num_received = 0
        self._is_in_epoch = False

    def _items(self) -> Iterator[Any]:
        epoch = self._epoch = self.epoch
        self._is_loaded = self._is_left = False
        self.pipeline.clock.set(epoch, is_start=epoch != self._next_whole)
        self._next_whole = -1
        self._budget.count = self._num_received = num_items = 0
        self._meter.begin(epoch)
        received = self._received(epoch)
        try:
            for num_items, item in enumerate(received, 1):
                if self._is_in_epoch:  # and no state was loaded since
                    self._num_received = num_items
                if num_items == self.pipeline.num_items:
                    self._finish(epoch, received)  # before the last item is yielded: a state then has the next epoch
                self._meter.received(item.num_samples)
                value = item.made.result()
                del item
                yield value
                del value
                self._meter.asked()
            if num_items == 0:
                why = f"the pipeline dropped all of them ({plural(self._budget.count, 'bad sample')})"
                raise PipelineError(f"epoch {epoch} is empty: the shards hold no samples, or {why}.")
            if self.pipeline.num_items is None:
                self._finish(epoch, received)
            elif num_items < self.pipeline.num_items:
                msg = f"with_epoch: the stream ended after {num_items} of {self.pipeline.num_items} items of an epoch."
                raise PipelineError(f"{msg}\n  No stage before with_epoch can end the stream.")
        finally:
            self._is_left = self._is_in_epoch and self._num_received > 0

    def _finish(self, epoch: int, received: Iterator[Item]) -> None:
        """Let the next epoch begin, after the ends of all workers."""
        next(received, None)
        if self._is_in_epoch:
            self._epoch = self._next_whole = epoch + 1
            self._num_received = 0
            self._end_epoch()

    def _received(self, epoch: int) -> Iterator[Item]:
        """Yield the items of the workers, one of each worker in turn. An error of a worker is raised in its place."""
        with block_sigint():
            if self._loader is None or not self.spec.persistent_workers:
                self._loader = self._make_loader()
            items = self._iterator = iter(self._loader)
        try:
            while True:
                try:
                    item = next(items, None)
                except RuntimeError as err:  # torch's: a worker was killed, or no item came within `timeout`
                    self._end_workers()
                    raise PipelineError(str(err)) from err
                if item is None:
                    return
                self._budget.spend(epoch, item.bad)
                self._meter.count_replaced(len(item.bad))
                if item.num_samples:
                    yield item
                else:
                    item.made.result()
        finally:
            if not self.spec.persistent_workers:
                self._end_workers()

    def _make_loader(self) -> DataLoader[Any]:
        """Return a DataLoader whose next iteration starts the workers."""
        spec, method = self.spec, self._prepare_start()
        if method is not None:
            check_guard(method)
        return DataLoader(
            _Items(self.pipeline),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=spec.workers,
            prefetch_factor=(spec.prefetch or DEFAULT_PREFETCH) if spec.workers else None,
            persistent_workers=spec.persistent_workers and spec.workers > 0,
            multiprocessing_context=method and method.name,
            timeout=spec.timeout or 0,
            worker_init_fn=functools.partial(_start_worker, self.pipeline, spec.workers),
            pin_memory=spec.pin_memory and torch.cuda.is_available(),
            generator=torch.Generator(),  # otherwise it draws from the program's own
        )

    def _prepare_start(self) -> StartMethod | None:
        """Check that the workers can start, and return how they start; None without workers."""
        if not self.spec.workers:
            return None
        reads_store = not all(map(is_local, self.pipeline.source.urls))
        return prepare_start(self.pipeline.pipeline, self.spec.start_method, reads_store=reads_store)

    def _close_pool(self) -> None:
        self._end_workers()
        self._next_whole = -1
        self.pipeline.close()

    def _end_workers(self) -> None:
        """End the workers. A worker that hangs is killed: torch would wait 5 s for it."""
        iterator, self._iterator, self._loader = self._iterator, None, None
        if not getattr(iterator, "_worker_pids_set", False):
            return
        with block_sigint():  # torch has no public names for these
            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # noqa: SLF001
            iterator._worker_pids_set = False  # noqa: SLF001
            killer = threading.Timer(_PATIENCE_S, lambda: [each.kill() for each in iterator._workers])  # noqa: SLF001
            killer.start()
            iterator._shutdown_workers()  # noqa: SLF001
            killer.cancel()


class Item(NamedTuple):
    """An item on its way from a worker.

    Attributes:
        made: The item, or the error of the pipeline; None at the end of a worker's epoch.
        num_samples: Number of samples in the item; 0 with an error or at the end.
        bad: The samples that were skipped before this item.
    """

    made: Outcome[Any]
    num_samples: int
    bad: tuple[RejectedSample, ...]


class _Items(IterableDataset[Item]):
    """The items of a stream's epoch, and an end or error after them."""

    def __init__(self, pipeline: StreamPipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[Item]:
        run, num_bad = self._pipeline.run, 0
        values = self._pipeline.items(self._pipeline.clock.epoch)
        while True:
            made: Outcome[Any] = Outcome.of(next, values, _END)
            if made.error is not None or made.value is _END:
                break
            yield Item(made, run.num_samples, tuple(run.bad[num_bad:]))
            num_bad = len(run.bad)
        end = Item(Outcome(error=made.error, where=f"worker {run.worker}"), 0, tuple(run.bad[num_bad:]))
        del made, values  # the traceback of the error refers to the loader, a cycle
        yield end


def _start_worker(pipeline: StreamPipeline, num_workers: int, number: int) -> None:
    """Prepare a worker process: it ends with the main process, and its generators are seeded as for all sources."""
    end_with_parent()
    pipeline.run.epoch = pipeline.clock.epoch
    seed_worker(pipeline, number, num_workers)


def _unchanged(item: Any) -> Any:
    return item
