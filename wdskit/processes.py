"""Processes: signals and parents of worker processes, and the CPU time of a process tree. Standard library only."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType, ModuleType

from wdskit.errors import PipelineError

_PROCESSES = Path("/proc")


def end_with_parent() -> None:
    """Let this worker process end when the main process ends or is killed. Call this once, at the worker's start."""
    # PR_SET_PDEATHSIG is not enough: with forkserver, the parent process of a worker is the server.
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call a function once: now if the module `name` is imported already, otherwise at the end of its import."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _CallAfterImport(name, call))


class _CallAfterImport(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Return the spec of the awaited module, with a loader that calls the function after the import.

        Return None for all other modules, if the awaited module does not exist, and after the first search for this
        module.
        """
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._call()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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


def is_stopped(pid: int) -> bool:
    """Return True if SIGSTOP or a debugger has stopped a process. Return False if the process does not exist, and on
    systems other than Linux.
    """
    with contextlib.suppress(OSError):
        return (_PROCESSES / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in {"T", "t"}
    return False


def cpu_s_of_tree() -> float | None:
    """Return the CPU seconds of this process and its living descendants; None on systems other than Linux."""
    if not _PROCESSES.is_dir():
        return None
    total = time.process_time()
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):  # the process has ended
            # the clock of clock_getcpuclockid(3): all threads, in nanoseconds
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def _descendants(pid: int) -> list[int]:
    """Return the process ids of all living descendants of process `pid`."""
    children: dict[int, list[int]] = {}
    for folder in _PROCESSES.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for each in found:  # the loop appends to `found`
        found += children.get(each, ())
    return found


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
