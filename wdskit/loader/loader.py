"""The loader: a pipeline run in worker processes, epoch by epoch, on one rank."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from wdskit.errors import PipelineError, RankError
from wdskit.loader.failures import Failure, Shipped
from wdskit.pipeline.ranks import group_place, initialised_place
from wdskit.pipeline.specs import LoaderSpec
from wdskit.pipeline.streaming import StreamPipeline, check_splits

logger = logging.getLogger(__name__)

_DEAD_WORKER = re.compile(r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (is killed|exited)")  # torch's words


class _Sampler:
    """Stands where frameworks look for a DistributedSampler."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """`loader.set_epoch`, which Lightning calls here."""
        self._loader.set_epoch(epoch)


class Loader:
    """Iterate it once an epoch; what a pipeline yields comes out, from any number of worker processes.

    `len(loader)` is the number of items of an epoch where that follows from the pipeline. Epochs count themselves on
    when they end; after a `break`, the same epoch starts again. It makes no collective call.

    Args:
        pipeline: Built for this rank, for at least `spec.workers` workers.
        spec: Workers, prefetch and the rest.
        process_group: The group that the rank came from, to compare with at the first item.
        told: Whether rank and world size were the caller's word, which no process group overrules.

    Attributes:
        epoch: The epoch that the next iteration runs, or the one that runs now. Settable through `set_epoch`.

    Raises:
        PipelineError: The pipeline cannot be run with these workers.
    """

    def __init__(
        self, pipeline: StreamPipeline, spec: LoaderSpec, *, process_group: Any = None, told: bool = False
    ) -> None:
        self.pipeline = pipeline
        self.spec = spec
        self.epoch = 0
        self._process_group = process_group
        self._told = told
        self._running: weakref.ref[Any] | None = None
        self._checked = False
        self._check()
        persistent = spec.persistent_workers and spec.workers > 0
        self._torch_loader: DataLoader[Any] = DataLoader(
            Shipped(pipeline),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=spec.workers,
            persistent_workers=persistent,
            prefetch_factor=spec.prefetch if spec.workers else None,
            pin_memory=spec.pin_memory and torch.cuda.is_available(),
        )
        weakref.finalize(self, _stop_persistent, self._torch_loader, os.getpid()).atexit = False  # torch has its own

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` >= 0 the one that the next iteration runs."""
        if type(epoch) is not int or epoch < 0:
            raise PipelineError(f"set_epoch({epoch!r}): an epoch is a whole number, 0 or more.")
        self.epoch = epoch

    @property
    def sampler(self) -> _Sampler:
        """Something with a `set_epoch`, as frameworks expect. Made on request: kept, it would be a cycle that outlives
        the loader.
        """
        return _Sampler(self)

    def __len__(self) -> int:
        """Items of a whole epoch on this rank.

        Raises:
            TypeError: It does not follow from the pipeline.
        """
        count = self._num_items()
        length = count if self.pipeline.layout.length is None else self.pipeline.layout.length
        if length is None:
            raise TypeError(
                "the length of this pipeline does not follow from its stages. Add with_epoch or with_length."
            )
        return length

    def __iter__(self) -> Iterator[Any]:
        """Start an iteration; nothing happens before the first item is asked for.

        Raises:
            PipelineError: Another iteration of this loader is still running.
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
        epoch = self.epoch
        self.pipeline.set_epoch(epoch)
        wanted = self._num_items()
        num_items = 0
        for item in self._from_workers():
            if isinstance(item, Failure):
                item.throw()
            if not self._checked:
                self._check_rank()
            num_items += 1
            if num_items == wanted:
                self.epoch = epoch + 1  # before the last item is out, so that a checkpoint taken with it goes on
            yield item
        if num_items != wanted:
            self._end(epoch, num_items, wanted)

    def _from_workers(self) -> Iterator[Any]:
        """What torch's loader yields.

        Raises:
            PipelineError: A worker process died.
        """
        loader = self._torch_loader
        if self.spec.workers and loader._iterator is None:  # noqa: SLF001 (torch says nowhere else if workers run)
            loader.multiprocessing_context = self._start_method()
        workers = iter(loader)
        try:
            yield from workers
        except RuntimeError as err:
            if not _DEAD_WORKER.match(str(err)):
                raise
            loader._iterator = None  # noqa: SLF001 (workers that persist would be asked again, though one is dead)
            _stop(workers, os.getpid())
            msg = f"a worker process died: {_death(err)}.\n  "
            raise PipelineError(f"{msg}Often memory ran out: try fewer workers, or a smaller shuffle.") from err
        finally:
            del workers  # a traceback kept by the user would keep the processes

    def _start_method(self) -> str:
        """How worker processes are to start now.

        Raises:
            PipelineError: They are to be forked, and CUDA is initialised.
        """
        said = self.spec.start_method
        # Asking for the default would settle it, and a later set_start_method of the user's would fail.
        default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if (said or default) != "fork" or not torch.cuda.is_initialized():
            return said or default
        if said is None:
            logger.info("CUDA is initialised, so workers are not forked: start_method is forkserver")
            return "forkserver"
        msg = "CUDA is initialised, so workers cannot be forked."
        raise PipelineError(f"{msg}\n  Use start_method: forkserver, or leave it out.")

    def _end(self, epoch: int, num_items: int, wanted: int | None) -> None:
        """The end of an epoch whose length was not known, or did not come true."""
        if wanted is not None:
            raise PipelineError(f"epoch {epoch} ended after {num_items} of {wanted} items.")
        if num_items == 0:
            msg = f"epoch {epoch} is empty: the shards hold no sample, or the pipeline dropped every one."
            raise PipelineError(f"{msg}\n  Look at its select and slice stages, and at `wdskit info` of the shards.")
        self.epoch = epoch + 1

    def _num_items(self) -> int | None:
        return self.pipeline.num_items(self.spec.workers)

    def _check(self) -> None:
        """Refuse at once what would fail, hang or lie later."""
        layout, workers = self.pipeline.layout, self.spec.workers
        check_splits(self.pipeline.pipeline, layout, self.pipeline.run.place.world_size, max(1, workers))
        count = self._num_items()
        if layout.length is not None and count is not None and layout.length != count:
            raise PipelineError(f"with_length says {layout.length}, but an epoch of this rank has {count} items.")
        if not workers:
            return
        if layout.cut is not None and layout.stateless and not self.spec.persistent_workers:
            msg = f"workers that do not persist cannot take over what {layout.stateless} holds when an epoch ends."
            raise PipelineError(f"{msg}\n  Use persistent_workers: true.")
        method = self._start_method()
        if method != "fork":
            _check_sendable(self.pipeline, method)

    def _check_rank(self) -> None:
        """Compare the captured rank with the process group that exists now.

        Raises:
            RankError: They differ.
        """
        self._checked = True
        if self._told:
            return
        now = group_place(self._process_group) if self._process_group is not None else initialised_place()
        place = self.pipeline.run.place
        if now is not None and now != place:
            msg = f"this loader reads for rank {place.rank} of {place.world_size}, but the process group says "
            raise RankError(f"{msg}{now.rank} of {now.world_size}.\n  Make the loader after init_process_group.")


def _stop_persistent(loader: DataLoader[Any], owner: int) -> None:
    """End workers that persist. Left to the garbage collector, it takes their queues apart before they are told, and
    torch waits five seconds for each before it kills them.
    """
    workers, loader._iterator = loader._iterator, None  # noqa: SLF001 (torch has no public way)
    if workers is not None:
        _stop(workers, owner)


def _stop(workers: Any, owner: int) -> None:
    if os.getpid() == owner:  # a forked process has a copy, and no workers
        workers._shutdown_workers()  # noqa: SLF001


def _death(err: RuntimeError) -> str:
    """Torch's words about a dead worker; where one error led to another, the first one names the signal."""
    first = err.__cause__ if isinstance(err.__cause__, RuntimeError) else err
    return str(first).partition(". ")[0].rstrip(". ")


def _as_it_is(item: Any) -> Any:
    """Leave samples and batches alone; torch's default would turn arrays into tensors."""
    return item


def _check_sendable(pipeline: StreamPipeline, method: str) -> None:
    """Name the function or stage that cannot reach workers that are not forked.

    Raises:
        PipelineError: A lambda, a closure, or an object that does not pickle.
    """
    from multiprocessing.reduction import ForkingPickler

    for stage in pipeline.pipeline:
        try:
            ForkingPickler.dumps(stage)
        except (pickle.PicklingError, AttributeError, TypeError) as err:
            msg = f"a stage cannot reach workers under {method!r}: {err}."
            raise PipelineError(
                f"{msg}\n  Define the function at the top of a module, or use start_method: fork."
            ) from err
