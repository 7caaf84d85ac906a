"""Statistics: items and waits of a consumer as numbers, with a clock that the test moves, and as text."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import FrozenInstanceError, asdict, replace

import pytest
from shards import number_of, write_numbers

from wdskit import LoaderStats, Pipeline, StageStats
from wdskit.loader.stats import Meter
from wdskit.shards.index import index_folder
from wdskit.stages.timing import Timings
from wdskit.storage.traffic import Traffic

STATS = LoaderStats(
    loader="train",
    rank=3,
    epoch=7,
    steps=101,
    samples=1010,
    replaced=0,
    elapsed_s=100.0,
    wait_s=1.0,
    wait_ratio=0.01,
    first_wait_s=5.0,
    samples_per_s=10.0,
    bytes_read=10**6,
    bytes_per_s=1e4,
    traffic=Traffic(),
    stages={
        "read": StageStats(0.02, 0.013),
        "decode-crop": StageStats(1.5, 0.987),
    },
)
SLOW = replace(STATS, wait_s=50.0, wait_ratio=0.5)


def test_the_report_for_people():
    assert str(replace(STATS, replaced=1)) == (
        "train, epoch 7: 101 steps, 1010 samples (1 replaced), 10.0 samples/s, 10.0 kB/s; waited 1.0% of 100 s, "
        "first wait 5 s.\n"
        " share       mean  stage\n"
        "  1.3%        20 ms  read\n"
        " 98.7%   1.5e+03 ms  decode-crop"
    )


def test_a_consumer_that_waits_gets_one_sentence():
    """The sentence names the largest stage, and the command that finds better settings."""
    sentence = (
        "The consumer waits for the loader: `decode-crop` takes 99% of the stages' time, and "
        "`wdskit bench` finds the workers and threads."
    )
    assert SLOW.line().endswith(f"; waited 50.0% of 100 s, first wait 5 s. {sentence}")
    assert str(SLOW).startswith(SLOW.line())
    without = "The consumer waits for the loader: `wdskit bench` finds the workers and threads."
    assert replace(SLOW, stages={}).line().endswith(f" 5 s. {without}")
    assert "bench" not in replace(SLOW, wait_ratio=0.049).line()


def test_it_is_frozen_and_plain_json_with_the_names_of_the_fields():
    written = json.loads(json.dumps(STATS.to_dict()))
    assert written == asdict(STATS) | {"traffic": STATS.traffic._asdict()}
    assert written["stages"]["read"].keys() == {"mean_s", "share_ratio"}
    with pytest.raises(FrozenInstanceError):
        STATS.steps = 1


class Run:
    """A loader and its consumer, second by second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meter = Meter(name="train", rank=3, clock=lambda: self.now)

    def epoch(self, epoch: int, steps: int, *, first: float = 5.0, wait: float = 0.5, work: float = 1.5, **counted):
        """Run an epoch with steps of ten samples each."""
        self.meter.begin(epoch)
        for step in range(steps):
            self.now += wait if step else first
            self.meter.received(10, **counted)
            self.now += work
            self.meter.asked()


def timings_of(**stages: float) -> Timings:
    """Return timings with one value in each stage."""
    return Timings(bytes_read=1000, stages={stage: (1, seconds) for stage, seconds in stages.items()})


def test_before_the_first_item_all_is_nothing():
    found = Run().meter.stats()
    assert not any(value for value in asdict(found).values() if isinstance(value, (int, float)) and value != 3)
    assert found.stages == {}
    assert str(found).startswith("train, epoch 0: 0 steps")


def test_speed_and_waits_are_those_between_the_first_item_and_the_last():
    """The time of the start, and of the work after the last item, does not count."""
    run = Run()
    run.epoch(0, 11, timings=timings_of(read=0.2, decode=0.6), replaced=1)
    found = run.meter.stats()
    assert (found.steps, found.samples, found.replaced) == (11, 110, 11)
    assert (found.first_wait_s, found.wait_s, found.elapsed_s) == (5.0, 5.0, 20.0)
    assert (found.wait_ratio, found.samples_per_s) == (0.25, 5.0)
    assert (found.bytes_read, found.bytes_per_s) == (11_000, pytest.approx(500.0))
    assert list(found.stages) == ["read", "decode"]
    assert [stage.share_ratio for stage in found.stages.values()] == pytest.approx([0.25, 0.75])
    assert [stage.mean_s for stage in found.stages.values()] == pytest.approx([0.2, 0.6])


def test_each_epoch_counts_by_itself():
    run = Run()
    run.epoch(0, 4, timings=timings_of(read=1.0))
    run.now += 1000.0  # a validation
    run.epoch(1, 6, first=1.0, timings=timings_of(decode=1.0))
    found = run.meter.stats()
    assert (found.epoch, found.steps, found.samples, found.first_wait_s) == (1, 6, 60, 1.0)
    assert (list(found.stages), found.elapsed_s) == (["decode"], 10.0)


def test_an_epoch_that_is_left_ends_with_its_last_item():
    run = Run()
    run.meter.begin(0)
    run.meter.received(10)
    run.now += 100.0
    run.epoch(1, 2, wait=0.0, work=0.0)
    assert run.meter.stats().elapsed_s == 0.0


def test_another_thread_reads_whole_numbers_while_the_loader_runs():
    """Each step adds ten samples and one stage; another thread sees both or neither."""
    run = Run()
    torn, done = [], threading.Event()

    def look():
        while not done.is_set():
            found = run.meter.stats()
            if (found.samples, found.replaced, len(found.stages)) != (10 * found.steps, found.steps, found.steps):
                torn.append(found)

    watcher = threading.Thread(target=look)
    watcher.start()
    for epoch in range(10):
        run.meter.begin(epoch)
        for stage in range(50):
            run.meter.received(10, replaced=1, timings=timings_of(**{f"stage{stage}": 1e-3}))
    done.set()
    watcher.join()
    assert not torn


@pytest.mark.parametrize("kind", ["exact", "stream"])
def test_each_epoch_ends_with_one_line_of_the_log(kind, tmp_path, caplog):
    """This includes planned sources, but not an epoch that was left."""
    pattern = write_numbers(tmp_path, [20, 20])
    index_folder(tmp_path)
    pipe = getattr(Pipeline(), kind)(pattern, seed=1).map(number_of).batched(4)
    loader = pipe.loader(workers=0)
    caplog.set_level(logging.INFO, logger="wdskit.loader")
    for _ in range(2):
        assert len(list(loader)) == 10
    next(iter(loader))
    lines = [record.message for record in caplog.records if " samples/s" in record.message]
    assert [line.partition(" samples (")[0] for line in lines] == [
        "pipeline, epoch 0: 10 steps, 40", "pipeline, epoch 1: 10 steps, 40"
    ]  # fmt: skip
    assert all("; waited " in line for line in lines)
