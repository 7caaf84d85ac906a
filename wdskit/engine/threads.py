"""Threads that work on samples, and that never keep a process from ending."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

JOIN_S = 0.5
"""How long the end of an iteration waits for the samples that threads are working on."""


class Threads:
    """Threads that call functions, which raise nothing, in the order in which these come.

    Args:
        number: How many.
        name: For debuggers.
    """

    def __init__(self, number: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        torch = sys.modules.get("torch")  # a worker process that imports it later sets the number of its threads then
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
        """Call the function after all earlier calls."""
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
        """End the threads after all calls. A thread whose call hangs is left to itself after `JOIN_S`, or at
        `deadline_s` of the monotonic clock: as a daemon, it does not keep the process alive.
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
        torch.set_num_threads(1)  # of this thread: several images at a time instead of several threads an image
        torch.get_num_threads()  # torch looks at the number again where a thread first asks, which may be later
    with contextlib.suppress(threading.BrokenBarrierError):  # another could not start
        ready.wait()
        _call_all(calls)


def _call_all(calls: SimpleQueue[tuple[Any, ...] | None]) -> None:
    while (call := calls.get()) is not None:
        function, *args = call
        del call
        function(*args)
        del function, args  # while this thread waits, it holds no batch
