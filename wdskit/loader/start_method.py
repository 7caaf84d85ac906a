"""Start worker processes: the start method, checks before the start, and how a process ended."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable
from multiprocessing import forkserver
from typing import Any, NamedTuple

import torch

from wdskit.errors import PipelineError, error_text
from wdskit.processes import GUARD, find_unguarded_line, needs_script


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


def prepare_start(
    stages: Iterable[Any], setting: str | None, *, reads_store: bool = False, needs_torch: bool = True
) -> StartMethod:
    """Return how worker processes start, check that all stages can be sent to them, and start the fork server if they
    need it, so that it is ready for the first batch.

    Call this function when the loader is made, so that errors come early, and each time that workers start, because
    CUDA may have been initialised meanwhile.

    Args:
        stages: The stages that the workers receive.
        setting: The user's setting. None: Python's default, but "forkserver" instead of "fork" once CUDA is initialised
            or if the shards are in a store.
        reads_store: Whether the shards are in a store.
        needs_torch: Whether the stages of wdskit need torch. Stages with user code are expected to need it.

    Raises:
        PipelineError: The user's setting is "fork", which is impossible now; or the method is not "fork" and a stage
            cannot be pickled, such as a lambda or a closure.
    """
    # get_start_method() without `allow_none` would fix the default, and the user could not set another default later.
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    method, why = setting or default, ""
    if method == "fork" and (reads_store or torch.cuda.is_initialized()):
        why = "the shards are in a store" if reads_store else "CUDA is initialised"
        if setting:
            msg = f"{why}, so workers cannot be forked."
            raise PipelineError(f"{msg}\n  Use start_method: forkserver, or leave it out.")
        method = "forkserver"
    if method == "fork":
        return StartMethod(method)
    try:
        has_user_code = needs_script(tuple(stages))
    except Exception as err:
        msg = f"a stage cannot reach workers under {method!r}{why and f', as {why}'}: {error_text(err)}."
        raise PipelineError(f"{msg}\n  Define the function at the top of a module, or use workers: 0.") from err
    needs_torch = has_user_code or needs_torch
    if method == "forkserver" and not multiprocessing.current_process().daemon:  # daemons cannot start processes
        _start_fork_server(needs_torch=needs_torch)
    return StartMethod(method, runs_script=has_user_code, needs_torch=needs_torch)


def _start_fork_server(*, needs_torch: bool) -> None:
    """Start the fork server if it does not run.

    The server imports wdskit once for all workers, and torch too if the first loader of the program needs torch. If the
    program has set its own list of modules to preload, the server imports only the modules of this list.
    """
    modules = getattr(forkserver._forkserver, "_preload_modules", None)  # noqa: SLF001 (multiprocessing has no getter)
    # With the default, the server runs the main script since Python 3.14. If the script hung, no message could say so.
    if modules == ["__main__"]:
        multiprocessing.set_forkserver_preload(["wdskit.loader.preload", *["wdskit.loader.make"] * needs_torch])
    forkserver.ensure_running()


def check_guard(method: StartMethod | None) -> None:
    """Check that a worker which runs the main script does not run again the line that starts the workers.

    Raises:
        PipelineError: Workers run the script, and this line is not under `if __name__ == "__main__":`. The message
            names the line.
    """
    if method is None or method.name == "fork" or not method.runs_script:
        return
    if line := find_unguarded_line():
        msg = f"{line}: each worker process would run this line again (start_method {method.name})."
        raise PipelineError(f"{msg}\n  Put the code that runs the loader under {GUARD}.")


def explain_exit(code: int | None) -> str:
    """Return how a worker ended and the likely reason, as the end of a sentence that starts with the worker's name.

    `code` is the exit code of the worker; None if the worker still runs.
    """
    if code is None or code >= 0:
        return f"{'does not run' if code is None else f'exited with status {code}'}. It printed why."
    names = {each.value: each.name for each in signal.Signals}  # without the realtime signals
    killed = f"was killed by {names.get(-code, f'signal {-code}')}."
    if -code == signal.SIGKILL:
        return f"{killed}\n  Often memory ran out: try fewer workers, a smaller shuffle, or smaller batches."
    return killed
