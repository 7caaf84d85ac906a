"""How long each stage takes, measured while batches are made, in less than 1 % of the work's own time.

To time a stage costs 1 to 3 us, and all the work on a small sample takes 6. So where work is short, `Pace` times only
some of it, with a weight for the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from wdskit.storage.traffic import NO_TRAFFIC, Traffic

LAP_S = 3e-6
"""What a lap costs where clocks are slow."""

TASK_S = 10e-6
"""What timing a task costs beside its laps."""

MAX_SHARE = 0.004
"""Of the time that work takes, for timing it."""

MAX_STRIDE = 4096

_END = object()


@dataclass(slots=True)
class Timings:
    """Time of stages and bytes read, measured in one thread; its clock runs when it is made. Not locked.

    Attributes:
        weight: How many times each lap counts: it stands for tasks that were not timed.
        bytes_read: From shards.
        traffic: What came from stores, for these samples and others.
        stages: The values that each stage worked on and the seconds that this took, in the order of the first laps.
        num_laps: Without weight.
        lap_start_s: When the running lap began.
    """

    weight: int = 1
    bytes_read: int = 0
    traffic: Traffic = NO_TRAFFIC
    stages: dict[str, tuple[int, float]] = field(default_factory=dict)
    num_laps: int = 0
    lap_start_s: float = field(default_factory=perf_counter, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Without names and clock: it travels with each batch."""
        return Timings, (self.weight, self.bytes_read, self.traffic, self.stages, self.num_laps)

    def start(self) -> None:
        """Begin the first lap now."""
        self.lap_start_s = perf_counter()

    def lap(self, stage: str, num: int = 1) -> None:
        """End a lap in which a stage worked on `num` values, and begin the next; what this takes is in neither."""
        seconds = perf_counter() - self.lap_start_s
        self.num_laps += 1
        self.add(stage, num * self.weight, seconds * self.weight)
        self.lap_start_s = perf_counter()

    def add(self, stage: str, num: int, total_s: float) -> None:
        """Count `num` values of a stage, which took `total_s` together."""
        num_before, before_s = self.stages.get(stage, (0, 0.0))
        self.stages[stage] = num_before + num, before_s + total_s

    def merge(self, other: Timings) -> None:
        """Count what another has counted."""
        self.bytes_read += other.bytes_read
        self.traffic = self.traffic.plus(other.traffic)
        for stage, counted in other.stages.items():
            self.add(stage, *counted)


class Pace:
    """Decides which tasks are timed, so that timing takes no more than `MAX_SHARE` of the work's own time.

    A task that is timed counts for those before it that were not. How many that would be was drawn before it began, so
    long tasks count for no more than short ones, and those that come every so often (the first of a batch) for no more
    than others. Threads may share a pace: what they lose to each other is the place of the next task.

    Attributes:
        stride: How many tasks further on the next one is timed, on average.
    """

    def __init__(self) -> None:
        self._left = self._weight = self.stride = self._random = 1

    def begin(self) -> Timings | None:
        """A clock that runs, for the task that begins now; None where it is not to be timed."""
        left = self._left = self._left - 1
        if left > 0:
            return None
        weight, self._weight = self._weight, self.gap()
        self._left = self._weight
        return Timings(weight)

    def gap(self) -> int:
        """Draw how many tasks further on the next one is timed: 1 to twice the stride, less 1."""
        self._random = (self._random * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64  # Knuth's MMIX
        return 1 + (self._random >> 33) % (2 * self.stride - 1)

    def end(self, timings: Timings) -> None:
        """Learn how long a task took."""
        total_s = sum(seconds for _, seconds in timings.stages.values()) / timings.weight
        wanted = (TASK_S + timings.num_laps * LAP_S) / (MAX_SHARE * max(total_s, 1e-7))  # some clocks step back
        self.stride = max(1, min(MAX_STRIDE, math.ceil(wanted)))


def clocked(values: Iterable[Any], stage: str, keep: Callable[[Timings], None]) -> Iterator[Any]:
    """The values of an iterator whose work it is to make them, some of them timed.

    Args:
        values: What the stage yields.
        stage: Its name.
        keep: Is given what was measured, in this thread.
    """
    pace, weight = Pace(), 1
    values = iter(values)
    while True:
        timings = Timings(weight)
        value = next(values, _END)
        if value is _END:
            return
        timings.lap(stage)
        pace.end(timings)
        keep(timings)
        yield value
        weight = pace.gap()
        yield from itertools.islice(values, weight - 1)
