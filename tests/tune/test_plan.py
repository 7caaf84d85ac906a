"""`wdskit.plan`: its numbers are those of a loader with the same configuration."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import write_numbers

import wdskit
from wdskit.dataset.index import ShardEntry, write_index
from wdskit.errors import ConfigError, FolderIndexError, PipelineError
from wdskit.order.base import DEPTHS
from wdskit.order.resampled import ResampledOrder
from wdskit.order.steps import Steps, rank_positions
from wdskit.shards.index import index_folder
from wdskit.tune.plan import LanesPlan, fitting_lanes, lanes_of_nodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Indexed shards of 9, 0, 30, 14, 7 and 40 samples: 100."""
    folder = tmp_path_factory.mktemp("plan") / "data"
    write_numbers(folder, [9, 0, 30, 14, 7, 40])
    index_folder(folder, workers=1)
    return folder


def config(*stages, **source):
    return {"pipeline": [source, *stages], "loader": {"workers": 0}}


def plan(folder, *, kind="exact", batch=4, stages=(), options=None, **where):
    source = {"shards": str(folder), "lanes": 12, "window": 5, **(options or {})}
    if kind == "sequential":
        del source["lanes"], source["window"]
    return wdskit.plan(config({"batched": batch}, *stages, **{kind: source}), **where)


def numbers_of(folder, options, rank, world_size, epoch=0, kind="exact", batch=4):
    """Return the output of a real loader: numbers of the samples, which of them are not padding, and the steps."""
    source = {"shards": str(folder), "lanes": 12, "window": 5, **options}
    if kind == "sequential":
        del source["lanes"], source["window"]
    stages = [{"decode": "rgb8"}, {"to_tuple": ["cls"]}, {"batched": batch}]
    loader = wdskit.make_loader(config(*stages, **{kind: source}), rank=rank, world_size=world_size)
    loader.set_epoch(epoch)
    found = []
    for cls, *mask in loader:
        found += cls[mask[0]].tolist() if mask else cls.tolist()
    return found, len(loader)


@pytest.mark.parametrize("kind", ["exact", "resampled", "sequential"])
@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_steps_and_tail_are_the_loaders(folder, kind, tail, world_size):
    found = plan(folder, kind=kind, options={"tail": tail}, world_size=world_size)
    there = [numbers_of(folder, {"tail": tail}, rank, world_size, kind=kind) for rank in range(world_size)]
    assert {steps for _, steps in there} == {found.steps}
    num_read = sum(len(numbers) for numbers, _ in there)
    assert found.num_samples == 100
    assert found.num_dropped == 100 - num_read
    assert found.num_padded == found.steps * found.global_batch - num_read if tail == "pad" else found.num_padded == 0
    assert found.global_batch == 4 * world_size


def test_the_shards_are_those_that_are_read(folder):
    found = plan(folder)
    sizes = [(folder / f"s-{at:03d}.tar").stat().st_size for at in (0, 2, 3, 4, 5)]
    assert found.num_shards == 5  # one shard is empty
    assert found.num_bytes == pytest.approx(sum(sizes), abs=1)
    assert found.downloads is None  # no shard is in a store
    twice = {"exact": {"mixture": [{"shards": str(folder), "repeat": 2}]}}
    assert wdskit.plan(config({"batched": 4}, **twice)).num_samples == 200


