"""Which runs of stages become one, and which do not."""

from __future__ import annotations

import functools

import pytest

from wdskit import Pipeline
from wdskit.codecs.images import IMAGE_SPECS
from wdskit.stages.field_specs import DecodeSpec, MapSpec, RenameSpec, ToTupleSpec
from wdskit.stages.fuse_plan import FusedSpec, fuse
from wdskit.stages.registry import STAGES
from wdskit.stages.specs import BatchedSpec
from wdskit.stages.stream_source import Stream
from wdskit.stages.streaming import Shuffle
from wdskit.stages.transforms import (
    CenterCrop,
    Normalize,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)

STREAM = Stream(shards="a.tar")
DECODE = DecodeSpec(images="rgb8")
RRC = RandomResizedCrop(size=224)
RESIZE = Resize(size=256)
CENTER = CenterCrop(size=224)
FLIP = RandomFlip()
NORMALIZE = Normalize(preset="imagenet")
TENSOR = ToTensor()
MAP = MapSpec(fn="my_augment")
TUPLE = ToTupleSpec(fields=["jpg;png", "cls"])


def lengths(*specs):
    """How many stages each item of the plan holds; the stages must come out in order and complete."""
    planned = fuse(specs)
    flat = [stage for item in planned for stage in (item.stages if isinstance(item, FusedSpec) else [item])]
    assert flat == list(specs)
    return [len(item.stages) if isinstance(item, FusedSpec) else 1 for item in planned]


@pytest.mark.parametrize(
    "run",
    [
        [RRC],
        [RESIZE],
        [RESIZE, CENTER],
        [RRC, FLIP],
        [RRC, NORMALIZE],
        [RRC, TENSOR],
        [RESIZE, CENTER, FLIP, NORMALIZE],
        [RRC, FLIP, NORMALIZE, TENSOR],
        [RRC, FLIP, TENSOR, NORMALIZE],
        [RRC, TENSOR, NORMALIZE],
    ],
)
def test_a_run_is_one_wherever_it_stands(run):
    assert lengths(DECODE, *run) == [1 + len(run)]
    assert lengths(STREAM, Shuffle(size=9), DECODE, *run, TUPLE, BatchedSpec(size=4)) == [1, 1, 1 + len(run), 1, 1]
    assert lengths(STREAM, DECODE, *run, MAP, TUPLE) == [1, 1 + len(run), 1, 1]


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([DECODE, RRC, MAP, FLIP, NORMALIZE], [2, 1, 1, 1]),
        ([DECODE, RRC, FLIP, FLIP], [3, 1]),
        ([DECODE, RRC, NORMALIZE, FLIP], [3, 1]),
        ([DECODE, RRC, NORMALIZE, NORMALIZE], [3, 1]),
        ([DECODE, RRC, NORMALIZE, TENSOR, NORMALIZE], [4, 1]),
        ([DECODE, RRC, CENTER], [2, 1]),
        ([DECODE, RRC, RRC], [2, 1]),
        ([DECODE, RESIZE, CENTER, CENTER], [3, 1]),
        ([DECODE, RESIZE, FLIP, CENTER], [3, 1]),
        ([DECODE, RRC, DECODE, RRC], [2, 2]),
    ],
)
def test_a_run_ends_where_something_else_comes(specs, expected):
    assert lengths(*specs) == expected


@pytest.mark.parametrize(
    "specs",
    [
        [DECODE],
        [DECODE, MAP, RRC],
        [DECODE, RenameSpec(names={"image": "jpg"}), RRC],
        [DECODE, Shuffle(size=9), RRC],
        [DECODE, functools.partial(list), RRC],
        [DECODE, CENTER],
        [DECODE, FLIP, RRC],
        [DECODE, NORMALIZE],
        [MAP, RRC, FLIP],
        [RRC, DECODE],
        [DecodeSpec(), RRC],
        [DecodeSpec(images="rgb8", fuse=False), RRC, NORMALIZE],
        [DECODE, RandomResizedCrop(size=224, masks="seg.png"), FLIP],
        [DECODE, Resize(size=224, fields="jpg", masks="png"), CENTER],
        [DECODE, RandomResizedCrop(size=224, fields="left.jpg right.jpg"), FLIP],
    ],
)
def test_what_stands_between_and_what_acts_on_several_fields_stays_apart(specs):
    assert lengths(*specs) == [1] * len(specs)


@pytest.mark.parametrize("images", sorted(IMAGE_SPECS))
def test_only_colour_arrays_and_tensors_are_fused(images):
    fused = images in {"rgb8", "rgb", "torchrgb8", "torchrgb", "torch"}
    assert lengths(DecodeSpec(images=images), RRC) == ([2] if fused else [1, 1])


def test_the_stages_of_a_run_name_the_same_field():
    def named(spec, fields):
        return type(spec)(**{**spec.model_dump(), "fields": fields})

    assert lengths(DECODE, *(named(spec, "jpg;png") for spec in (RESIZE, CENTER, FLIP, NORMALIZE))) == [5]
    assert lengths(DECODE, named(RRC, "jpg"), FLIP, NORMALIZE) == [2, 1, 1]
    assert lengths(DECODE, named(RRC, "jpg"), named(FLIP, "png")) == [2, 1]
    assert lengths(DECODE, RRC, named(FLIP, "jpg")) == [2, 1]
    assert lengths(DECODE, named(RESIZE, "jpg"), CENTER) == [2, 1]
    assert lengths(DECODE, RRC, RandomFlip(masks="seg.png"), NORMALIZE) == [2, 1, 1]


def test_the_plan_is_no_stage_that_a_user_can_name():
    assert FusedSpec not in STAGES.values()
    assert not hasattr(Pipeline, "fused")


def test_the_callers_list_stays_as_it_was():
    specs = [STREAM, DECODE, RRC]
    planned = fuse(specs)
    assert specs == [STREAM, DECODE, RRC]
    assert planned == fuse(specs)
    assert fuse([]) == []
