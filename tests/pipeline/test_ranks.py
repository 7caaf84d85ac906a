"""Where rank and world size come from."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from shards import number_of, write_numbers

from wdskit import Pipeline, RankError
from wdskit.pipeline.ranks import find_place
from wdskit.shards.index import index_folder

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}


@pytest.fixture
def group(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_order_of_sources_is_arguments_group_distributed_torchrun_slurm(group):
    environ = TORCHRUN | SLURM
    assert find_place(1, 2, environ=environ) == (1, 2)
    assert find_place(environ=environ) == (0, 1)
    assert find_place(process_group=dist.group.WORLD, environ=environ) == (0, 1)


def test_the_environment_counts_where_no_group_exists():
    assert find_place(environ=TORCHRUN | SLURM) == (3, 8)
    assert find_place(environ=SLURM) == (2, 4)
    assert find_place(environ={}) == (0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # inside sbatch, before srun
        {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun of one task that runs torchrun
        {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_slurm_counts_only_where_the_step_has_all_tasks(environ):
    assert find_place(environ=environ) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ((1, None), {}, "give both or neither"),
        ((2, 2), {}, "below the world size"),
        ((-1, 2), {}, "below the world size"),
        ((None, None), {"RANK": "0"}, "WORLD_SIZE is not set"),
        ((None, None), {"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
    ],
)
def test_half_a_rank_is_refused(arguments, environ, message):
    with pytest.raises(RankError, match=message):
        find_place(*arguments, environ=environ)


def test_a_rank_beside_a_process_group_is_refused_unless_they_agree(tmp_path, group):
    """Neither of the two is passed over in silence."""
    pattern = write_numbers(tmp_path / "shards", [8])
    pipe = Pipeline().stream(pattern).split_by_node().split_by_worker()
    for place in ({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}):
        with pytest.raises(RankError, match=r"rank=\d, world_size=2, but the process group says 0 of 1.\n  Give"):
            pipe.with_epoch(4).loader(workers=0, process_group=dist.group.WORLD, **place)
        with pytest.raises(RankError, match="but the process group says 0 of 1"):
            pipe.build(process_group=dist.group.WORLD, **place)
    loader = pipe.loader(workers=0, rank=0, world_size=1, process_group=dist.group.WORLD)
    assert len(list(loader)) == 8


@pytest.mark.parametrize("source", ["stream", "sequential"])
def test_a_process_group_that_says_otherwise_is_an_error_at_every_first_batch(tmp_path, monkeypatch, source):
    """Whether it was there before the first epoch, or came between two; and again, however often one asks."""
    pattern = write_numbers(tmp_path / "shards", [8, 8])
    index_folder(tmp_path / "shards")
    if source == "stream":
        pipe = Pipeline().stream(pattern).split_by_node().split_by_worker().map(number_of).with_epoch(4)
    else:
        pipe = Pipeline().sequential(pattern, tail="drop").map(number_of).with_epoch(4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    by_environment, iterated_before = pipe.loader(workers=0), pipe.loader(workers=0)
    assert len(list(iterated_before)) == 4
    by_argument = pipe.loader(workers=0, rank=1, world_size=2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for loader in (by_environment, iterated_before):
            for _ in range(3):
                with pytest.raises(RankError, match="rank 1 of 2, but the process group says 0 of 1"):
                    next(iter(loader))
        assert (by_environment.epoch, iterated_before.epoch) == (0, 1)
        assert len(list(by_argument)) == 4
    finally:
        dist.destroy_process_group()
    assert len(list(by_environment)) == 4


def test_workers_that_are_not_forked_know_the_rank_of_the_main_process(tmp_path):
    """They inherit no process group, and without the captured rank each would read everything."""
    pattern = write_numbers(tmp_path, [4, 4, 4, 4])
    pipe = (
        Pipeline().stream(pattern, shuffle_shards=False).split_by_node().split_by_worker().map(number_of).with_epoch(8)
    )
    read = [list(pipe.loader(rank=rank, world_size=2, workers=2, start_method="forkserver")) for rank in range(2)]
    assert sorted(read[0] + read[1]) == list(range(16))
