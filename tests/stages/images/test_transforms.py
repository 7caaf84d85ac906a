"""The image transforms on samples."""

from __future__ import annotations

import numpy as np
import pytest
from image_kinds import OTHERS, make

from wdskit.errors import PipelineError, WdskitError
from wdskit.stages.base import Context
from wdskit.stages.images import transforms
from wdskit.stages.images.transforms import CenterCrop, Normalize, RandomFlip, RandomResizedCrop, Resize, ToTensor
from wdskit.stages.run import Origin, RankInfo, Roles, Run


def bound(spec, image_fields=frozenset(), seed=0):
    context = Context(Run(RankInfo(0, 1), seed), {}.__getitem__, Roles(image_fields))
    return spec.step(context)[0].function


def at(number=0):
    return Origin("a.tar", "k", 0, number, 0)


SPECS = {
    "resize": Resize(size=8),
    "center_crop": CenterCrop(size=8),
    "random_resized_crop": RandomResizedCrop(size=8),
    "random_flip": RandomFlip(),
    "normalize": Normalize(preset="imagenet"),
    "to_tensor": ToTensor(),
}


def apply(spec, sample, image_fields=frozenset(), seed=0):
    return bound(spec, image_fields, seed)(sample, at())


def with_fields(name, **settings):
    return type(SPECS[name])(**{**SPECS[name].model_dump(exclude_unset=True), **settings})


@pytest.mark.parametrize("name", sorted(SPECS))
def test_the_sample_is_copied_and_other_fields_are_the_same_objects(name):
    sample = {"__key__": "a", "jpg": make("numpy", 12, 14), "json": {"a": 1}, "cls": 3}
    before, kept = dict(sample), sample["jpg"].copy()
    result = apply(SPECS[name], sample)
    assert result is not sample
    assert list(result) == list(sample)
    assert all(sample[key] is before[key] for key in before)
    assert np.array_equal(sample["jpg"], kept)
    assert all(result[key] is before[key] for key in ("__key__", "json", "cls"))


def test_the_image_field_is_found_by_its_name_or_by_what_the_pipeline_knows():
    image = make("numpy", 12, 14)
    spec = SPECS["center_crop"]
    assert apply(spec, {"left.JPEG": image, "txt": "a"})["left.JPEG"].shape == (8, 8, 3)
    assert apply(spec, {"photo": image}, frozenset({"photo"}))["photo"].shape == (8, 8, 3)
    with pytest.raises(PipelineError):
        apply(spec, {"photo": image})
    result = apply(spec, {"jpg": image, "png": b"not decoded"})
    assert result["jpg"].shape == (8, 8, 3)
    assert result["png"] == b"not decoded"
    assert apply(spec, {"npy": image}, frozenset({"npy"}))["npy"].shape == (8, 8, 3)


OTHER = "Put `decode: rgb8` before this stage; use the stage `torchvision` for tensors and images of Pillow"


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", sorted(SPECS))
def test_tensors_and_images_of_pillow_are_for_torchvision(name, kind):
    for sample in ({"png": make(kind, 12, 14)}, {"png": make(kind, 12, 14), "jpg": b""}):
        with pytest.raises(PipelineError, match=f"{name}: `png` is not an array but .* {OTHER}"):
            apply(with_fields(name, fields="png"), sample)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_messages_say_what_to_do(name):
    cases = [
        (
            {"__key__": "a", "cls": 1, "json": {}},
            (
                f"{name}: no image field in this sample (fields: cls, json). Put decode before it, "
                "or name one with `fields`"
            ),
        ),
        (
            {"jpg": make("numpy", 9, 9), "png": make("numpy", 9, 9)},
            f"{name}: several image fields in this sample (jpg, png). Name those to change with `fields`",
        ),
        (
            {"jpg": np.zeros(5)},
            (
                f"{name}: `jpg` has the shape (5,), and an image has (height, width[, channels]). For boxes and "
                "keypoints, use the stage `torchvision`"
            ),
        ),
        (
            {"jpg": np.zeros((5, 5))},
            f"{name}: `jpg` is float64, and an image is uint8 or float32. Name a mask in `masks`",
        ),
    ]
    for sample, message in cases:
        with pytest.raises(PipelineError) as caught:
            apply(SPECS[name], sample)
        assert str(caught.value) == message


@pytest.mark.parametrize("name", sorted(SPECS))
def test_named_fields_with_alternatives(name):
    image = make("numpy", 12, 14)
    spec = with_fields(name, fields=["jpg;png", "right"])
    result = apply(spec, {"png": image, "right": image, "bmp": image})
    assert result["bmp"] is image
    assert np.array_equal(result["png"], result["right"])
    assert np.array_equal(result["png"], apply(SPECS[name], {"png": image})["png"])
    with pytest.raises(WdskitError, match="no field `jpg;png`; the sample has: right, cls"):
        apply(spec, {"right": image, "cls": 1})
    with pytest.raises(PipelineError, match=r"`right` is not an array but bytes. Put `decode: rgb8` before"):
        apply(spec, {"jpg": image, "right": b""})


def test_golden_draws():
    """A resume repeats the draws: a change here would change the epochs of all users."""
    rng = np.random.Generator(np.random.Philox(7))
    drawn = [transforms.draw_crop(rng, 385, 455, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(4)]
    assert drawn == [(29, 38, 306, 293), (59, 261, 190, 191), (180, 141, 161, 187), (26, 7, 200, 153)]
