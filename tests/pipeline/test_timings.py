"""What a process measures: histograms, laps, and how seldom small work is timed."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.stages import timing as module
from wdskit.stages.timing import (
    CPU_STRIDE,
    LAP_S,
    LEAST_S,
    MAX_SHARE,
    MAX_STRIDE,
    TASK_S,
    Histogram,
    Pace,
    Timings,
    clocked,
    started,
)

DURATIONS = st.floats(1e-7, 100.0)
SOME = st.lists(DURATIONS, min_size=1, max_size=60)


def histogram_of(durations: list[float]) -> Histogram:
    found = Histogram()
    for seconds in durations:
        found.add(seconds)
    return found


def counts_of(found: Histogram) -> tuple[object, ...]:
    return found.num, pytest.approx(found.total_s), pytest.approx(found.cpu_s), found.buckets


class Clock:
    """Stands for both clocks: it goes on when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 0.0
        monkeypatch.setattr(module, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(module, "thread_time", lambda: self.cpu)

    def work(self, seconds: float, *, cpu_ratio: float = 1.0) -> None:
        self.wall += seconds
        self.cpu += seconds * cpu_ratio


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(module, "CPU_STRIDE", 1)
    return Clock(monkeypatch)


@given(SOME, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_mean_is_exact_and_quantiles_are_within_5_percent(durations, share):
    found = histogram_of(durations)
    assert found.mean_s == pytest.approx(sum(durations) / len(durations))
    exact = sorted(durations)[max(0, math.ceil(share * len(durations)) - 1)]
    assert found.quantile_s(share) == pytest.approx(exact, rel=0.05)


def test_nothing_has_no_mean():
    assert (Histogram().mean_s, Histogram().quantile_s(0.99)) == (0.0, 0.0)


@pytest.mark.parametrize("seconds", [0.0, -1e-9, 1e-12, LEAST_S, 1e3, 1e9])
def test_durations_beyond_both_ends_are_counted(seconds):
    """A clock may stand still or, on some machines, step back."""
    found = histogram_of([seconds])
    assert (found.num, sum(found.buckets.values())) == (1, 1)


@given(SOME, SOME)
def test_merging_is_counting_together(first, second):
    merged = histogram_of(first)
    merged.merge(histogram_of(second))
    assert counts_of(merged) == counts_of(histogram_of(first + second))


def test_laps_say_what_stands_between_them(clock):
    timings = Timings()
    clock.work(5.0)  # before it starts
    timings.start()
    clock.work(0.25, cpu_ratio=0.5)
    timings.lap("read")
    clock.work(1.0)
    timings.lap("decode")
    clock.work(2.0)
    timings.lap("batched", 4)
    assert list(timings.stages) == ["read", "decode", "batched"]
    assert [(each.num, each.total_s, each.cpu_s) for each in timings.stages.values()] == [
        (1, 0.25, 0.125),
        (1, 1.0, 1.0),
        (4, 2.0, 2.0),
    ]
    assert timings.stages["batched"].quantile_s(0.5) == pytest.approx(0.5, rel=0.05)


def test_a_clock_with_weight_counts_for_what_was_not_timed():
    timings = Timings(weight=7)
    timings.add("decode", 0.5, cpu_s=0.25)
    found = timings.stages["decode"]
    assert (found.num, found.total_s, found.cpu_s) == (7, 3.5, 1.75)
    assert found.buckets == histogram_of([0.5] * 7).buckets


def test_merging_leaves_the_other_alone():
    first, second = Timings(), Timings()
    second.add("read", 1.0)
    second.bytes_read = 5
    first.merge(second)
    first.add("read", 1.0)
    first.merge(second)
    assert (first.stages["read"].num, first.bytes_read) == (3, 10)
    assert (second.stages["read"].num, second.bytes_read) == (1, 5)


def test_what_travels_with_a_batch_is_small():
    """Six stages, each spread over an octave; and of small samples, hardly ever timed, next to nothing."""
    timings = Timings(weight=3)
    for stage, part in itertools.product("abcdef", range(64)):
        timings.add(f"stage_{stage}", 1e-3 * 2 ** (part / 64), cpu_s=1e-3)
    sent = pickle.dumps(timings, protocol=5)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert [counts_of(each) for each in received.stages.values()] == [
        counts_of(each) for each in timings.stages.values()
    ]
    assert len(pickle.dumps(Timings(), protocol=5)) < 100


@pytest.mark.parametrize("seconds", [6e-6, 5e-5, 1e-3, 1e-2, 1.0])
def test_timing_takes_less_than_its_share(clock, seconds):
    """As many laps as a sample has, against the work that they time; and all tasks are counted."""
    pace, num_laps, num_tasks, counted = Pace(), 0, int(min(50_000, max(2_000, 2 / seconds))), Timings()
    for _ in range(num_tasks):
        timings = pace.begin()
        clock.work(seconds)
        if timings is not None:
            for stage in ("read", "decode", "to_tuple"):
                timings.lap(stage)
            pace.end(timings)
            num_laps += timings.num_laps
            counted.merge(timings)
    assert num_laps >= 30
    task_s = TASK_S + 3 * LAP_S
    assert num_laps / 3 * task_s <= 1.1 * MAX_SHARE * seconds * num_tasks + 10 * task_s
    assert num_tasks - 2 * MAX_STRIDE <= counted.stages["read"].num <= num_tasks
    assert counted.stages["read"].mean_s == pytest.approx(seconds)


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 30))
def test_tasks_are_picked_as_if_one_by_one(sizes, stride):
    """Jobs of any number of tasks: the same tasks are timed, with the same weights."""
    one_by_one, in_jobs = Pace(), Pace()
    one_by_one.stride = in_jobs.stride = stride
    expected = []
    for task in range(sum(sizes)):
        timings = one_by_one.begin()
        if timings is not None:
            expected.append((task, timings.weight))
    found, before = [], 0
    for size in sizes:
        found += [(before + task, weight) for task, weight in in_jobs.pick(size).items()]
        before += size
    assert found == expected


