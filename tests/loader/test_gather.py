"""Ranks on gloo: metrics without padding, peers that share batches, meshes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from ranks import run_ranks
from shards import draw, write_numbers
from torch.distributed.device_mesh import init_device_mesh

from wdskit import Pipeline, PipelineError, RankError, gather_valid, make_loader
from wdskit.loader import gather
from wdskit.shards.index import index_folder

SIZES = [0, 1, 2, 3, 5, 8, 13]


def number_and_text(sample):
    return int(sample["cls"]), sample["__key__"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Indexed data sets of `SIZES[1:]` samples by size, all with empty shards."""
    folder = tmp_path_factory.mktemp("sizes")
    found = {}
    for size in SIZES[1:]:
        counts = [size // 2, 0, size - size // 2, 0]
        found[size] = write_numbers(folder / str(size), counts)
        index_folder(folder / str(size))
    return found


# --- gather_valid


def evaluate(pattern, batch, **place):
    """Return the results of an evaluation on this rank, gathered in every way."""
    loader = Pipeline().sequential(pattern).map(number_and_text).batched(batch).loader(workers=0, **place)
    rows, lists, images = [], [], []
    total, squares, num_steps = 0, torch.zeros(2, dtype=torch.float64), 0
    for numbers, keys, valid in loader:
        assert len(numbers) == len(keys) == len(valid) == batch
        rows += gather_valid(numbers, valid).tolist()
        lists += gather_valid(keys, valid)
        images += gather_valid(numbers[:, None, None].expand(-1, 2, 3).half(), valid)[:, 1, 2].tolist()
        total += gather_valid(numbers, valid, reduce="sum").item()
        squares += gather_valid(torch.stack([numbers**2, numbers], 1).float(), valid, reduce="sum")
        mean = gather_valid(numbers, valid, reduce="mean")
        assert mean.item() == np.mean(rows[-int(gather_valid(valid, None, reduce="sum")) :])
        num_steps += 1
    return rows, lists, images, total, squares.tolist(), num_steps


def check_evaluations(folders, tmp_path, *, world_size, sizes, batches):
    """Check that the results are the same on every rank, and count each sample once."""
    cases = [(size, batch) for size in sizes for batch in batches]
    ranks = run_ranks(world_size, lambda _: [evaluate(folders[size], batch) for size, batch in cases], tmp_path)
    assert all(rank == ranks[0] for rank in ranks)
    for (size, batch), (rows, lists, images, total, squares, num_steps) in zip(cases, ranks[0], strict=True):
        assert rows == images == list(range(size))
        assert lists == [f"n{number:06d}" for number in range(size)]
        assert total == sum(range(size))
        assert squares == [sum(number**2 for number in range(size)), total]
        assert num_steps == -(-size // (batch * world_size))
        assert evaluate(folders[size], batch)[:5] == (rows, lists, images, total, squares)  # without a process group


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_evaluation_counts_each_sample_once_with_fewer_samples_than_ranks_too(folders, tmp_path, world_size):
    """Last batches are uneven. Rows and reductions, as tensors and lists, are on every rank the same as on one rank."""
    check_evaluations(folders, tmp_path, world_size=world_size, sizes=SIZES[1:], batches=(1, 2, 4))


MUTANTS = {
    "ranks in another order": ("_all_gather", lambda rows, group: true_parts(rows, group)[::-1]),
    "padding is kept": ("_gather_objects", lambda rows, mask, *how: true_gather(rows, torch.ones_like(mask), *how)),
    "padding is summed": ("_reduce", lambda rows, mask, *how: true_reduce(rows, torch.ones_like(mask), *how)),
}
true_gather, true_reduce, true_parts = gather._gather_objects, gather._reduce, gather._all_gather


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_of_evaluations_catches(folders, tmp_path, name, monkeypatch):
    monkeypatch.setattr(gather, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_evaluations(folders, tmp_path, world_size=2, sizes=[5], batches=[2])


def states_of(pipe):
    """Return states of an epoch on 1 to 4 ranks, before it and after every step but the last."""
    for world_size in range(1, 5):
        loader = pipe.loader(workers=0, rank=0, world_size=world_size)
        yield from [loader.state_dict(), *(loader.state_dict() for _ in loader)][:-1]


def gather_rest(pipe, state, size):
    """Return the samples gathered after a state, as a tensor and as a list, with nodes of `size` ranks."""
    loader = make_loader(pipe, workers=0, ranks_per_node=size)
    loader.load_state_dict(state)
    rows, texts = [], []
    for numbers, keys, *valid in loader:
        mask, positions = (valid[0], None) if valid else (None, loader.positions)
        rows += gather_valid(numbers, mask, positions=positions).tolist()
        texts += gather_valid(keys, mask, positions=positions)
    assert texts == [f"n{number:06d}" for number in rows]
    return rows


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("source", ["sequential", "exact"])
def test_rows_are_gathered_in_the_order_of_their_samples_after_every_resume(folders, tmp_path, source, tail):
    """From 1 to 4 ranks to 1 to 4 ranks, after every step; the positions are not divisible by the number of ranks."""
    pipe = getattr(Pipeline(), source)(folders[13], tail=tail).map(number_and_text).batched(2)
    one = getattr(Pipeline(), source)(folders[13]).map(number_and_text).batched(1)
    order = [int(numbers[0]) for numbers, *_ in one.loader(workers=0)]
    assert sorted(order) == list(range(13))
    states = list(states_of(pipe))
    for world_size, size in ((1, 1), (2, 1), (3, 3), (4, 1), (4, 2)):
        gather = functools.partial(gather_rest, pipe, size=size)
        found = run_ranks(world_size, lambda _, gather=gather: [gather(state) for state in states], tmp_path)
        for state, *rest in zip(states, *found, strict=True):
            left = order[state["consumed"] :]
            kept = left if tail == "pad" else left[: len(left) // (2 * world_size) * 2 * world_size]
            assert rest == [kept] * world_size


def test_gather_valid_takes_any_type_and_a_part_of_the_ranks(tmp_path):
    types = [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64]

    def gather_all(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        valid = torch.tensor([True, mesh["dp"].get_local_rank() == 0])
        found = [gather_valid(torch.tensor([rank, 0]).to(each), valid, group=mesh["dp"]) for each in types]
        assert [each.dtype for each in found] == types
        assert gather_valid([rank, -1], valid, group=mesh.get_group("dp")) == [rank % 2, -1, rank % 2 + 2]
        with pytest.raises(RankError, match=r"2 dimensions \(dp, tp\)"):
            gather_valid([rank], None, group=mesh)
        return [each.float().tolist() for each in found]

    for rank, found in enumerate(run_ranks(4, gather_all, tmp_path)):
        numbers = [rank % 2, 0, rank % 2 + 2]
        assert found == [[float(bool(number)) for number in numbers], *([numbers] * 6)]


def test_gather_valid_takes_types_that_backends_do_not_have(tmp_path):
    """Fields `npy` and images may be uint16."""
    types = [torch.int8, torch.int16, torch.uint16, torch.uint32, torch.int64, torch.uint64, torch.float8_e4m3fn]

    def gather_all(rank):
        found = []
        for each in types:
            rows = torch.tensor([[1, 2], [3 + rank, 4], [5, 6]]).to(each)
            valid = torch.tensor([True, True, False])
            gathered = gather_valid(rows, valid, positions=[5 - rank, 1 - rank, 7])
            assert gathered.dtype == each
            assert gather_valid(rows, valid, reduce="sum").tolist() == [9, 12]
            assert gather_valid(rows[:, :1].repeat(1, 3).t()[0], None).dtype == each
            found.append(gathered.float().tolist())
        return found

    for found in run_ranks(2, gather_all, tmp_path):
        assert found == [[[4, 4], [3, 4], [1, 2], [1, 2]]] * len(types)
    large = torch.tensor([65535, 2], dtype=torch.uint16)
    assert gather_valid(large, None).tolist() == [65535, 2]
    assert gather_valid(large, None, reduce="sum").item() == 65537
    waves = torch.tensor([1 + 2j, 3 + 4j, 5], dtype=torch.complex64)
    mask = torch.tensor([True, True, False])
    assert gather_valid(waves, mask, reduce="sum").item() == 4 + 6j
    assert gather_valid(waves, mask, reduce="mean").item() == 2 + 3j


def sum_of_waves(rank):
    return gather_valid(torch.tensor([[1 + 2j], [3 * rank]]), None, reduce="mean").tolist()


def test_complex_rows_are_reduced_over_ranks(tmp_path):
    assert run_ranks(2, sum_of_waves, tmp_path) == [[(2 + 4j + 3) / 4]] * 2


def test_what_cannot_be_gathered_is_refused():
    for valid in (torch.ones(3, dtype=torch.bool), torch.ones(2), torch.ones(2, 1, dtype=torch.bool)):
        with pytest.raises(PipelineError, match="Give the mask that came with the batch"):
            gather_valid([1, 2], valid)
    with pytest.raises(PipelineError, match=r"this is one number\. Give a row for each sample"):
        gather_valid(torch.tensor(1.0), None)
    with pytest.raises(PipelineError, match="reduce='sum' needs a tensor, not a list"):
        gather_valid([1, 2], None, reduce="sum")
    with pytest.raises(PipelineError, match="the mean of no rows"):
        gather_valid(torch.ones(2), torch.zeros(2, dtype=torch.bool), reduce="mean")
    with pytest.raises(PipelineError, match="reduce='max' is neither 'sum' nor 'mean'"):
        gather_valid(torch.ones(2), None, reduce="max")


def refusals(rank):
    """Return the errors on this rank when one rank has a wrong batch."""
    bad, pair, both = rank == 1, torch.ones(2), torch.ones(2, dtype=torch.bool)
    calls = [
        lambda: gather_valid(pair, torch.ones(3, dtype=torch.bool) if bad else both),
        lambda: gather_valid(pair, None, positions=[0] if bad else [0, 1]),
        lambda: gather_valid([1, lambda: 2] if bad else [1, 2], None),
        lambda: gather_valid(torch.ones(2, 3) if bad else pair, None),
        lambda: gather_valid(pair, 7 if bad else both, reduce="sum"),
        lambda: gather_valid(pair.double() if bad else pair, None, reduce="mean"),
    ]
    texts = []
    for call in calls:
        with pytest.raises(PipelineError) as caught:
            call()
        texts.append(str(caught.value))
    assert gather_valid(pair, both).tolist() == [1, 1, 1, 1]  # the ranks are still in step
    return texts


def test_a_rank_that_refuses_its_batch_is_an_error_on_every_rank(tmp_path):
    first, second = run_ranks(2, refusals, tmp_path)
    assert first == second
    mask, positions, pickled, shape, kind, dtype = first
    assert mask.startswith("rank 1 has refused its batch: gather_valid: 2 rows, but a mask of (3,) torch.bool.")
    assert "rank 1 has refused its batch: gather_valid: 2 rows, but positions of (1,)." in positions
    assert "rank 1 has refused its batch: " in pickled
    assert "the ranks give different rows (rank 0: torch.float32 (2,), rank 1: torch.float32 (2, 3)).\n" in shape
    assert "rank 1 has refused its batch: AttributeError" in kind
    assert "rank 1: torch.float64 ('any',) for a mean" in dtype


# --- a mesh


def loaders_of(pattern, mesh):
    """Return a planned loader and a stream that are split over the mesh's first dimension."""
    planned = Pipeline().exact(pattern, seed=3).map(draw).batched(2)
    stream = Pipeline().stream(pattern, seed=3, resampled=True).split_by_node().map(draw).batched(2).with_epoch(4)
    return [pipe.loader(workers=0, process_group=mesh["dp"]) for pipe in (planned, stream)]


def test_peers_of_a_mesh_get_identical_batches_and_others_disjoint_ones(folders, tmp_path):
    def read(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found = []
        for loader in loaders_of(folders[13], mesh):
            found += [[part.tolist() for part in batch] for batch in loader]
        return found

    ranks = run_ranks(4, read, tmp_path)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    numbers = [number for rank in (0, 2) for batch in ranks[rank][:3] for number in batch[0]]
    assert len(set(numbers)) == len(numbers) == 12


def test_a_mesh_of_two_dimensions_is_refused(folders, tmp_path):
    def refuse(rank):
        told = []
        for names in (("dp", "tp"), None):
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
            with pytest.raises(RankError) as caught:
                Pipeline().exact(folders[8]).loader(process_group=mesh)
            told.append(str(caught.value))
        one = init_device_mesh("cpu", (2,))
        assert tuple(Pipeline().exact(folders[8]).loader(workers=0, process_group=one).program.run.rank_info)[:2] == (
            rank,
            2,
        )
        return told

    way = 'Pass the dimension that the data is split over: process_group=mesh["dp"].'
    assert run_ranks(2, refuse, tmp_path)[1] == [
        f"process_group: this mesh has 2 dimensions (dp, tp).\n  {way}",
        f"process_group: this mesh has 2 dimensions (without names).\n  {way}",
    ]
