"""Which pieces of work are timed.

Clocks cost: a lap takes 1 to 3 us, a small sample 6. So where work is short only some of it is timed, and counts for
what was not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from wdskit.pipeline.timings import LEAST_S, Timings, started

LAP_S = 3e-6
"""What a lap costs where clocks are slow: four of them, and a bucket. And"""
PIECE_S = 10e-6
"""what a piece of work costs that is timed, beside its laps."""

MAX_SHARE = 0.001
"""Of the time that work takes, for timing it."""

MAX_STRIDE = 4096


class Pace:
    """Decides which pieces of work are timed, so that timing takes no more than `MAX_SHARE` of the work's own time.

    A piece that is timed counts for those before it that were not. How many that would be was drawn before it began, so
    long pieces count for no more than short ones, and those that come every so often (the first of a batch) for no
    more than others. Threads may share a pace: what they lose to each other is the place of the next piece.

    Attributes:
        stride: How many pieces further on the next one is timed, on average.
    """

    __slots__ = ("_left", "_random", "_weight", "stride")

    def __init__(self) -> None:
        self._left = self._weight = self.stride = 1
        self._random = 1

    def begin(self) -> Timings | None:
        """A clock that has started, for the piece of work that begins now; None where it is not to be timed."""
        self._left -= 1
        if self._left > 0:
            return None
        timings = started(self._weight)
        self._left = self._weight = self.gap()
        return timings

    def pick(self, num: int) -> dict[int, int]:
        """Of the next `num` pieces those that are to be timed, each with its weight for `started`."""
        picked, before = {}, 0
        while before + self._left <= num:
            before += self._left
            picked[before - 1] = self._weight
            self._left = self._weight = self.gap()
        self._left -= num - before
        return picked

    def gap(self) -> int:
        """Draw how many pieces further on the next one is timed: 1 to twice the stride, less 1."""
        self._random = (self._random * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64  # Knuth's MMIX
        return 1 + (self._random >> 33) % (2 * self.stride - 1)

    def end(self, timings: Timings) -> None:
        """Learn how long a piece took."""
        total_s = sum(each.total_s for each in timings.stages.values()) / timings.weight
        wanted = (PIECE_S + timings.num_laps * LAP_S) / (MAX_SHARE * max(total_s, LEAST_S))
        self.stride = max(1, min(MAX_STRIDE, math.ceil(wanted)))


def clocked(values: Iterable[Any], stage: str, keep: Callable[[Timings], None]) -> Iterator[Any]:
    """The values of an iterator, with what it took to make them, where it is the stage's work to make one.

    Args:
        values: What the stage yields.
        stage: Its name.
        keep: Is given what was measured, in this thread.
    """
    pace, weight = Pace(), 1
    values = iter(values)
    while True:
        timings = started(weight)
        for value in itertools.islice(values, 1):
            timings.lap(stage)
            pace.end(timings)
            keep(timings)
            yield value
            break
        else:
            return
        weight = pace.gap()
        yield from itertools.islice(values, weight - 1)
