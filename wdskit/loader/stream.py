"""The loader of streams. Its worker processes continue the stream from epoch to epoch."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from wdskit.engine.batch import Batch
from wdskit.engine.stream import StreamBatches, StreamJob, StreamPipeline, check_splits, empty_epoch
from wdskit.errors import PipelineError, StateError
from wdskit.loader.base import Loader
from wdskit.loader.budget import Budget
from wdskit.loader.device import move_ahead, pin_mover
from wdskit.loader.pools import make_pool
from wdskit.loader.start_method import start_method_of
from wdskit.loader.state import add_digest, compare_fingerprints, unused_state
from wdskit.pipeline.settings import DEFAULT_PREFETCH, ErrorsSpec, LoaderSpec
from wdskit.storage.urls import is_local

logger = logging.getLogger(__name__)

STATE_VERSION = 1
_MAX_EPOCH = 1 << 30  # a stream numbers its draws with 63 bits, of which 30 hold the epoch
_NO_EPOCH = -2  # -1 is not the number of an epoch, so that no epoch follows it


class StreamLoader(Loader):
    """The loader of a stream. Each iteration is one epoch of the items that its worker processes yield.

    The workers live as long as the loader, so that an epoch of `with_epoch` continues the stream where the last epoch
    ended. The state is only the number of the epoch. After a `break`, or after a state was loaded, the workers start a
    new stream, whose shards and random numbers depend on the seed and on the number of the epoch.

    Args:
        pipeline: The pipeline, built for this rank.
        spec: The settings: workers, prefetch and so on.
        errors: The settings `errors`: how many bad samples an epoch may have; None for the defaults. Bad samples are
            skipped.
        origin: Keyword arguments for the constructor of `Loader`: `name`, `stages` and so on.

    Raises:
        PipelineError: The splits or the length do not fit the ranks and workers, a stage cannot be sent to the workers,
            `start_method` is "fork" and forking is impossible, or `errors.dir` is not a folder.
    """

    def __init__(
        self, pipeline: StreamPipeline, spec: LoaderSpec, errors: ErrorsSpec | None = None, **origin: Any
    ) -> None:
        super().__init__(pipeline.run.rank_info, spec, **origin)
        self.pipeline = pipeline
        self._epoch = 0
        self._is_loaded = False  # a loaded state has not been used yet
        self._finished_epoch = _NO_EPOCH  # the last epoch, if the consumer received all of it and no later epoch began
        self._started_epoch: int | None = None  # the epoch that began last
        self._num_received = 0  # items of this epoch
        self._has_warned = False
        self._budget = Budget(errors or ErrorsSpec(), name=self._meter.name, rank=self._rank_info.rank, num_samples=0)
        self._waiting: deque[tuple[int, Any]] = deque()  # workers and the tickets of their jobs, in turn
        layout, count = pipeline.layout, self._num_items()
        check_splits(pipeline.pipeline, layout, self._rank_info.world_size, max(1, spec.workers))
        if layout.length is not None and count is not None and layout.length != count:
            raise PipelineError(f"with_length says {layout.length}, but an epoch of this rank has {count} items.")
        shards = getattr(pipeline.parts[0], "shards", None)  # another library's source has none
        reads_store = not all(map(is_local, shards.urls if shards else ()))
        start_method = functools.partial(start_method_of, pipeline.parts, spec.start_method, reads_store=reads_store)
        self._pool = make_pool(pipeline, StreamBatches, spec.workers, start_method, spec.timeout)
        self._mover = pin_mover(spec)

    @property
    def epoch(self) -> int:
        """Number of the running epoch. Between two iterations: number of the epoch that the next iteration runs.

        The number of the next epoch is set just before the last item is yielded. If the number of items is unknown, the
        number is set after the last item.
        """
        return self._epoch

    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        if self._is_loaded and epoch != self._epoch:
            # A framework's own count is one less than a state that was saved with the last batch of an epoch, and one
            # more than a state that was saved in an epoch which the framework ended early.
            if not is_counted_elsewhere or abs(epoch - self._epoch) > 1:
                raise unused_state(epoch, self._epoch)
            if epoch < self._epoch:
                return
            self._is_loaded = False
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of items of a whole epoch on this rank.

        Raises:
            TypeError: The stages do not define the length of an epoch.
        """
        count = self._num_items()
        length = count if self.pipeline.layout.length is None else self.pipeline.layout.length
        if length is None:
            way = "Add with_epoch or" if self.pipeline.layout.cut is None else "Put with_epoch last, or add"
            raise TypeError(f"the stages of this pipeline do not define its length. {way} with_length.")
        return length

    @property
    def remaining(self) -> int:
        """Number of items of the running or next epoch (see `epoch`) that the consumer has not received yet; 0 if the
        epoch has more items than `with_length` says.

        Raises:
            TypeError: The stages do not define the length of an epoch.
        """
        return max(0, len(self) - (self._num_received if self._epoch == self._started_epoch else 0))

    def state_dict(self) -> dict[str, Any]:
        """Return a state with the number of the running or next epoch, as plain JSON, the same on every rank.

        A run that loads the state starts this epoch from its beginning. With `with_epoch`, the samples may differ
        from the samples of this run. The first call in the middle of an epoch logs a warning about this.
        """
        if not self._has_warned and self._epoch == self._started_epoch and self._num_received:
            self._has_warned = True
            logger.warning(
                "the state of a stream is the start of its epoch: a resumed run starts epoch %d with new draws. To "
                "resume at any step, index the shards (`wdskit index FOLDER`) and use the source `exact`",
                self._epoch,
            )
        fingerprint = add_digest(self.pipeline.layout.fingerprint)
        return {"version": STATE_VERSION, "epoch": self._epoch, "fingerprint": fingerprint}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Let the next iteration start the epoch of a saved state, from its beginning.

        Args:
            state: Result of `state_dict`, on any number of ranks, workers and threads.
            strict: If True, refuse a state that belongs to another order of samples. If False, load this state too and
                log the difference.

        Raises:
            StateError: `state` is not the state of a stream, or `strict` is True and the state belongs to another order
                of samples. The message names the difference.
        """
        given: Any = state
        if isinstance(given, Mapping) and "consumed" in given:
            raise StateError("this is the state of a planned source, such as `exact`, not of a stream.")
        if not isinstance(given, Mapping) or given.get("version") != STATE_VERSION:
            raise StateError(f"this is not the state of a stream of version {STATE_VERSION}.")
        epoch, fingerprint = given.get("epoch"), given.get("fingerprint")
        if type(epoch) is not int or not 0 <= epoch < _MAX_EPOCH:
            raise StateError(f"state: epoch is {epoch!r}, not a whole number from 0 to {_MAX_EPOCH - 1}.")
        if not isinstance(fingerprint, Mapping):
            raise StateError("state: fingerprint is missing.")
        compare_fingerprints(self.pipeline.layout.fingerprint, fingerprint, strict=strict)
        self._epoch, self._is_loaded = epoch, True
        self._started_epoch = None
        self._is_in_epoch = False

    def _items(self) -> Any:
        epoch = self._epoch
        continues = epoch == self._finished_epoch + 1 and not self._is_loaded
        self._started_epoch, self._is_loaded, self._num_received = epoch, False, 0
        self._finished_epoch = _NO_EPOCH
        expected = self._num_items()
        self._meter.begin(epoch)
        batches = self._take(StreamJob(epoch, is_first=True, continues=continues))
        moved = batches if self._mover is None else move_ahead(batches, self._mover, self._is_ready)
        num_items = 0
        self._budget.count = 0
        for batch in moved:
            self._spend(epoch, batch)
            if batch.is_end:
                continue
            num_items += 1
            if self._started_epoch == epoch:  # and no state was loaded since
                self._num_received = num_items
            if num_items == expected:  # before the last item is yielded: a state that is saved then has the next epoch
                for end in moved:  # let each worker reach its end
                    self._spend(epoch, end)
                    num_items += not end.is_end
                self._check_length(epoch, num_items, expected)
                self._finish(epoch)
            self._meter.received(batch.num_samples, timings=batch.timings)
            value = batch.value
            del batch
            yield value
            del value
            self._meter.asked()
        if not expected or self._budget.count:  # skipped samples after `with_epoch` make an epoch shorter
            if num_items == 0:
                raise empty_epoch(epoch, num_bad=self._budget.count)
            self._finish(epoch)
        else:
            self._check_length(epoch, num_items, expected)

    def _spend(self, epoch: int, batch: Batch) -> None:
        self._budget.spend(epoch, batch.bad)
        self._meter.count_replaced(len(batch.bad))

    def _take(self, job: StreamJob) -> Iterator[Batch]:
        """Yield the items of an epoch, one from each worker in turn. After the last item of each worker, yield a batch
        with `is_end`, which is not an item. An error of a worker is raised in place of its item.
        """
        pool = self._pool
        turns = range(max(1, self.spec.workers))
        waiting = self._waiting = deque()
        following = StreamJob(job.epoch)
        try:
            waiting += [(worker, pool.submit(job, worker)) for worker in turns]
            for _ in range(1, (self.spec.prefetch or DEFAULT_PREFETCH) if self.spec.workers else 1):
                waiting += [(worker, pool.submit(following, worker)) for worker in turns]
            while waiting:
                worker, ticket = waiting[0]
                outcome = pool.take(ticket)
                waiting.popleft()
                batches = outcome.result()
                if not batches:  # the worker had reached its end before
                    continue
                if not batches[0].is_end:
                    waiting.append((worker, pool.submit(following, worker)))
                yield batches.pop()  # no reference is kept here
        finally:
            pool.forget([ticket for _, ticket in waiting])
            waiting.clear()
            pool.free_memory()

    def _is_ready(self) -> bool:
        return bool(self._waiting) and self._pool.is_ready(self._waiting[0][1])

    def _close_pool(self) -> None:
        self._pool.close()

    def _finish(self, epoch: int) -> None:
        if self._is_in_epoch:  # and no state was loaded since
            self._finished_epoch = epoch
            self._epoch = epoch + 1
            self._end_epoch()

    def _check_length(self, epoch: int, num_items: int, expected: int) -> None:
        if num_items != expected:
            raise PipelineError(f"epoch {epoch} ended after {num_items} of {expected} items.")

    def _num_items(self) -> int | None:
        return self.pipeline.num_items(self.spec.workers)
