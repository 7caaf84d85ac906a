"""Reading and decoding without a loader, and a loader, are what they say; times are not compared."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from shards import write_numbers

import wdskit
from wdskit import Pipeline
from wdskit.shards.index import index_folder
from wdskit.tune.measure import HeldSamples, Part, Parts, measure_loader


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    """Ten samples in a shard, indexed."""
    pattern = write_numbers(tmp_path / "data", [10])
    index_folder(tmp_path / "data", workers=1)
    return pattern


def endless_pipeline(pattern: str) -> Any:
    return Pipeline().exact(pattern).decode().batched(4).with_epoch(10**9)


def test_reading_reads_and_decoding_does_not(pattern: str, tmp_path: Path) -> None:
    with Parts(endless_pipeline(pattern).build().program, 2, "fork") as parts:
        os.truncate(tmp_path / "data" / "s-000.tar", 0)  # of a file that is gone, what is open could still be read
        rate = parts.run(Part("decode", 2, 2), 0.01)
        assert rate.samples_per_s > 0
        assert rate.cpu_ms > 0
        with pytest.raises(wdskit.WdskitError, match=r"s-000\.tar"):
            parts.run(Part("read", 1, 1), 0.01)


def test_what_is_read_goes_on_where_the_last_run_ended(pattern: str) -> None:
    with Parts(endless_pipeline(pattern).build().program, 1, "fork") as parts:
        steps = []
        for _ in range(3):
            parts.run(Part("read", 1, 2), 0.005)
            steps.append(parts._step)
    assert 0 < steps[0] < steps[1] < steps[2]


def test_samples_in_memory_reach_a_process_that_is_not_forked() -> None:
    held = pickle.loads(pickle.dumps(HeldSamples([("p", "a", 0, {"x": b"1"}), ("p", "b", 0, {"x": b"2"})])))
    assert [held.read(5, 7)[1] for _ in range(3)] == ["a", "b", "a"]
    many = held.read_many([0, 0], [0, 0], viewed=None)
    assert (many.paths, many.keys, many.fields["x"].cut()) == (["p", "p"], ["b", "a"], [b"2", b"1"])
    mixed = HeldSamples([("p", "a", 0, {"x": b"1"}), ("p", "b", 0, {"y": b"2"})])
    assert mixed.read_many([0, 0], [0, 0]) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rate_of_a_loader_counts_samples(workers: int, pattern: str) -> None:
    rate = measure_loader(endless_pipeline(pattern).loader(workers=workers), 0.01)
    assert rate.samples_per_s > 0
    assert rate.first_batch_s > 0
    assert rate.cpu_ms is not None
