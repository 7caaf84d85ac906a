"""The outcome of a job: a value, an error, or both, which can be sent to another thread or process."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from wdskit.errors import PipelineError, error_text

T = TypeVar("T")


class Outcome(Generic[T]):
    """The result of a job: a value, an error, or both. Can be pickled with any error.

    Unpickling restores the error and its cause, and adds a `WorkerTraceback` as the last cause. An error that cannot be
    pickled becomes a PipelineError with the same text. A cause that cannot be pickled is only in the traceback.

    Args:
        value: The result; with an error, the part of the result that was made before the error.
        error: The error, which may be any BaseException; None without an error.
        where: Name of the process in which the error was raised, for the traceback; empty for this process.
    """

    __slots__ = ("error", "value", "where")

    def __init__(self, value: T | None = None, error: BaseException | None = None, where: str = "") -> None:
        self.value = value
        self.error = error
        self.where = where

    @classmethod
    def of(cls, function: Callable[..., T], *args: Any) -> Outcome[T]:
        """Call a function, and return an outcome with its result or with the BaseException that it raised."""
        try:
            return cls(function(*args))
        except BaseException as err:  # noqa: BLE001 (the consumer receives every error)
            return cls(error=err)

    def result(self) -> T | None:
        """Return the value; if there is an error, raise it. Only the first call does this; later calls return None.

        Raises:
            BaseException: The error of the outcome, which may be any exception.
        """
        value, error = self.value, self.error
        self.value = self.error = None
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: a cycle would keep the batch, or the workers, alive

    def __reduce__(self) -> tuple[Callable[..., Outcome[T]], tuple[Any, ...]]:
        if self.error is None:
            return Outcome, (self.value,)
        trace = f"{self.where}:\n{''.join(traceback.format_exception(self.error))}"
        pickled = _pickled(self.error), _pickled(self.error.__cause__)
        return _unpickle_outcome, (self.value, *pickled, error_text(self.error), trace, self.where)


class WorkerTraceback(Exception):
    """The traceback of an error in a worker process, as text. It is the last cause of an unpickled error."""


def _unpickle_outcome(value: Any, pickled: bytes, cause: bytes, text: str, trace: str, where: str) -> Outcome[Any]:
    error: BaseException = PipelineError(text)
    with contextlib.suppress(Exception):  # only the worker may have the module of the exception
        error = pickle.loads(pickled)  # noqa: S301 (from our own worker)
    with contextlib.suppress(Exception):
        error.__cause__ = pickle.loads(cause)  # noqa: S301 (from our own worker)
    (error.__cause__ or error).__cause__ = WorkerTraceback(trace)
    return Outcome(value, error, where)


def _pickled(err: BaseException | None) -> bytes:
    """Return the pickled exception; no bytes if pickling or unpickling fails, or gives another type."""
    with contextlib.suppress(BaseException):  # its __reduce__ or __init__ may raise anything
        data = pickle.dumps(err)
        if type(pickle.loads(data)) is type(err):  # noqa: S301 (made above)
            return data
    return b""
