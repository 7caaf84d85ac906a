"""Watch long waits for a batch: log a line each minute, and raise PipelineError after the `timeout`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import PipelineError
from wdskit.processes import is_stopped
from wdskit.stages import progress
from wdskit.stages.progress import IDLE, TURN, describe_silence

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two calls of `look`
_DESCRIBE_S = 1.0  # longest time to read the key of a sample, because the disk may hang


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
        self._next_s = self._started_s + progress.REPORT_S
        self._first: NDArray[np.int64] | None = None
        self._last: NDArray[np.int64] | None = None

    @property
    def step_s(self) -> float:
        """Seconds to wait for the batch before the next call of `look`; at least 0.001."""
        longest_s = self.timeout_s or math.inf
        until_s = min(self._next_s, self._started_s + longest_s)
        return max(0.001, min(_LOOK_S, progress.REPORT_S / 4, longest_s / 4, until_s - time.monotonic()))

    def look(self, who: str, pid: int, slots: NDArray[np.int64] | None, *, start_hint: str = "") -> None:
        """Log the sample that a process works on, at most once a minute. Raise if the wait for its batch is too long.

        The caller calls this method every `step_s` seconds during the wait.

        Args:
            who: Name of the process that makes the batch, for messages.
            pid: Id of the process. If the process is stopped (SIGSTOP), messages say so.
            slots: The slots of the process's `Board`; None if the process has not sent them yet.
            start_hint: Likely reason why the process has not started, for messages; empty if the process has started.

        Raises:
            PipelineError: The wait has lasted for `timeout_s`.
        """
        now_s = time.monotonic()
        if slots is not None:
            slots = slots.copy()
            if self._first is None or self._last is None:
                self._first = self._last = slots
                self._since = np.full(len(slots), self._started_s)
            self._since[(slots[:, :2] != self._last[:, :2]).any(axis=1)] = now_s
            self._last = slots
        waited_s = now_s - self._started_s
        is_over = bool(self.timeout_s) and waited_s >= self.timeout_s
        if not is_over and now_s < self._next_s:
            return
        self._next_s = now_s + progress.REPORT_S
        what = f"{who} has not started within {waited_s:.0f} s. {start_hint}"
        if not start_hint:
            what = self._state(who, now_s, waited_s)
        if is_stopped(pid):
            what += " The process is stopped (SIGSTOP): `kill -CONT` resumes it."
        if is_over:
            msg = f"no batch came within {self.timeout_s:g} s (timeout): {what}"
            raise PipelineError(f"{msg}\n  Correct what hangs, or raise `timeout`; 0 is no limit.")
        logger.warning("%s", what)

    def _state(self, who: str, now_s: float, waited_s: float) -> str:
        busy = [] if self._last is None else np.flatnonzero(self._last[:, 1] != IDLE).tolist()
        if self._first is None or self._last is None:
            return f"no batch has come from {who} for {waited_s:.0f} s."
        if not busy:
            return f"no batch has come from {who} for {waited_s:.0f} s. It is not working on a sample."
        slot = min(busy, key=self._since.__getitem__)
        if TURN in busy and now_s - self._since[TURN] >= waited_s / 2:  # other threads wait for this one
            slot = TURN
        for_s = now_s - float(self._since[slot])
        num_samples = int(self._last[:, 2].sum() - self._first[:, 2].sum())
        if for_s < waited_s / 2 and num_samples:
            return describe_silence(who, waited_s, num_samples)
        sample = self._named(*self._last[slot, :2].tolist())
        if for_s < waited_s / 2:
            return f"no batch has come from {who} for {waited_s:.0f} s. It is at {sample}."
        return f"{who} has been at {sample} for {for_s:.0f} s."

    def _named(self, major: int, minor: int) -> str:
        """Return the name of the sample (major, minor); "a sample" if `describe` fails, takes too long or knows no
        name.
        """
        found: list[str] = []

        def find() -> None:
            try:
                found.append(self._describe(major, minor))
            except Exception as err:  # noqa: BLE001 (the shard may be deleted; the hang is reported in any case)
                logger.debug("the sample that hangs cannot be named: %s", err)

        thread = threading.Thread(target=find, name="wdskit-watch", daemon=True)
        thread.start()
        thread.join(_DESCRIBE_S)
        return (found and found[0]) or "a sample"
