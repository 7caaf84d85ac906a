"""The sources of rank and world size."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from shards import index_numbers, number_of, write_numbers

from wdskit import Pipeline, RankError
from wdskit.pipeline.ranks import find_rank

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
    assert find_rank(1, 2, environ=environ)[:2] == (1, 2)
    assert find_rank(environ=environ)[:2] == (0, 1)
    assert find_rank(process_group=dist.group.WORLD, environ=environ)[:2] == (0, 1)


def test_the_environment_counts_where_no_group_exists():
    assert find_rank(environ=TORCHRUN | SLURM)[:2] == (3, 8)
    assert find_rank(environ=SLURM)[:2] == (2, 4)
    assert find_rank(environ={})[:2] == (0, 1)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # inside sbatch, before srun
        {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun of one task that runs torchrun
        {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_slurm_counts_only_where_the_step_has_all_tasks(environ):
    assert find_rank(environ=environ)[:2] == (0, 1)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI", "PMIX", "HOROVOD"])
def test_the_variables_of_mpirun_and_others_are_read(name):
    """A rank that took all samples would only show in the loss."""
    environ = {f"{name}_RANK": "2", f"{name}_SIZE": "4"}
    assert find_rank(environ=environ)[:2] == (2, 4)
    assert find_rank(environ=environ | TORCHRUN)[:2] == (3, 8)
    assert find_rank(environ=environ | {f"{name}_SIZE": "1", f"{name}_RANK": "0"})[:2] == (0, 1)
    assert find_rank(environ={f"{name}_RANK": "2"})[:2] == (0, 1)
    with pytest.raises(RankError, match="not a number"):
        find_rank(environ=environ | {f"{name}_SIZE": "x"})


def test_ranks_of_a_machine_are_those_of_mpirun():
    ompi = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert find_rank(environ=ompi | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}) == (5, 8, 4)
    with pytest.raises(RankError, match="ranks_per_node: 1"):
        find_rank(environ=ompi | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"})
    hydra = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
    assert find_rank(environ=hydra) == (5, 8, 4)


LAUNCHED = {
    "torchrun": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "2"},
    "without local rank": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
    "slurm": SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "0"},
    "slurm on one node": SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "2"},
    "nobody says": TORCHRUN,
    "one rank of another launcher's": {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"},
    "slurm of an older version": SLURM | {"SLURM_LOCALID": "2"},
}


@pytest.mark.parametrize(("name", "expected"), [*zip(LAUNCHED, [4, 4, 2, 4, 1, 1, 1], strict=True)])
def test_launchers_say_how_many_ranks_a_machine_has(name, expected):
    environ = LAUNCHED[name]
    assert find_rank(environ=environ).ranks_per_node == expected
    assert find_rank(environ=environ, ranks_per_node=1).ranks_per_node == 1
    assert find_rank(1, 4, environ=environ).ranks_per_node == 1  # explicit ranks differ from the process ranks
    assert find_rank(1, 4, environ=environ, ranks_per_node=2).ranks_per_node == 2


def test_a_group_that_a_launcher_made_has_its_machines(group):
    assert find_rank(environ={"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}).ranks_per_node == 1
    assert find_rank(process_group=dist.group.WORLD, environ=LAUNCHED["torchrun"]).ranks_per_node == 1


@pytest.mark.parametrize("sizes", [[8, 4], [4, 8], [2, 1, 3], [3, 2, 1], [8, 4, 6], [1, 1, 2]], ids=str)
def test_uneven_machines_are_refused_on_one_rank_at_least(sizes):
    """Ranks with different world sizes would read some samples twice and others never."""
    refused, rank = [], 0
    for size in sizes:
        for local in range(size):
            numbers = {"RANK": rank, "WORLD_SIZE": sum(sizes), "LOCAL_WORLD_SIZE": size, "LOCAL_RANK": local}
            environ = {name: str(value) for name, value in numbers.items()} | {"GROUP_WORLD_SIZE": str(len(sizes))}
            try:
                find_rank(environ=environ)
            except RankError as err:
                refused.append(str(err))
            rank += 1
    assert refused
    assert "machines do not have equal blocks of ranks.\n  If machines have different numbers" in refused[0]


def test_ranks_that_are_dealt_to_machines_in_turn_are_refused_on_one_rank_at_least():
    places = [(rank, rank // 2) for rank in range(8)]  # 2 machines, srun --distribution=cyclic
    slurm = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    refused = 0
    for rank, local in places:
        try:
            find_rank(environ=slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)})
        except RankError:
            refused += 1
    assert refused
    with pytest.raises(RankError, match="ranks_per_node is 3, and the 8 ranks are not a multiple of it"):
        find_rank(0, 8, ranks_per_node=3)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ((1, None), {}, "give both or neither"),
        ((2, 2), {}, "below the world size"),
        ((-1, 2), {}, "below the world size"),
        ((None, None), {"RANK": "0"}, "WORLD_SIZE is not set"),
        ((None, None), {"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ((None, None), {"RANK": "\u00b2", "WORLD_SIZE": "2"}, "RANK is '\u00b2', not a number"),
        (
            (None, None),
            {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_PROCID is not set",
        ),
    ],
)
def test_half_a_rank_is_refused(arguments, environ, message):
    with pytest.raises(RankError, match=message):
        find_rank(*arguments, environ=environ)


def test_a_rank_beside_a_process_group_is_refused_unless_they_agree(tmp_path, group):
    """Neither of the two is silently ignored."""
    pattern = write_numbers(tmp_path / "shards", [8])
    pipe = Pipeline().stream(pattern).split_by_node().split_by_worker()
    for place in ({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}):
        with pytest.raises(RankError, match=r"rank=\d, world_size=2, but the process group has rank 0 of 1.\n  Give"):
            pipe.with_epoch(4).loader(workers=0, process_group=dist.group.WORLD, **place)
        with pytest.raises(RankError, match="but the process group has rank 0 of 1"):
            pipe.build(process_group=dist.group.WORLD, **place)
    loader = pipe.loader(workers=0, rank=0, world_size=1, process_group=dist.group.WORLD)
    assert len(list(loader)) == 8


@pytest.mark.parametrize("source", ["stream", "sequential"])
def test_a_process_group_that_says_otherwise_is_an_error_at_every_first_batch(tmp_path, monkeypatch, source):
    """The group was made before the first epoch, or between two epochs; every later iteration raises again."""
    pattern = index_numbers(tmp_path / "shards", [8, 8])
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
                with pytest.raises(RankError, match="rank 1 of 2, but the process group has rank 0 of 1"):
                    next(iter(loader))
        assert (by_environment.epoch, iterated_before.epoch) == (0, 1)
        assert len(list(by_argument)) == 4
    finally:
        dist.destroy_process_group()
    assert len(list(by_environment)) == 4


def test_workers_that_are_not_forked_know_the_rank_of_the_main_process(tmp_path):
    """They inherit no process group; without the captured rank each worker would read all samples."""
    pattern = write_numbers(tmp_path, [4, 4, 4, 4])
    pipe = (
        Pipeline().stream(pattern, shuffle_shards=False).split_by_node().split_by_worker().map(number_of).with_epoch(8)
    )
    read = [list(pipe.loader(rank=rank, world_size=2, workers=2, start_method="forkserver")) for rank in range(2)]
    assert sorted(read[0] + read[1]) == list(range(16))
