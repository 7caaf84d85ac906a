"""Functions by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from wdskit.errors import PipelineError
from wdskit.pipeline import registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_FUNCTIONS", {})
    return


def augment(sample):
    return sample


def other(sample):
    return sample


def test_a_registered_function_is_found_and_stays_what_it_was() -> None:
    """The decorator gives the function back."""
    assert registry.register("my_augment")(augment) is augment
    assert registry.resolve("my_augment", {}) is augment
    assert registry.registered_names() == ("my_augment",)


def test_a_function_handed_over_comes_first() -> None:
    """make_loader(transforms=...) is nearer than the registry."""
    registry.register("my_augment")(augment)
    assert registry.resolve("my_augment", {"my_augment": other}) is other


@pytest.mark.parametrize("name", ["", "my-augment", "torch.load", "2x", "class", "a b", None, 5])
def test_a_name_is_an_identifier(name) -> None:
    """Nothing that reads like an import path or an expression."""
    with pytest.raises(PipelineError, match="a name is letters"):
        registry.register(name)


def test_what_is_no_function_is_refused() -> None:
    """Where it is registered, not where it is called."""
    with pytest.raises(PipelineError, match="decorates a function, not int"):
        registry.register("a")(5)


def test_a_name_belongs_to_one_function() -> None:
    """Another function under the same name is refused with both."""
    registry.register("my_augment")(augment)
    with pytest.raises(PipelineError, match=r"test_registry\.augment has this name already; .*test_registry\.other"):
        registry.register("my_augment")(other)
    assert registry.resolve("my_augment", {}) is augment


def test_two_lambdas_are_two_functions() -> None:
    """Their names say nothing."""
    registry.register("a")(lambda sample: sample)
    with pytest.raises(PipelineError, match="has this name already"):
        registry.register("a")(lambda sample: None)


def test_the_same_definition_may_run_again() -> None:
    """A notebook's cell, a reloaded module, a decorated function registered twice."""
    source = "def f(sample):\n    return sample\n"
    first, second = {"__name__": "cell"}, {"__name__": "cell"}
    exec(source, first)
    exec(source, second)
    registry.register("f")(first["f"])
    registry.register("f")(first["f"])
    registry.register("f")(second["f"])
    assert registry.resolve("f", {}) is second["f"]


def test_an_unknown_name_gets_the_nearest_and_the_way_out() -> None:
    """From the registry and from what was handed over."""
    registry.register("my_augment")(augment)
    with pytest.raises(
        PipelineError, match=r"my_augmnt: no function .* Did you mean `my_augment`\?\n  Register it with"
    ):
        registry.resolve("my_augmnt", {})
    with pytest.raises(PipelineError, match="Did you mean `your_augment`"):
        registry.resolve("your_augmnt", {"your_augment": other})
    with pytest.raises(PipelineError, match=r"is registered\.\n"):
        registry.resolve("zzz", {})