@given(num_lanes=st.integers(1, 40), num_nodes=st.integers(2, 8), node_batch=st.integers(1, 9), is_dealt=st.booleans())
def test_nodes_take_from_the_lanes_that_the_plan_names(num_lanes, num_nodes, node_batch, is_dealt):
    """This is exact if an epoch is long enough."""
    order = ResampledOrder([num_lanes * num_nodes * node_batch], seed=1, lanes=num_lanes, window=3)
    steps = Steps(order.num_samples, node_batch, num_nodes, "drop" if is_dealt else "pad")
    there = np.zeros((num_nodes, num_lanes), dtype=bool)
    for step in range(len(steps)):
        for node in range(num_nodes):
            positions = rank_positions(order, 0, steps, step, rank=node)
            _, depths = order.locate(positions)
            there[node, -(-depths * num_lanes // DEPTHS)] = True
    found = lanes_of_nodes(num_lanes, num_nodes, steps.global_batch, is_dealt=is_dealt)
    assert found.sum(axis=1).tolist() == there.sum(axis=1).tolist()


def test_lanes_that_nodes_share_are_a_warning(folder):
    found = plan(folder, world_size=4, batch=3, gpus_per_node=1)
    assert found.lanes == LanesPlan(num_lanes=12, per_node=3, num_shared=1.0, fitting=(12,))
    (dropped,) = found.warnings
    assert dropped.startswith("4 of 100 samples are dropped")
    found = plan(folder, world_size=8, batch=2, gpus_per_node=1)
    assert (found.lanes.per_node, found.lanes.fitting) == (3, (8, 16))
    warning, _ = found.warnings
    what, way_out = warning.split("\n")
    assert what == "a lane is read by 1.5 nodes on average, which read the same shards."
    assert way_out == "  Before a run begins, set `lanes: 8 or 16`. A different number gives a different order."
    assert plan(folder, world_size=8, batch=2, gpus_per_node=1, options={"lanes": 16}).lanes.num_shared == 1
    assert plan(folder, world_size=8, batch=2, gpus_per_node=8).lanes.num_shared == 1


def test_each_node_has_its_own_of_fitting_lanes_and_of_none_nearer():
    for num_nodes in range(2, 20):
        for factor, num_lanes in ((1, 40), (8, 40), (12, 7), (64, 240)):
            batch = num_nodes * factor
            fits = [each for each in range(1, 1000) if each % num_nodes == 0 and batch % each == 0]
            for each in fits:
                assert (lanes_of_nodes(each, num_nodes, batch).sum(axis=0) == 1).all()
            near = fitting_lanes(num_lanes, num_nodes, batch)
            below, above = ([each for each in fits if sign * each >= sign * num_lanes] for sign in (-1, 1))
            assert set(near) == {*below[-1:], *(each for each in above[:1] if each < 4 * num_lanes + num_nodes)}


def test_a_mixture_has_the_length_of_its_epoch(folder):
    parts = [
        {"shards": str(folder), "weight": 3, "range": ["0%", "50%"]},
        {"shards": str(folder / "s-005.tar"), "weight": 2},
    ]
    source = {"mixture": parts, "lanes": 12, "window": 5}
    found = wdskit.plan(config({"batched": 4}, {"with_epoch": 50}, exact=source), world_size=3)
    assert (found.steps, found.num_samples, found.num_shards) == (50, 600, 4)
    parts = [{"shards": str(folder), "repeat": 2}, {"shards": str(folder / "s-005.tar"), "repeat": 1}]
    found = wdskit.plan(config({"batched": 4}, exact={"mixture": parts, "tail": "pad"}))
    assert (found.num_samples, found.num_shards) == (240, 11)


def test_a_large_tail_is_a_warning(folder):
    (dropped,) = plan(folder, batch=60).warnings
    assert dropped == (
        "40 of 100 samples are dropped in each epoch (40.0%): they do not fill a batch of 60.\n"
        "  Use smaller batches, or `tail: pad`, which uses all samples."
    )


def test_ranks_per_node_divide_all_ranks(folder):
    found = [plan(folder, world_size=12, gpus_per_node=most, batch=1).gpus_per_node for most in (3, 1, 99, 8)]
    assert found == [3, 1, 12, 6]


def test_global_sizes_that_do_not_divide_are_refused(folder):
    with pytest.raises(PipelineError, match=r"global_size 32 is not a multiple of 6 ranks\.\n  30 and 36 are"):
        plan(folder, batch={"global_size": 32}, world_size=6)
    assert plan(folder, batch={"global_size": 30}, world_size=6).batch == 5


def test_a_plan_reads_no_shard(tmp_path, folder):
    """Only the index has to exist; user functions need not be registered."""
    (tmp_path / "index.json").write_bytes((folder / "index.json").read_bytes())
    for at in range(6):
        (tmp_path / f"s-{at:03d}.tar").touch()
    stages = [{"map": "unheard_of"}, {"to_tuple": ["cls"]}, {"batched": 4}]
    assert wdskit.plan(config(*stages, exact=str(tmp_path))).steps == 25


def test_a_plan_of_many_shards_is_quick(tmp_path):
    """100,000 shards with a hundred million samples."""
    entries = [ShardEntry(f"{at:06d}.tar", 900 + at % 200, 10**8, f"{at:016x}" * 4, ()) for at in range(100_000)]
    for entry in entries:
        (tmp_path / entry.name).touch()
    write_index(tmp_path, entries)
    for entry in entries:
        (tmp_path / entry.name).touch()
    wdskit.plan(config({"batched": 64}, exact=str(tmp_path)), world_size=64)  # loads what it needs
    seconds = []
    for _ in range(5):  # the machine may be busy, but not in every attempt
        start = time.process_time()
        found = wdskit.plan(config({"batched": 64}, exact=str(tmp_path)), world_size=64)
        seconds.append(time.process_time() - start)
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1
    assert found.num_samples == sum(entry.num_samples for entry in entries)


def test_streams_have_the_steps_of_with_epoch(folder):
    stages = ["split_by_node", "split_by_worker", {"map": "unheard_of"}, {"batched": 4}, {"with_epoch": 7}]
    found = wdskit.plan(config(*stages, stream=str(folder)), world_size=2, workers=2)
    assert (found.num_shards, found.steps, found.batch) == (6, 7, 4)
    assert wdskit.plan(wdskit.Pipeline().stream(str(folder))).steps is None


def test_streams_that_would_be_refused_are_refused(folder):
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        wdskit.plan(config({"with_epoch": 3}, stream=str(folder)), world_size=2)
    with pytest.raises(PipelineError, match="ends at a different step on each"):
        wdskit.plan(config("split_by_node", stream=str(folder)), world_size=2)
    with pytest.raises(PipelineError, match="6 shards cannot feed 7 workers"):
        wdskit.plan(config("split_by_node", "split_by_worker", stream=str(folder)), workers=7)


def test_a_resampled_stream_needs_no_epoch_on_several_ranks(folder):
    endless = config("split_by_node", stream={"shards": str(folder), "resampled": True})
    assert wdskit.plan(endless, world_size=2).steps is None
    for rank in range(2):
        loader = wdskit.make_loader(endless, rank=rank, world_size=2)
        assert len(list(itertools.islice(loader, 100))) == 100
        loader.close()


def test_a_source_of_another_library_cannot_be_planned(folder):
    pipe = wdskit.Pipeline([lambda: iter(())])
    with pytest.raises(PipelineError, match="the source is not wdskit's"):
        wdskit.plan(pipe)


def test_errors_come_before_numbers(folder, tmp_path):
    with pytest.raises(PipelineError, match=r"plan\(world_size=0\): pass a whole number, 1 or more"):
        plan(folder, world_size=0)
    with pytest.raises(PipelineError, match=r"plan\(epoch=1.5\): pass a whole number, 0 or more"):
        plan(folder, epoch=1.5)
    with pytest.raises(PipelineError, match="belong to a configuration"):
        wdskit.plan(wdskit.Pipeline().exact(str(folder)), pipeline="train")
    with pytest.raises(PipelineError, match="cannot fill one batch"):
        plan(folder, batch=200)
    with pytest.raises(ConfigError, match="bacthed"):
        wdskit.plan(config({"bacthed": 4}, exact=str(folder)))
    write_numbers(tmp_path, [3])
    with pytest.raises(FolderIndexError, match="wdskit index"):
        wdskit.plan(config(exact=str(tmp_path)))


def test_the_workers_are_the_configurations_unless_given(folder):
    configured = config(exact=str(folder)) | {"loader": {"workers": 3}}
    assert (wdskit.plan(configured).workers, wdskit.plan(configured, workers=5).workers) == (3, 5)


def test_planning_a_planned_source_does_not_wait_for_torch(folder, script_environment):
    import subprocess
    import sys

    code = (
        "import sys, wdskit\n"
        f"wdskit.plan({{'pipeline': [{{'exact': {json.dumps(str(folder))}}}]}})\n"
        "print([name for name in ('torch', 'webdataset', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=script_environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
