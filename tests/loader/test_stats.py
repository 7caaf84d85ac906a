"""Statistics as text, and the advice they lead to: one case for each sentence, and a sweep where none may be wrong."""

from __future__ import annotations

import itertools
import re

import pytest

from wdskit.loader.stats import LoaderStats, Setting, StageStats, advise, duration, number, percent

# What each stage takes for a sample, in seconds, and the part of it on a CPU.
QUICK_READ = {"read": (0.1e-3, 0.9)}
DECODE = {"decode": (1.0e-3, 1.0)}


def stats_of(
    stages: dict[str, tuple[float, float]],
    *,
    busy: float,
    threads: int = 1,
    wait: float = 0.5,
    ready: float = 0.0,
    empty: float = 1.0,
    capacity: int = 4,
) -> LoaderStats:
    """Numbers that fit each other: ten seconds in which so many threads were busy."""
    total_s = sum(seconds for seconds, _ in stages.values())
    samples_per_s = busy * threads / total_s if total_s else 100.0
    table = {
        name: StageStats(1000, seconds, seconds, 3 * seconds, seconds / total_s, cpu_ratio)
        for name, (seconds, cpu_ratio) in stages.items()
    }
    return LoaderStats(
        loader="train",
        rank=0,
        epoch=0,
        steps=100,
        samples=6400,
        replaced=0,
        elapsed_s=10.0,
        wait_s=10 * wait,
        wait_ratio=wait,
        wait_p99_s=0.2,
        first_wait_s=1.0,
        samples_per_s=samples_per_s,
        bytes_read=10**9,
        bytes_per_s=1e8,
        capacity=capacity,
        ready_mean=ready,
        empty_ratio=empty,
        busy_ratio=busy if stages else None,
        cpus=samples_per_s * sum(seconds * cpu_ratio for seconds, cpu_ratio in stages.values()),
        stages=table,
        advice=None,
    )


def setting_of(workers: int = 1, threads: int = 1, num_cpus: int = 4, prefetch: int = 4) -> Setting:
    return Setting(workers, threads, prefetch, prefetch * max(1, workers), num_cpus)


def advice_of(stats: LoaderStats, setting: Setting, *, crowded: bool = False) -> str:
    advice = advise(stats, setting, crowded=crowded)
    assert advice is not None
    return advice


def test_a_consumer_that_is_the_bottleneck_gets_no_advice():
    """Whatever else the numbers are."""
    for busy, ready, stages in itertools.product((0.1, 0.9), (0.0, 4.0), (QUICK_READ, DECODE, {})):
        stats = stats_of(stages, busy=busy, wait=0.049, ready=ready)
        assert advise(stats, setting_of()) is None
        assert str(stats).endswith("The loader keeps up with its consumer: there is nothing to change.")


def test_threads_that_are_all_busy_beside_free_cpus():
    stats = stats_of(QUICK_READ | DECODE, busy=0.98, threads=2)
    assert advice_of(stats, setting_of(threads=2, num_cpus=16)) == (
        "The consumer waited 50 % of the time: the threads were busy 98 % of theirs, and 1.9 of 16 CPUs were. Use"
        " threads: 16."
    )
    assert advice_of(stats, setting_of(workers=2, num_cpus=16)).endswith("Use threads: 8.")


def test_cpus_that_are_all_busy():
    """No setting helps: the largest stage is named."""
    stats = stats_of(QUICK_READ | DECODE, busy=0.98, threads=4)
    assert advice_of(stats, setting_of(threads=4)) == (
        "The consumer waited 50 % of the time: all CPUs are in use (3.9 of 4); `decode` takes 91 % of their time "
        "(1 ms on average, p99 3 ms). Make that stage cheaper."
    )


def test_python_code_that_holds_the_gil():
    """Four threads that are busy all the time, and one CPU."""
    stages = {"read": (0.4e-3, 0.25), "map": (4.0e-3, 0.25)}
    stats = stats_of(stages, busy=0.97, threads=4)
    assert advice_of(stats, setting_of(threads=4, num_cpus=8)) == (
        "The consumer waited 50 % of the time: the 4 threads of a process kept only 1.0 CPUs busy, because Python"
        " code holds the GIL; `map` takes 91 % of their time (4 ms on average, p99 12 ms). Use workers: 2; more "
        "threads would not help."
    )


def test_slow_storage():
    stages = {"read": (12e-3, 0.02), "decode": (1e-3, 1.0)}
    stats = stats_of(stages, busy=0.97, threads=8)
    assert advice_of(stats, setting_of(threads=8)) == (
        "The consumer waited 50 % of the time: `read` takes 92 % of the threads' time (12 ms on average, p99 36 "
        "ms), and waits in 98 % of that: the storage is slow. Use threads: 16, which wait for more at once, or "
        "bring the shards nearer."
    )


def test_a_stage_that_waits_for_something_outside():
    stats = stats_of(QUICK_READ | DECODE | {"map": (50e-3, 0.01)}, busy=1.0, threads=2)
    assert advice_of(stats, setting_of(threads=2)) == (
        "The consumer waited 50 % of the time: `map` takes 98 % of the threads' time (50 ms on average, p99 150 "
        "ms), and waits in 99 % of that: for something outside. Use threads: 4, which wait for more at once."
    )


