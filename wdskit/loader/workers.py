"""Worker processes: how they start, what they send, how they die, and how they end."""

from __future__ import annotations

import multiprocessing.connection
import os
import re
import signal
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from wdskit.errors import PipelineError
from wdskit.loader.failures import Failure
from wdskit.loader.starting import start_method_of
from wdskit.pipeline.settings import LoaderSpec
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
        self._stages = stages
        if spec.workers:
            start_method_of(stages, spec.start_method)
        weakref.finalize(self, _stop_persistent, self._loader, os.getpid()).atexit = False  # torch has its own

    def __iter__(self) -> Iterator[Any]:
        """Yield the items of one pass.

        Raises:
            PipelineError: A worker process died, in this pass or before it.
            Exception: What the dataset raised.
        """
        loader = self._loader
        if self._spec.workers and loader._iterator is None:  # noqa: SLF001 (torch says nowhere else if workers run)
            loader.multiprocessing_context = start_method_of(self._stages, self._spec.start_method)
        items = loader._iterator  # noqa: SLF001 (workers that persist)
        try:
            _check_alive(items)
            _hear_deaths(items)
            items = iter(loader)
            while True:
                _hear_deaths(items)
                item = _next_of(items)
                _ignore_deaths(items)
                if item is _END:
                    return
                if isinstance(item, Failure):
                    item.throw()
                yield item
                del item
        except RuntimeError as err:
            if not _DEAD_WORKER.match(str(err)):
                raise
            loader._iterator = None  # noqa: SLF001 (workers that persist would be asked again, though one is dead)
            if items is not None:
                _ignore_deaths(items)
                _stop(items, os.getpid())
            msg = f"a worker process died: {_death(err)}.\n  "
            raise PipelineError(f"{msg}Often memory ran out: try fewer workers, or a smaller shuffle.") from err
        finally:
            _ignore_deaths(items)
            del items  # a traceback kept by the user would keep the processes


_END = object()
_END_S = 5
"""How long a worker may take to end behind the end of what it writes to."""


def _next_of(items: Any) -> Any:
    """The next item, `_END` behind the last.

    Raises:
        RuntimeError: A worker is dead, in torch's words, also where its connection was noticed first.
    """
    try:
        return next(items, _END)
    except (ConnectionError, EOFError):
        workers = {worker.sentinel: worker for worker in getattr(items, "_workers", ())}
        for sentinel in multiprocessing.connection.wait([*workers], _END_S):
            workers[sentinel].join(_END_S)  # its pipe closes a moment before it is gone
        _check_alive(items)
        raise


_signals: Any = signal_handling  # torch has no public way


def _check_alive(items: Any) -> None:
    """Raise in torch's words of a worker that died between two passes, also where somebody has waited for it."""
    for worker in getattr(items, "_workers", ()):
        if worker.exitcode:
            how = f"exited unexpectedly with exit code {worker.exitcode}"
            if worker.exitcode < 0:
                how = f"is killed by signal: {signal.Signals(-worker.exitcode).name}"
            msg = f"DataLoader worker (pid {worker.pid}) {how}."
            raise RuntimeError(msg)


def _hear_deaths(items: Any) -> None:
    """Let torch look at these workers when a child ends. It raises its error in a signal handler, in the midst of
    whatever runs, so it looks at them only while the loader waits for them.

    Raises:
        RuntimeError: One is dead already.
    """
    if getattr(items, "_workers", None) and not items._worker_pids_set:  # noqa: SLF001
        _signals._set_worker_pids(id(items), tuple(worker.pid for worker in items._workers))  # noqa: SLF001
        items._worker_pids_set = True  # noqa: SLF001
        _signals._error_if_any_worker_fails()  # noqa: SLF001


def _ignore_deaths(items: Any) -> None:
    """Let torch not look at them until `_hear_deaths` is called."""
    if getattr(items, "_worker_pids_set", False):
        _signals._remove_worker_pids(id(items))  # noqa: SLF001
        items._worker_pids_set = False  # noqa: SLF001


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
