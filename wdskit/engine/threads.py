"""Threads that work on samples. They do not keep a process alive."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

JOIN_S = 0.5
"""Longest time that the end of an iteration waits for the samples on which threads work."""


class Threads:
    """Threads that call submitted functions. The calls start in the order of submission. The functions must not raise.

    Args:
        number: Number of threads.
        name: Part of the names of the threads, for debuggers.

    Raises:
        RuntimeError: The system allows no more threads.
    """

    def __init__(self, number: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        torch = sys.modules.get("torch")  # a worker process that imports torch later sets the number of threads then
        before = torch.get_num_threads() if torch is not None else 0
        ready = threading.Barrier(number + 1)
        self._threads = [
            threading.Thread(target=_work, args=(self._calls, ready), name=f"wdskit-{name}-{at}", daemon=True)
            for at in range(number)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system allows no more threads
            ready.abort()
            raise
        ready.wait()
        if torch is not None:
            torch.set_num_threads(before)  # the new threads keep 1

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Queue a call of `function` with `args`. After `close`, the call never runs."""
        self._calls.put((function, *args))

    def run_all(self, function: Callable[[int], None], num: int) -> None:
        """Call `function` with 0 to num - 1, in any order, and wait until all calls have returned."""
        done = threading.Semaphore(0)

        def run(number: int) -> None:
            try:
                function(number)
            finally:
                done.release()

        for number in range(num):
            self.submit(run, number)
        for _ in range(num):
            done.acquire()

    def close(self, deadline_s: float | None = None) -> None:
        """Let the threads finish all submitted calls, and wait until the threads end.

        The wait stops at `deadline_s` of the monotonic clock; with None, after `JOIN_S`. A call that then still runs is
        not stopped, but does not keep the process alive.
        """
        deadline_s = time.monotonic() + JOIN_S if deadline_s is None else deadline_s
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))


def _work(calls: SimpleQueue[tuple[Any, ...] | None], ready: threading.Barrier) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # of this thread: each thread works on another image, not all on one image
        torch.get_num_threads()  # torch reads the process's number when a thread first asks, which may be later
    try:
        ready.wait()
    except threading.BrokenBarrierError:  # another thread could not start
        return
    while (call := calls.get()) is not None:
        function, *args = call
        del call
        function(*args)
        del function, args  # while this thread waits, it holds no batch
