"""The time that each stage takes, measured on a part of the samples.

Timing all samples would double the cost of small samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from wdskit.storage.traffic import NO_TRAFFIC, Traffic

INTERVAL_S = 0.05
"""Shortest time between two timed tasks. A task has up to 50 laps of 3 us each, so timing takes 0.3 % of the time."""


@dataclass(slots=True)
class Timings:
    """The time of each stage, the traffic and the bytes read, measured in one thread. The clock starts on creation.

    A lap is the time between two calls of `lap`, in which one stage works.

    Attributes:
        bytes_read: Number of bytes read from shards.
        traffic: Traffic with stores, which may include traffic for other samples.
        stages: Maps each stage to (number of timed samples, their total time in seconds), in the order of the first
            laps.
        lap_start_s: Value of `perf_counter` at the start of the running lap.
    """

    bytes_read: int = 0
    traffic: Traffic = NO_TRAFFIC
    stages: dict[str, tuple[int, float]] = field(default_factory=dict)
    lap_start_s: float = field(default_factory=perf_counter, compare=False)

    def start(self) -> None:
        """Start a lap now. The time since the end of the last lap is not counted."""
        self.lap_start_s = perf_counter()

    def lap(self, stage: str, num: int = 1) -> None:
        """End the running lap, in which `stage` worked on `num` samples, and start the next lap."""
        self._add(stage, num, perf_counter() - self.lap_start_s)
        self.start()

    def merge(self, other: Timings) -> None:
        """Add the times and counts of `other`. The running lap of this object continues."""
        self.bytes_read += other.bytes_read
        self.traffic = self.traffic.plus(other.traffic)
        for stage, (num, total_s) in other.stages.items():
            self._add(stage, num, total_s)

    def _add(self, stage: str, num: int, total_s: float) -> None:
        num_before, before_s = self.stages.get(stage, (0, 0.0))
        self.stages[stage] = num_before + num, before_s + total_s


class TimingSampler:
    """Decides which tasks are timed: the first task, and then at most one task in `INTERVAL_S`. Threads may share a
    sampler.
    """

    def __init__(self) -> None:
        self._next_s = 0.0

    def begin(self) -> Timings | None:
        """Return new timings for the task that starts now, with a running clock; None if it is not to be timed."""
        now_s = perf_counter()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        return Timings()
