"""How long each stage takes, measured while batches are made, at less than 1 % of the work's own time.

A lap of the wall clock costs 1 to 3 us, a small sample 6. So where work is short, `Pace` times only some of it, with a
weight for what it left out. The clock of a thread's own CPU time is a system call: 0.7 us on a quiet machine, up to 150
where many threads start and stop, with Python's lock held. So it runs in every eighth task that is timed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any

LEAST_S = 1e-7
BUCKETS_AN_OCTAVE = 8
NUM_BUCKETS = 240
"""Log-spaced from 100 ns to 107 s; what is shorter or longer stands in the first or the last."""

CPU_STRIDE = 8
"""Of the tasks that are timed, every so many have their CPU time taken too."""

LAP_S = 3e-6
"""What a lap costs where clocks are slow: four of them, and a bucket."""

TASK_S = 10e-6
"""What timing a task costs beside its laps."""

MAX_SHARE = 0.001
"""Of the time that work takes, for timing it."""

MAX_STRIDE = 4096

_started = itertools.count()
_END = object()


@dataclass(slots=True)
class Histogram:
    """Durations in log-spaced buckets, with their exact sum.

    Attributes:
        num: How many.
        total_s: Their sum.
        clocked_s: The sum of those whose CPU time was taken.
        cpu_s: Of these, the time in which the thread ran; in the rest it waited, for a disk, a lock, the GIL or a CPU.
        buckets: Durations in each bucket that has any, by its number.
    """

    num: int = 0
    total_s: float = 0.0
    clocked_s: float = 0.0
    cpu_s: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[Histogram], tuple[Any, ...]]:
        return Histogram, (self.num, self.total_s, self.clocked_s, self.cpu_s, self.buckets)

    def add(self, seconds: float, *, cpu_s: float | None = None, num: int = 1) -> None:
        """Count `num` durations of `seconds` each."""
        self.num += num
        self.total_s += seconds * num
        if cpu_s is not None:
            self.clocked_s += seconds * num
            self.cpu_s += cpu_s * num
        octaves = math.log2(seconds / LEAST_S) if seconds > LEAST_S else 0.0  # some machines' clocks step back
        bucket = min(NUM_BUCKETS - 1, int(octaves * BUCKETS_AN_OCTAVE))
        self.buckets[bucket] = self.buckets.get(bucket, 0) + num

    def merge(self, other: Histogram) -> None:
        """Count what another has counted."""
        self.num += other.num
        self.total_s += other.total_s
        self.clocked_s += other.clocked_s
        self.cpu_s += other.cpu_s
        for bucket, num in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + num

    @property
    def mean_s(self) -> float:
        """The mean, exact; 0 of none."""
        return self.total_s / self.num if self.num else 0.0

    @property
    def cpu_ratio(self) -> float:
        """The share of their time in which the thread ran; 0 where that was not taken."""
        return min(1.0, self.cpu_s / self.clocked_s) if self.clocked_s else 0.0

    def quantile_s(self, share: float) -> float:
        """The duration that a share of all does not exceed, within 5 %; 0 of none."""
        left = share * self.num
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return edge_s(bucket + 0.5)
        return 0.0


def edge_s(bucket: float) -> float:
    """Where a bucket begins."""
    return float(LEAST_S * 2 ** (bucket / BUCKETS_AN_OCTAVE))


class Timings:
    """What one thread measures: laps between stages, and bytes. Not locked; `merge` joins those of several.

    Args:
        weight: How many times each lap counts: it stands for tasks that were not timed.
        bytes_read: From shards.
        stages: A histogram for each stage, in the order in which they were first met.
    """

    __slots__ = ("_cpu", "_takes_cpu", "_wall", "bytes_read", "num_laps", "stages", "weight")

    def __init__(self, weight: int = 1, bytes_read: int = 0, stages: dict[str, Histogram] | None = None) -> None:
        self.weight = weight
        self.bytes_read = bytes_read
        self.stages: dict[str, Histogram] = {} if stages is None else stages
        self.num_laps = 0
        self._wall = self._cpu = 0.0
        self._takes_cpu = False

    def __reduce__(self) -> tuple[type[Timings], tuple[Any, ...]]:
        """Some hundred bytes: it travels with each batch of a worker."""
        return Timings, (1, self.bytes_read, self.stages)

    def start(self) -> None:
        """Begin the first lap."""
        self._takes_cpu = next(_started) % CPU_STRIDE == 0
        self._begin()

    def begin_earlier(self, seconds: float) -> None:
        """Let the lap have begun so long before, with work done by this thread."""
        self._wall -= seconds
        self._cpu -= seconds

    def _begin(self) -> None:
        if self._takes_cpu:
            self._cpu = thread_time()
        self._wall = perf_counter()

    def lap(self, stage: str, num: int = 1) -> None:
        """End a lap in which a stage worked on `num` values, and begin the next; what this takes is in neither."""
        wall_s = perf_counter() - self._wall
        cpu_s = min(thread_time() - self._cpu, wall_s) if self._takes_cpu else None
        self.add(stage, wall_s, num, cpu_s=cpu_s)
        self._begin()

    def add(self, stage: str, seconds: float, num: int = 1, *, cpu_s: float | None = None) -> None:
        """Count that a stage took `seconds` for `num` values together, `cpu_s` of it on a CPU where that is known."""
        self.num_laps += 1
        cpu_each_s = None if cpu_s is None else cpu_s / num
        self._histogram(stage).add(seconds / num, cpu_s=cpu_each_s, num=num * self.weight)

    def merge(self, other: Timings) -> None:
        """Count what another has counted."""
        self.bytes_read += other.bytes_read
        for stage, histogram in other.stages.items():
            self._histogram(stage).merge(histogram)

    def _histogram(self, stage: str) -> Histogram:
        return self.stages.get(stage) or self.stages.setdefault(stage, Histogram())


def started(weight: int) -> Timings:
    """A clock whose first lap has begun."""
    timings = Timings(weight)
    timings.start()
    return timings


class Pace:
    """Decides which tasks are timed, so that timing takes no more than `MAX_SHARE` of the work's own time.

    A task that is timed counts for those before it that were not. How many that would be was drawn before it began, so
    long tasks count for no more than short ones, and those that come every so often (the first of a batch) for no more
    than others. Threads may share a pace: what they lose to each other is the place of the next task.

    Attributes:
        stride: How many tasks further on the next one is timed, on average.
    """

    __slots__ = ("_left", "_random", "_weight", "stride")

    def __init__(self) -> None:
        self._left = self._weight = self.stride = self._random = 1

    def begin(self) -> Timings | None:
        """A clock that has started, for the task that begins now; None where it is not to be timed."""
        self._left -= 1
        if self._left > 0:
            return None
        timings = started(self._weight)
        self._left = self._weight = self.gap()
        return timings

    def pick(self, num: int) -> dict[int, int]:
        """Of the next `num` tasks those that are to be timed, each with its weight for `started`."""
        picked, before = {}, 0
        while before + self._left <= num:
            before += self._left
            picked[before - 1] = self._weight
            self._left = self._weight = self.gap()
        self._left -= num - before
        return picked

    def gap(self) -> int:
        """Draw how many tasks further on the next one is timed: 1 to twice the stride, less 1."""
        self._random = (self._random * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64  # Knuth's MMIX
        return 1 + (self._random >> 33) % (2 * self.stride - 1)

    def end(self, timings: Timings) -> None:
        """Learn how long a task took."""
        total_s = sum(each.total_s for each in timings.stages.values()) / timings.weight
        wanted = (TASK_S + timings.num_laps * LAP_S) / (MAX_SHARE * max(total_s, LEAST_S))
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
        timings = started(weight)
        value = next(values, _END)
        if value is _END:
            return
        timings.lap(stage)
        pace.end(timings)
        keep(timings)
        yield value
        weight = pace.gap()
        yield from itertools.islice(values, weight - 1)