def test_long_work_is_always_timed(clock):
    pace = Pace()
    for _ in range(20):
        timings = pace.begin()
        assert timings is not None
        clock.work(0.1)
        timings.lap("decode")
        pace.end(timings)


def share_counted(clock) -> float:
    """What a pace counts of work of which one task in a hundred takes a hundred times as long, to what it is."""
    pace, counted, total_s = Pace(), Timings(), 0.0
    for number in range(400_000):
        seconds = 1e-3 if number % 101 == 7 else 1e-5
        timings = pace.begin()
        clock.work(seconds)
        total_s += seconds
        if timings is not None:
            timings.lap("decode")
            pace.end(timings)
            counted.merge(timings)
    return counted.stages["decode"].total_s / total_s


def test_rare_long_tasks_count_for_what_they_are(clock):
    assert share_counted(clock) == pytest.approx(1, rel=0.3)


def test_weights_settled_by_a_tasks_own_length_are_seen(clock, monkeypatch):
    """Were they, long ones would count for too little."""
    end = Pace.end

    def weighed(self, timings):
        end(self, timings)
        for each in timings.stages.values():
            each.total_s *= self.stride / timings.weight

    monkeypatch.setattr(Pace, "end", weighed)
    assert share_counted(clock) != pytest.approx(1, rel=0.3)


@pytest.mark.parametrize("num", [0, 1, 2, 3, 1000, 5000])
@pytest.mark.parametrize("seconds", [1e-6, 1.0])
def test_clocked_values_are_the_values(clock, num, seconds):
    def values():
        for number in range(num):
            clock.work(seconds)
            yield number

    counted = Timings()
    got = []
    for value in clocked(values(), "read", counted.merge):
        clock.work(seconds)  # what the consumer does is none of its business
        got.append(value)
    assert got == list(range(num))
    assert bool(num) == bool(counted.stages)
    if num:
        assert counted.stages["read"].mean_s == pytest.approx(seconds)
        assert num - 2 * MAX_STRIDE <= counted.stages["read"].num <= num


def test_clocked_values_are_made_only_when_they_are_asked_for():
    asked = []

    def values():
        for number in range(5):
            asked.append(number)
            yield number

    found = clocked(values(), "read", lambda _: None)
    assert asked == []
    next(found)
    assert asked == [0]


def test_real_clocks_run():
    """That of CPU time in one of eight tasks."""
    clocked = []
    for _ in range(CPU_STRIDE):
        timings = started(1)
        for _ in range(2):
            sum(range(10_000))
            timings.lap("work")
        found = timings.stages["work"]
        assert found.total_s > 0
        assert found.clocked_s in {0, found.total_s}
        if found.clocked_s:
            clocked.append(found)
    assert len(clocked) == 1
    assert clocked[0].cpu_s > 0


def test_the_share_of_cpu_time_is_that_of_the_tasks_where_it_was_taken():
    """Whatever stands beside them."""
    found = Histogram()
    found.add(3.0, num=5)
    assert found.cpu_ratio == 0
    found.add(1.0, cpu_s=0.25)
    other = Histogram()
    other.add(1.0, cpu_s=0.75)
    found.merge(other)
    assert (found.cpu_ratio, found.total_s, found.clocked_s) == (0.5, 17.0, 2.0)
    assert pickle.loads(pickle.dumps(found)).cpu_ratio == 0.5
