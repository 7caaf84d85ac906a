"""The actor that makes batches on a node of a Ray cluster. `loader.ray` starts and calls it."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import platform
import socket
import tempfile
import threading
from importlib import metadata
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit import __version__
from wdskit.dataset.columns import Column
from wdskit.dataset.remote import read_copy
from wdskit.engine.batch import Batch, Maker
from wdskit.engine.outcome import Outcome
from wdskit.errors import PipelineError, error_text
from wdskit.loader.memory import Arena, Arenas, BatchPickler, Bytes, keep_freed_memory
from wdskit.loader.worker import seed_worker
from wdskit.native import describe_native, native

Answer = tuple[bytes, list[Bytes]]
"""A pickled Outcome, and the buffers of its tensors and arrays, a uint8 array each."""

NEEDS = (
    "All nodes need the same versions, the modules of your functions, and the shards under the same path or URL. "
    "To send modules, call `ray.init(runtime_env=...)` before the loader is made"
)


class ActorStart(NamedTuple):
    """What an actor knows besides its program.

    Attributes:
        number: Number of the worker, from 0.
        num_workers: Number of all workers.
        host: Name of the machine of the training process.
        cwd: Folder of the training process. Relative paths start there.
        versions: Result of `describe_versions` in the training process.
    """

    number: int
    num_workers: int
    host: str
    cwd: str
    versions: str


def describe_versions() -> str:
    """Return the versions that must be equal on all nodes. The version of torch has no build (`+cu121`)."""
    python = ".".join(platform.python_version_tuple()[:2])
    torch = metadata.version("torch").partition("+")[0]
    return f"wdskit {__version__} {describe_native()}, Python {python}, torch {torch}"


class NodeWorker:
    """Makes batches on a node, as a Ray actor. Ray calls its methods in several threads, and makes a new object after
    the process has died. So each call has the program and its `make_maker`, as bytes from `pickle_by_reference`.
    """

    def __init__(self, start: ActorStart) -> None:
        self._start = start
        self._arenas = Arenas()
        self._opening = threading.Lock()
        self._maker: Maker | None = None

    def begin(self, pickled: Bytes) -> Outcome[str]:
        """Open the program. Return the name of the node, or the error if this node cannot run the program."""
        host = socket.gethostname()
        try:
            with self._opening:
                self._open(pickled)
        except Exception as err:  # noqa: BLE001 (the consumer receives it)
            error = PipelineError(f"on: host {host} cannot run the pipeline: {error_text(err)}.\n  {NEEDS}.")
            error.__cause__ = err
            return Outcome(error=error, where=host)
        return Outcome(host)

    def _open(self, pickled: Bytes) -> Maker:
        """Return the maker of the batches; the first call unpickles the program. The caller holds `_opening`."""
        if self._maker is not None:
            return self._maker
        start = self._start
        if "without native code" in start.versions:  # native code would make slightly other pixels
            os.environ["WDSKIT_NATIVE"] = "0"
            native.cache_clear()
        if (versions := describe_versions()) != start.versions:
            raise PipelineError(f"the node has {versions}, but {start.host} has {start.versions}")
        with contextlib.suppress(OSError):  # only relative paths need this folder
            os.chdir(start.cwd)
        program, make_maker = _NodeUnpickler(io.BytesIO(pickled.data)).load()
        keep_freed_memory()
        run = program.run
        run.worker, run.num_workers = start.number, start.num_workers
        seed_worker(program, start.number, start.num_workers)
        self._where, self._board = f"worker {start.number} on {socket.gethostname()}", run.board
        self._maker = make_maker(program)
        self._making = threading.Semaphore(run.num_threads)
        return self._maker

    def make(self, pickled: Bytes, job: Any) -> Answer:
        """Make the batches of a job, and return their Outcome, or the Outcome of an error, as an `Answer`."""
        with self._opening:
            maker = self._open(pickled)
            opened = maker.open(job)  # requests samples of a store while earlier jobs are made
        with self._making:
            arena = Arena(self._arenas)
            outcome = maker(opened, arena, lambda: False)
        outcome.where = self._where
        try:
            return _pack(outcome)
        except Exception as err:  # noqa: BLE001 (the consumer receives it)
            return _pack(Outcome(error=err, where=self._where))

    def state(self) -> tuple[NDArray[np.int64], str]:
        """Return a copy of `Board.slots`, int64 (slots, 3), which has the sample of each thread, and the stacks of the
        threads.
        """
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return self._board.slots.copy(), file.read().decode(errors="replace")


def _pack(outcome: Outcome[list[Batch]]) -> Answer:
    file, buffers = io.BytesIO(), list[Bytes]()

    def take(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.frombuffer(buffer.raw(), np.uint8))

    BatchPickler(file, protocol=5, buffer_callback=take).dump(outcome)
    return file.getvalue(), buffers


class _ReferencePickler(pickle.Pickler):
    """Pickles a program for other machines. For the columns of a folder in a store, the pickle has the URL in place of
    the path of the local copy.

    Raises:
        PicklingError: A function or class is defined in the main script.
    """

    def persistent_id(self, value: object) -> tuple[str, Any] | None:
        return (value.url, value.__getstate__()) if isinstance(value, Column) and value.url else None

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, (FunctionType, type)) and value.__module__ in {"__main__", "__mp_main__"}:
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the script that runs")
        return NotImplemented


class _NodeUnpickler(pickle.Unpickler):
    """Unpickles a program on a node, and fetches the columns of folders in a store."""

    def persistent_load(self, pid: tuple[str, Any]) -> Column:
        url, known = pid
        return read_copy(url, [], lambda copy: Column(**{**known, "folder": copy}))


def pickle_by_reference(value: Any) -> bytes:
    """Pickle a value, such as (program, factory), with `_ReferencePickler`.

    Raises:
        PipelineError: A part of the value cannot be pickled, or is defined in the main script.
    """
    file = io.BytesIO()
    try:
        _ReferencePickler(file, protocol=5).dump(value)
    except Exception as err:
        msg = f"on: a stage cannot reach the nodes of a cluster: {error_text(err)}."
        raise PipelineError(f"{msg}\n  Define the function at the top of a module that all nodes can import.") from err
    return file.getvalue()
