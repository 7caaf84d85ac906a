"""What the threads of a process work on, in memory that another process can read while this one hangs or is stopped."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

REPORT_S = 60.0
"""A wait for a batch is reported after this time, and each time that it has lasted as long again."""

IDLE = -1
"""In place of `minor`: the thread works on nothing."""

TURN = 1
"""The row of `Board.turn`."""

_SLOTS = 64  # threads that work at the same time; further ones work unseen
_WORDS = 3
BOARD_BYTES = _SLOTS * _WORDS * 8

Slot: TypeAlias = "memoryview[int]"


class Board:
    """One slot for each thread that works: `major` and `minor` of the sample's `Origin`, and how many samples it read.

    A slot is written before its thread touches a sample: two stores of 40 ns.

    Args:
        memory: `BOARD_BYTES` of shared memory; without, this process's own.

    Attributes:
        slots: As `slots_in` returns them.
        main: The slot of the thread that reads a stream, and runs its stages where they have no threads.
        turn: The slot of the thread whose turn it is to call a function of the user's: others wait for it.
    """

    def __init__(self, memory: Any = None) -> None:
        self.slots = slots_in(bytearray(BOARD_BYTES) if memory is None else memory)
        self.slots[:] = (0, IDLE, 0)
        self.main, self.turn, *others = (slot.data for slot in self.slots)
        self._free: deque[Slot] = deque(others)

    def claim(self) -> Slot:
        """Take a slot for this thread."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(bytearray(_WORDS * 8)).cast("q")

    def release(self, slot: Slot) -> None:
        """Give a slot back, idle."""
        slot[1] = IDLE
        self._free.append(slot)


def slots_in(memory: Any) -> NDArray[np.int64]:
    """Return the slots of a `Board` in its memory, int64 (slots, 3)."""
    return np.frombuffer(memory, np.int64).reshape(_SLOTS, _WORDS)


class Silence:
    """The time since something came out of a stream, for streams that no loader watches from another thread."""

    def __init__(self, num_heard: int) -> None:
        self.begin(num_heard)

    def begin(self, num_heard: int) -> None:
        """Count from here on, where `num_heard` values have come out."""
        self._num_heard = num_heard
        self._started_s = time.monotonic()
        self._next_s = self._started_s + REPORT_S
        self._num_samples = 0

    def after(self, num_heard: int, num_samples: int) -> str:
        """Note samples that were read. Returns the line to log if nothing has come out for long, else an empty text."""
        if num_heard != self._num_heard:
            self.begin(num_heard)
        self._num_samples += num_samples
        now_s = time.monotonic()
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + REPORT_S
        return describe_silence("the pipeline", now_s - self._started_s, self._num_samples)


def describe_silence(who: str, waited_s: float, num_samples: int) -> str:
    """Return the message about a stream that reads samples and yields nothing."""
    return (
        f"no sample has come out of {who} for {waited_s:.0f} s: {num_samples} samples were read in this time, and all "
        "were dropped or are held by its stages. Check its select and shuffle stages."
    )
