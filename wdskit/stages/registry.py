"""Functions that YAML and the builder call by name: nothing runs that was not registered or handed over in Python."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from wdskit.errors import PipelineError
from wdskit.stages.base import is_function_name

F = TypeVar("F", bound=Callable[..., Any])

Functions = Mapping[str, Callable[..., Any]]
"""Functions by name."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def register(name: str) -> Callable[[F], F]:
    """Decorator that makes a function or class known as `name`, for `- map: name` in YAML and `.map("name")` in Python.

    In YAML it is a stage of its own too, with settings: a function gets them as keyword arguments, a class is made with
    them and its instance is called. One with a parameter `rng` gets a numpy Generator of the sample's position.

    ```python
    @wdskit.register("brighten")  # - brighten: {by: 0.2}
    class Brighten:
        def __init__(self, by=0.1): ...
        def __call__(self, sample, rng): ...
    ```

    Running the same definition again (a notebook cell, a reloaded module) replaces the function.

    Raises:
        PipelineError: The name is no identifier, what is decorated is no function, or another function has the name.
    """
    if not is_function_name(name):
        raise PipelineError(
            f"register({name!r}): a name is letters, digits and _, and starts with no digit: `my_augment`."
        )

    def keep(function: F) -> F:
        if not callable(function):
            raise PipelineError(f"register({name!r}): it decorates a function, not {type(function).__name__}.")
        known = _FUNCTIONS.get(name, function)
        if known is not function and not _is_same_definition(known, function):
            msg = f"register({name!r}): {_place(known)} has this name already; {_place(function)} needs another one."
            raise PipelineError(msg)
        _FUNCTIONS[name] = function
        return function

    return keep


def resolve(name: str, extra: Functions) -> Callable[..., Any]:
    """The function called `name`: one of `extra` (`make_loader(transforms=...)`), else a registered one.

    Raises:
        PipelineError: There is none; the message names the nearest one.
    """
    if name in extra:
        return extra[name]
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    near = difflib.get_close_matches(name, [*extra, *_FUNCTIONS], n=1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    way_out = (
        f'Register it with @wdskit.register("{name}"), or hand it over: make_loader(..., transforms={{"{name}": ...}}).'
    )
    raise PipelineError(f"{name}: no function of this name is registered.{hint}\n  {way_out}")


def registered_names() -> tuple[str, ...]:
    """All registered names, sorted."""
    return tuple(sorted(_FUNCTIONS))


def _is_same_definition(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    place = _place(one)
    return place == _place(other) and "<" not in place


def _place(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else f"<a {type(function).__name__}>"
