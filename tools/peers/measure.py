"""CPU time and memory of this process and all below it."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def below() -> Iterator[psutil.Process]:
    """All living processes below this one."""
    yield from psutil.Process().children(recursive=True)


def cpu_s() -> float:
    """CPU seconds of the tree since it began: this process, the living ones below it, and those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for process in below():
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and both of its own ended children
    return total


def pss_mb() -> float:
    """Proportional set size of the tree in megabytes: shared pages count once."""
    total = 0
    for process in [psutil.Process(), *below()]:
        with suppress(OSError, psutil.NoSuchProcess):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total / 1e6


def end_below() -> None:
    """Kill all processes below this one but Python's own tracker, which removes what they leave in shared memory."""
    for process in below():
        with suppress(psutil.Error):
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()
