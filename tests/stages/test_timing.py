"""Timing in a process: times of stages, and the intervals at which small jobs are timed."""

from __future__ import annotations

from time import perf_counter

from wdskit.stages.timing import INTERVAL_S, Timings, TimingSampler

SPIN_S = 2e-3


def spin(seconds: float = SPIN_S) -> None:
    """Work for this time."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def test_laps_say_what_stands_between_them():
    timings = Timings()
    spin()  # before the timing starts
    before = perf_counter()
    timings.start()
    spin()
    timings.lap("read")
    spin(2 * SPIN_S)
    timings.lap("decode")
    spin(4 * SPIN_S)
    timings.lap("batched", 4)
    elapsed_s = perf_counter() - before
    assert [(stage, num) for stage, (num, _) in timings.stages.items()] == [("read", 1), ("decode", 1), ("batched", 4)]
    took = [total_s for _, total_s in timings.stages.values()]
    assert all(total_s >= factor * SPIN_S * 0.99 for total_s, factor in zip(took, (1, 2, 4), strict=True))
    assert sum(took) <= elapsed_s


def test_merging_is_counting_together_and_leaves_the_other_alone():
    first, second = Timings(), Timings(bytes_read=5, stages={"read": (1, 1.0)})
    first.merge(second)
    first.merge(Timings(stages={"read": (2, 0.5)}))
    first.merge(second)
    assert (first.stages, first.bytes_read) == ({"read": (4, 2.5)}, 10)
    assert (second.stages, second.bytes_read) == ({"read": (1, 1.0)}, 5)


def test_one_task_is_timed_at_once_and_then_one_in_each_interval(monkeypatch):
    now = 1000.0
    monkeypatch.setattr("wdskit.stages.timing.perf_counter", lambda: now)
    pace = TimingSampler()
    timed = []
    for number in range(100):
        timed += [number] * (pace.begin() is not None)
        now += INTERVAL_S / 10.5
    assert timed == list(range(0, 100, 11))
