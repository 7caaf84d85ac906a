"""What a process measures: laps of stages, and how seldom small work is timed."""

from __future__ import annotations

import pickle
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.stages.timing import LAP_S, MAX_SHARE, MAX_STRIDE, TASK_S, Pace, Timings, clocked

SPIN_S = 2e-3


def spin(seconds: float = SPIN_S) -> None:
    """Work for so long."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def timed(timings: Timings, seconds: float, stages: tuple[str, ...] = ("decode",)) -> None:
    """What a task of these stages comes to that takes `seconds` in all."""
    for stage in stages:
        timings.num_laps += 1
        timings.add(stage, timings.weight, seconds / len(stages) * timings.weight)


def test_laps_say_what_stands_between_them():
    timings = Timings()
    spin()  # before it starts
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


def test_a_clock_with_weight_counts_for_what_was_not_timed():
    timings = Timings(7)
    spin()
    timings.lap("decode", 2)
    num, total_s = timings.stages["decode"]
    assert num == 14
    assert total_s >= 7 * SPIN_S * 0.99
    assert timings.num_laps == 1


def test_merging_is_counting_together_and_leaves_the_other_alone():
    first, second = Timings(), Timings(bytes_read=5)
    second.add("read", 1, 1.0)
    first.merge(second)
    first.add("read", 2, 0.5)
    first.merge(second)
    assert (first.stages, first.bytes_read) == ({"read": (4, 2.5)}, 10)
    assert (second.stages, second.bytes_read) == ({"read": (1, 1.0)}, 5)


def test_what_travels_with_a_batch_is_small():
    """Six stages; and of small samples, hardly ever timed, next to nothing."""
    timings = Timings(weight=3, bytes_read=10**9)
    for stage in "abcdef":
        timings.add(f"stage_{stage}", 64, 1e-3)
    sent = pickle.dumps(timings, protocol=5)
    assert len(sent) < 500
    assert pickle.loads(sent) == timings
    assert len(pickle.dumps(Timings(), protocol=5)) < 200


@pytest.mark.parametrize("seconds", [6e-6, 5e-5, 1e-3, 1e-2, 1.0])
def test_timing_takes_less_than_its_share(seconds):
    """As many laps as a sample has, against the work that they time; and all tasks are counted."""
    pace, num_timed, num_tasks, counted = Pace(), 0, int(min(50_000, max(2_000, 2 / seconds))), Timings()
    for _ in range(num_tasks):
        timings = pace.begin()
        if timings is not None:
            timed(timings, seconds, ("read", "decode", "to_tuple"))
            pace.end(timings)
            num_timed += 1
            counted.merge(timings)
    assert num_timed >= 10
    task_s = TASK_S + 3 * LAP_S
    assert num_timed * task_s <= 1.1 * MAX_SHARE * seconds * num_tasks + 10 * task_s
    num, total_s = counted.stages["read"]
    assert num_tasks - 2 * MAX_STRIDE <= num <= num_tasks
    assert 3 * total_s == pytest.approx(num * seconds)


@given(st.integers(1, 200), st.integers(0, 3000))
def test_each_task_is_counted_by_itself_or_by_the_next_that_is_timed(stride, num):
    pace = Pace()
    pace.stride = stride
    waiting = 0
    for _ in range(num):
        waiting += 1
        timings = pace.begin()
        if timings is not None:
            assert timings.weight == waiting
            waiting = 0
    assert waiting < 2 * stride


def test_long_work_is_always_timed():
    pace = Pace()
    for _ in range(20):
        timings = pace.begin()
        assert timings is not None
        timed(timings, 0.1)
        pace.end(timings)


def test_a_clock_that_steps_back_is_no_error():
    pace = Pace()
    for seconds in (0.0, -1e-9):
        timed(timings := Timings(), seconds)
        pace.end(timings)
        assert pace.stride == MAX_STRIDE


def share_counted() -> float:
    """What a pace counts of work of which one task in a hundred takes a hundred times as long, to what it is."""
    pace, counted, all_s = Pace(), Timings(), 0.0
    for number in range(400_000):
        seconds = 1e-3 if number % 101 == 7 else 1e-5
        timings = pace.begin()
        all_s += seconds
        if timings is not None:
            timed(timings, seconds)
            pace.end(timings)
            counted.merge(timings)
    return counted.stages["decode"][1] / all_s


def test_rare_long_tasks_count_for_what_they_are():
    assert share_counted() == pytest.approx(1, rel=0.3)


def test_weights_from_a_tasks_own_length_are_seen(monkeypatch):
    """Were they, long ones would count for too little."""
    end = Pace.end

    def weighed(self, timings):
        end(self, timings)
        for stage, (num, total_s) in timings.stages.items():
            timings.stages[stage] = num, total_s * self.stride / timings.weight

    monkeypatch.setattr(Pace, "end", weighed)
    assert share_counted() != pytest.approx(1, rel=0.3)


@pytest.mark.parametrize("num", [0, 1, 2, 3, 1000, 5000])
def test_clocked_values_are_the_values(num):
    counted = Timings()
    assert list(clocked(iter(range(num)), "read", counted.merge)) == list(range(num))
    assert bool(num) == bool(counted.stages)
    if num:
        assert num - 2 * MAX_STRIDE <= counted.stages["read"][0] <= num


def test_only_the_work_on_clocked_values_is_timed():
    def values():
        for number in range(3):
            spin(15e-3)  # so long that each is timed
            yield number

    counted, before = Timings(), perf_counter()
    for _ in clocked(values(), "read", counted.merge):
        spin(30e-3)  # what the consumer does is none of its business
    num, total_s = counted.stages["read"]
    assert num == 3
    assert 3 * 15e-3 * 0.99 <= total_s <= perf_counter() - before - 3 * 30e-3


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
