"""Errors on their way from worker processes: as values, so that they arrive as the objects they were."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from wdskit.engine.streaming import StreamPipeline
from wdskit.errors import PipelineError


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the process that started the worker.

    Attributes:
        pickled: The exception; None where it does not survive that.
        said: Its type and its text.
        trace: The traceback that it had in its worker.
        worker: Number of the worker.
    """

    pickled: bytes | None
    said: str
    trace: str
    worker: int

    @classmethod
    def of(cls, err: BaseException, worker: int) -> Failure:
        """Whatever was raised in a worker; this raises nothing."""
        trace = "".join(traceback.format_exception(err))
        return cls(_pickled(err), _said(err), trace, worker)

    def throw(self) -> NoReturn:
        """Raise the exception itself, or a PipelineError that says the same, with the worker's traceback as cause."""
        error = self._error()
        try:
            raise error from WorkerTraceback(f"worker {self.worker}:\n{self.trace}")
        finally:
            del error  # its traceback refers to this frame: a cycle would keep the workers alive

    def _error(self) -> BaseException:
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # a module that only the worker has
                error: BaseException = pickle.loads(self.pickled)  # noqa: S301 (of a worker of ours)
                return error
        return PipelineError(self.said)


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
        values = iter(self.pipeline)
        while True:
            try:
                value = next(values, _END)
            except BaseException as err:  # noqa: BLE001 (every error of a worker is the consumer's to see)
                failure = Failure.of(err, info.id)
                break
            if value is _END:
                return
            yield info.id, value, run.take_timings()
        yield failure


_END = object()


def _pickled(err: BaseException) -> bytes | None:
    """The exception's pickle where the same comes out of it."""
    with contextlib.suppress(BaseException):  # whatever its __reduce__ or __init__ raises
        file = io.BytesIO()
        _Pickler(file).dump(err)
        if type(pickle.loads(file.getvalue())) is type(err):  # noqa: S301 (made above)
            return file.getvalue()
    return None


class _Pickler(pickle.Pickler):
    """Finds classes that stand in another module than they say: pytest's exceptions say `builtins`."""

    def reducer_override(self, value: object) -> Any:
        """Where a class really stands; all else as usual."""
        if isinstance(value, type) and _class_in(value.__module__, value.__name__) is not value:
            for module in [*sys.modules]:
                if _class_in(module, value.__name__) is value:
                    return _class_in, (module, value.__name__)
        return NotImplemented


def _class_in(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), "__dict__", {}).get(name)


def _said(err: BaseException) -> str:
    with contextlib.suppress(BaseException):  # whatever its __str__ raises
        return f"{type(err).__name__}: {err}"
    return type(err).__name__
