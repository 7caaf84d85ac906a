"""What YAML and the builder call by name: wdskit's stages, and the functions and classes that users register.

Nothing runs that was not registered or handed over in Python.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from wdskit.config.spec import StageSpec, checked, read_stage
from wdskit.errors import PipelineError
from wdskit.stages import batching, buckets, fields, shard_reader, sources, stream_source, streaming, vision
from wdskit.stages.base import check_settings, is_function_name
from wdskit.stages.images import transforms

F = TypeVar("F", bound=Callable[..., Any])

STAGES: dict[str, type[StageSpec]] = {
    stage.name: stage
    for stage in (
        sources.Exact,
        sources.Resampled,
        sources.Sequential,
        stream_source.Stream,
        stream_source.SplitByNode,
        stream_source.SplitByWorker,
        shard_reader.TarfileToSamples,
        streaming.Shuffle,
        streaming.Select,
        streaming.Slice,
        fields.Decode,
        fields.Map,
        fields.MapDict,
        fields.MapTuple,
        fields.Rename,
        transforms.Resize,
        transforms.CenterCrop,
        transforms.RandomResizedCrop,
        transforms.RandomFlip,
        transforms.Normalize,
        transforms.ToTensor,
        buckets.ResizeToBucket,
        vision.Torchvision,
        fields.MultiHot,
        fields.ToTuple,
        fields.ToDict,
        batching.Batched,
        batching.Unbatched,
        buckets.Bucketed,
        streaming.WithEpoch,
        streaming.WithLength,
    )
}
"""Every stage of wdskit by its name."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def register(name: str) -> Callable[[F], F]:
    """Decorator that gives a function or class a name, for `- map: name` in YAML and `.map("name")` in Python.

    In YAML the name is also a stage with settings: a function gets them as keyword arguments; a class gets them when
    its instance is made, and the instance is called. If it has a parameter `rng`, it gets a numpy Generator that
    depends on the seed and on the sample's position only.

    ```python
    @wdskit.register("brighten")  # - brighten: {by: 0.2}
    class Brighten:
        def __init__(self, by=0.1): ...
        def __call__(self, sample, rng): ...
    ```

    Running the same definition again (a notebook cell, a reloaded module) replaces the function.

    Raises:
        PipelineError: The name is not an identifier or that of a stage of wdskit, the decorated object is not callable,
            or another function has the name.
    """
    if not is_function_name(name):
        raise PipelineError(
            f"register({name!r}): a name is letters, digits and _, and does not start with a digit: `my_augment`."
        )
    refuse_stage_name(f"register({name!r})", name)

    def keep(function: F) -> F:
        if not callable(function):
            raise PipelineError(f"register({name!r}): it decorates a function, not {type(function).__name__}.")
        known = _FUNCTIONS.get(name, function)
        if known is not function and not _is_same_definition(known, function):
            msg = f"register({name!r}): {_place(known)} already has this name; {_place(function)} needs another."
            raise PipelineError(msg)
        _FUNCTIONS[name] = function
        return function

    return keep


def refuse_stage_name(where: str, name: str) -> None:
    """Refuse a function under the name of a stage of wdskit, which would be called in its place.

    Raises:
        PipelineError: There is such a stage; `where` is said first.
    """
    if name in STAGES:
        raise PipelineError(f"{where}: `{name}` is a stage of wdskit. Use another name: `my_{name}`.")


def check_registered(stages: Iterable[Any], *, where: str) -> None:
    """Compare the settings of registered stages with the parameters of their functions and classes.

    Raises:
        PipelineError: A function does not take a setting; `where` is said first.
    """
    for stage in stages:
        if isinstance(stage, fields.UserStage) and stage.name in _FUNCTIONS:
            check_settings(f"{where}: {stage.name}", _FUNCTIONS[stage.name], stage.settings)
        for part in getattr(stage, "mixture", None) or ():
            check_registered(part.stages, where=where)


def resolve(name: str, extra: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function called `name`: one of `extra` (`make_loader(transforms=...)`), else a registered one.

    Raises:
        PipelineError: The name is unknown. The message gives the most similar name.
    """
    if name in extra:
        return extra[name]
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    near = difflib.get_close_matches(name, [*extra, *_FUNCTIONS], n=1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    way_out = (
        f'Register it with @wdskit.register("{name}"), or pass it: make_loader(..., transforms={{"{name}": ...}}).'
    )
    raise PipelineError(f"{name}: no function with this name is registered.{hint}\n  {way_out}")


def registered_names() -> tuple[str, ...]:
    """All registered names, sorted."""
    return tuple(sorted(_FUNCTIONS))


def known_stages(functions: Iterable[str] = ()) -> dict[str, type[StageSpec]]:
    """Return wdskit's stages by name, then registered names and `functions` that are not names of wdskit's stages."""
    own = {name: fields.user_stage(name) for name in (*registered_names(), *functions) if name not in STAGES}
    return {**STAGES, **own}


def parse_stage(name: str, value: object = None, *, where: str = "pipeline") -> StageSpec:
    """A stage of wdskit with its settings.

    Args:
        name: A key of `STAGES`.
        value: As in YAML: None, a bare value as in `parse_stage("shuffle", 200)`, or a mapping of settings.
        where: First in messages.

    Raises:
        ConfigError: The stage is unknown, or settings are wrong. The message lists all wrong settings.
    """
    return checked(*read_stage(STAGES, name, value), where=where)


def _is_same_definition(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    place = _place(one)
    return place == _place(other) and "<" not in place


def _place(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else f"<a {type(function).__name__}>"
