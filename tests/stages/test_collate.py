"""Batches: the result for each kind of value, memory and copies, ragged fields, and messages that name the slot."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from by_columns import count_made, forgo_columns
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shards import npy, write_indexed, write_pictures

from wdskit import ConfigError, Pipeline, PipelineError, Ragged, SampleError
from wdskit.stages.collate import FRESH, Collate, as_tensors, make_ragged
from wdskit.stages.run import Roles

LAST = torch.channels_last
ALIKE = ". Use to_tuple or to_dict to choose fields that all have"


def collate(samples, images=(), ragged=frozenset(), places=None):
    """Return a batch of samples whose slots `images`, keys or positions, are images."""
    places = places or tuple("jpg" if at in images else f"x{at}" for at in range(9))
    roles = Roles(images=frozenset(each for each in images if isinstance(each, str)), places=places)
    return as_tensors(Collate(roles, ragged)(samples))


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_tuples_become_a_tuple_dicts_a_dict_and_values_a_batch():
    assert collate([("a", "b"), ("c", "d")]) == (["a", "c"], ["b", "d"])
    assert collate([{"x": "a", "y": "b"}, {"y": "d", "x": "c"}]) == {"x": ["a", "c"], "y": ["b", "d"]}
    assert list(collate([{"x": "a", "y": "b"}, {"y": "d", "x": "c"}])) == ["x", "y"]
    assert collate(["a", "b"]) == ["a", "b"]
    assert collate([1, 2]).tolist() == [1, 2]
    assert collate([()]) == ()


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, -2], torch.int64),
        ([2**63 - 1], torch.int64),
        ([True, False], torch.bool),
        ([1.5, float("nan")], torch.float64),
        ([np.float32(1), np.float32(2)], torch.float32),
        ([np.float64(1), 2.0], torch.float64),
        ([np.int64(1), 2], torch.int64),
        ([np.uint8(1)], torch.uint8),
        ([np.int16(1)], torch.int16),
        ([np.bool_(1), True], torch.bool),
        ([np.float16(1)], torch.float16),
        ([np.complex64(1j)], torch.complex64),
    ],
)
def test_numbers_become_tensors_of_their_dtype(values, dtype):
    (batch,) = collate([(value,) for value in values])
    assert batch.dtype == dtype
    assert batch.shape == (len(values),)
    assert np.array_equal(batch.numpy(), np.array(values), equal_nan=True)


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        [b"a", b"b"],
        [None, None],
        [None, "a"],
        [{"a": 1}, {"b": 2}],
        [[1, 2], [3]],
        [(1, 2), (3, 4)],
        [np.str_("a")],
        [np.array(["a"]), np.array(["bcd"])],
        [Image.new("RGB", (2, 2))],
        [{1, 2}],
    ],
    ids=["str", "bytes", "None", "mixed", "dict", "list", "tuple", "numpy str", "text array", "pil", "set"],
)
def test_everything_else_stays_a_list_of_the_same_objects(values):
    (batch,) = collate([(value,) for value in values], [0])
    assert isinstance(batch, list)
    assert all(one is other for one, other in zip(batch, values, strict=True))


@pytest.mark.parametrize(
    "dtype", ["bool", "u1", "i1", "<i2", ">i2", "<i4", "<i8", ">i8", "<f2", "<f4", ">f4", "<f8", "<c8"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (4, 5, 3)])
def test_arrays_are_stacked(dtype, shape):
    arrays = [(np.ones(shape) * n).astype(dtype) for n in range(3)]
    (batch,) = collate([(array,) for array in arrays])
    assert batch.is_contiguous()
    assert np.array_equal(batch.numpy(), np.stack(arrays))
    assert batch.numpy().dtype == np.dtype(dtype).newbyteorder("=")


# --- images


@pytest.mark.parametrize("size", list(itertools.product([1, 2, 5], [1, 3], [1, 4], [1, 2, 3, 4, 7])))
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float16, np.float64])
def test_hwc_arrays_become_channels_last_images(size, dtype):
    num, height, width, channels = size
    arrays = [pixels(height, width, channels, seed=n).astype(dtype) for n in range(num)]
    for batch in (
        collate([(0, array) for array in arrays], [1])[1],
        collate([{"jpg": array} for array in arrays], ["jpg"])["jpg"],
    ):
        assert batch.shape == (num, channels, height, width)
        assert batch.is_contiguous(memory_format=LAST)
        assert batch.stride() == (height * width * channels, 1, width * channels, channels)
        assert np.array_equal(batch.numpy(), np.stack(arrays).transpose(0, 3, 1, 2))
        assert batch.numpy().dtype == dtype
    tensors = [torch.from_numpy(array).permute(2, 0, 1).bfloat16() for array in arrays]  # which numpy cannot hold
    assert torch.equal(collate([{"jpg": each} for each in tensors], ["jpg"])["jpg"], batch.bfloat16())
    assert collate([{"jpg": each} for each in tensors], ["jpg"])["jpg"].is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("slots", [[], [0]])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_batches_are_fresh_memory(kind, slots):
    """This includes a batch of one sample: the batch may be changed, and pinned."""
    array = pixels(4, 5, 3)
    array.flags.writeable = kind == "tensor"
    value = array if kind == "array" else torch.from_numpy(array).permute(2, 0, 1)
    kept = array.copy()
    (batch,) = collate([(value,)], slots)
    batch.fill_(0)
    assert np.array_equal(array, kept)


def test_images_are_copied_once():
    """The batch is the only large allocation: there is no list of transposed copies."""
    import tracemalloc

    arrays = [pixels(64, 64, 3, seed=n) for n in range(32)]
    collate([(array,) for array in arrays], [0])
    tracemalloc.start()
    try:
        collate([(array,) for array in arrays], [0])
        assert tracemalloc.get_traced_memory()[1] < arrays[0].nbytes * (len(arrays) + 4)
    finally:
        tracemalloc.stop()


# --- errors


def test_whole_numbers_of_json_between_floats_become_floats():
    """JSON writes 1.0 as 1, as do lists of JSON."""
    for values in ([1, 1.5], [1.5, 1, 2], [2, 3, float("nan")]):
        [numbers] = collate([(value,) for value in values], [0])
        assert numbers.dtype == torch.float64
        assert np.array_equal(numbers, np.array(values, np.float64), equal_nan=True)
    assert collate([(1,), (2,)], [0])[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(1, 2), (1,)], f"batched: sample is a tuple of 2 in sample 0 but a tuple of 1 in sample 1{ALIKE}"),
        (
            [{"a": 1, "b": 2}, {"a": 1, "c": 2}],
            f"batched: sample is a dict of a, b in sample 0 but a dict of a, c in sample 1{ALIKE}",
        ),
        ([(np.int32(1),), (1.5,)], "batched: slot 0 is int32 in sample 0 but float64 in sample 1"),
        (
            [{"cls": 1}, {"cls": None}],
            "batched: `cls` is int64 in sample 0 but neither a number nor an array in sample 1",
        ),
        ([("a", np.zeros(2)), ("b", torch.zeros(2))], "batched: slot 1 is array in sample 0 but tensor in sample 1"),
        (
            [{"jpg": np.zeros((2, 3, 3))}, {"jpg": np.zeros((4, 3, 3))}],
            "batched: `jpg` is (2, 3, 3) in sample 0 but (4, 3, 3) in sample 1. Resize or crop first",
        ),
        (
            [(np.zeros(2, np.float32),), (np.zeros(2),)],
            "batched: slot 0 is float32 in sample 0 but float64 in sample 1. Convert them with `map`",
        ),
    ],
)
def test_messages_name_the_slot(samples, message):
    with pytest.raises(PipelineError) as caught:
        collate(samples, [0])
    assert str(caught.value) == message


def test_byte_orders_of_one_dtype_mix():
    (batch,) = collate([(np.array([1, 2], "<i4"),), (np.array([3, 4], ">i4"),)])
    assert batch.tolist() == [[1, 2], [3, 4]]


# --- ragged: arrays of different lengths end to end, in batches made in any way


LENGTHS = [3, 0, 1, 7, 2, 2, 5, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ragged")
    samples = {
        f"k{at}": {
            "npy": npy(np.arange(length, dtype=np.int32) + 100 * at),
            "box.npy": npy(np.full((length, 4), at, np.float32)),
            "f.npy": npy(np.asfortranarray(np.full((length, 2), at, ">i2"))),
            "one.npy": npy(np.float32(at)),
            "cls": b"%d" % at,
        }
        for at, length in enumerate(LENGTHS)
    }
    return write_indexed(path, samples)


def both(pipe: Pipeline) -> list[Any]:
    """Return the batches by columns, after comparing them with batches made sample by sample."""
    loader, apart = (pipe.loader(workers=0) for _ in range(2))
    forgo_columns(apart.program)
    made = count_made(loader.program)
    batches, others = list(loader), list(apart)
    assert sum(made) == len(batches)
    for batch, other in zip(batches, others, strict=True):
        columns = [each.values() if isinstance(each, dict) else each for each in (batch, other)]
        for a, b in zip(*columns, strict=True):
            assert type(a) is type(b)
            if isinstance(a, Ragged):
                assert a.values.dtype == b.values.dtype
                assert torch.equal(a.values, b.values)
                assert torch.equal(a.offsets, b.offsets)
    return batches


def test_the_values_of_a_dict_s_fields_stand_end_to_end(folder: str) -> None:
    pipe = Pipeline().sequential(folder, tail="drop").decode().batched(4, ragged=["npy", "box.npy", "f.npy"])
    for number, batch in enumerate(both(pipe)):
        lengths = LENGTHS[4 * number : 4 * number + 4]
        assert batch["npy"].offsets.tolist() == np.cumsum([0, *lengths]).tolist()
        assert batch["npy"].offsets.dtype == torch.int64
        assert batch["npy"].values.dtype == torch.int32
        assert batch["box.npy"].values.shape == (sum(lengths), 4)
        assert batch["f.npy"].values.dtype == torch.int16
        for at, length in enumerate(lengths):
            assert batch["npy"][at].tolist() == [100 * (4 * number + at) + place for place in range(length)]
        assert [row.tolist() for row in batch["npy"]] == [batch["npy"][at].tolist() for at in range(4)]
        assert len(batch["npy"]) == 4
        assert isinstance(batch["one.npy"], torch.Tensor)


def test_a_field_is_found_in_tuples_by_its_name(folder: str) -> None:
    pipe = Pipeline().sequential(folder, tail="drop").decode()
    for batch in both(pipe.to_tuple("x;npy", "cls", "npy").batched(2, ragged="npy")):
        assert [type(column) for column in batch] == [Ragged, torch.Tensor, Ragged]
    with pytest.raises(PipelineError, match=r"batched: ragged: no field `json`; the samples have: npy, cls"):
        pipe.to_tuple("npy", "cls").batched(2, ragged="json").build(rank=0, world_size=1)
    with pytest.raises(ConfigError, match="`ragged` has no effect with your own `collate`"):
        pipe.batched(2, ragged="npy", collate=list)


def test_arrays_that_differ_in_more_than_their_length_are_refused() -> None:
    for other in (np.zeros((1, 3)), np.zeros((1, 2), np.float32), np.zeros(2)):
        with pytest.raises(PipelineError, match=r"slot 0 is \(\.\.\., 2\) of float64 in sample 0 but .* in sample 1"):
            collate([(np.zeros((1, 2)),), (other,)], ragged=frozenset({"x"}), places=("x",))
    with pytest.raises(PipelineError, match="slot 0 is a ndarray in sample 0"):
        collate([(np.array(["a"]),)], ragged=frozenset({"x"}), places=("x",))


@pytest.mark.parametrize("dtypes", [("f8", "f4"), ("f4", "f8"), ("i8", "f4"), ("f4", "i8"), ("i8", "f8", "f4")])
def test_lists_of_several_dtypes_get_one_in_every_order(dtypes: tuple[str, ...]) -> None:
    lists = [(np.ones(at + 1, dtype),) for at, dtype in enumerate(dtypes)]
    (ragged,) = collate(lists, places=("json.x",))
    assert ragged.values.dtype == torch.float64
    assert [len(each) for each in ragged] == [1, 2, 3][: len(dtypes)]


@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=6))
def test_any_rows_come_back(rows: list[list[int]]) -> None:
    for make in (lambda row: np.array(row, dtype=np.int16), lambda row: torch.tensor(row, dtype=torch.int16)):
        ragged = as_tensors(make_ragged([make(row) for row in rows], "x", FRESH))
        copy = pickle.loads(pickle.dumps(ragged))
        assert [row.tolist() for row in copy] == [copy[at].tolist() for at in range(len(copy))] == rows
        assert copy[-1].tolist() == rows[-1]
        assert ragged.to(torch.float32).values.dtype == torch.float32
        for at in (len(rows), -len(rows) - 1):
            with pytest.raises(IndexError, match="out of range"):
                ragged[at]


# --- whole pipelines


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    """The pattern of ten pictures in shards of 4, 3 and 3."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [4, 3, 3])
    return f"{folder}/p-*.tar"


def test_a_batch_that_does_not_fit_names_its_first_and_last_sample(pattern):
    pipe = Pipeline().stream(pattern, shuffle_shards=False).decode("rgb8")
    with pytest.raises(SampleError, match=r"p-000\.tar: k000 to k002: batched: sample is a dict of .*jpg"):
        list(pipe.batched(3).loader(workers=0))
    with pytest.raises(SampleError, match=r"p-000\.tar: k000 to .*p-001\.tar: k005: batched: sample is a dict of "):
        list(pipe.batched(6).loader(workers=0))
