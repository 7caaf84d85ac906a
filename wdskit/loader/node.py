"""The actor that makes batches on a node of a Ray cluster. `loader.ray` starts and calls it."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import socket
import threading
from dataclasses import dataclass
from importlib import metadata

from wdskit import __version__
from wdskit.engine.batch import BatchMaker
from wdskit.engine.program import Job
from wdskit.errors import PipelineError
from wdskit.loader.memory import Arena, Arenas, Bytes, Message, keep_freed_memory, pack
from wdskit.loader.worker import seed_worker
from wdskit.native import describe_native, native


def describe_versions() -> str:
    """Return the versions that must be equal on all nodes. The version of torch has no build (`+cu121`)."""
    python = ".".join(platform.python_version_tuple()[:2])
    torch = metadata.version("torch").partition("+")[0]
    return f"wdskit {__version__} {describe_native()}, Python {python}, torch {torch}"


@dataclass
class NodeWorker:
    """Makes batches on a node, as a Ray actor. Ray calls its methods in several threads, and makes a new object after
    the process has died. So each call has the program, as bytes from cloudpickle.

    Args:
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

    def __post_init__(self) -> None:
        self._arenas = Arenas()
        self._opening = threading.Lock()
        self._maker: BatchMaker | None = None

    def begin(self, pickled: Bytes) -> str:
        """Open the program, and return the name of the node.

        Raises:
            PipelineError: The versions of the node differ.
            Exception: Any error of unpickling the program.
        """
        with self._opening:
            self._open(pickled)
        return socket.gethostname()

    def _open(self, pickled: Bytes) -> BatchMaker:
        """Return the maker of the batches; the first call unpickles the program. The caller holds `_opening`."""
        if self._maker is not None:
            return self._maker
        if "without native code" in self.versions:  # native code would make slightly other pixels
            os.environ["WDSKIT_NATIVE"] = "0"
            native.cache_clear()
        if (versions := describe_versions()) != self.versions:
            raise PipelineError(f"{socket.gethostname()} has {versions}, but {self.host} has {self.versions}")
        with contextlib.suppress(OSError):  # only relative paths need this folder
            os.chdir(self.cwd)
        program = pickle.loads(pickled.data)  # noqa: S301 (from our own training process)
        keep_freed_memory()
        seed_worker(program, self.number, self.num_workers)
        self._where = f"worker {self.number} on {socket.gethostname()}"
        self._making = threading.Semaphore(program.run.num_threads)
        self._maker = BatchMaker(program)
        return self._maker

    def make(self, pickled: Bytes, job: Job) -> tuple[Message, Bytes | None]:
        """Make the batches of a job. Return the packed outcome, and the bytes of its block; None without a block."""
        with self._opening:
            maker = self._open(pickled)
            opened = maker.open(job)  # requests samples of a store while earlier jobs are made
        with self._making:
            arena = Arena(self._arenas)
            outcome = maker(opened, arena, lambda: False)
        outcome.where = self._where
        message = pack(outcome, arena)
        used = max((start + size for start, size in message.parts), default=0)
        return message, None if arena.bytes is None else arena.bytes[:used]  # Ray copies the bytes
