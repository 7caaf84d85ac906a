"""An image batches as (batch, channels, height, width) under any name; what may be one or not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded, photo
from shards import write_shard

from wdskit import Pipeline
from wdskit.codecs.fields import encode_field
from wdskit.errors import PipelineError, SampleError
from wdskit.shards.index import index_folder

POINTS = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("layouts")
    samples = {
        f"k{n}": {"png": encoded(photo() + np.uint8(n), "PNG"), "npy": encode_field("npy", POINTS)} for n in (0, 1)
    }
    write_shard(path / "s.tar", samples)
    index_folder(path, workers=1)
    return str(path)


@pytest.fixture(params=["exact", "stream"])
def source(request: pytest.FixtureRequest, folder: str) -> Pipeline:
    return getattr(Pipeline(), request.param)(folder)


def batch_of(pipe: Pipeline) -> Any:
    return next(iter(pipe.batched(2).loader(workers=0)))


HANDED_ON = {
    "itself": lambda sample: {"image": sample["png"]},
    "mirrored": lambda sample: {"image": sample["png"][:, ::-1]},
    "cut": lambda sample: {"image": sample["png"][2:9, 3:9]},
    "popped": lambda sample: {**{name: value for name, value in sample.items() if name != "png"}, "x": sample["png"]},
    "tuple": lambda sample: (sample["png"], 1),
    "bare": lambda sample: sample["png"],
}


def image_in(batch: Any) -> Any:
    if isinstance(batch, dict):
        return batch.get("image", batch.get("x"))
    return batch[0] if isinstance(batch, tuple) else batch


@pytest.mark.parametrize("spec", ["rgb8", "rgb", "l8", "rgba8"])
@pytest.mark.parametrize("how", HANDED_ON)
def test_a_decoded_image_that_a_function_hands_on_is_one_under_any_name(source, how, spec):
    channels = {"l8": 1, "rgba8": 4}.get(spec, 3)
    size = (7, 6) if how == "cut" else (21, 34)
    pipe = source.decode(spec)
    image = image_in(batch_of(pipe.map(HANDED_ON[how])))
    assert image.shape == (2, channels, *size)
    if how == "itself":
        assert torch.equal(image, batch_of(pipe)["png"])
        twice = pipe.map(HANDED_ON[how]).map(lambda sample: {"again": sample["image"][::2], "and": sample["image"]})
        assert batch_of(twice)["again"].shape == (2, channels, 11, 34)
        seen: list[type] = []
        pipe = pipe.map(HANDED_ON[how]).map_dict(image=lambda image: seen.append(type(image)) or image)
        assert batch_of(pipe)["image"].shape == (2, channels, *size)
        assert set(seen) == {np.ndarray}


def test_an_image_behind_a_transform_is_one_under_any_name(source):
    base = source.decode("rgb8")
    for pipe in (base.resize([6, 8]), base.resize([6, 8], fields="png").normalize("imagenet")):
        assert batch_of(pipe.map(lambda sample: {"image": sample["png"]}))["image"].shape == (2, 3, 6, 8)
    made = base.map(lambda sample: {"image": sample["png"] // 2, "other": sample["png"] // 3})
    for settings in ({"fields": "image"}, {"fields": "image", "masks": "other"}, {"fields": "none;image"}):
        pipe = made.random_flip(**settings).to_dict("image")
        assert batch_of(pipe)["image"].shape == (2, 3, 21, 34)
        assert batch_of(pipe.rename(photo="image"))["photo"].shape == (2, 3, 21, 34)
        assert batch_of(pipe.to_tuple("image"))[0].shape == (2, 3, 21, 34)
    both = made.center_crop(8, fields="image other").to_tuple("other", "image")
    assert [tuple(each.shape) for each in batch_of(both)] == [(2, 3, 8, 8)] * 2


MADE = {
    "dict": lambda sample: {"image": sample["png"] // 2},
    "float": lambda sample: {"image": sample["png"] / 255.0},
    "tuple": lambda sample: (sample["png"] // 2, 1),
    "bare": lambda sample: sample["png"] // 2,
    "grey with an axis": lambda sample: {"image": sample["png"][..., :1] // 2},
    "points": lambda sample: {"points": sample["npy"] * 2},
}


@pytest.mark.parametrize("how", MADE)
def test_an_array_that_may_be_an_image_or_not_is_refused_with_the_ways_out(source, how):
    pipe = source.decode("rgb8").map(MADE[how])
    slot = {"tuple": "slot 0", "bare": "the value", "points": "`points`"}.get(how, "`image`")
    message = rf"batched: {slot} is an array \(.*\) of \w+ from a function.*\n.* image field.*npy field.*tensor"
    with pytest.raises((PipelineError, SampleError), match=message):
        batch_of(pipe)


def test_the_ways_out_work(source):
    base = source.decode("rgb8")
    named = batch_of(base.map(lambda sample: {"left.png": sample["png"] // 2, "p.npy": sample["npy"] * 2}))
    assert named["left.png"].shape == (2, 3, 21, 34)
    assert named["p.npy"].shape == (2, 2, 5, 3)
    renamed = batch_of(base.map(MADE["dict"]).rename(**{"x.jpg": "image"}))
    assert renamed["x.jpg"].shape == (2, 3, 21, 34)
    tensors = batch_of(base.map(lambda sample: {"points": torch.from_numpy(sample["npy"] * 2)}))
    assert tensors["points"].shape == (2, 2, 5, 3)


def test_arrays_of_npy_files_are_stacked_as_they_are_stored(source):
    base = source.decode("rgb8")
    for pipe in (
        base.to_dict("npy"),
        base.rename(points="npy").to_dict("points"),
        base.map(lambda sample: {"points": sample["npy"]}),
        base.map(lambda sample: {"points": sample["npy"][:, 1:]}),
        base.to_tuple("npy"),
        base.map(lambda sample: (sample["npy"],)),
        source.decode(only=["npy"]).to_dict("npy"),  # by columns, where that can be
        source.decode(only=["npy"]).rename(points="npy").to_tuple("points"),
    ):
        batch = batch_of(pipe)
        (points,) = batch.values() if isinstance(batch, dict) else batch
        assert points.shape in {(2, 2, 5, 3), (2, 2, 4, 3)}


def test_arrays_that_can_be_no_image_are_stacked_as_they_are(source):
    made = {
        "a": np.zeros((4, 5)),
        "b": np.zeros((4, 5, 2), np.uint8),
        "c": np.zeros((4, 5, 3), np.int64),
        "d": np.zeros((2, 4, 5, 3), np.uint8),
        "e": np.zeros(3, np.uint8),
        "f": np.zeros((4, 5, 3), bool),
    }
    batch = batch_of(source.map(lambda _: dict(made)))
    assert {name: tuple(values.shape[1:]) for name, values in batch.items()} == {n: a.shape for n, a in made.items()}


def test_columns_and_samples_make_the_same_of_arrays(folder):
    for chosen in (["npy"], ["npy", "__key__"]):
        base = Pipeline().exact(folder).decode(only=["npy"])
        for pipe in (base.to_tuple(*chosen), base.to_dict(*chosen), base.rename(**{"x.png": "npy"}).to_dict("x.png")):
            one, other = batch_of(pipe), batch_of(pipe.map(lambda value: value))
            pairs = (
                zip(one.values(), other.values(), strict=True)
                if isinstance(one, dict)
                else zip(one, other, strict=True)
            )
            assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_named_tuples_of_functions_stay_what_they_are(folder, tmp_path: Path):
    from collections import namedtuple

    Pair = namedtuple("Pair", "image cls")  # noqa: PYI024
    pipe = Pipeline().exact(folder).decode("rgb8").map(lambda sample: Pair(sample["png"], 3))
    images, labels = batch_of(pipe.map(lambda pair: (pair.image, pair.cls)))
    assert images.shape == (2, 3, 21, 34)
    assert labels.tolist() == [3, 3]
