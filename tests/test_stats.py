"""What a consumer's waits and batches come to as numbers, with a clock that stands still until it is told."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict

import pytest

from wdskit.loader.advice import Setting
from wdskit.loader.stats import Stats
from wdskit.loader.stats_types import duration, number, percent
from wdskit.pipeline.timings import Timings

SETTING = Setting(workers=1, threads=4, prefetch=4, capacity=4, num_cpus=4)


class Run:
    """A loader and its consumer, second by second."""

    def __init__(self, setting: Setting = SETTING) -> None:
        self.now = 0.0
        self.stats = Stats(name="train", rank=3, setting=setting, clock=lambda: self.now)

    def epoch(self, epoch: int, steps: int, *, first: float = 5.0, wait: float = 0.5, work: float = 1.5, **facts):
        """Steps of ten samples each."""
        self.stats.begin(epoch)
        for step in range(steps):
            self.now += wait if step else first
            self.stats.received(10, ready=step % 3, **facts)
            self.now += work
            self.stats.asked()


def timings_of(**stages: float) -> Timings:
    timings = Timings()
    for stage, seconds in stages.items():
        timings.add(stage, seconds, cpu_s=seconds / 2)
    timings.bytes_read = 1000
    return timings


def test_before_the_first_item_all_is_nothing():
    found = Run().stats.stats()
    assert not any(value for value in asdict(found).values() if isinstance(value, (int, float)) and value not in {3, 4})
    assert found.busy_ratio is None
    assert found.advice is None
    assert str(found).startswith("train, epoch 0: 0 steps")


def test_speed_and_waits_are_those_between_the_first_item_and_the_last():
    """However long the start took, and the work behind the last."""
    run = Run()
    run.epoch(0, 11, timings=timings_of(read=0.2, decode=0.6), replaced=1)
    found = run.stats.stats()
    assert (found.steps, found.samples, found.replaced) == (11, 110, 11)
    assert (found.first_wait_s, found.wait_s, found.elapsed_s) == (5.0, 5.0, 20.0)
    assert (found.wait_ratio, found.samples_per_s) == (0.25, 5.0)
    assert found.wait_p99_s == pytest.approx(0.5, rel=0.05)
    assert (found.bytes_read, found.bytes_per_s) == (11_000, pytest.approx(500.0))
    assert found.ready_mean == pytest.approx(1.0)
    assert found.empty_ratio == pytest.approx(0.3)
    assert found.busy_ratio == pytest.approx(0.8 / 2 / 4)  # 0.8 s for a batch, every 2 s, on 4 threads
    assert found.cpus == pytest.approx(0.4 / 2)
    assert list(found.stages) == ["read", "decode"]
    assert [stage.share_ratio for stage in found.stages.values()] == pytest.approx([0.25, 0.75])
    assert [stage.mean_s for stage in found.stages.values()] == pytest.approx([0.2, 0.6])
    assert all(stage.num == 11 and stage.cpu_ratio == pytest.approx(0.5) for stage in found.stages.values())


def test_each_epoch_counts_by_itself_and_life_counts_all():
    run = Run()
    run.epoch(0, 4, timings=timings_of(read=1.0))
    run.now += 1000.0  # a validation
    run.epoch(1, 6, first=1.0, timings=timings_of(decode=1.0))
    found = run.stats.stats()
    assert (found.epoch, found.steps, found.samples, found.first_wait_s) == (1, 6, 60, 1.0)
    assert (list(found.stages), found.elapsed_s) == (["decode"], 10.0)
    life = run.stats.stats("life")
    assert (life.steps, life.first_wait_s, life.elapsed_s, list(life.stages)) == (10, 6.0, 16.0, ["read", "decode"])


def test_an_epoch_that_is_left_ends_with_its_last_item():
    run = Run()
    run.stats.begin(0)
    run.stats.received(10)
    run.now += 100.0
    run.epoch(1, 2, wait=0.0, work=0.0)
    assert (run.stats.stats().elapsed_s, run.stats.stats("life").elapsed_s) == (0.0, 0.0)


def test_a_report_tells_what_was_since_the_last_one():
    run = Run()
    run.epoch(0, 5)
    assert run.stats.stats("report").steps == 5
    run.stats.begin_report()
    assert run.stats.stats("report").steps == 0
    run.epoch(1, 3)
    assert (run.stats.stats("report").steps, run.stats.stats().steps, run.stats.steps) == (3, 3, 8)


def test_several_items_that_came_together_are_one_wait():
    run = Run()
    run.stats.begin(0)
    for _ in range(3):
        run.now += 1.0
        run.stats.received(64, steps=64)
        run.stats.asked()
    found = run.stats.stats()
    assert (found.steps, found.samples, found.elapsed_s, found.samples_per_s) == (192, 192, 2.0, 64.0)


def test_it_is_plain_json_with_the_names_of_the_fields():
    run = Run()
    run.epoch(2, 20, timings=timings_of(read=0.2))
    found = run.stats.stats()
    told = json.loads(json.dumps(found.to_json()))
    assert told == asdict(found)
    assert told["stages"]["read"].keys() == {"num", "mean_s", "p50_s", "p99_s", "share_ratio", "cpu_ratio"}
    assert (told["loader"], told["rank"], told["epoch"]) == ("train", 3, 2)


def test_the_report_for_people():
    run = Run()
    run.epoch(0, 101, wait=0.01, work=0.99, replaced=1, timings=timings_of(read=0.02, **{"decode-crop": 1.5}))
    assert str(run.stats.stats()) == (
        "train, epoch 0: 101 steps, 1010 samples, 101 replaced; 10 samples/s, 0.001 MB/s\n"
        "waited 1 % of 100 s, 1.0 of 4 ready; the first 5 s, 99 of 100 within 9.68 ms\n"
        "threads busy 38 % of the time, on 0.8 CPUs\n"
        "stage        share   mean      p50      p99  on a CPU\n"
        "read         1.3 %  20 ms  19.4 ms  19.4 ms      50 %\n"
        "decode-crop   99 %  1.5 s   1.47 s   1.47 s      50 %\n"
        "The loader keeps up with its consumer: there is nothing to change."
    )


def test_the_line_for_the_log():
    run = Run()
    run.epoch(7, 101, wait=0.01, work=0.99, timings=timings_of(read=0.02))
    line = "train: epoch 7, 101 steps: 10 samples/s, 0.001 MB/s, waited 1 % of 100 s, 1.0 of 4 ready."
    assert run.stats.stats().line() == line


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
def test_durations_are_told_in_three_digits(seconds, text):
    assert duration(seconds) == text


def test_numbers_and_shares_are_told_shortly():
    assert [number(value) for value in (0, 1.234, 23.14, 231.4, 2310.2, 151_234.0)] == [
        "0", "1.23", "23.1", "231", "2,310", "151,234"
    ]  # fmt: skip
    assert [percent(share) for share in (0, 0.00432, 0.074, 0.74, 0.994, 0.999, 1.0, 1.2)] == [
        "0 %", "0.43 %", "7.4 %", "74 %", "99 %", "100 %", "100 %", "120 %"
    ]  # fmt: skip


def test_another_thread_reads_whole_numbers_while_the_loader_runs():
    """Each step brings ten samples and one lap; whoever looks in between sees both or none."""
    run = Run()
    torn, done = [], threading.Event()

    def look():
        while not done.is_set():
            for window in ("life", "epoch", "report"):
                found = run.stats.totals(window)
                laps = sum(each.num for each in found.timings.stages.values())
                if found.samples != 10 * found.steps or laps != found.steps:
                    torn.append(found)

    watcher = threading.Thread(target=look)
    watcher.start()
    for epoch in range(10):
        for stage in range(50):
            run.epoch(epoch, 1, timings=timings_of(**{f"stage{stage}": 1e-3 * epoch}))
    done.set()
    watcher.join()
    assert not torn
