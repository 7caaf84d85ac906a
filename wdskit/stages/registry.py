"""The names that YAML and the builder know: wdskit's stages, and the functions and classes that users register.

YAML can only name a function: no function runs that was not registered or passed in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from wdskit.config.types import StageSpec, config_error, did_you_mean, read_stage
from wdskit.errors import PipelineError
from wdskit.stages import batching, buckets, fields, sources, streaming, vision
from wdskit.stages.base import parameters_of
from wdskit.stages.images import transforms

F = TypeVar("F", bound=Callable[..., Any])

_SOURCES = sources.Exact, sources.Resampled, sources.Sequential, streaming.Stream
_OF_STREAMS = streaming.SplitByNode, streaming.SplitByWorker, streaming.Shuffle, streaming.Select
_OF_FIELDS = fields.Decode, fields.Map, fields.MapDict, fields.MapTuple, fields.Rename
_MOVES = transforms.Resize, transforms.CenterCrop, transforms.RandomResizedCrop, transforms.RandomFlip
_OF_IMAGES = transforms.Normalize, transforms.ToTensor, buckets.ResizeToBucket, vision.Torchvision
_OF_OUTPUT = fields.MultiHot, fields.ToTuple, fields.ToDict, batching.Batched, buckets.Bucketed
_OF_EPOCHS = streaming.WithEpoch, streaming.WithLength

STAGES: dict[str, type[StageSpec]] = {
    stage.name: stage
    for stage in (*_SOURCES, *_OF_STREAMS, *_OF_FIELDS, *_MOVES, *_OF_IMAGES, *_OF_OUTPUT, *_OF_EPOCHS)
}
"""Maps the name of each stage of wdskit to its class."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def register(name: str) -> Callable[[F], F]:
    """Return a decorator that registers a function or class for `- map: name` in YAML and `.map("name")` in Python. The
    decorator returns the function or class itself.

    In YAML the name is also a stage with settings. A function gets the settings as keyword arguments. A class gets them
    when its instance is made, and the instance is called. If the function or `__call__` has a parameter `rng`, it gets
    a numpy Generator that depends only on the seed, the stage and the sample's position.

    ```python
    @wdskit.register("brighten")  # - brighten: {by: 0.2}
    class Brighten:
        def __init__(self, by=0.1): ...
        def __call__(self, sample, rng): ...
    ```

    Running the same definition again (a notebook cell, a reloaded module) replaces the function.

    Raises:
        PipelineError: The name is not an identifier, or is the name of a stage of wdskit. From the decorator: another
            function has the name.
    """
    if not name.isidentifier():
        raise PipelineError(f"register({name!r}): a name is letters, digits and _, as in `my_augment`.")
    if name in STAGES:
        raise PipelineError(f"register({name!r}): it is a stage of wdskit. Use another name: `my_{name}`.")

    def keep(function: F) -> F:
        known = _FUNCTIONS.get(name)
        if known is not None and known is not function and (_place(known) != _place(function) or "<" in _place(known)):
            msg = f"register({name!r}): {_place(known)} already has this name; {_place(function)} needs another."
            raise PipelineError(msg)
        _FUNCTIONS[name] = function
        return function

    return keep


def _place(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else f"<a {type(function).__name__}>"


def resolve(name: str, extra: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the user's function with this name.

    `extra` are the functions of `make_loader(transforms=...)`, by name. They are used before registered functions.

    Raises:
        PipelineError: The name is unknown. The message suggests the most similar name.
    """
    known = {**_FUNCTIONS, **extra}
    if name in known:
        return known[name]
    msg = f"{name}: no function with this name is registered.{did_you_mean(name, known)}"
    way_out = f'Register it with @wdskit.register("{name}"), or pass it to make_loader: transforms={{"{name}": ...}}.'
    raise PipelineError(f"{msg}\n  {way_out}")


def registered_names() -> tuple[str, ...]:
    """Return all registered names, sorted."""
    return tuple(sorted(_FUNCTIONS))


def known_stages(functions: Mapping[str, Callable[..., Any]]) -> dict[str, type[StageSpec]]:
    """Return a dict from the name of each stage to its class.

    Registered functions, and those in `functions`, are stages too. PipelineError: A name in `functions` is the name of
    a stage of wdskit.
    """
    for name in STAGES.keys() & functions:
        raise PipelineError(f"transforms: {name!r} is a stage of wdskit. Use another name: `my_{name}`.")
    own = {name: fields.user_stage(name, parameters_of(each)) for name, each in {**_FUNCTIONS, **functions}.items()}
    return own | STAGES


def parse_stage(name: str, value: object = None, *, where: str = "pipeline") -> StageSpec:
    """Return a stage with its settings.

    Args:
        name: A key of `STAGES`, or the name of a registered function.
        value: As in YAML: None, a bare value as in `parse_stage("shuffle", 200)`, or a mapping of settings.
        where: Start of messages.

    Raises:
        ConfigError: The stage is unknown, or settings are invalid. The message lists all problems.
    """
    try:
        return read_stage({name: value}, known_stages({}))
    except ValidationError as err:
        raise config_error(err, where) from err
