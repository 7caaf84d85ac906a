"""How long each stage takes, measured on some of the work: timing everything would double the cost of small samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from wdskit.storage.traffic import NO_TRAFFIC, Traffic

INTERVAL_S = 0.05
"""Least time between two tasks that are timed. A task has up to 50 laps of 3 us, so that timing takes 0.3 %."""

_END = object()


class NodeCounts(NamedTuple):
    """What a node of a cluster has made.

    Attributes:
        batches: Number of batches that came from the node.
        num_bytes: Bytes of these batches.
        repeated: Number of jobs that the node lost, and that were run again.
    """

    batches: int = 0
    num_bytes: int = 0
    repeated: int = 0

    def plus(self, other: NodeCounts) -> NodeCounts:
        """Return the sum."""
        return NodeCounts(*(mine + others for mine, others in zip(self, other, strict=True)))


@dataclass(slots=True)
class Timings:
    """Time of stages, traffic, and bytes read, measured in one thread; its clock runs when it is made. Not locked.

    Attributes:
        bytes_read: From shards.
        traffic: What came from stores, for these samples and others.
        stages: The number of samples on which each stage was timed and the seconds that these took, in the order of the
            first laps.
        nodes: By the name of the node, where workers run on a cluster. The main process counts them.
        lap_start_s: When the running lap began.
    """

    bytes_read: int = 0
    traffic: Traffic = NO_TRAFFIC
    stages: dict[str, tuple[int, float]] = field(default_factory=dict)
    nodes: dict[str, NodeCounts] = field(default_factory=dict)
    lap_start_s: float = field(default_factory=perf_counter, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Without names and clock: it travels with each batch."""
        return Timings, (self.bytes_read, self.traffic, self.stages)

    def start(self) -> None:
        """Begin the first lap now."""
        self.lap_start_s = perf_counter()

    def lap(self, stage: str, num: int = 1) -> None:
        """End a lap in which a stage worked on `num` samples, and begin the next; what this takes is in neither."""
        self._add(stage, num, perf_counter() - self.lap_start_s)
        self.lap_start_s = perf_counter()

    def merge(self, other: Timings) -> None:
        """Add the counts of another."""
        self.bytes_read += other.bytes_read
        self.traffic = self.traffic.plus(other.traffic)
        for stage, (num, total_s) in other.stages.items():
            self._add(stage, num, total_s)
        for node, counts in other.nodes.items():
            self.nodes[node] = self.nodes.get(node, NodeCounts()).plus(counts)

    def _add(self, stage: str, num: int, total_s: float) -> None:
        num_before, before_s = self.stages.get(stage, (0, 0.0))
        self.stages[stage] = num_before + num, before_s + total_s


class Pace:
    """Decides which tasks are timed: the first one, and then one every `INTERVAL_S`. Threads may share a pace.

    Args:
        every: Number of tasks of which one looks at the clock, for tasks that take microseconds.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._num_tasks = -1
        self._next_s = 0.0

    def begin(self) -> Timings | None:
        """Return a running clock for the task that begins now, or None if the task is not timed."""
        self._num_tasks += 1
        if self._num_tasks % self._every or (now_s := perf_counter()) < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        return Timings()


def clocked(values: Iterable[Any], stage: str, keep: Callable[[Timings], None]) -> Iterator[Any]:
    """Yield the values of an iterator, and time how long it takes to make some of them.

    Args:
        values: What the stage yields.
        stage: Its name.
        keep: Receives the timings, in this thread.
    """
    pace = Pace(every=8)
    values = iter(values)
    while True:
        timings = pace.begin()
        value = next(values, _END)
        if value is _END:
            return
        if timings is not None:
            timings.lap(stage)
            keep(timings)
        yield value
