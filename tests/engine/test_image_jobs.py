"""A job with several batches of images gives the batches of jobs with one batch each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded, photo
from masks import mask_of
from shards import write_shard

from wdskit import Pipeline, native
from wdskit.loader import loader as planned
from wdskit.shards.index import index_folder

NUM = 50
FEW, MANY = {"max_bad": 5}, {"max_bad": 40}


def folder_of(path: Path, bad: dict[int, bytes]) -> str:
    """Write fifty JPEGs in three shards; `bad` are the bytes of some of them."""
    keys = [f"k{at:02d}" for at in range(NUM)]
    files = {}
    for at, key in enumerate(keys):
        image = np.roll(photo(40 + at % 3, 50 + at % 5), at, axis=1)
        files[key] = {"jpg": bad.get(at, encoded(image, "JPEG", quality=90)), "cls": b"%d" % at}
    for shard, part in enumerate((keys[:13], keys[13:31], keys[31:])):
        write_shard(path / f"s-{shard}.tar", {key: files[key] for key in part})
    index_folder(path, workers=1)
    return str(path / "s-*.tar")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("good"), {})


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> str:
    whole = encoded(photo(40, 50), "JPEG", quality=90)
    return folder_of(tmp_path_factory.mktemp("damaged"), {7: b"no image", 8: whole[:200], 44: whole[:-2]})


def crop(pipe: Pipeline) -> Pipeline:
    return pipe.decode("rgb8").random_resized_crop(24).random_flip().to_tuple("jpg", "cls", *mask_of(pipe))


def normalize(pipe: Pipeline) -> Pipeline:
    return pipe.decode("rgb8").resize(32).center_crop(24).normalize("imagenet")


def resize(pipe: Pipeline) -> Pipeline:
    """The images differ in size, so that stages do not write into the batch."""
    return pipe.decode("rgb8").resize(24).to_tuple("jpg", "cls", *mask_of(pipe))


def as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.stride(), value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: as_arrays(each) for name, each in value.items()}
    return [as_arrays(each) for each in value] if isinstance(value, (list, tuple)) else value


def batches(pipe: Pipeline, num_batches: int, monkeypatch: pytest.MonkeyPatch, errors: Any) -> Any:
    """Return two epochs of batches from jobs of `num_batches`, the number of bad samples and the error."""
    monkeypatch.setattr(planned, "jobs_ahead", lambda *_: (num_batches, 2))
    loader = pipe.loader(workers=0, threads=3, errors=errors, rank=0, world_size=1)
    found, error = [], ""
    try:
        found += [as_arrays(batch) for _ in range(2) for batch in loader]
    except Exception as err:  # noqa: BLE001 (compared below)
        error = str(err)
    loader.close()
    return found, error, loader.stats().replaced


@pytest.mark.parametrize("chain", [crop, normalize, resize])
@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("uses_native", [True, False])
def test_a_job_of_several_batches_gives_the_same_batches(
    good: str, damaged: str, chain: Callable[[Pipeline], Pipeline], tail: str, uses_native: bool, monkeypatch
) -> None:
    if uses_native and native.native() is None:
        pytest.skip("the C code is not built")
    if not uses_native:
        monkeypatch.setenv("WDSKIT_NATIVE", "0")
        native.native.cache_clear()
    try:
        for shards, errors in [(good, None), (damaged, MANY), (damaged, FEW), (damaged, None)]:
            pipe = chain(Pipeline().exact(shards, seed=3, tail=tail)).batched(7)
            one = batches(pipe, 1, monkeypatch, errors=errors)
            for num_batches in (2, 8):
                assert batches(pipe, num_batches, monkeypatch, errors=errors) == one
    finally:
        native.native.cache_clear()
