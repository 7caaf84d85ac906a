"""A stage that fails names itself, its shard and its sample; a user's StopIteration ends no stream."""

from __future__ import annotations

import multiprocessing

import pytest
from shards import fail_on_7, index_numbers, listed

from wdskit import Pipeline, PipelineError, SampleError
from wdskit.pipeline.settings import load_config

FAILING = {
    "map": lambda p: p.map(fail_on_7),
    "map_dict": lambda p: p.map_dict(cls=lambda data: 1 / (int(data) - 7)),
    "map_tuple": lambda p: p.to_tuple("__key__", "cls").map_tuple(None, lambda data: 1 / (int(data) - 7)),
    "select": lambda p: p.select(fail_on_7),
    "batched": lambda p: p.batched(1, collate=lambda samples: fail_on_7(samples[0])),
    "decode": lambda p: p.rename(json="cls").map(lambda s: {**s, "json": b"{" if s["json"] == b"7" else b"1"}).decode(),
    "to_tuple": lambda p: p.map(lambda s: {} if s["cls"] == b"7" else s).to_tuple("jpg;cls"),
    "to_dict": lambda p: p.map(lambda s: {} if s["cls"] == b"7" else s).to_dict("cls"),
    "rename": lambda p: p.map(lambda s: {} if s["cls"] == b"7" else s).rename(a="cls"),
}


@pytest.mark.parametrize("stage", FAILING)
@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": 1, "start_method": "fork"}], ids=["here", "worker"])
def test_a_failing_stage_names_itself_the_shard_and_the_key(six, stage, settings):
    with pytest.raises(SampleError) as caught:
        list(FAILING[stage](listed(six)).loader(**settings))
    assert not multiprocessing.active_children()  # torch would wait 5 s for them once the error is collected
    err = caught.value
    assert (err.stage, err.key, err.shard.rpartition("/")[2]) == (stage, "n000007", "s-001.tar")
    assert str(err).startswith(f"{err.shard}: n000007: {stage} failed: ")


def raise_stop(value):
    raise StopIteration


@pytest.mark.parametrize("stage", ["map", "select", "batched"])
def test_a_stop_iteration_of_a_users_function_does_not_end_the_stream(six, stage):
    stages = {"map": {"fn": raise_stop}, "select": {"fn": raise_stop}, "batched": {"size": 2, "collate": raise_stop}}
    pipe = Pipeline(load_config({"pipeline": [*listed(six).stages, {stage: stages[stage]}]}).pipeline())
    with pytest.raises(SampleError, match="StopIteration"):
        list(pipe.loader(workers=0))


def test_a_schedule_without_a_weight_is_refused(tmp_path):
    index_numbers(tmp_path, [4, 5])
    part = {"shards": str(tmp_path), "weight": {0: 1, 1000: 0}}
    pipe = Pipeline().exact(mixture=[part, part]).batched(2).with_epoch(5)
    with pytest.raises(PipelineError, match=r"exact: mixture: .* at every position one part must have a weight"):
        pipe.loader(workers=0)
