"""Arenas: a block is used again after all references to it are gone, and never before."""

from __future__ import annotations

import gc
import os
import pickle
import random
import resource
import sys
import threading
import warnings
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from wdskit.loader import memory as memory_module
from wdskit.loader.memory import MIN_BYTES, Arena, Arenas, Block, Message, pack, receive_memory, unpack
from wdskit.stages.collate import empty_images

SHAPE = (4, 3, 64, 96)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def lent(arenas: Arenas, shape: Any, dtype: Any = np.uint8) -> torch.Tensor:
    """Return a batch of one tensor as its consumer gets it."""
    arena = Arena(arenas)
    tensor = torch.from_numpy(arena.empty(shape, dtype))
    arena.end()
    return tensor


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64, "<f2"], ids=str)
@pytest.mark.parametrize("is_image", [False, True])
def test_memory_has_the_shape_and_the_dtype_that_were_asked_for(is_shared, dtype, is_image):
    arena = Arena(Arenas(is_shared=is_shared))
    array = empty_images(arena, SHAPE, dtype) if is_image else arena.empty(SHAPE, dtype)
    assert arena.find(array.ctypes.data) == 0
    tensor = torch.from_numpy(array)
    assert (tensor.shape, array.dtype) == (SHAPE, np.dtype(dtype))
    assert tensor.is_contiguous(memory_format=torch.channels_last if is_image else torch.contiguous_format)
    tensor.fill_(3)
    assert (array == 3).all()


VIEWS = {
    "itself": lambda tensor: tensor,
    "a row": lambda tensor: tensor[1],
    "flattened": lambda tensor: tensor.flatten(1)[:, 7:9],
    "detached": lambda tensor: tensor.detach(),
    "an array": lambda tensor: tensor.numpy(),
    "part of an array": lambda tensor: tensor.numpy()[2:, 0],
    "another tensor of an array": lambda tensor: torch.from_numpy(tensor.numpy()[0]),
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "through dlpack": torch.from_dlpack,
    "a storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_memory_comes_back_with_the_last_that_shares_it_and_not_before(name):
    arenas = Arenas()
    first = lent(arenas, SHAPE)
    place = address(first)
    view = VIEWS[name](first)
    del first
    other = lent(arenas, SHAPE)
    assert address(other) != place, "it was lent again while something still shares it"
    del view
    gc.collect()
    assert address(lent(arenas, SHAPE)) == place


def test_when_none_is_free_a_new_one_is_made():
    arenas = Arenas()
    held = [lent(arenas, SHAPE) for _ in range(20)]
    assert len({address(tensor) for tensor in held}) == 20


def test_blocks_grow_to_the_usual_batch_and_those_not_wanted_go():
    """Batches of other sizes reuse memory; blocks that are too small are freed."""
    arenas, rng = Arenas(is_shared=True), random.Random(1)
    held = [lent(arenas, [100_000]) for _ in range(5)]
    del held
    seen = {address(lent(arenas, [rng.randrange(500_000, 600_000)])) for _ in range(300)}
    assert len(seen) < 8
    assert len(arenas.dropped) >= 5


def test_arrays_of_a_batch_are_in_one_block_from_the_second_batch_on():
    """What the first block has no room for is allocated elsewhere, and the next block is larger."""
    arenas = Arenas()
    for number in range(3):
        arena = Arena(arenas)
        arrays = [arena.empty([size], np.float32) for size in (20_000, 3, 20_000, 2_000)]
        places = [arena.find(array.ctypes.data) for array in arrays]
        assert [place is not None for place in places] == [True, False, number > 0, True]
        for value, array in enumerate(arrays):
            array[:] = value
        assert all((array == value).all() for value, array in enumerate(arrays))
        del array, arrays
        arena.end()


def test_free_blocks_give_their_pages_back_and_stay_usable():
    for is_shared in (False, True):
        arenas = Arenas(is_shared=is_shared)
        kept, dropped = (lent(arenas, (1 << 20,)) for _ in range(2))
        kept.fill_(1), dropped.fill_(2)
        del dropped
        [block] = arenas.free
        arenas.free_pages()
        if is_shared and sys.platform == "linux":
            assert os.fstat(block._file).st_blocks == 0
        assert kept.eq(1).all()
        assert lent(arenas, (1 << 20,)).fill_(3).eq(3).all()
        assert kept.eq(1).all()


def test_small_tensors_are_left_to_malloc():
    arena = Arena(Arenas())
    assert arena.find(arena.empty([MIN_BYTES - 1], np.uint8).ctypes.data) is None
    assert arena.find(arena.empty([MIN_BYTES], np.uint8).ctypes.data) == 0


def test_many_threads_never_share_a_block():
    arenas = Arenas()
    problems = []

    def work(number: int) -> None:
        for _ in range(200):
            tensor = lent(arenas, [MIN_BYTES])
            tensor.fill_(number)
            if not (tensor == number).all():
                problems.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert len(arenas.free) <= 16  # a thread gets its next tensor before it drops the last one


def test_the_check_of_sharing_catches_arenas_that_takes_back_too_early(monkeypatch):
    """The mutant: a block counts as free as soon as it is lent."""

    def early(memory: Any, back: Any, number: int) -> Any:
        back.append(number)
        return np.frombuffer(memory, np.uint8)

    monkeypatch.setattr(memory_module, "borrow", early)
    with pytest.raises(AssertionError, match="lent again"):
        test_memory_comes_back_with_the_last_that_shares_it_and_not_before("a row")


# --- messages


def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the API is a prototype
        return torch.nested.nested_tensor(tensors)


def values() -> dict[str, Any]:
    """Return all kinds of values that a batch may hold."""
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)).permute(0, 3, 1, 2)
    return {
        "channels_last": images,
        "small": torch.arange(5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3, 7),
        "strided": torch.arange(40_000).view(200, 200)[::2, 1:],
        "transposed": torch.arange(40_000).view(200, 200).t(),
        "bfloat16": torch.ones(9000, dtype=torch.bfloat16),
        "bool": torch.ones(9000, dtype=torch.bool),
        "complex": torch.ones(9000, dtype=torch.complex64).conj(),
        "with gradient": torch.ones(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(9000)),
        "array": rng.normal(size=(100, 100)),
        "channels_last array": images.numpy(),
        "fortran": np.asfortranarray(rng.normal(size=(100, 100))),
        "with gaps": rng.normal(size=(100, 100))[::3, ::2],
        "objects": np.array([{"a": 1}, None], dtype=object),
        "texts": ["é" * n for n in range(300)],
        "bytes": [bytes(100_000), b"x", bytearray(9000)],
        "dicts": [{"id": n, "boxes": [[1.5, n]], "none": None} for n in range(100)],
        "twice": [images, images],
        "sparse": torch.eye(50).to_sparse(),
        "nested": nested([torch.arange(n) for n in (3, 4000, 0)]),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and one.is_nested:
        return all(map(torch.equal, one.unbind(), other.unbind()))
    if isinstance(one, torch.Tensor) and one.is_sparse:
        return torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, type(one)) == (other.dtype, other.shape, type(other))
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        return bool((one == other).all())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


