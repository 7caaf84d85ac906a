"""Positions of the samples that threads work on, readable by another process while this process hangs or is stopped."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

REPORT_S = 60.0
"""Time between two reports of a wait for a batch; also the time before the first report."""

IDLE = -1
"""The value of `minor` in a slot whose thread works on no sample."""

TURN = 1
"""The row of `Board.turn` in `Board.slots`."""

_SLOTS = 64  # further threads get a slot that no other process can read
_WORDS = 3
BOARD_BYTES = _SLOTS * _WORDS * 8

Slot: TypeAlias = "memoryview[int]"


class Board:
    """Shows on which sample each thread of a process works. Every working thread has a slot of the board and writes the
    slot before it touches a sample.

    A slot has three numbers: `major` and `minor` of the sample's `Origin`, and the number of samples read. `minor` is
    `IDLE` if the thread works on no sample.

    Args:
        memory: Shared memory of `BOARD_BYTES`; None for memory of this process.

    Attributes:
        slots: All slots, int64 (slots, 3).
        main: The slot of the thread that reads a stream. If the stages have no threads, this thread also runs the
            stages.
        turn: The slot of the thread that holds the lock of `Run.call_lock`. Other threads wait for this thread.
    """

    def __init__(self, memory: Any = None) -> None:
        self.slots = slots_in(bytearray(BOARD_BYTES) if memory is None else memory)
        self.slots[:] = (0, IDLE, 0)
        self.main, self.turn, *others = (slot.data for slot in self.slots)
        self._free: deque[Slot] = deque(others)

    def claim(self) -> Slot:
        """Return a slot that only this thread uses until `release`. If no slot is free, return memory outside `slots`,
        which no other process can read.
        """
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(_WORDS * 8)).cast("q")

    def release(self, slot: Slot) -> None:
        """Mark a slot from `claim` as idle, and make it free."""
        slot[1] = IDLE
        if not isinstance(slot.obj, bytearray):  # memory outside `slots` is not used again
            self._free.append(slot)


def slots_in(memory: Any) -> NDArray[np.int64]:
    """Return the slots in the memory of a `Board` as a view: int64 (slots, 3). `Board` explains the numbers."""
    return np.frombuffer(memory, np.int64).reshape(_SLOTS, _WORDS)


class SilenceTimer:
    """Measures for how long a stream has read samples without yielding a value."""

    def __init__(self, num_yielded: int) -> None:
        self.restart(num_yielded)

    def restart(self, num_yielded: int) -> None:
        """Start the measurement again. `num_yielded` is the number of values that the stream has yielded so far."""
        self._num_yielded = num_yielded
        self._started_s = time.monotonic()
        self._next_s = self._started_s + REPORT_S
        self._num_samples = 0

    def update(self, num_yielded: int, num_samples: int) -> str:
        """Return a warning to log if the stream has yielded no value for `REPORT_S` seconds, and again after each
        further `REPORT_S` seconds. Otherwise return an empty text.

        Args:
            num_yielded: Number of values that the stream has yielded so far.
            num_samples: Number of samples that the stream has read since the last call.
        """
        if num_yielded != self._num_yielded:
            self.restart(num_yielded)
        self._num_samples += num_samples
        now_s = time.monotonic()
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + REPORT_S
        return describe_silence("the pipeline", now_s - self._started_s, self._num_samples)


def describe_silence(who: str, waited_s: float, num_samples: int) -> str:
    """Return a message: the stream `who` has read `num_samples` samples in `waited_s` seconds, but yielded no value."""
    return (
        f"no sample has come out of {who} for {waited_s:.0f} s: {num_samples} samples were read in this time, and all "
        "were dropped or are held by its stages. Check its select, slice and shuffle stages."
    )
