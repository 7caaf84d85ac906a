"""What a consumer's waits and batches come to as numbers, with a clock that stands still until a test moves it."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict

import pytest
from shards import number_of, write_numbers

from wdskit import Pipeline, PipelineError
from wdskit.files import Disk
from wdskit.loader import meter
from wdskit.loader.meter import Meter
from wdskit.pipeline.settings import StatsSpec
from wdskit.stages.timing import Timings


class Run:
    """A loader and its consumer, second by second."""

    def __init__(self, spec: StatsSpec | None = None) -> None:
        self.now = 0.0
        self.meter = Meter(name="train", rank=3, spec=spec, clock=lambda: self.now)

    def epoch(self, epoch: int, steps: int, *, first: float = 5.0, wait: float = 0.5, work: float = 1.5, **counted):
        """Steps of ten samples each."""
        self.meter.begin(epoch)
        for step in range(steps):
            self.now += wait if step else first
            self.meter.received(10, **counted)
            self.now += work
            self.meter.asked()


def timings_of(**stages: float) -> Timings:
    """Of one value in each stage."""
    return Timings(bytes_read=1000, stages={stage: (1, seconds) for stage, seconds in stages.items()})


def test_before_the_first_item_all_is_nothing():
    found = Run().meter.stats()
    assert not any(value for value in asdict(found).values() if isinstance(value, (int, float)) and value != 3)
    assert found.stages == {}
    assert str(found).startswith("train, epoch 0: 0 steps")


def test_speed_and_waits_are_those_between_the_first_item_and_the_last():
    """However long the start took, and the work behind the last."""
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
    assert [stage.total_s for stage in found.stages.values()] == pytest.approx([2.2, 6.6])
    assert all(stage.num == 11 for stage in found.stages.values())


def test_each_epoch_counts_by_itself_and_life_counts_all():
    run = Run()
    run.epoch(0, 4, timings=timings_of(read=1.0))
    run.now += 1000.0  # a validation
    run.epoch(1, 6, first=1.0, timings=timings_of(decode=1.0))
    found = run.meter.stats()
    assert (found.epoch, found.steps, found.samples, found.first_wait_s) == (1, 6, 60, 1.0)
    assert (list(found.stages), found.elapsed_s) == (["decode"], 10.0)
    life = run.meter.stats("life")
    assert (life.steps, life.first_wait_s, life.elapsed_s, list(life.stages)) == (10, 6.0, 16.0, ["read", "decode"])


def test_an_epoch_that_is_left_ends_with_its_last_item():
    run = Run()
    run.meter.begin(0)
    run.meter.received(10)
    run.now += 100.0
    run.epoch(1, 2, wait=0.0, work=0.0)
    assert (run.meter.stats().elapsed_s, run.meter.stats("life").elapsed_s) == (0.0, 0.0)


def test_a_report_holds_what_was_since_the_last_one(caplog):
    """And neither it nor a new epoch begins the other's counts again."""
    caplog.set_level(logging.INFO, logger="wdskit.loader.meter")
    run = Run(spec=StatsSpec(every=4))
    run.epoch(0, 5)
    assert (run.meter.stats("report").steps, run.meter.stats().steps) == (1, 5)
    run.epoch(1, 2)
    assert (run.meter.stats("report").steps, run.meter.stats().steps) == (3, 2)
    run.epoch(2, 3)
    assert (run.meter.stats("report").steps, run.meter.stats().steps) == (2, 3)
    assert [each.message.partition(" steps")[0] for each in caplog.records] == [
        "train, epoch 0: 4", "train, epoch 2: 4"
    ]  # fmt: skip
    assert run.meter.stats("life").steps == 10


def test_another_thread_reads_whole_numbers_while_the_loader_runs():
    """Each step brings ten samples and one lap; whoever looks in between sees both or none."""
    run = Run()
    torn, done = [], threading.Event()

    def look():
        while not done.is_set():
            for window in ("life", "epoch", "report"):
                found = run.meter.stats(window)
                laps = sum(each.num for each in found.stages.values())
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


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    """Shards of 40 samples in all."""
    return write_numbers(tmp_path_factory.mktemp("numbers"), [20, 20])


def loader_of(numbers: str, **settings):
    return Pipeline().stream(numbers, seed=1).map(number_of).batched(4).loader(workers=0, **settings)


def test_a_line_of_the_log_every_so_many_steps(numbers, caplog):
    caplog.set_level(logging.INFO, logger="wdskit.loader.meter")
    loader = loader_of(numbers, stats=4)
    for _ in range(2):
        assert len(list(loader)) == 10
    lines = [record.message for record in caplog.records if record.name == "wdskit.loader.meter"]
    assert [line.partition(" steps")[0] for line in lines] == [
        "pipeline, epoch 0: 4", "pipeline, epoch 0: 4", "pipeline, epoch 1: 4", "pipeline, epoch 1: 4",
        "pipeline, epoch 1: 4",
    ]  # fmt: skip
    assert all(" samples/s" in line and "; waited " in line for line in lines)


def test_a_file_of_lines_for_each_rank(numbers, tmp_path):
    for rank in range(2):
        pipe = Pipeline().stream(numbers, seed=1).split_by_node().batched(4).with_epoch(6)
        stats = {"every": 3, "file": str(tmp_path / "new" / "stats.jsonl")}
        for _ in pipe.loader(workers=0, rank=rank, world_size=2, stats=stats):
            pass
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "stats-rank00000.jsonl",
        "stats-rank00001.jsonl",
    ]
    for rank in range(2):
        lines = (tmp_path / "new" / f"stats-rank{rank:05d}.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert [(each["rank"], each["steps"], each["samples"]) for each in found] == [(rank, 3, 12)] * 2
        assert all(each["time"] > 1.7e9 for each in found)


@pytest.mark.parametrize(
    ("file", "name"),
    [("stats.jsonl", "stats-rank00003.jsonl"), ("a/b.c.jsonl", "a/b.c-rank00003.jsonl"), ("x", "x-rank00003")],
)
def test_names_of_files(file, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Run(spec=StatsSpec(file=file))
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [name]


def test_a_file_that_cannot_be_written_is_an_error_at_once(numbers, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PipelineError, match=r"stats: .*file/stats-rank00000\.jsonl cannot be written: "):
        loader_of(numbers, stats={"file": str(tmp_path / "file" / "stats.jsonl")})


def test_a_disk_that_fills_up_later_ends_the_file_and_not_the_training(numbers, tmp_path, monkeypatch, caplog):
    loader = loader_of(numbers, stats={"every": 2, "file": str(tmp_path / "stats.jsonl")})
    asked = []

    class Full(Disk):
        def write(self, fd, data):
            asked.append(data)
            raise OSError(28, "No space left on device")

    append_lines = meter.append_lines
    monkeypatch.setattr(meter, "append_lines", lambda path, lines: append_lines(path, lines, disk=Full()))
    assert len(list(loader)) == 10
    assert len(asked) == 1
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "can no longer be written: [Errno 28] No space left on device" in warnings[0]
