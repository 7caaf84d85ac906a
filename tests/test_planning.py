"""`wdskit.plan`: its numbers are those of a loader with the same configuration."""

from __future__ import annotations

import bisect
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shards import write_numbers

import wdskit
from wdskit.dataset.index import ShardEntry, write_index
from wdskit.shards.index import index_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Indexed shards of 9, 0, 30, 14, 7 and 40 samples: 100."""
    folder = tmp_path_factory.mktemp("plan") / "data"
    write_numbers(folder, [9, 0, 30, 14, 7, 40])
    index_folder(folder, columns="cls", workers=1)
    return folder


def config(*stages, **source):
    return {"pipeline": [source, *stages], "loader": {"workers": 0}}


def source_of(folder, kind, options):
    sizes = {} if kind == "sequential" or "balance" in options else {"lanes": 12, "window": 5}
    return {kind: {"shards": str(folder), **sizes, **options}}


def plan(folder, *, kind="exact", batch=4, stages=(), options=None, **where):
    return wdskit.plan(config({"batched": batch}, *stages, **source_of(folder, kind, options or {})), **where)


def numbers_of(folder, options, rank, world_size, epoch=0, kind="exact", batch=4, ranks_per_node=1):
    """Return the output of a real loader: numbers of the samples, which of them are not padding, and the steps."""
    stages = [{"decode": "rgb8"}, {"to_tuple": ["cls", "__valid__"]}, {"batched": batch}]
    whole = config(*stages, **source_of(folder, kind, options))
    loader = wdskit.make_loader(whole, rank=rank, world_size=world_size, ranks_per_node=ranks_per_node)
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


@pytest.mark.parametrize("kind", ["exact", "resampled", "sequential"])
@pytest.mark.parametrize("options", [{}, {"tail": "pad"}, {"where": "cls >= 50", "balance": "cls"}])
@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(1, 8), (4, 1), (4, 2), (101, 1)])
def test_rank_0_reads_the_planned_shards_and_bytes(folder, kind, options, world_size, gpus_per_node):
    if kind != "resampled":
        options = {name: value for name, value in options.items() if name != "balance"}
    options = options | {"tail": "pad"} if world_size > 100 else options  # more ranks than samples: rank 0 has none
    found = plan(folder, kind=kind, options=options, world_size=world_size, gpus_per_node=gpus_per_node, epoch=1)
    numbers, _ = numbers_of(folder, options, 0, world_size, 1, kind, ranks_per_node=found.gpus_per_node)
    assert found.num_shards == (3 if "where" in options else 5)
    firsts = [0, 9, 39, 53, 60]  # number of the first sample of each shard with samples
    assert found.rank_shards == len({bisect.bisect_right(firsts, number) for number in numbers})
    assert found.rank_bytes == pytest.approx(found.num_bytes * len(numbers) / found.num_samples, rel=0.1)


def test_a_plan_reads_no_shard(tmp_path, folder):
    """Only the index has to exist; user functions need not be registered."""
    (tmp_path / "index.json").write_bytes((folder / "index.json").read_bytes())
    for at in range(6):
        (tmp_path / f"s-{at:03d}.tar").touch()
    stages = [{"map": "unheard_of"}, {"to_tuple": ["cls", "__valid__"]}, {"batched": 4}]
    assert wdskit.plan(config(*stages, exact=str(tmp_path))).steps == 25


def test_a_plan_of_many_shards_is_quick(tmp_path):
    """20,000 shards with twenty million samples."""
    entries = [
        ShardEntry(f"{at:06d}.tar", 900 + at % 200, 10**8, f"{at:016x}" * 4, (), "1" * 64) for at in range(20_000)
    ]
    write_index(tmp_path, entries)
    for entry in entries:
        (tmp_path / entry.name).touch()
    wdskit.plan(config({"batched": 64}, exact=str(tmp_path)), world_size=64)  # loads what it needs
    seconds = []
    for _ in range(5):  # the machine may be busy, but not in every attempt
        start = time.process_time()
        found = wdskit.plan(config({"batched": 64}, exact=str(tmp_path)), world_size=64)
        seconds.append(time.process_time() - start)
        if seconds[-1] < 0.3:
            break
    assert min(seconds) < 0.3
    assert found.num_samples == sum(entry.num_samples for entry in entries)


def test_planning_a_planned_source_does_not_wait_for_torch(folder, script_environment):
    code = (
        "import sys, wdskit\n"
        f"wdskit.plan({{'pipeline': [{{'exact': {json.dumps(str(folder))}}}]}})\n"
        "print([name for name in ('torch', 'webdataset', 'PIL') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], env=script_environment, text=True) == "[]\n"
