"""Memory of batches: it is used again after all references to it are gone, and values arrive as they were."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from shards import index_numbers, number_of

from wdskit import Pipeline
from wdskit.loader import memory as memory_module

WAYS = [{"workers": 0}, {"workers": 0, "threads": 3}, {"workers": 1, "threads": 2}]


def batches_of(pictures: str, **way: int) -> Any:
    """Return a loader of batches of 16 images, 288 KiB each."""
    pipe = Pipeline().exact(pictures, seed=3).decode("rgb8").resize([64, 96]).to_tuple("jpg;png").batched(16)
    return pipe.loader(**way)


VIEWS = {
    "itself": lambda tensor: tensor,
    "a row": lambda tensor: tensor[1],
    "flattened": lambda tensor: tensor.permute(0, 2, 3, 1).flatten(1)[:, 7:9],
    "detached": lambda tensor: tensor.detach(),
    "an array": lambda tensor: tensor.numpy(),
    "part of an array": lambda tensor: tensor.numpy()[2:, 0],
    "another tensor of an array": lambda tensor: torch.from_numpy(tensor.numpy()[0]),
    "a memoryview": lambda tensor: memoryview(tensor.permute(0, 2, 3, 1).numpy()),
    "through dlpack": torch.from_dlpack,
    "a storage": lambda tensor: tensor.untyped_storage(),
}


def content_of(view: Any) -> bytes:
    return bytes(view) if isinstance(view, torch.UntypedStorage) else np.asarray(view).tobytes()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_memory_is_not_used_again_while_anything_shares_it(pictures: str, way: dict[str, int]) -> None:
    """Every kind of view is kept without its batch, over all batches of four epochs."""
    views = [*VIEWS.values()]
    kept = []
    loader = batches_of(pictures, **way)
    for _ in range(4):
        for number, (images,) in enumerate(loader):
            view = views[(len(kept) + number) % len(views)](images)
            kept.append((view, content_of(view)))
            del images, view
    assert len(kept) > 2 * len(views) - 5
    assert all(content_of(view) == then for view, then in kept)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_memory_is_used_again_after_the_last_reference(pictures: str, way: dict[str, int]) -> None:
    loader, places = batches_of(pictures, **way), []
    for _ in range(8):
        for (images,) in loader:
            places.append(images.data_ptr())
            del images
    gc.collect()
    assert len({*places}) < len(places) // 2


def test_the_check_of_sharing_catches_memory_that_is_taken_back_too_early(
    pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a block counts as free as soon as it is lent."""

    def early(memory: Any, back: Any, number: int) -> Any:
        back.append(number)
        return np.frombuffer(memory, np.uint8)

    monkeypatch.setattr(memory_module, "borrow", early)
    with pytest.raises(AssertionError):
        test_memory_is_not_used_again_while_anything_shares_it(pictures, {"workers": 0})


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
        "dicts": [{"id": n, "boxes": [[1.5, n]], "none": None} for n in range(1000)],
        "twice": [images, images],
        "sparse": torch.eye(50).to_sparse(),
        "nested": nested([torch.arange(n) for n in (3, 4000, 0)]),
    }


def value_of(sample: dict[str, Any]) -> Any:
    return [*values().values()][number_of(sample)]


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


def test_values_arrive_from_a_worker_as_they_were(tmp_path: Any) -> None:
    """In the second epoch the memory of a batch has the size of earlier batches."""
    index_numbers(tmp_path, [len(values())])
    loader = Pipeline().sequential(str(tmp_path), tail="drop").map(value_of).loader(workers=1)
    for _ in range(2):
        for (name, value), found in zip(values().items(), loader, strict=True):
            assert same(value, found), name
