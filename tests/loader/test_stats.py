"""Statistics of loaders: all delivered samples are counted, for every way to make them; as text and as JSON."""

from __future__ import annotations

import json
import logging
from dataclasses import FrozenInstanceError, asdict, replace

import pytest
from shards import index_numbers, number_of, write_pictures, write_shard

from wdskit import LoaderStats, Pipeline
from wdskit.shards.index import index_folder
from wdskit.stages.run import Timings, TimingSampler
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
        "read": 0.02,
        "decode-crop": 1.5,
    },
)


def test_report_for_people_names_the_largest_stage_where_the_consumer_waits():
    figures = "train, epoch 7: 101 steps, 1010 samples (1 replaced), 10.0 samples/s, 10.0 kB/s; waited"
    stages = " share       mean  stage\n  1.3%        20 ms  read\n 98.7%   1.5e+03 ms  decode-crop"
    found = replace(STATS, replaced=1)
    assert str(found) == f"{figures} 1.0% of 100 s, first wait 5 s.\n{stages}"
    sentence = (
        "The consumer waits for the loader: `decode-crop` takes 99% of the stages' time, and "
        "`wdskit bench` finds the workers and threads."
    )
    slow = replace(found, wait_s=50.0, wait_ratio=0.5)
    assert str(slow) == f"{figures} 50.0% of 100 s, first wait 5 s. {sentence}\n{stages}"
    without = "The consumer waits for the loader: `wdskit bench` finds the workers and threads."
    assert replace(slow, stages={}).line().endswith(f" 5 s. {without}")
    assert "bench" not in replace(slow, wait_ratio=0.049).line()


def test_it_is_frozen_and_plain_json_with_the_names_of_the_fields():
    written = json.loads(json.dumps(STATS.to_dict()))
    assert written == asdict(STATS) | {"traffic": STATS.traffic._asdict()}
    with pytest.raises(FrozenInstanceError):
        STATS.steps = 1


@pytest.mark.parametrize("kind", ["exact", "stream"])
def test_each_epoch_ends_with_one_line_of_the_log(kind, tmp_path, caplog):
    """This includes planned sources, but not an epoch that was left."""
    pattern = index_numbers(tmp_path, [20, 20])
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


WAYS = [(0, 1), (0, 4), (1, 1), (2, 2)]
NUM = 70


@pytest.fixture(autouse=True)
def _always_timed(monkeypatch):
    """Measure the time of every call, also in forked workers, which inherit this setting."""
    monkeypatch.setattr(TimingSampler, "begin", lambda _: Timings())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """70 small images with their numbers in 4 shards."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [20, 20, 20, 10])
    index_folder(str(folder))
    return folder


def label_of(sample):
    return {**sample, "label": sample["json"]["number"]}


def shift(sample):
    return {**sample, "label": sample["label"] + 1}


def doubled(batch):
    images, labels = batch
    return images, labels * 2


def pictures(folder, **settings):
    pipe = Pipeline().exact(str(folder), seed=3).decode("rgb8").resize([8, 8]).map(label_of).map(shift)
    return (
        pipe.to_tuple("jpg;png", "label")
        .batched(8)
        .map(doubled)
        .loader(start_method="fork" if settings["workers"] else None, **settings)
    )


@pytest.mark.parametrize(("workers", "threads"), WAYS)
def test_what_is_counted_is_what_was_delivered(folder, workers, threads):
    loader = pictures(folder, workers=workers, threads=threads)
    for epoch in range(2):
        delivered = [labels for _, labels in loader]
        found = loader.stats()
        assert (found.epoch, found.steps, found.samples) == (epoch, len(delivered), sum(map(len, delivered)))
        assert found.steps == 8
        stages = ["read", "decode-resize", "map", "map:1", "to_tuple", "batched", "map:2"]
        assert sorted(found.stages) == sorted(stages)
        assert found.replaced == 0
        consistent(found)


def consistent(found):
    """Check that waits and shares are consistent."""
    assert 0 < found.wait_s <= found.elapsed_s
    assert found.wait_ratio == pytest.approx(found.wait_s / found.elapsed_s)
    assert found.samples_per_s > 0
    assert found.first_wait_s > 0
    assert found.bytes_read > 0
    assert found.bytes_per_s == pytest.approx(found.bytes_read / found.samples * found.samples_per_s)
    assert all(mean_s > 0 for mean_s in found.stages.values())
    assert str(found).count("\n") == 1 + len(found.stages)


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_count_items_and_waits(folder, workers):
    pipe = Pipeline().stream(str(folder / "p-*.tar"), seed=3).split_by_worker().decode("rgb8").resize([8, 8])
    pipe = pipe.to_tuple("jpg;png", "cls").batched(8).map(doubled)
    loader = pipe.loader(workers=workers, start_method="fork" if workers else None)
    for epoch in range(2):
        delivered = [len(labels) for _, labels in loader]
        found = loader.stats()
        assert (
            (found.epoch, found.steps, found.samples)
            == (epoch, len(delivered), sum(delivered))
            == (epoch, len(delivered), NUM)
        )
        assert 0 < found.wait_ratio <= 1
        assert not found.stages


def test_bytes_are_those_of_the_files(folder):
    """They are the mean of the shards of the samples."""
    total = sum(path.stat().st_size for path in folder.glob("*.tar"))
    planned = Pipeline().exact(str(folder), seed=3).batched(1).loader(workers=0)
    assert len(list(planned)) == NUM
    assert planned.stats().bytes_read == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize(("workers", "threads"), WAYS)
def test_replaced_samples_are_counted_and_padding_is_not_counted(tmp_path, workers, threads):
    samples = {f"k{at:03d}": {"cls": b"x" if at % 10 == 3 else b"%d" % at} for at in range(50)}
    write_shard(tmp_path / "s-000.tar", samples)
    index_folder(str(tmp_path))
    settings = {"workers": workers, "threads": threads, "errors": {"max_bad": 5}}
    loader = (
        Pipeline()
        .exact(str(tmp_path), seed=1, tail="pad")
        .decode()
        .to_tuple("cls", "__valid__")
        .batched(8)
        .loader(**settings)
    )
    valid = sum(int(mask.sum()) for _, mask in loader)
    found = loader.stats()
    assert (found.steps, found.samples, found.replaced, valid) == (7, 50, 5, 45)


def test_ranks_count_what_is_theirs(folder):
    for rank in range(3):
        pipe = Pipeline().sequential(str(folder)).to_tuple("cls", "__valid__").batched(8)
        loader = pipe.loader(workers=0, rank=rank, world_size=3)
        valid = sum(int(mask.sum()) for _, mask in loader)
        assert (loader.stats().rank, loader.stats().samples) == (rank, valid)
