"""Ranks on gloo: results without padding, peers that share batches, meshes."""

from __future__ import annotations

import functools
import logging
import threading
import time

import pytest
import torch
from places import with_positions
from ranks import run_ranks
from shards import draw, write_numbers
from torch.distributed.device_mesh import init_device_mesh

from wdskit import Pipeline, PipelineError, gather_valid, make_loader
from wdskit.loader import gather
from wdskit.shards.index import index_folder

SIZES = [1, 3, 13]


def number_and_text(sample):
    return int(sample["cls"]), sample["__key__"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Indexed data sets of `SIZES` samples by size, all with empty shards."""
    folder = tmp_path_factory.mktemp("sizes")
    found = {}
    for size in SIZES:
        counts = [size // 2, 0, size - size // 2, 0]
        found[size] = write_numbers(folder / str(size), counts)
        index_folder(folder / str(size))
    return found


# --- gather_valid


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
    for (numbers, keys, *valid), positions in with_positions(loader):
        mask = valid[0] if valid else None
        order = gather_valid(torch.as_tensor(positions), mask).argsort().tolist()
        assert not valid or order == sorted(order)  # with `tail: pad`, the rows have the order of the samples
        found, names = gather_valid(numbers, mask).tolist(), gather_valid(keys, mask)
        rows += [found[at] for at in order]
        texts += [names[at] for at in order]
    assert texts == [f"n{number:06d}" for number in rows]
    return rows


def check_rows(pattern, source, tail, tmp_path, places=((1, 1), (2, 1), (3, 3), (4, 1), (4, 2))):
    """Check the gathered rows of ranks and nodes at `places`, after each state of other ranks."""
    pipe = getattr(Pipeline(), source)(pattern, tail=tail).map(number_and_text).batched(2)
    one = getattr(Pipeline(), source)(pattern).map(number_and_text).batched(1)
    order = [int(numbers[0]) for numbers, *_ in one.loader(workers=0)]
    assert sorted(order) == list(range(len(order)))
    states = list(states_of(pipe))
    for world_size, size in places:
        rest_of = functools.partial(gather_rest, pipe, size=size)
        found = run_ranks(world_size, lambda _, rest_of=rest_of: [rest_of(state) for state in states], tmp_path)
        for state, *rest in zip(states, *found, strict=True):
            left = order[state["consumed"] :]
            kept = left if tail == "pad" else left[: len(left) // (2 * world_size) * 2 * world_size]
            assert rest == [kept] * world_size


@pytest.mark.parametrize(
    ("source", "tail", "size"),
    [
        ("sequential", "pad", 13),
        ("exact", "pad", 13),
        ("exact", "drop", 13),
        *(("sequential", "pad", n) for n in (1, 3)),
    ],
)
def test_rows_are_gathered_in_the_order_of_their_samples_after_every_resume(folders, tmp_path, source, tail, size):
    """From 1 to 4 ranks to 1 to 4 ranks, after every step; there may be fewer samples than ranks."""
    check_rows(folders[size], source, tail, tmp_path)


MUTANTS = {
    "ranks in another order": ("_gather", lambda value, group: true_gather(value, group)[::-1]),
    "a rank is left out": ("_gather", lambda value, group: true_gather(value, group)[1:]),
}
true_gather = gather._gather


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_of_rows_catches(folders, tmp_path, name, monkeypatch):
    monkeypatch.setattr(gather, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_rows(folders[3], "sequential", "pad", tmp_path, places=[(2, 1)])


TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64),
]


def test_gather_valid_takes_any_type_and_a_part_of_the_ranks(tmp_path):
    """Backends do not have all types. Fields `npy` and images may be uint16."""

    def gather_all(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        valid = torch.tensor([True, mesh["dp"].get_local_rank() == 0])
        found = [gather_valid(torch.tensor([rank, 0]).to(each), valid, group=mesh["dp"]) for each in TYPES]
        assert [each.dtype for each in found] == TYPES
        assert gather_valid([rank, -1], valid, group=mesh.get_group("dp")) == [rank % 2, -1, rank % 2 + 2]
        with pytest.raises(RuntimeError, match="2 dimensions"):
            gather_valid([rank], None, group=mesh)
        return [each.to(torch.complex128).real.tolist() for each in found]

    for rank, found in enumerate(run_ranks(4, gather_all, tmp_path)):
        numbers = [rank % 2, 0, rank % 2 + 2]
        assert found == [[float(bool(number)) for number in numbers], *([numbers] * (len(TYPES) - 1))]


def test_ranks_may_have_other_numbers_of_rows_and_rows_with_gradients(tmp_path):
    def gather_some(rank):
        rows = torch.full((rank, 2), float(rank), requires_grad=True) * 2
        return gather_valid(rows, None).tolist()

    assert run_ranks(3, gather_some, tmp_path) == [[[2.0, 2.0], [4.0, 4.0], [4.0, 4.0]]] * 3


def test_a_mask_that_does_not_fit_is_refused():
    for valid in (torch.ones(3, dtype=torch.bool), torch.ones(2), torch.ones(2, 1, dtype=torch.bool)):
        for rows in ([1, 2], torch.ones(2)):
            with pytest.raises(PipelineError, match="Give the mask that came with the batch"):
                gather_valid(rows, valid)


def test_the_ranks_that_do_not_call_are_named(tmp_path, monkeypatch):
    """The counts are those of a group, and the second call is named although the first was complete."""
    monkeypatch.setattr("wdskit.stages.run.REPORT_S", 0.2)

    def gather_alone(rank):
        found: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: found.append(record.getMessage())
        logging.getLogger("wdskit.loader.gather").addHandler(handler)
        store = torch.distributed.distributed_c10d._get_default_store()
        assert gather_valid([rank], None) == [0, 1, 2]
        if rank == 1:
            store.wait(["reported"])  # the others wait for this rank
        elif rank == 0:
            threading.Thread(target=lambda: (wait_for(found), store.set("reported", "yes")), daemon=True).start()
        assert gather_valid([rank], None) == [0, 1, 2]
        return found

    ranks = run_ranks(3, gather_alone, tmp_path)
    assert ranks[0] == ["gather_valid waits for ranks [1]: every rank of the group must call it."]
    assert ranks[1] == []


def wait_for(found: list[str]) -> None:
    while not found:
        time.sleep(0.01)


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
