"""Start worker processes: the start method, checks before the start, and how a process ended."""

from __future__ import annotations

import io
import logging
import multiprocessing
import pickle
import signal
import sys
from collections.abc import Iterable
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, NamedTuple

import torch

from wdskit.errors import PipelineError
from wdskit.processes import GUARD, can_import_main, find_unguarded_line

logger = logging.getLogger(__name__)

_NOT_USERS = sys.stdlib_module_names | {"wdskit", "numpy", "pydantic", "pydantic_core"}  # packages of a plain program


class StartMethod(NamedTuple):
    """How worker processes start.

    Attributes:
        name: "fork", "spawn" or "forkserver".
        runs_script: Whether a new process runs the main script again. False if the stages have no user code. Has no
            effect with "fork", which never runs the script again.
        needs_torch: Whether the processes will probably import torch. Has no effect with "fork".
    """

    name: str
    runs_script: bool = True  # the script often imports torch, which takes 1.5 s and 150 MB
    needs_torch: bool = True


def choose_start_method(setting: str | None, *, reads_store: bool) -> str:
    """Return the start method of worker processes: "fork", "spawn" or "forkserver".

    Args:
        setting: The user's setting. None: Python's default, but "forkserver" instead of "fork" once CUDA is initialised
            or if the shards are in a store.
        reads_store: Whether the shards are in a store.

    Raises:
        PipelineError: The user's setting is "fork", which is impossible now.
    """
    # get_start_method() without `allow_none` would fix the default, and the user could not set another default later.
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    reason = why_not_fork(reads_store=reads_store)
    if (setting or default) != "fork" or not reason:
        return setting or default
    if setting is None:
        logger.info("%s, so workers are not forked: start_method is forkserver", reason)
        return "forkserver"
    msg = f"{reason}, so workers cannot be forked."
    raise PipelineError(f"{msg}\n  Use start_method: forkserver, or leave it out.")


def why_not_fork(*, reads_store: bool) -> str:
    """Return the reason why workers cannot be forked now: CUDA is initialised, or the shards are in a store
    (`reads_store`). Return an empty text if they can be forked.
    """
    if reads_store:
        return "the shards are in a store"
    return "CUDA is initialised" if torch.cuda.is_initialized() else ""


def start_method_of(
    stages: Iterable[Any], setting: str | None, *, reads_store: bool = False, needs_torch: bool = True
) -> StartMethod:
    """Return how worker processes start, and check that all stages can be sent to them.

    Call this function when the loader is made, so that errors come early, and each time that workers start, because
    CUDA may have been initialised meanwhile.

    Args:
        stages: The stages that the workers receive.
        setting: The user's setting; None for the default of `choose_start_method`.
        reads_store: Whether the shards are in a store.
        needs_torch: Whether the stages of wdskit need torch. Stages with user code are expected to need it.

    Raises:
        PipelineError: The user's setting is "fork", which is impossible now; or the method is not "fork" and a stage
            cannot be pickled, such as a lambda or a closure. The message names the stage.
    """
    method = choose_start_method(setting, reads_store=reads_store)
    if method == "fork":
        return StartMethod(method)
    has_user_code = False
    for stage in stages:
        pickler = _UserCodePickler()
        try:
            pickler.dump(stage)
            has_user_code = has_user_code or pickler.has_user_code
        except Exception as err:
            reason = why_not_fork(reads_store=reads_store) if setting != method else ""
            why = f", as {reason}" if reason else ""
            ways = {
                "": "use start_method: fork",
                "CUDA is initialised": "leave `device` out and iterate the loader before CUDA is used",
            }
            way = ways.get(reason, "use workers: 0")
            what = str(err) if isinstance(err, (pickle.PicklingError, AttributeError, TypeError)) else repr(err)
            msg = f"a stage cannot reach workers under {method!r}{why}: {what}."
            raise PipelineError(f"{msg}\n  Define the function at the top of a module, or {way}.") from err
    return StartMethod(method, runs_script=has_user_code, needs_torch=has_user_code or needs_torch)


class _UserCodePickler(ForkingPickler):
    """Finds out whether an object contains user code, by pickling it. User code is code of a package that is not in
    `_NOT_USERS`.

    Attributes:
        has_user_code: True if a pickled object contained user code.
    """

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.has_user_code = False

    def reducer_override(self, value: Any) -> Any:
        """Set `has_user_code` if `value` or its class is user code. The value is pickled as usual.

        Raises PicklingError for code of a program that workers cannot import, such as a notebook.
        """
        owner = value if isinstance(value, (type, FunctionType)) else type(value)
        if owner.__module__ == "__main__" and not can_import_main():
            raise pickle.PicklingError(f"workers cannot import the program that defines `{owner.__qualname__}`")
        self.has_user_code = self.has_user_code or str(owner.__module__).partition(".")[0] not in _NOT_USERS
        return NotImplemented


def start_fork_server(method: StartMethod) -> None:
    """Start the fork server if it does not run, so that it is ready for the first batch. Do nothing if the start method
    is not "forkserver", or if this process is a daemon.

    The server imports wdskit once for all workers, and torch too if the first loader of the program needs torch. If the
    program has set its own list of modules to preload, the server imports only the modules of this list.
    """
    if method.name != "forkserver" or multiprocessing.current_process().daemon:  # daemons cannot start processes
        return
    modules = getattr(forkserver._forkserver, "_preload_modules", None)  # noqa: SLF001 (multiprocessing has no getter)
    # With the default, the server runs the main script since Python 3.14. If the script hung, no message could say so.
    if modules == ["__main__"]:
        multiprocessing.set_forkserver_preload(["wdskit.loader.preload", *["wdskit.loader.make"] * method.needs_torch])
    forkserver.ensure_running()


def check_guard(method: StartMethod) -> None:
    """Check that a worker which runs the main script does not run again the line that starts the workers.

    Raises:
        PipelineError: Workers run the script, and this line is not under `if __name__ == "__main__":`. The message
            names the line.
    """
    line = "" if method.name == "fork" or not method.runs_script else find_unguarded_line()
    if line:
        msg = f"{line}: each worker process would run this line again (start_method {method.name})."
        raise PipelineError(f"{msg}\n  Put the code that runs the loader under {GUARD}.")


def explain_exit(code: int | None, *, has_started: bool) -> str:
    """Return how a worker ended and the likely reason, as the end of a sentence that starts with the worker's name.

    Args:
        code: The exit code of the worker; None if the worker still runs.
        has_started: False if the worker may have ended in its imports.
    """
    if code is not None and code < 0:
        known = {each.value: each.name for each in signal.Signals}
        how = f"was killed by {known.get(-code, f'signal {-code}')}."
        if -code == signal.SIGKILL:
            how += "\n  Often memory ran out: try fewer workers, a smaller shuffle, or smaller batches."
        return how
    how = "does not run" if code is None else f"exited with status {code}"
    if has_started:
        return f"{how}.\n  It printed why, or one of your functions ended it."
    return f"{how}.\n  It printed why. Often the script's own code is not under {GUARD}. Put it there."
