"""The loader of streams: torch's DataLoader runs the pipeline.

`StreamPipeline.check` in engine/stream.py refuses a stream whose ranks would end at different steps.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import webdataset
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from wdskit.engine.outcome import Outcome
from wdskit.engine.stream import StreamPipeline
from wdskit.errors import PipelineError, StateError
from wdskit.limits import MAX_EPOCH
from wdskit.loader.budget import Budget
from wdskit.loader.loader import Loader
from wdskit.loader.start_method import StartMethod, check_guard, prepare_start
from wdskit.loader.state import STATE_VERSION, differences, plain_state, refuse_state, unused_state
from wdskit.pipeline.settings import DEFAULT_PREFETCH, ErrorsSpec, LoaderSpec
from wdskit.processes import block_sigint, end_with_parent
from wdskit.stages.run import RejectedSample
from wdskit.storage.urls import is_local
from wdskit.text import plural

_END = object()
_PATIENCE_S = 0.5  # for workers to finish their sample


class StreamLoader(Loader):
    """The loader of a stream. Each iteration is one epoch of the items that its worker processes yield.

    An epoch of `with_epoch` continues the stream where the last epoch ended, if the workers are persistent and the
    consumer received all of the last epoch. Otherwise the stream starts anew, with shards and random numbers that
    depend on the seed and the number of the epoch. A state is the start of an epoch.

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
        self._following: int | None = None  # the epoch with which `_iterator` continues
        self._num_received = 0  # items of the running epoch, or of the epoch that the consumer has left early
        self._budget = Budget(errors or ErrorsSpec(), name=self._meter.name, rank=self._rank_info.rank, num_samples=0)
        pipeline.check(max(1, spec.workers))
        if spec.device is not None:
            raise PipelineError("device: a stream's batches stay in this machine's memory. Move them in your loop.")
        self._prepare_start()

    @property
    def epoch(self) -> int:
        """Number of the running epoch. Between two iterations: number of the epoch that the next iteration runs.

        The number of the next epoch is set just before the last item is yielded, or when an iteration is left early. If
        the number of items is unknown, the number is set after the last item.
        """
        return self._epoch + (self._num_received > 0 and not self._is_in_epoch)

    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        if self._is_loaded and epoch != self._epoch:
            # A framework's own count is one less than a state that was saved with the last batch of an epoch, and one
            # more than a state that was saved in an epoch which the framework ended early.
            if not is_counted_elsewhere or abs(epoch - self._epoch) > 1:
                raise unused_state(epoch, self._epoch)
            epoch = max(epoch, self._epoch)
        self._epoch, self._num_received = epoch, 0

    def __len__(self) -> int:
        """Return the number of items of a whole epoch on this rank, which `with_length` or `with_epoch` sets.

        Raises:
            TypeError: The pipeline has neither `with_length` nor `with_epoch`.
        """
        length = self.pipeline.fixed_length or self.pipeline.run.num_items
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
        return max(0, len(self) - (self._num_received if self._is_in_epoch else 0))

    def state_dict(self) -> dict[str, Any]:
        """Return a state as plain JSON, the same on every rank: the number of the epoch, and what decides the order of
        the shards (see `StreamSource.fingerprint`).

        A run that loads the state starts this epoch from its beginning. With `with_epoch`, the samples may differ
        from the samples of this run.
        """
        return {"version": STATE_VERSION, "epoch": self._epoch, **self.pipeline.source.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Let the next iteration start the epoch of a saved state, from its beginning.

        Args:
            state: Result of `state_dict`, on any number of ranks and workers.
            strict: If True, refuse a state of another source. If False, load this state too and log the difference.

        Raises:
            StateError: `state` is not the state of a stream, or `strict` is True and the stream has another seed, other
                shards or another order. The message names the difference.
        """
        given = plain_state(state)
        epoch: Any = given.get("epoch")
        if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH:
            raise StateError(f"this is not the state of a stream: epoch is {epoch!r}.")
        if differing := differences({**self.state_dict(), "epoch": epoch}, given):
            refuse_state(differing, strict=strict)
        self._epoch, self._num_received = epoch, 0
        self._is_loaded, self._is_in_epoch = True, False

    def _items(self) -> Iterator[Any]:
        self._epoch += self._num_received > 0  # the last epoch was left
        self._compare_ranks(self.state_dict, batch=self.batch_size, with_epoch=self.pipeline.run.num_items)
        epoch, num_wanted = self._epoch, self.pipeline.run.num_items
        self._budget.count = self._num_received = num_items = 0
        if num_wanted is None or epoch != self._following:
            self.pipeline.set_epoch(epoch)
            if self._loader is None:
                self._loader = self._make_loader(epoch)
            with block_sigint():
                self._iterator = iter(self._loader)  # starts the workers, or resets persistent ones
        self._is_loaded, self._following = False, None
        self._meter.begin(epoch)
        try:
            for num_items, item in enumerate(itertools.islice(self._received(epoch), num_wanted), 1):
                self._num_received = num_items if self._is_in_epoch else 0  # 0: a state was loaded since
                if num_items == num_wanted:
                    self._finish(epoch)  # before the last item is yielded: a state then has the next epoch
                self._meter.received(item.num_samples)
                value = item.value
                del item
                yield value
                del value
                self._meter.asked()
            if num_items < (num_wanted or 1):
                why = f"the shards have no more samples, or a stage dropped them: {self._budget.count} were bad"
                raise PipelineError(f"epoch {epoch} ended after {plural(num_items, 'item')}: {why}.")
            if num_wanted is None:
                self._finish(epoch)
        finally:
            if not self.spec.persistent_workers:
                self._close_pool()

    def _finish(self, epoch: int) -> None:
        """Let the next epoch begin, unless a state was loaded in this epoch."""
        if self._is_in_epoch:
            self._epoch = self._following = epoch + 1
            self._num_received = 0
            self._end_epoch()

    def _received(self, epoch: int) -> Iterator[Item]:
        """Yield the items of the workers, one of each worker in turn. An error of a worker is raised in its place."""
        while True:
            try:
                item = next(self._iterator, None)
            except (EOFError, OSError, RuntimeError) as err:  # a worker was killed, or no item came within `timeout`
                raise PipelineError(f"a worker of the stream: {err}") from err
            if item is None:
                return
            self._budget.spend(epoch, item.bad)
            self._meter.count_replaced(len(item.bad))
            if item.end is None:
                yield item
            else:
                item.end.result()

    def _make_loader(self, epoch: int) -> DataLoader[Any]:
        """Return a DataLoader whose first iteration starts the workers."""
        spec, run, method = self.spec, self.pipeline.run, self._prepare_start()
        check_guard(method)
        seed = zlib.crc32(repr((run.seed, run.rank_info.rank, epoch)).encode())
        return DataLoader(
            webdataset.DataPipeline(functools.partial(_items_of, self.pipeline)),
            batch_size=None,
            collate_fn=webdataset.utils.identity,
            num_workers=spec.workers,
            prefetch_factor=(spec.prefetch or DEFAULT_PREFETCH) if spec.workers else None,
            persistent_workers=spec.persistent_workers and spec.workers > 0,
            multiprocessing_context=method and method.name,
            timeout=(spec.timeout or 0) if spec.workers else 0,
            worker_init_fn=_start_worker,
            pin_memory=spec.pin_memory and torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(seed),  # torch seeds random, numpy and torch in each worker from it
        )

    def _prepare_start(self) -> StartMethod | None:
        """Check that the workers can start, and return how they start; None without workers."""
        if not self.spec.workers:
            return None
        reads_store = not all(map(is_local, self.pipeline.source.shards.urls))
        return prepare_start(self.pipeline.pipeline, self.spec.start_method, reads_store=reads_store)

    def _close_pool(self) -> None:
        """End the workers. A worker that hangs is killed: torch would wait 5 s for it."""
        iterator, self._iterator, self._loader, self._following = self._iterator, None, None, None
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
        value: The item; None after the last one.
        end: The error of the pipeline, or no error, after the last item; None with an item.
        num_samples: Number of samples in the item.
        bad: The samples that were skipped since the worker's last item.
    """

    value: Any
    end: Outcome[Any] | None
    num_samples: int
    bad: tuple[RejectedSample, ...]


def _items_of(pipeline: StreamPipeline) -> Iterator[Item]:
    """Yield the items of a stream from the start of an epoch on, and an end or error after them. With `with_epoch`
    there is no end: the consumer counts the items of each epoch.
    """
    run, epoch = pipeline.run, pipeline.epoch
    values = pipeline.values(epoch)
    for number in itertools.count(run.worker, run.num_workers):  # among the items of all workers of the rank
        run.epoch = epoch + number // (run.num_items or sys.maxsize)
        made: Outcome[Any] = Outcome.of(next, values, _END)
        bad, run.bad = tuple(run.bad), []
        if made.error is not None or made.value is _END:
            break
        yield Item(made.value, None, run.num_samples, bad)
    made.where, made.value = f"worker {run.worker}", None
    yield Item(None, made, 0, bad)


def _start_worker(_: int) -> None:
    end_with_parent()
