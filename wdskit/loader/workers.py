"""Worker processes: how they start, what they send, how they die, and how they end."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from wdskit.errors import PipelineError
from wdskit.loader.failures import Failure
from wdskit.loader.starting import check_sendable, choose_start_method
from wdskit.pipeline.loader_specs import LoaderSpec
from wdskit.processes import end_with_parent

_DEAD_WORKER = re.compile(r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (is killed|exited)")  # torch's words


class Workers:
    """torch's DataLoader around a dataset that makes whole items, with errors that say what happened.

    Args:
        dataset: What runs in each process. Its errors come as `Failure` values.
        spec: Workers, prefetch and the rest.
        stages: Those of the pipeline in it, to name the one that cannot be sent to a process.
        sampler: For a dataset of items by index: the indices, iterated once a pass.

    Raises:
        PipelineError: The pipeline cannot run in such processes.
    """

    def __init__(
        self, dataset: Any, spec: LoaderSpec, *, stages: Iterable[Any], sampler: Iterable[Any] | None = None
    ) -> None:
        self._spec = spec
        self._items: weakref.ref[Any] | None = None
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=spec.workers,
            worker_init_fn=_start_worker if spec.workers else None,
            persistent_workers=spec.persistent_workers and spec.workers > 0,
            prefetch_factor=spec.prefetch if spec.workers else None,
            pin_memory=spec.pin_memory and torch.cuda.is_available(),
        )
        if spec.workers:
            check_sendable(stages, choose_start_method(spec.start_method))
        weakref.finalize(self, _stop_persistent, self._loader, os.getpid()).atexit = False  # torch has its own

    def __iter__(self) -> Iterator[Any]:
        """Yield the items of one pass.

        Raises:
            PipelineError: A worker process died.
            Exception: What the dataset raised.
        """
        loader = self._loader
        if self._spec.workers and loader._iterator is None:  # noqa: SLF001 (torch says nowhere else if workers run)
            loader.multiprocessing_context = choose_start_method(self._spec.start_method)
        items = iter(loader)
        self._items = weakref.ref(items)
        try:
            for item in items:
                if isinstance(item, Failure):
                    item.throw()
                yield item
        except RuntimeError as err:
            if not _DEAD_WORKER.match(str(err)):
                raise
            loader._iterator = None  # noqa: SLF001 (workers that persist would be asked again, though one is dead)
            _stop(items, os.getpid())
            msg = f"a worker process died: {_death(err)}.\n  "
            raise PipelineError(f"{msg}Often memory ran out: try fewer workers, or a smaller shuffle.") from err
        finally:
            del items  # a traceback kept by the user would keep the processes

    def ready(self) -> int:
        """Items that workers have sent and nobody has taken yet; 0 without workers."""
        items = self._items() if self._items is not None else None
        if items is None or not self._spec.workers:
            return 0
        early = sum(len(told) == 2 for told in items._task_info.values())  # noqa: SLF001 (torch tells nowhere else)
        pinned = items._data_queue.qsize() if self._loader.pin_memory else 0  # noqa: SLF001
        return int(items._worker_result_queue.qsize() + early + pinned)  # noqa: SLF001


def _start_worker(_: int) -> None:
    end_with_parent()  # torch looks at the parent's number, which under forkserver stays the server's


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
