"""Processes: signals, parents and scripts of worker processes, and usable cores. Standard library only."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process, spawn
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from wdskit.errors import PipelineError

GUARD = '`if __name__ == "__main__":`'

_NOT_USERS = sys.stdlib_module_names | {"wdskit", "numpy", "pydantic", "pydantic_core"}  # packages of a plain program
_patching = threading.Lock()


def end_with_parent() -> None:
    """Let this worker process end when the main process ends or is killed. Call this once, at the worker's start."""
    # PR_SET_PDEATHSIG is not enough: with forkserver, the parent process of a worker is the server.
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def block_sigint() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, if the block runs in the main thread. In every thread, processes that
    the block starts never receive Ctrl-C, unless they call `exit_on_ctrl_c`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handler = signal.getsignal(signal.SIGINT)
    owner = os.getpid()
    received: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            received.append((number, frame))
        elif callable(handler):  # another thread forked this process during the block
            handler(number, frame)

    # Another thread may receive the signal. Python then calls the handler in the main thread, although it is blocked.
    is_main = threading.current_thread() is threading.main_thread()
    try:  # block inside of `try`: if an earlier Ctrl-C is raised here, the signal does not stay blocked
        if is_main and callable(handler):
            signal.signal(signal.SIGINT, note)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main and signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])


def refuse_fork(owner: int) -> None:
    """Check that this process is the process that started a loader. A forked process does not have the loader's workers
    and threads.

    Raises:
        PipelineError: The id of this process is not `owner`.
    """
    if os.getpid() != owner:
        msg = f"this loader has run in process {owner}, from which this one was forked."
        raise PipelineError(f"{msg}\n  Make a loader in each process.")


def exit_on_ctrl_c() -> None:
    """Let Ctrl-C end this worker process at once, without a traceback. Do nothing outside of the main thread."""
    with contextlib.suppress(ValueError):  # only the main thread can set signals
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    The limits are the affinity of the process and the quota of the container, rounded down.

    Args:
        quota: Linux's file with two numbers: the allowed processor time per period and the period, in microseconds.
            If the file is missing or says `max`, there is no quota.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        used, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, int(used) // int(period)))
    except (OSError, ValueError):  # not in a container, or without a limit: the file says `max`
        return cores


def needs_script(value: object) -> bool:
    """Pickle a value for worker processes, and return whether the value has code of the user, so that workers must
    import the main script first.

    Raises:
        PicklingError: A function or class of the main program that workers cannot import: of a notebook, `python -c`,
            standard input, a folder or a zip file, or under `if __name__ == "__main__":`.
        Exception: The error of pickle.
    """
    pickler = _UserCodePickler()
    pickler.dump(value)
    return pickler.has_user_code


class _UserCodePickler(ForkingPickler):
    """Sets `has_user_code` if it pickles code of a package that is not in `_NOT_USERS`."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.has_user_code = False

    def reducer_override(self, value: Any) -> Any:
        owner = value if isinstance(value, (type, FunctionType)) else type(value)
        if owner.__module__ == "__main__":
            functions = [each for each in (owner, *vars(owner).values()) if isinstance(each, FunctionType)]
            if not _main_script():
                raise pickle.PicklingError(f"workers cannot import the program that defines `{owner.__qualname__}`")
            if any(_is_guarded(each.__code__.co_firstlineno) for each in functions):
                raise pickle.PicklingError(f"`{owner.__qualname__}` is defined under {GUARD}, which workers do not run")
        self.has_user_code = self.has_user_code or str(owner.__module__).partition(".")[0] not in _NOT_USERS
        return NotImplemented


def _main_script() -> str:
    """Return the path of the main script; "" if workers cannot run the main program."""
    main = sys.modules["__main__"]
    is_package = str(getattr(main.__spec__, "name", "")).endswith("__main__")
    path = getattr(main, "__file__", None) or ""
    return path if not is_package and Path(path).is_file() else ""


def _is_guarded(line: int) -> bool | None:
    """Return whether a line of the main script is in a statement that tests `__name__`; None if nobody knows."""
    try:
        statements = ast.parse(Path(_main_script()).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # the script is not Python source, or was removed
        return None
    found = [each for each in statements if each.lineno <= line <= (each.end_lineno or each.lineno)]
    return any(isinstance(node, ast.Name) and node.id == "__name__" for each in found for node in ast.walk(each))


def find_unguarded_line() -> str:
    """Return `FILE:LINE` of the line of the main script that runs now, if a worker that runs the script would run this
    line again; otherwise "".
    """
    # In a worker that runs the script, a loop at module level would start workers again, and `init_process_group` at
    # module level would wait for ever.
    path = _main_script()
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 (inspect.stack reads the source of every frame)
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("<module>", path):
        frame = frame.f_back
    return f"{path}:{frame.f_lineno}" if frame is not None and _is_guarded(frame.f_lineno) is False else ""


@contextlib.contextmanager
def without_script() -> Iterator[None]:
    """Return a context in which processes that this thread starts do not run the main script."""
    thread = threading.get_ident()
    with _patching:
        original = spawn.get_preparation_data

        def get_preparation_data(name: str) -> dict[str, object]:
            found = original(name)
            is_ours = threading.get_ident() == thread
            return {key: value for key, value in found.items() if not (is_ours and key.startswith("init_main"))}

        spawn.get_preparation_data = get_preparation_data
        try:
            yield
        finally:
            spawn.get_preparation_data = original
