"""Pipelines with the fused step and with separate stages, for the tests that compare them."""

from __future__ import annotations

import numpy as np
import torch
from images import encoded, pixels

from wdskit.engine.sample import SampleStages
from wdskit.engine.stream import Samples
from wdskit.pipeline.build import build_pipeline
from wdskit.stages.base import Origin, RankInfo
from wdskit.stages.fields import Decode
from wdskit.stages.images.fused import FusedStep
from wdskit.stages.images.transforms import (
    CenterCrop,
    Normalize,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from wdskit.stages.streaming import Stream

SPECS = ["rgb8", "rgb"]
CROPS = {
    "random": [RandomResizedCrop(size=12)],
    "random wide": [RandomResizedCrop(size=[7, 15], scale=[0.3, 0.9])],
    "resize": [Resize(size=14)],
    "resize both": [Resize(size=[11, 18])],
    "middle": [Resize(size=14), CenterCrop(size=12)],
    "middle padded": [Resize(size=8), CenterCrop(size=[12, 6])],
}
FLIP, NORMALIZE, TENSOR = RandomFlip(), Normalize(preset="imagenet"), ToTensor()
ENDINGS = {
    "": [],
    "flip": [FLIP],
    "normalize": [Normalize(mean=[0.4], std=[0.3])],
    "tensor": [TENSOR],
    "flip normalize tensor": [FLIP, NORMALIZE, TENSOR],
}


def each_of(*specs, fuse=True, images="rgb8", **options):
    """Return the running one-to-one stages; check whether they contain the fused step."""
    decode = Decode(images=images, fuse=fuse, **options)
    stages = build_pipeline(
        [Stream(shards=__file__, seed=3), decode, *specs], rank_info=RankInfo(0, 1), functions={}
    ).pipeline
    [each] = [SampleStages(tuple(stage.steps)) for stage in stages if isinstance(stage, Samples)]
    assert fuse == any(isinstance(step.function, FusedStep) for step in each.steps)
    return each


def at(number=0):
    """Return the origin of sample `number`."""
    return Origin("a.tar", f"k{number}", 5, number, 0)


def results(each, sample, count=1):
    """Return the results for one sample at each of `count` positions."""
    return [each.apply(dict(sample), at(number)) for number in range(count)]


def assert_same(one, other, atol=0.0):
    """Check that two samples have equal fields, types, dtypes, memory layouts and, within `atol`, values."""
    assert list(one) == list(other)
    for field in one:
        a, b = one[field], other[field]
        assert type(a) is type(b)
        if not isinstance(a, (np.ndarray, torch.Tensor)):
            assert a == b
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if isinstance(a, torch.Tensor):
            assert a.stride() == b.stride()
        else:
            assert a.flags.c_contiguous
            assert a.flags.writeable
        assert np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() <= atol


PICTURE = encoded(pixels(30, 40, 3), "PNG")