def unpacked(message: Message, arena: Arena) -> Any:
    """Unpack a message in this process."""
    return unpack(message, arena.bytes if message.block >= 0 else None)


@pytest.mark.parametrize("name", values())
@pytest.mark.parametrize("has_room", [False, True])
def test_values_arrive_as_they_were(name, has_room):
    """Large arrays are in the arena, or in the message if the arena has no room."""
    arenas = Arenas(is_shared=True)
    arena, value = Arena(arenas), values()[name]
    held = None if has_room else arena.empty([1 << 16], np.uint8)
    message = pickle.loads(pickle.dumps(pack(value, arena)))
    assert has_room or not message.parts
    assert same(value, unpacked(message, arena))
    del held


@pytest.mark.parametrize("is_array", [False, True])
def test_what_is_in_the_arena_is_not_copied_and_layouts_stay(is_array):
    arenas = Arenas(is_shared=True)
    arena = Arena(arenas)
    array = empty_images(arena, SHAPE, np.float32)
    images = torch.from_numpy(array).fill_(2)
    message = pack((array if is_array else images, [1, 2]), arena)
    assert message.parts == ((0, array.nbytes),)
    arrived, _ = unpacked(message, arena)
    assert type(arrived) is (np.ndarray if is_array else torch.Tensor)
    arrived = torch.as_tensor(arrived)
    assert arrived.stride() == images.stride()
    images.fill_(9)
    assert (arrived == 9).all(), "it is another memory"


def test_a_block_comes_back_when_both_sides_are_done_with_it():
    arenas = Arenas(is_shared=True)
    for local_first in (True, False):
        arena = Arena(arenas)
        images: Any = torch.from_numpy(arena.empty(SHAPE, np.uint8))
        arrived = unpacked(pack([images], arena), arena)
        arena.end()
        if local_first:
            del images
        else:
            arrived.clear()
        arenas.free_pages()
        assert not arenas.free, "one side still holds it"
        images = None
        arrived.clear()
        arenas.free_pages()
        assert arenas.free


def test_large_pickles_travel_in_shared_memory_and_small_ones_in_the_pipe():
    arena = Arena(Arenas(is_shared=True))
    small = pack([b"x"], arena)
    assert (small.parts, small.block) == ((), -1)
    large = pack(values()["dicts"] * 10, arena)
    assert (large.pickled, len(large.parts)) == (b"", 1)
    assert len(pickle.dumps(large)) < 1000


def test_a_block_that_is_sent_takes_no_byte_of_a_request_that_comes_meanwhile():
    here, there = Pipe()
    here.send("a request")
    block = Block(0, MIN_BYTES, is_shared=True)
    block.send(there)
    assert block.is_sent, "a block leaves no descriptor"
    memory = np.frombuffer(receive_memory(here, MIN_BYTES), np.uint8)
    np.frombuffer(block.memory, np.uint8)[:] = 7
    assert (memory == 7).all()
    assert there.recv() == "a request"
    assert not here.poll()


def test_a_block_that_cannot_be_received_is_an_error():
    """With too many open files the kernel drops the descriptor; or the other process may have ended."""
    here, there = Pipe()
    Block(0, MIN_BYTES, is_shared=True).send(there)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(here.fileno())
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))  # only enough for the copy of the connection
    try:
        with pytest.raises(OSError, match="Too many open files"):
            receive_memory(here, MIN_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    there.close()
    with pytest.raises(EOFError):
        receive_memory(here, MIN_BYTES)
