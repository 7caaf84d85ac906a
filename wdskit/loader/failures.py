"""Errors on their way from worker processes: as values, so that they arrive as the objects they were."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from torch.utils.data import IterableDataset, get_worker_info

from wdskit.errors import PipelineError
from wdskit.pipeline.streaming import StreamPipeline


@dataclass
class Failure:
    """An exception and the traceback it had in its worker, as text."""

    error: Exception
    trace: str
    worker: int

    def throw(self) -> NoReturn:
        """Raise it here, with the worker's traceback as its cause."""
        try:
            raise self.error from WorkerTraceback(f"worker {self.worker}:\n{self.trace}")
        finally:
            del self.error  # its traceback refers to this frame: a cycle would keep the workers alive


class WorkerTraceback(Exception):
    """The traceback of a worker process."""


class Shipped(IterableDataset[Any]):
    """A pipeline that yields (worker, value, timings); errors in worker processes come out as `Failure` values."""

    def __init__(self, pipeline: StreamPipeline) -> None:
        self.pipeline = pipeline

    def __iter__(self) -> Iterator[Any]:
        """Yield the pipeline's values, and a failure where it ends in one."""
        info = get_worker_info()
        run = self.pipeline.run
        if info is None:
            for value in self.pipeline:
                yield 0, value, run.take_timings()
            return
        try:
            for value in self.pipeline:
                yield info.id, value, run.take_timings()
        except (Exception, SystemExit) as err:  # noqa: BLE001 (every error of a worker is the consumer's to see)
            trace = traceback.format_exc()
            yield Failure(sendable(err), trace, info.id)


def sendable(err: BaseException) -> Exception:
    """The error itself where it survives the way between processes, else one that says the same."""
    if isinstance(err, Exception):
        with contextlib.suppress(Exception):  # whatever its __reduce__ or __init__ raises
            make, arguments = cast(tuple[Any, ...], err.__reduce__())[:2]  # how it is made again on the other side
            if type(make(*arguments)) is type(err) and pickle.dumps(err):
                return err.with_traceback(None)
    return PipelineError(f"{type(err).__name__}: {err}")
