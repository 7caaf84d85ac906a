"""Functions by name."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from shards import index_numbers

import wdskit
from wdskit.errors import ConfigError, PipelineError
from wdskit.stages import registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_FUNCTIONS", {})
    return


def augment(sample):
    return sample


def other(sample):
    return sample


@pytest.mark.parametrize("name", ["", "my-augment", "torch.load", "2x", "a b"])
def test_a_name_is_an_identifier(name) -> None:
    """Import paths and expressions are refused."""
    with pytest.raises(PipelineError, match="a name is letters"):
        registry.register(name)


def test_a_name_belongs_to_one_function() -> None:
    """Another function under the same name is refused; the message names both."""
    registry.register("my_augment")(augment)
    with pytest.raises(PipelineError, match=r"test_registry\.augment already has this name; .*test_registry\.other"):
        registry.register("my_augment")(other)
    assert registry.resolve("my_augment", {}) is augment


def test_two_lambdas_are_two_functions() -> None:
    registry.register("a")(lambda sample: sample)
    with pytest.raises(PipelineError, match="already has this name"):
        registry.register("a")(lambda sample: None)


def test_the_same_definition_may_run_again() -> None:
    """Examples are a notebook's cell, a reloaded module, and a decorated function registered twice."""
    source = "def f(sample):\n    return sample\n"
    first, second = {"__name__": "cell"}, {"__name__": "cell"}
    exec(source, first)
    exec(source, second)
    registry.register("f")(first["f"])
    registry.register("f")(first["f"])
    registry.register("f")(second["f"])
    assert registry.resolve("f", {}) is second["f"]


def test_an_unknown_name_gets_the_nearest_and_the_way_out() -> None:
    """Names of the registry and of `transforms` are suggested."""
    registry.register("my_augment")(augment)
    with pytest.raises(PipelineError, match=r"Did you mean `my_augment`\?\n  Register it with"):
        registry.resolve("my_augmnt", {})
    with pytest.raises(PipelineError, match="Did you mean `your_augment`"):
        registry.resolve("your_augmnt", {"your_augment": other})
    with pytest.raises(PipelineError, match=r"is registered\.\n"):
        registry.resolve("zzz", {})


# Stages of users.


class Shift:
    """A stage that adds to the number of a sample, and adds a draw by its position."""

    def __init__(self, by=1, *, draws=False):
        if by < 0:
            raise ValueError("`by` is negative")
        self.by, self.draws = by, draws

    def __call__(self, sample, rng):
        return {**sample, "cls": int(sample["cls"]) + self.by + (int(rng.integers(1 << 30)) if self.draws else 0)}


def add(sample, by=0):
    return {**sample, "cls": int(sample["cls"]) + by}


def batches(folder, *stages, **settings):
    source = {"exact": {"shards": folder, "seed": 3}}
    config = {"pipeline": [source, *stages, {"to_tuple": ["__key__", "cls"]}, {"batched": 4}]}
    return [(keys, labels.tolist()) for keys, labels in wdskit.make_loader(config, workers=0, **settings)]


@pytest.fixture
def numbers(tmp_path) -> str:
    return index_numbers(tmp_path / "numbers", [9, 8])


def test_a_class_is_a_stage_with_settings_and_draws_by_position(numbers):
    registry.register("shift")(Shift)
    registry.register("add")(add)
    plain = dict(zip(*map(sum_of, zip(*batches(numbers, {"add": {}}), strict=True)), strict=True))
    five = {"by": 5}
    shifted = dict(zip(*map(sum_of, zip(*batches(numbers, {"shift": five}), strict=True)), strict=True))
    assert shifted == {key: label + 5 for key, label in plain.items()}
    assert batches(numbers, {"shift": five}) == batches(numbers, {"add": five}) == batches(numbers, {"map": Shift(5)})
    part = {"shards": numbers, "repeat": 1, "stages": [{"shift": five}]}
    assert wdskit.Pipeline().exact(mixture=[part]).stages[0].mixture[0].stages[0].settings == five
    assert batches(numbers, "shift") == batches(numbers, {"map": "shift"}) == batches(numbers, {"add": {"by": 1}})
    drawn = {"shift": {"draws": True}}
    assert batches(numbers, drawn) == batches(numbers, drawn, threads=3) != batches(numbers, "shift")
    config = {"pipeline": [{"exact": numbers}, drawn, {"to_tuple": ["cls"]}, {"batched": 4}]}
    loaders = [wdskit.make_loader(config, workers=workers) for workers in (0, 2)]
    one, two = ([labels.tolist() for (labels,) in loader] for loader in loaders)
    assert one == two


def sum_of(lists):
    return [item for part in lists for item in part]


def test_what_is_handed_over_is_a_stage_too(numbers):
    assert batches(numbers, {"mine": {"by": 2}}, transforms={"mine": Shift})[0][1] is not None
    with pytest.raises(ConfigError, match="`mine` is not a stage"):
        batches(numbers, {"mine": {"by": 2}})


def test_a_stage_of_ones_own_stands_in_yaml_and_in_streams(numbers, tmp_path):
    registry.register("shift")(Shift)
    path = tmp_path / "c.yaml"
    path.write_text(
        f"version: 1\npipeline:\n  - stream: {{shards: {numbers}}}\n  - shift: {{by: 7}}\n  - to_tuple: [cls]\n"
    )
    assert sorted(label for (label,) in wdskit.make_loader(path, workers=0)) == list(range(7, 24))
    config = wdskit.load_config(path, overrides=["pipeline.shift.by=8"])
    changed = wdskit.make_loader(path, workers=0, overrides=["pipeline.shift.by=8"])
    assert min(label for (label,) in changed) == 8
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert wdskit.load_config(again) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ({"shift": {"bye": 1}}, r"shift\.bye: no such setting. Did you mean `by`\?"),
        ({"shift": {"by": -1}}, "shift: it cannot be created with these settings: `by` is negative"),
        ({"shift": 3}, r"shift: Input should be a valid dictionary, not 3"),
        ({"add": {"much": 1}}, r"add\.much: no such setting. Known: `sample` and `by`"),
    ],
)
def test_wrong_settings_are_refused_by_name(numbers, stage, problem):
    registry.register("shift")(Shift)
    registry.register("add")(add)
    with pytest.raises((PipelineError, ConfigError), match=problem):
        batches(numbers, stage)


@pytest.mark.parametrize("name", ["resize", "shuffle", "exact"])
def test_a_function_under_the_name_of_a_stage_is_refused(name):
    with pytest.raises(PipelineError, match=f"it is a stage of wdskit. Use another name: `my_{name}`"):
        wdskit.register(name)(lambda sample: sample)
    with pytest.raises(PipelineError, match=f"{name}' is a stage of wdskit"):
        wdskit.make_loader({"pipeline": [{"stream": "a.tar"}]}, transforms={name: len})
