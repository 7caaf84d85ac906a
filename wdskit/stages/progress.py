"""Positions of the samples that threads work on, readable by another process while this process hangs or is stopped."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

REPORT_S = 60.0
"""Time between two reports of a wait for a batch; also the time before the first report."""

IDLE = -1
"""The value of `minor` in a slot whose thread works on no sample."""

_SHAPE = (1024, 2)  # the most threads of a process, and the numbers of a slot
BOARD_BYTES = 1024 * 2 * 8

Slot: TypeAlias = "memoryview[int]"


class Board:
    """Shows on which sample each thread of a process works. Every working thread has a slot of the board and writes the
    slot before it touches a sample.

    A slot has two numbers: `major` and `minor` of the sample's `Origin`. `minor` is `IDLE` if the thread works on no
    sample.

    Args:
        memory: Shared memory of `BOARD_BYTES`; None for memory of this process.

    Attributes:
        slots: All slots, int64 (slots, 2).
    """

    def __init__(self, memory: Any = None) -> None:
        self.slots = slots_in(bytearray(BOARD_BYTES) if memory is None else memory)
        self.slots[:] = (0, IDLE)
        self._free: deque[Slot] = deque(slot.data for slot in self.slots)

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return Board, ()  # each process has its own

    def claim(self) -> Slot:
        """Return a slot that only this thread uses until `release`."""
        return self._free.pop()

    def release(self, slot: Slot) -> None:
        """Mark a slot from `claim` as idle, and make it free."""
        slot[1] = IDLE
        self._free.append(slot)


def slots_in(memory: Any) -> NDArray[np.int64]:
    """Return the slots in the memory of a `Board` as a view: int64 (slots, 2). `Board` explains the numbers."""
    return np.frombuffer(memory, np.int64).reshape(_SHAPE)
