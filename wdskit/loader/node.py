"""The actor that makes batches on a node of a Ray cluster. `loader.ray` starts and calls it."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import platform
import socket
import threading
import weakref
from collections.abc import Sequence
from importlib import metadata
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit import __version__
from wdskit.dataset.columns import Column
from wdskit.dataset.remote import read_copy
from wdskit.engine.batch import BatchFactory
from wdskit.engine.outcome import Outcome
from wdskit.errors import PipelineError
from wdskit.loader.shared_memory import Bytes, Part, Ring, keep_freed_memory
from wdskit.loader.worker import pack_outcome, seed_worker
from wdskit.native import native

_NATIVE, _USED, _NOT_USED = "native code", "(used)", "(not used)"

Answer = tuple[Any, list[Bytes]]
"""A pickled Outcome (bytes, or a uint8 array), and the buffers of its tensors and arrays, a uint8 array each."""


class ActorStart(NamedTuple):
    """The arguments of `NodeWorker.begin`, besides the program.

    Attributes:
        number: Number of the worker, from 0.
        num_workers: Number of all workers.
        host: Name of the machine of the training process.
        cwd: Folder of the training process. Relative paths start there.
        versions: Result of `find_versions` in the training process.
    """

    number: int
    num_workers: int
    host: str
    cwd: str
    versions: dict[str, str]


def find_versions() -> dict[str, str]:
    """Return the versions of wdskit, Python (major.minor), torch, by name, and whether native code is used.
    They must be equal on all nodes.

    The version of torch has no build (`+cu121`); without torch it is "(not installed)".
    """
    found = {"wdskit": __version__, "Python": ".".join(platform.python_version_tuple()[:2]), "torch": "(not installed)"}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch").partition("+")[0]
    found[_NATIVE] = _NOT_USED if native() is None else _USED
    return found


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


class NodeWorker:
    """Makes batches on a node, as a Ray actor. Ray calls its methods in several threads."""

    def __init__(self) -> None:
        self._memory = Ring()
        self._opening = threading.Lock()
        self._cancelled: set[int] = set()

    def begin(self, pickled: bytes, start: ActorStart) -> Outcome[str]:
        """Unpickle and open the program. Return the name of the node, or the error if this node cannot run the program.

        `pickled` is the program and its `make_factory`, from `pickle_by_reference`. This method does not raise.
        """
        host = socket.gethostname()
        try:
            self._open(pickled, start, host)
            import ray

            return Outcome(f"{host} ({ray.get_runtime_context().get_node_id()[:8]})")
        except ModuleNotFoundError as err:
            return Outcome(error=lacks_module(host, str(err.name)), where=host)
        except _VersionError as err:
            return Outcome(error=err, where=host)
        except Exception as err:  # noqa: BLE001 (the consumer receives it)
            problem = str(err).partition("\n")[0].rstrip(".")
            msg = f"on: host {host} cannot run the pipeline: {problem}."
            remedy = f"All nodes need the shards under the same path or URL and the same modules as {start.host}."
            error = PipelineError(f"{msg}\n  {remedy}")
            error.__cause__ = err
            return Outcome(error=error, where=host)

    def _open(self, pickled: bytes, start: ActorStart, host: str) -> None:
        """Unpickle the program and make its factory. `host` is the name of this machine.

        Raises:
            _VersionError: This node has another version of a package than the training process.
            Exception: The program cannot be unpickled here, or its files cannot be read.
        """
        if start.versions[_NATIVE] == _NOT_USED and native() is not None:  # it would make slightly other pixels
            os.environ["WDSKIT_NATIVE"] = "0"
            native.cache_clear()
        for name, here in find_versions().items():
            if start.versions[name] != here:
                or_without = ", or set WDSKIT_NATIVE=0 for the training process" if name == _NATIVE else ""
                raise _VersionError(
                    f"on: host {host} has {name} {here}, but {start.host} has {start.versions[name]}.\n"
                    f"  Install the same version on all nodes{or_without}."
                )
        with contextlib.suppress(OSError):  # only relative paths need this folder
            os.chdir(start.cwd)
        program, make_factory = _NodeUnpickler(io.BytesIO(pickled)).load()
        keep_freed_memory()
        run = program.run
        run.worker, run.num_workers, run.is_watched = start.number, start.num_workers, True
        seed_worker(program, start.number, start.num_workers)
        self._where = f"worker {start.number} on {host}"
        self._board = run.board
        self._factory: BatchFactory = make_factory(program)
        self._making = threading.Semaphore(self._factory.num_loops)

    def make(self, ticket: int, job: Any) -> Answer:
        """Make the batches of a job, and return their Outcome, or the Outcome of an error, as an `Answer`.

        The buffers of the answer are views of memory that is reused after the views are garbage-collected. `ticket` is
        the number of the job, for `cancel`. The Outcome of a cancelled job is empty.
        """
        with self._opening:
            opened = self._factory.open(job)  # requests samples of a store while earlier jobs are made
        with self._making:
            outcome = self._factory(opened, self._memory, lambda: ticket in self._cancelled)
        outcome.where = self._where
        if ticket in self._cancelled:
            self._cancelled.discard(ticket)
            outcome = Outcome()
        message = pack_outcome(outcome, self._memory)
        blocks = {number: self._lend(number) for number in message.blocks}

        def find(part: Part) -> Bytes:
            return blocks[part.block][part.start : part.start + part.num_bytes]

        pickled = message.pickled if isinstance(message.pickled, bytes) else find(message.pickled)
        return pickled, [find(part) for part in message.buffers]

    def _lend(self, number: int) -> Bytes:
        """Return the bytes of the block `number`. The block is reused after the result is garbage-collected."""
        memory: Bytes = np.frombuffer(self._memory.hold(number).memory, np.uint8)
        self._memory.give_back(number)  # ends this method's own `hold`
        weakref.finalize(memory, self._memory.give_back, number).atexit = False
        return memory

    def cancel(self, tickets: Sequence[int]) -> None:
        """Cancel the jobs with these tickets. A running job ends after its current samples."""
        self._cancelled.update(tickets)

    def slots(self) -> NDArray[np.int64]:
        """Return a copy of `Board.slots`, int64 (slots, 3): for each thread of this actor, its sample (see `Board`)."""
        found: NDArray[np.int64] = self._board.slots.copy()
        return found

    def live(self) -> None:
        """Never return. If the actor dies, Ray ends this call with an error, and the caller knows about the death."""
        threading.Event().wait()

    def free_memory(self) -> None:
        """Free the memory that no batch uses, so that other processes can use it."""
        self._memory.free_pages()


class _VersionError(PipelineError):
    """A node has another version of wdskit, Python, torch, or no native code."""


def lacks_module(host: str, module: str) -> PipelineError:
    """Return an error with the message that the node `host` cannot import `module`."""
    msg = f"on: {host} has no module {module!r}."
    remedy = "Install it on all nodes, or send it to them: `ray.init(runtime_env=...)` before the loader is made"
    return PipelineError(f"{msg}\n  {remedy} (`py_modules`, `working_dir` or `pip`).")


def pickle_by_reference(value: Any) -> bytes:
    """Pickle a value, such as (program, factory), with `_ReferencePickler`.

    Raises:
        PipelineError: A part of the value cannot be pickled, or is defined in the main script.
    """
    file = io.BytesIO()
    try:
        _ReferencePickler(file, protocol=5).dump(value)
    except Exception as err:
        what = str(err) if isinstance(err, (pickle.PicklingError, AttributeError, TypeError)) else repr(err)
        msg = f"on: a stage cannot reach the nodes of a cluster: {what}."
        raise PipelineError(f"{msg}\n  Define the function at the top of a module that all nodes can import.") from err
    return file.getvalue()
