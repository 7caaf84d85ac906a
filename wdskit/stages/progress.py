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
    """The slots of the working threads of a process. A thread writes its slot before it touches a sample.

    A slot has three numbers: `major` and `minor` of the sample's `Origin`, and the number of samples read. `minor` is
    `IDLE` if the thread works on no sample.

    Args:
        memory: `BOARD_BYTES` of shared memory; None for memory of this process.

    Attributes:
        slots: All slots, int64 (slots, 3).
        main: The slot of the thread that reads a stream, and that runs the stages if they have no threads.
        turn: The slot of the thread that holds the lock of `Run.call_lock`. Other threads wait for this thread.
    """

    def __init__(self, memory: Any = None) -> None:
        self.slots = slots_in(bytearray(BOARD_BYTES) if memory is None else memory)
        self.slots[:] = (0, IDLE, 0)
        self.main, self.turn, *others = (slot.data for slot in self.slots)
        self._free: deque[Slot] = deque(others)

    def claim(self) -> Slot:
        """Return a free slot for this thread, until `release`. If no slot is free, return memory outside `slots`, which
        no other process can read.
        """
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(_WORDS * 8)).cast("q")

    def release(self, slot: Slot) -> None:
        """Mark a slot from `claim` as idle, and make it free."""
        slot[1] = IDLE
        self._free.append(slot)


def slots_in(memory: Any) -> NDArray[np.int64]:
    """Return the slots of a `Board` as a view of its memory of `BOARD_BYTES`, int64 (slots, 3)."""
    return np.frombuffer(memory, np.int64).reshape(_SLOTS, _WORDS)


class SilenceTimer:
    """The time since a stream yielded its last value, for streams that no loader watches from another thread."""

    def __init__(self, num_yielded: int) -> None:
        self.restart(num_yielded)

    def restart(self, num_yielded: int) -> None:
        """Measure from now on. The stream has yielded `num_yielded` values."""
        self._num_yielded = num_yielded
        self._started_s = time.monotonic()
        self._next_s = self._started_s + REPORT_S
        self._num_samples = 0

    def update(self, num_yielded: int, num_samples: int) -> str:
        """Add `num_samples` samples that were read. Return the line to log after each `REPORT_S` seconds in which
        `num_yielded` has not changed, otherwise an empty text.
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
    """Return the message about a stream `who` that reads samples and has yielded no value for `waited_s` seconds."""
    return (
        f"no sample has come out of {who} for {waited_s:.0f} s: {num_samples} samples were read in this time, and all "
        "were dropped or are held by its stages. Check its select and shuffle stages."
    )