def test_threads_are_not_advised_where_functions_of_the_users_are_called():
    """Several would call them at the same time."""
    waiting = stats_of(QUICK_READ | DECODE | {"map": (50e-3, 0.01)}, busy=1.0, threads=1)
    busy = stats_of(QUICK_READ | DECODE, busy=1.0, threads=1)
    for stats, wanted in ((waiting, 4), (busy, 8)):
        advice = advice_of(stats, setting_of(workers=2, threads=1, num_cpus=8)._replace(one_thread=True))
        assert f"Use workers: {wanted}" in advice
        assert "Use threads" not in advice


def test_bursts():
    stats = stats_of(QUICK_READ | DECODE, busy=0.5, ready=2.1, empty=0.3)
    assert advice_of(stats, setting_of()) == (
        "The consumer waited 50 % of the time: though the threads were busy 50 % of theirs and 2.1 of 4 items "
        "were ready on average when it asked, none at 30 % of the steps: it asks in bursts. Use prefetch: 8."
    )


def test_items_that_are_ready_and_slow_to_hand_over():
    stats = stats_of(QUICK_READ, busy=0.2, ready=3.9, empty=0.01)
    assert advice_of(stats, setting_of()) == (
        "The consumer waited 50 % of the time: though the threads were busy 20 % of theirs and 3.9 of 4 items "
        "were ready on average when it asked, so to hand one over takes 50 ms. Use larger batches."
    )


def test_a_consumer_whose_python_code_keeps_threads_from_running():
    stats = stats_of(QUICK_READ | DECODE, busy=0.3, ready=0.2, empty=0.9)
    assert advice_of(stats, setting_of(workers=0, threads=4)) == (
        "The consumer waited 50 % of the time: though the threads were busy 30 % of theirs and 0.2 of 4 items "
        "were ready on average when it asked: the consumer's own Python code keeps them from running. Use "
        "workers: 1."
    )


def test_nothing_is_made_ahead():
    stats = stats_of(QUICK_READ | DECODE, busy=0.5, capacity=0)
    assert advice_of(stats, Setting(0, 1, 4, 0, 4)) == (
        "The consumer waited 50 % of the time: each item is made only when it is asked for. Use workers: 1, which"
        " makes them ahead."
    )


@pytest.mark.parametrize("cpu_ratio", [0.45, 0.25, 0.1])
def test_cpus_that_others_hold(cpu_ratio):
    """Threads that are busy and hardly run, on a machine with more work than CPUs: no word of the GIL or storage."""
    stages = {"read": (2.0e-3, cpu_ratio), "decode": (2.1e-3, cpu_ratio)}
    advice = advice_of(stats_of(stages, busy=1.0, threads=4), setting_of(threads=4), crowded=True)
    assert f"ran in {percent(cpu_ratio)} of that, since other programs hold the CPUs; `decode` takes 51 %" in advice


def test_cpus_that_are_too_few_for_the_threads():
    stages = {"read": (0.2e-3, 0.45), "decode": (2.0e-3, 0.45)}
    advice = advice_of(stats_of(stages, busy=1.0, threads=4), setting_of(threads=4))
    assert "ran in 45 % of that, as 4 CPUs let them" in advice


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (9.96e-7, "0.996 us"),
        (1.234e-5, "12.3 us"),
        (9.999e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (99.94, "99.9 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_durations_are_written_in_three_digits(seconds, text):
    assert duration(seconds) == text


def test_numbers_and_shares_are_written_shortly():
    assert [number(value) for value in (0, 1.234, 23.14, 231.4, 2310.2, 151_234.0)] == [
        "0", "1.23", "23.1", "231", "2,310", "151,234"
    ]  # fmt: skip
    assert [percent(share) for share in (0, 0.00432, 0.074, 0.74, 0.994, 0.999, 1.0, 1.2)] == [
        "0 %", "0.43 %", "7.4 %", "74 %", "99 %", "100 %", "100 %", "120 %"
    ]  # fmt: skip


KNOB = re.compile(r"Use (workers|threads|prefetch): (\d+)")


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("num_cpus", [1, 4, 64])
def test_advice_is_one_sentence_that_names_another_value(workers, threads, num_cpus):
    """Over all kinds of numbers: whoever follows the advice changes something, upwards."""
    setting = setting_of(workers, threads, num_cpus)
    kinds = itertools.product((0.05, 0.4, 1.0), (0.02, 0.3, 1.0), (0.02, 0.3, 1.0), (0.01, 0.5, 0.95))
    for busy, read_cpu, decode_cpu, read_share in kinds:
        stages = {"read": (read_share * 1e-3, read_cpu), "decode": ((1 - read_share) * 1e-3, decode_cpu)}
        for (ready, empty), some_stages in itertools.product(((0.0, 1.0), (2.0, 0.4), (3.9, 0.0)), (stages, {})):
            stats = stats_of(some_stages, busy=busy, threads=setting.num_threads, ready=ready, empty=empty)
            advice = advice_of(stats, setting, crowded=busy == 0.4)
            assert advice.startswith("The consumer waited 50 % of the time: ")
            assert "\n" not in advice
            assert advice.endswith((".", ". "))
            for knob, value in KNOB.findall(advice):
                assert int(value) > getattr(setting, knob), advice
