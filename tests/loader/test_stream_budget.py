"""The error budget of streams: bad samples are skipped, counted and listed; a damaged shard is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shards import write_shard

from wdskit import Pipeline, PipelineError, SampleError

BAD = [3, 4, 17, 25, 39]  # the last one comes after the last item


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """40 samples in four shards, five of which have no number in `cls`."""
    for shard in range(4):
        samples = {}
        for number in range(10 * shard, 10 * shard + 10):
            samples[f"k{number:02d}"] = {"cls": b"x" if number in BAD else b"%d" % number}
        write_shard(tmp_path / f"s-{shard}.tar", samples)
    return str(tmp_path / "s-{0..3}.tar")


def make(shards: str, *, batch: int | None = None, epoch: int | None = None) -> Pipeline:
    pipe = Pipeline().stream(shards).split_by_node().split_by_worker().decode().to_tuple("cls", "__key__")
    pipe = pipe if batch is None else pipe.batched(batch)
    return pipe if epoch is None else pipe.with_epoch(epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_skipped_counted_and_listed(shards: str, tmp_path: Path, workers: int):
    errors = {"max_bad": 5, "dir": str(tmp_path / "bad")}
    loader = make(shards, batch=4).loader(workers=workers, errors=errors)
    for epoch in range(2):
        numbers = sorted(int(number) for classes, _ in loader for number in classes)
        assert numbers == [number for number in range(40) if number not in BAD]
        assert loader.stats().replaced == 5
        listed = [
            json.loads(line) for line in (tmp_path / "bad" / "bad-pipeline-rank00000.jsonl").read_text().splitlines()
        ]
        found = [each for each in listed if each["epoch"] == epoch]
        assert sorted(each["key"] for each in found) == [f"k{number:02d}" for number in BAD]
        assert all("not an integer" in each["reason"] for each in found)
        assert {Path(each["shard"]).name for each in found} == {f"s-{number // 10}.tar" for number in BAD}


@pytest.mark.parametrize("workers", [0, 2])
def test_one_more_than_allowed_stops_the_epoch(shards: str, workers: int):
    loader = make(shards).loader(workers=workers, errors={"max_bad": 4})
    with pytest.raises(SampleError, match=r"not an integer.*(\n.*)*errors.max_bad allows 4"):
        list(loader)
    with pytest.raises(SampleError, match="not an integer"):
        list(make(shards).loader(workers=workers))


def test_with_epoch_yields_its_number_in_spite_of_bad_samples(shards: str):
    pipe = Pipeline().stream(shards, resampled=True, seed=1).split_by_worker().decode().to_tuple("cls").with_epoch(50)
    loader = pipe.loader(workers=2, errors={"max_bad": 40})
    for _ in range(3):
        assert len(list(loader)) == 50
        assert loader.stats().replaced > 0


def fails_on_7(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 7:
        raise ValueError("seven")
    return sample


def test_functions_count_only_if_that_is_said(shards: str):
    pipe = Pipeline().stream(shards).decode().map(fails_on_7).to_tuple("cls")
    with pytest.raises(SampleError, match="seven"):
        list(pipe.loader(workers=0, errors={"max_bad": 30}))
    loader = pipe.loader(workers=0, errors={"max_bad": 30, "transforms": True})
    assert sorted(int(number) for (number,) in loader) == [n for n in range(40) if n not in [*BAD, 7]]


def test_a_share_of_a_stream_is_refused(shards: str):
    with pytest.raises(PipelineError, match=r"errors.max_bad: 1% of a stream is unknown.*\n  Write a number"):
        make(shards).loader(workers=0, errors={"max_bad": "1%"})
