"""Watch long waits for a batch: log a line each minute, and raise PipelineError after the `timeout`."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import PipelineError
from wdskit.stages import run
from wdskit.stages.run import IDLE

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Longest wait between two calls of `Watch.look`."""

_STDERR = 2  # a notebook's sys.stderr has no descriptor


class Watch:
    """Watches one wait for a batch at a time.

    Args:
        describe: Called with (major, minor), which identify a sample in a slot of a `Board`. Returns the name of the
            sample.
        timeout_s: The longest wait in seconds; 0 for no limit.
    """

    def __init__(self, describe: Callable[[int, int], str], timeout_s: float) -> None:
        self._describe = describe
        self._timeout_s = timeout_s
        self.begin()

    def begin(self) -> None:
        """Start to watch a new wait, which begins now."""
        self._started_s = self._reported_s = time.monotonic()

    def look(
        self, who: str, pid: int | None = None, slots: NDArray[np.int64] | None = None, *, start_hint: str = ""
    ) -> None:
        """At most once a minute, log the samples that a process works on, and let it print its stack. Raise if the wait
        for its batch is too long.

        The caller calls this method every `LOOK_S` during the wait.

        Args:
            who: Name of the process that makes the batch, for messages.
            pid: Id of the process; None if the process runs on another machine.
            slots: The slots of the process's `Board`; None if the process runs on another machine.
            start_hint: Likely reason why the process has not started, for messages; empty if the process has started.

        Raises:
            PipelineError: The wait has lasted for `timeout_s`.
        """
        now_s = time.monotonic()
        waited_s = now_s - self._started_s
        is_over = 0 < self._timeout_s <= waited_s
        if not is_over and now_s < self._reported_s + run.REPORT_S:
            return
        self._reported_s = now_s
        what = f"no batch has come from {who} for {waited_s:.0f} s."
        if start_hint:
            what += f" It has not started. {start_hint}"
        elif slots is not None:
            busy = np.unique(slots[slots[:, 1] != IDLE], axis=0).tolist()
            what += f" It is at {', '.join(self._describe(*each) for each in busy) or 'no sample'}."
            if pid == os.getpid():
                faulthandler.dump_traceback(_STDERR)
            elif pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
        logger.warning("%s", what)
        if is_over:
            msg = f"no batch came within {self._timeout_s:g} s (timeout): {what}"
            raise PipelineError(f"{msg}\n  Correct what hangs, or raise `timeout`; 0 is no limit.")


def print_stack_on_signal() -> None:
    """Let this worker process print the stacks of its threads when `Watch.look` sends a signal."""
    faulthandler.register(signal.SIGUSR2, _STDERR)
