"""Functions that stages call: all kinds of functions, random numbers by position, and global random numbers."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from shards import draw, index_numbers, listed

from wdskit import Pipeline, PipelineError, SampleError, WdskitError
from wdskit.shards.index import index_folder
from wdskit.stages.fields import Rename


def add_sample(extra, sample):
    return int(sample["cls"]) + extra


def keyword_rng(sample, *, rng=None):
    return int(sample["cls"]), int(rng.integers(1 << 40))


class Adder:
    """A class with a function as a method, as a class method, and as an object."""

    def __init__(self, extra):
        self.extra = extra

    def __call__(self, sample):
        return int(sample["cls"]) + self.extra

    def method(self, sample):
        return self(sample)

    @classmethod
    def of_class(cls, sample):
        return cls(10)(sample)


KINDS = {
    "partial": functools.partial(add_sample, 10),
    "object": Adder(10),
    "method": Adder(10).method,
    "classmethod": Adder.of_class,
    "lambda": lambda sample: int(sample["cls"]) + 10,
}


@pytest.mark.parametrize("function", KINDS.values(), ids=KINDS)
def test_a_function_may_be_of_any_kind(six, function):
    for settings in ({"workers": 0}, {"workers": 1, "start_method": "fork"}):  # a lambda needs fork
        loader = listed(six).map(function).loader(**settings)
        assert list(loader) == list(range(10, 49))


class Drawer:
    def __call__(self, sample, rng):
        return draw(sample, rng)


def test_whoever_has_a_parameter_rng_gets_the_numbers_of_the_position(six):
    """This holds for all kinds of functions; a registered name gives the same as the function."""
    kinds = [draw, keyword_rng, Drawer(), functools.partial(draw), lambda sample, rng: draw(sample, rng)]  # noqa: PLW0108
    drawn = [list(listed(six, seed=3).map(function).loader(workers=0)) for function in kinds]
    assert all(other == drawn[0] for other in drawn)
    assert len({number for _, number in drawn[0]}) == 39
    by_name = listed(six, seed=3).map("draw").loader(workers=0, transforms={"draw": draw})
    assert list(by_name) == drawn[0]


def test_rng_is_left_alone_where_it_is_bound_or_gets_the_value(six):
    bound = np.random.default_rng(5)
    expected = [(number, int(np.random.default_rng(5).integers(1 << 40))) for number in range(1)]
    assert next(iter(listed(six).map(functools.partial(draw, rng=bound)).loader(workers=0))) == expected[0]
    assert list(listed(six).map(lambda rng: int(rng["cls"])).loader(workers=0)) == list(range(39))


def test_each_stage_each_field_and_each_place_has_numbers_of_its_own(six):
    def toss(value, rng):
        return int(rng.integers(1 << 40))

    def also(value, rng):
        return value, toss(value, rng)

    pipe = listed(six).map(lambda s, rng: {**s, "a": toss(s, rng)}).map(lambda s, rng: {**s, "b": toss(s, rng)})
    pipe = pipe.map_dict(a=also, b=also).to_tuple("a", "b").map_tuple(also, also)
    drawn = [(a, b, c, d, e, f) for ((a, b), c), ((d, e), f) in pipe.loader(workers=0)]
    assert len({number for numbers in drawn for number in numbers}) == 39 * 6


def global_draws(sample):
    return sample["__key__"], random.random(), float(np.random.random()), float(torch.rand(1))  # noqa: NPY002


def test_global_rng_repeats_by_position_whatever_the_workers(six):
    pipe = listed(six, seed=3).shuffle(9).map(global_draws, global_rng=True)
    first = sorted(pipe.loader(workers=0))
    random.seed(1)
    torch.manual_seed(1)
    assert sorted(pipe.loader(workers=0)) == first
    assert sorted(pipe.loader(workers=2)) == first
    assert all(len({item[at] for item in first}) == 39 for at in (1, 2, 3))
    assert not {item[1] for item in first} & {
        item[1] for item in listed(six, seed=4).map(global_draws, global_rng=True).loader(workers=0)
    }


def test_global_rng_is_refused_with_several_threads(six, tmp_path):
    index_folder(Path(six).parent, workers=1)
    pipe = Pipeline().exact(six).map(global_draws, global_rng=True)
    for make in (lambda: pipe.build(threads=2), lambda: pipe.loader(threads=2, workers=0)):
        with pytest.raises(PipelineError, match=r"global_rng .* which 2 threads of a process share\.\n  Take `rng`"):
            make()
    assert len(list(pipe.loader(threads=1, workers=0))) == 39


def test_a_decode_of_fields_that_a_sample_does_not_have_is_an_error(tmp_path):
    index_numbers(tmp_path, [3])
    for source in (Pipeline().exact(str(tmp_path)), Pipeline().stream(str(tmp_path))):
        for pipe in (source.decode(only="nope"), source.decode(only=["nope", "no"]).batched(2)):
            with pytest.raises(SampleError, match=r"decode failed: no field `no.*` \(`only`\); the sample has: cls"):
                list(pipe.loader(workers=0))
        assert len(list(source.decode(only=["nope", "cls"]).loader(workers=0))) == 3


def test_rename_replaces_and_drops_no_field():
    sample = {"__key__": "k", "left.png": 1, "right.png": 2, "cls": 3}
    picked = Rename(names={"a": "left.png;right.png"})(sample)
    assert picked == {"__key__": "k", "right.png": 2, "cls": 3, "a": 1}
    assert Rename(names={"cls": "left.png", "left.png": "cls"})(sample) == {**sample, "cls": 1, "left.png": 3}
    assert Rename(names={"cls": "cls"})(sample) == sample
    for names in ({"cls": "left.png"}, {"right.png": "left.png;right.png"}):
        with pytest.raises(WdskitError, match=r"would replace the field `\S+` of the sample"):
            Rename(names=names)(sample)
