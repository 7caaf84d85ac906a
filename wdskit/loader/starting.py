"""How worker processes start, what cannot reach them, and why one does not run."""

from __future__ import annotations

import ast
import logging
import multiprocessing
import pickle
import signal
import sys
import tokenize
from collections.abc import Iterable
from multiprocessing import forkserver
from types import FrameType
from typing import Any

import torch

from wdskit.errors import PipelineError

logger = logging.getLogger(__name__)

GUARD = '`if __name__ == "__main__":`'


def choose_start_method(said: str | None, *, reads_store: bool = False) -> str:
    """How worker processes are to start now.

    Args:
        said: What the user said; None for torch's default, but never fork once CUDA is initialised, nor where shards
            stand in a store, whose client hangs in a forked process.
        reads_store: Whether they do.

    Raises:
        PipelineError: They are to be forked, and cannot be.
    """
    # Asking for the default would settle it, and a later set_start_method of the user's would fail.
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    reason = why_not_fork(reads_store=reads_store)
    if (said or default) != "fork" or not reason:
        return said or default
    if said is None:
        logger.info("%s, so workers are not forked: start_method is forkserver", reason)
        return "forkserver"
    msg = f"{reason}, so workers cannot be forked."
    raise PipelineError(f"{msg}\n  Use start_method: forkserver, or leave it out.")


def why_not_fork(*, reads_store: bool) -> str:
    """Why workers cannot be forked now, "" where they can."""
    if reads_store:
        return "the shards are in a store"
    return "CUDA is initialised" if torch.cuda.is_initialized() else ""


def start_method_of(stages: Iterable[Any], said: str | None, *, reads_store: bool = False) -> str:
    """How worker processes with these stages are to start now. A loader asks when it is made, so that what could not
    start is refused there, and each time that workers start, when CUDA may be initialised.

    Args:
        stages: Of the pipeline that they get.
        said: As `choose_start_method` takes it.
        reads_store: As `choose_start_method` takes it.

    Raises:
        PipelineError: They are to be forked, and cannot be; or they are not forked, and a lambda, a closure, or an
            object that does not pickle cannot reach them. It is named.
    """
    method = choose_start_method(said, reads_store=reads_store)
    if method == "fork":
        return method
    from multiprocessing.reduction import ForkingPickler

    for stage in stages:
        try:
            ForkingPickler.dumps(stage)
        except Exception as err:
            reason = why_not_fork(reads_store=reads_store) if said != method else ""
            why = f", as {reason}" if reason else ""
            way = {"": "use start_method: fork", "CUDA is initialised": "iterate the loader before CUDA is used"}.get(
                reason, "use workers: 0"
            )
            what = str(err) if isinstance(err, (pickle.PicklingError, AttributeError, TypeError)) else repr(err)
            msg = f"a stage cannot reach workers under {method!r}{why}: {what}."
            raise PipelineError(f"{msg}\n  Define the function at the top of a module, or {way}.") from err
    return method


def start_fork_server(method: str) -> None:
    """Let the fork server load wdskit and torch, which its workers then share: each would take 2 s and 150 MB for its
    own. That begins when a loader is made, beside what its program does until the first batch. What a program has said
    that the server loads is left as it is. The script, which the server would run since Python 3.14, is left to the
    workers: no message could say that it waits or ends in the server.
    """
    if method != "forkserver" or multiprocessing.current_process().daemon:  # which may not start processes
        return
    said = getattr(forkserver._forkserver, "_preload_modules", None)  # noqa: SLF001 (nothing else tells)
    if said == ["__main__"]:
        multiprocessing.set_forkserver_preload(["wdskit.loader.make"])
    forkserver.ensure_running()


def check_guard(method: str) -> None:
    """Refuse to start workers from a line of the script that each worker runs again.

    A process that is not forked imports the script. A loop at module level would start workers in it, and an
    `init_process_group` there would wait for itself.

    Raises:
        PipelineError: Such a line starts them. It is named.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if method == "fork" or path is None or str(getattr(main.__spec__, "name", "")).endswith("__main__"):
        return  # what has no file, and `python -m package`, is not imported
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 (inspect.stack reads the source of every frame)
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("<module>", path):
        frame = frame.f_back
    if frame is None:  # another thread, or code that no file holds
        return
    try:
        with tokenize.open(path) as file:
            statements = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):  # it is no text of Python, or gone
        return
    for statement in statements:
        is_current = statement.lineno <= frame.f_lineno <= (statement.end_lineno or statement.lineno)
        names = (node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
        if is_current and not isinstance(statement, ast.If) and "__name__" not in names:
            msg = f"{path}:{frame.f_lineno}: each worker process would run this line again (start_method {method})."
            raise PipelineError(f"{msg}\n  Put the code that runs the loader under {GUARD}.")


def explain_exit(code: int | None, *, has_started: bool) -> str:
    """How a worker ended, and what that may mean."""
    if code is not None and code < 0:
        advice = "Often memory ran out: try fewer workers, a smaller shuffle, or smaller batches."
        known = {each.value: each.name for each in signal.Signals}
        return f"was killed by {known.get(-code, f'signal {-code}')}.\n  {advice}"
    how = "is gone" if code is None else f"exited with status {code}"
    if has_started:
        return f"{how}.\n  It printed why, or one of your functions ended it."
    return f"{how}.\n  It printed why. Often the script's own code is not under {GUARD}. Put it there."
