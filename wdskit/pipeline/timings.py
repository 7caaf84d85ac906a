"""How long each stage takes, as measured while batches are made.

Clocks cost, so where work is short only some of it is timed, and counts for what was not (`pacing.Pace`). The clock of
a thread's own CPU time is a system call: 0.7 us on a quiet machine, up to 150 where many threads start and stop, with
Python's lock held. So it runs in every eighth piece that is timed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter, thread_time
from typing import Any, NamedTuple

from typing_extensions import Self

LEAST_S = 1e-7
BUCKETS_AN_OCTAVE = 8
NUM_BUCKETS = 240
"""Log-spaced from 100 ns to 107 s; what is shorter or longer stands in the first or the last."""

CPU_STRIDE = 8
"""Of the pieces that are timed, every so many have their CPU time taken too."""

_started = itertools.count()


class Histogram:
    """Durations in log-spaced buckets, with their exact sum.

    Attributes:
        num: How many.
        total_s: Their sum.
        clocked_s: The sum of those whose CPU time was taken.
        cpu_s: What the thread was running of these; in the rest it waited, for a disk, a lock, the GIL or a free CPU.
        buckets: Durations in each bucket that has any, by its number.
    """

    __slots__ = ("buckets", "clocked_s", "cpu_s", "num", "total_s")

    def __init__(
        self,
        num: int = 0,
        total_s: float = 0.0,
        clocked_s: float = 0.0,
        cpu_s: float = 0.0,
        buckets: Mapping[int, int] | None = None,
    ) -> None:
        self.num = num
        self.total_s = total_s
        self.clocked_s = clocked_s
        self.cpu_s = cpu_s
        self.buckets: dict[int, int] = dict(buckets or {})

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.num, self.total_s, self.clocked_s, self.cpu_s, self.buckets)

    def add(self, seconds: float, *, cpu_s: float | None = None, num: int = 1) -> None:
        """Count `num` durations of `seconds` each."""
        self.num += num
        self.total_s += seconds * num
        if cpu_s is not None:
            self.clocked_s += seconds * num
            self.cpu_s += cpu_s * num
        bucket = _bucket(seconds)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + num

    def merge(self, other: Histogram) -> None:
        """Count what another has counted."""
        self.num += other.num
        self.total_s += other.total_s
        self.clocked_s += other.clocked_s
        self.cpu_s += other.cpu_s
        for bucket, num in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + num

    def since(self, earlier: Histogram) -> Histogram:
        """What was counted after a copy of this was taken.

        Where no CPU time was taken since, as of a few pieces, what was known before stands for it.
        """
        clocked_s, cpu_s = self.clocked_s - earlier.clocked_s, self.cpu_s - earlier.cpu_s
        if clocked_s <= 0:
            clocked_s, cpu_s = self.clocked_s, self.cpu_s
        left = ((bucket, num - earlier.buckets.get(bucket, 0)) for bucket, num in self.buckets.items())
        return Histogram(
            self.num - earlier.num,
            max(0.0, self.total_s - earlier.total_s),
            clocked_s,
            max(0.0, cpu_s),
            {bucket: num for bucket, num in left if num},
        )

    def copy(self) -> Histogram:
        """One that stays as it is."""
        return Histogram(self.num, self.total_s, self.clocked_s, self.cpu_s, self.buckets)

    @property
    def mean_s(self) -> float:
        """The mean, exact; 0 of none."""
        return self.total_s / self.num if self.num else 0.0

    @property
    def cpu_ratio(self) -> float:
        """The share of their time in which the thread was running; 0 where that was not taken."""
        return min(1.0, self.cpu_s / self.clocked_s) if self.clocked_s else 0.0

    def quantile_s(self, share: float) -> float:
        """The duration that a share of all does not exceed, within 5 %; 0 of none."""
        left = share * self.num
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return edge_s(bucket + 0.5)
        return 0.0


class Timings:
    """What one thread measures: laps between stages, and bytes. Not locked; `merge` joins those of several.

    Args:
        weight: How many times what is timed here is to count, since as much was not timed.

    Attributes:
        stages: A histogram for each stage, in the order in which they were first met.
        bytes_read: From shards.
    """

    __slots__ = ("_cpu", "_takes_cpu", "_wall", "bytes_read", "num_laps", "stages", "weight")

    def __init__(self, *, weight: int = 1) -> None:
        self.stages: dict[str, Histogram] = {}
        self.bytes_read = 0
        self.weight = weight
        self.num_laps = 0
        self._wall = self._cpu = 0.0
        self._takes_cpu = False

    def __reduce__(self) -> tuple[Callable[..., Timings], tuple[Any, ...]]:
        """Some hundred bytes: it travels with each batch of a worker."""
        return _restored, (self.bytes_read, self.stages)

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
        """End a lap in which the work of a stage was done on `num` values, and begin the next; what this takes is in
        neither.
        """
        wall_s = perf_counter() - self._wall
        cpu_s = min(thread_time() - self._cpu, wall_s) if self._takes_cpu else None
        self.add(stage, wall_s, num, cpu_s=cpu_s)
        self._begin()

    def add(self, stage: str, seconds: float, num: int = 1, *, cpu_s: float | None = None) -> None:
        """Count that a stage took `seconds` for `num` values together, `cpu_s` of it on a CPU where that is known."""
        self.num_laps += 1
        known = self.stages.get(stage)
        if known is None:
            known = self.stages[stage] = Histogram()
        known.add(seconds / num, cpu_s=None if cpu_s is None else cpu_s / num, num=num * self.weight)

    def merge(self, other: Timings) -> None:
        """Count what another has counted."""
        self.bytes_read += other.bytes_read
        for stage, histogram in other.stages.items():
            known = self.stages.get(stage)
            if known is None:
                self.stages[stage] = histogram.copy()
            else:
                known.merge(histogram)

    def since(self, earlier: Timings) -> Timings:
        """What was counted after a copy of this was taken; stages without anything are left out."""
        none = Histogram()
        found = ((stage, each.since(earlier.stages.get(stage, none))) for stage, each in self.stages.items())
        return _restored(self.bytes_read - earlier.bytes_read, {stage: each for stage, each in found if each.num})

    def copy(self) -> Timings:
        """One that stays as it is."""
        return _restored(self.bytes_read, {stage: each.copy() for stage, each in self.stages.items()})


class Bucket(NamedTuple):
    """A power of four of durations: those of at most `edge_s`, from the shortest on."""

    edge_s: float
    num: int


def cumulated(histogram: Histogram) -> Iterator[Bucket]:
    """How many durations are at most 0.4 us, 1.6 us, 6.4 us, ... 107 s: what a monitoring system keeps."""
    num = 0
    for first in range(0, NUM_BUCKETS, 2 * BUCKETS_AN_OCTAVE):
        num += sum(histogram.buckets.get(first + at, 0) for at in range(2 * BUCKETS_AN_OCTAVE))
        yield Bucket(edge_s(first + 2 * BUCKETS_AN_OCTAVE), num)


def edge_s(bucket: float) -> float:
    """Where a bucket begins."""
    return float(LEAST_S * 2 ** (bucket / BUCKETS_AN_OCTAVE))


def started(weight: int) -> Timings:
    """A clock whose first lap has begun."""
    timings = Timings(weight=weight)
    timings.start()
    return timings


def _bucket(seconds: float) -> int:
    if seconds <= LEAST_S:
        return 0
    return min(NUM_BUCKETS - 1, int(math.log2(seconds / LEAST_S) * BUCKETS_AN_OCTAVE))


def _restored(bytes_read: int, stages: dict[str, Histogram]) -> Timings:
    timings = Timings()
    timings.bytes_read, timings.stages = bytes_read, stages
    return timings
