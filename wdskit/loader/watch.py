"""Watch long waits for a batch: log a line each minute, and raise PipelineError after the `timeout`."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import PipelineError
from wdskit.stages import run
from wdskit.stages.run import IDLE

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two calls of `look`
_DESCRIBE_S = 1.0  # longest time to read the keys of samples, because the disk may hang
_STDERR = 2  # a notebook's sys.stderr has no descriptor


class Watch:
    """Watches one wait for a batch at a time.

    Args:
        describe: Called with (major, minor), which identify a sample in a slot of a `Board`. Returns the name of the
            sample; "" if the name is unknown.
        timeout_s: The longest wait in seconds; 0 for no limit.
    """

    def __init__(self, describe: Callable[[int, int], str], timeout_s: float) -> None:
        self._describe = describe
        self.timeout_s = timeout_s
        self.begin()

    def begin(self) -> None:
        """Start to watch a new wait, which begins now."""
        self._started_s = time.monotonic()
        self._next_s = self._started_s + run.REPORT_S

    @property
    def step_s(self) -> float:
        """Seconds to wait for the batch before the next call of `look`; at least 0.001."""
        return max(0.001, min(_LOOK_S, run.REPORT_S / 4, (self.timeout_s or math.inf) / 4))

    def look(
        self, who: str, pid: int | None = None, slots: NDArray[np.int64] | None = None, *, start_hint: str = ""
    ) -> None:
        """At most once a minute, log the samples that a process works on, and let it print its stack. Raise if the wait
        for its batch is too long.

        The caller calls this method every `step_s` seconds during the wait.

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
        is_over = bool(self.timeout_s) and waited_s >= self.timeout_s
        if not is_over and now_s < self._next_s:
            return
        self._next_s = now_s + run.REPORT_S
        what = f"no batch has come from {who} for {waited_s:.0f} s."
        if start_hint:
            what = f"{who} has not started within {waited_s:.0f} s. {start_hint}"
        elif slots is not None:
            what += f" It is at {self._samples(slots)}."
            if pid == os.getpid():
                faulthandler.dump_traceback(_STDERR)
            elif pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
        logger.warning("%s", what)
        if is_over:
            msg = f"no batch came within {self.timeout_s:g} s (timeout): {what}"
            raise PipelineError(f"{msg}\n  Correct what hangs, or raise `timeout`; 0 is no limit.")

    def _samples(self, slots: NDArray[np.int64]) -> str:
        """Return the names of the samples in the slots that are not idle."""
        busy = np.unique(slots[slots[:, 1] != IDLE, :2], axis=0).tolist()
        found: list[str] = []

        def find() -> None:
            try:
                found.extend(self._describe(*each) for each in busy)
            except Exception as err:  # noqa: BLE001 (the shard may be deleted; the hang is reported in any case)
                logger.debug("the sample that hangs cannot be named: %s", err)

        thread = threading.Thread(target=find, name="wdskit-watch", daemon=True)
        thread.start()
        thread.join(_DESCRIBE_S)
        return ", ".join(filter(None, found)) or "no sample that has a name"


def print_stack_on_signal() -> None:
    """Let this worker process print the stacks of its threads when `Watch.look` sends a signal."""
    faulthandler.register(signal.SIGUSR2, _STDERR)
