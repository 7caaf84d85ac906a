"""Processes: what every worker does, and the CPU time that they use. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path

from wdskit.errors import PipelineError

_PROCESSES = Path("/proc")


def end_with_parent() -> None:
    """Let this worker process not outlive the main process, which may be killed: call it once, at its start. Under
    forkserver the parent that the kernel knows is the server, which lives on.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def block_sigint() -> Iterator[None]:
    """This process hears Ctrl-C when the block is left. Processes that start inside do not hear it in the middle of
    their imports, where they would print a traceback; then they ignore it, or call `hear_ctrl_c`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:  # a Ctrl-C that came just before is heard in here, and does not leave it blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def refuse_fork(owner: int) -> None:
    """Refuse to use what belongs to the process `owner`: in one that was forked from it, its workers and threads are
    not there.

    Raises:
        PipelineError: This is another process.
    """
    if os.getpid() != owner:
        msg = f"this loader has run in process {owner}, from which this one was forked."
        raise PipelineError(f"{msg}\n  Make a loader in each process.")


def hear_ctrl_c() -> None:
    """Let Ctrl-C end this worker process at once and without a word, from now on."""
    with contextlib.suppress(ValueError):  # not in a main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, as SIGSTOP and debuggers do. Only Linux knows it; elsewhere False."""
    with contextlib.suppress(OSError):
        return (_PROCESSES / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in {"T", "t"}
    return False


def cpu_s_of_tree() -> float | None:
    """CPU seconds that this process and all below it that live have used so far; None where only Linux knows it."""
    if not _PROCESSES.is_dir():
        return None
    total = time.process_time()
    for pid in _below(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) gives: all threads, to the ns
    return total


def _below(pid: int) -> list[int]:
    """The processes that descend from `pid`."""
    children: dict[int, list[int]] = {}
    for folder in _PROCESSES.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(pid, ()))
    for each in found:  # grows on the way
        found += children.get(each, ())
    return found


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processor cores that this process may use: those it is bound to, or fewer where a container's share is less.

    Args:
        quota: Linux's file with the microseconds of processor time in a period, and its length.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        used, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, int(used) // int(period)))
    except (OSError, ValueError):  # not in a container, or no limit: `max`
        return cores
