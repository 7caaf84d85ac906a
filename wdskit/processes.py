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
from types import ModuleType

from wdskit.errors import PipelineError

_PROCESSES = Path("/proc")


def end_with_parent() -> None:
    """End this worker process when the main process ends, even if it is killed. Call it once, at the start.

    PR_SET_PDEATHSIG would not do: under forkserver, the kernel's parent of a worker is the server.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call a function once: now if a module is imported already, otherwise at the end of its import."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _CallAfterImport(name, call))


class _CallAfterImport(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Return the spec of the module as the other finders find it, with the call after its execution."""
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
    """Delay Ctrl-C until the end of the block.

    Processes that start in the block do not receive Ctrl-C during their imports, where they would print a traceback.
    Later they ignore it, or call `hear_ctrl_c`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:  # a Ctrl-C just before is raised inside of `try`, so that the signal does not stay blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def refuse_fork(owner: int) -> None:
    """Check that this is the process `owner`, because its workers and threads do not exist in a forked process.

    Raises:
        PipelineError: This is another process.
    """
    if os.getpid() != owner:
        msg = f"this loader has run in process {owner}, from which this one was forked."
        raise PipelineError(f"{msg}\n  Make a loader in each process.")


def hear_ctrl_c() -> None:
    """Let Ctrl-C end this worker process at once, without a traceback."""
    with contextlib.suppress(ValueError):  # not in a main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def is_stopped(pid: int) -> bool:
    """True if a process is stopped by SIGSTOP or a debugger. False on systems other than Linux."""
    with contextlib.suppress(OSError):
        return (_PROCESSES / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in {"T", "t"}
    return False


def cpu_s_of_tree() -> float | None:
    """Return the CPU seconds of this process and its living descendants; None on systems other than Linux."""
    if not _PROCESSES.is_dir():
        return None
    total = time.process_time()
    for pid in _below(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime(
                (~pid << 3) | 2
            )  # the clock of clock_getcpuclockid(3): all threads, in nanoseconds
    return total


def _below(pid: int) -> list[int]:
    """Return the descendants of process `pid`."""
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
    """Return the number of CPU cores that this process may use: its affinity, or the quota of its container if less.

    Args:
        quota: Linux's file with the microseconds of processor time in a period, and its length.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        used, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, int(used) // int(period)))
    except (OSError, ValueError):  # not in a container, or no limit: `max`
        return cores
