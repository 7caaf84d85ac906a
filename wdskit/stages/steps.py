"""The one-to-one stages of a pipeline as functions, and what they leave in the values."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from wdskit.codecs.formats import is_image_field
from wdskit.config.messages import unknown_setting
from wdskit.errors import PipelineError
from wdskit.stages.base import Run, Step
from wdskit.stages.field_specs import UserSpec
from wdskit.stages.layouts import NOTHING_KNOWN
from wdskit.stages.transforms import Stored

Find = Callable[[str], Callable[..., Any]]


class StepMaker:
    """Turns the specs of one pipeline into functions, in their order.

    Args:
        run: Of the pipeline.
        find: The user's function of a name.
        specs: All of the pipeline, those of a mixture's parts included.
    """

    def __init__(self, run: Run, find: Find, specs: Sequence[Any]) -> None:
        self.run = run
        self._find = find
        self._masks = _masks_of(specs)
        self._stored = Stored()
        self._seen: Counter[str] = Counter()
        self._images: set[str] = set()  # fields that hold images under names that do not say so
        self._layouts = NOTHING_KNOWN
        self._fields: tuple[str, ...] | None = None  # of a tuple

    def label(self, spec: Any) -> str:
        """The stage's name with how many of that name stand before it: a key of its random numbers."""
        number = self._seen[spec.name]
        self._seen[spec.name] += 1
        return f"{spec.name}:{number}"

    def step(self, spec: Any) -> Step:
        """What a one-to-one spec does to a value, or several that run as one.

        Raises:
            PipelineError: A function is unknown, or cannot run with the threads there are.
        """
        from wdskit.stages.functions import Call  # these import Pillow, which settings do not need
        from wdskit.stages.fuse_plan import FusedSpec

        if isinstance(spec, FusedSpec):
            from wdskit.stages.images.fused import fused_step  # imports torch, which settings do not need

            steps = [self.step(stage) for stage in spec.stages]
            return fused_step(spec.stages, steps, frozenset(self._images))
        ordinal = self._seen[spec.name]
        if isinstance(spec, UserSpec):
            function = with_settings(spec.name, self.resolve(spec.name, spec.name), spec.settings)
            label = self.label(spec)
            return Step(spec.name, Call(self.run, label, function, is_map=True, layouts=self._layouts), ordinal)
        return Step(spec.name, self._function(spec, self.label(spec)), ordinal)

    def call(self, stage: str, fn: Any, label: str) -> Any:
        """A user's function as a step, which may want random numbers."""
        from wdskit.stages.functions import Call

        return Call(self.run, label, self.resolve(stage, fn), layouts=self._layouts)

    def collate(self, spec: Any) -> Callable[..., Any]:
        """What makes a batch of a list of samples."""
        if spec.collate is not None:
            return self.resolve("batched", spec.collate)
        from wdskit.stages.collate import Collate

        ragged = [self._places(name) for name in spec.ragged or ()]
        return Collate(self._layouts, frozenset(itertools.chain.from_iterable(ragged)))

    def resolve(self, stage: str, fn: Any) -> Callable[..., Any]:
        """A function by its name, or as it is."""
        if not isinstance(fn, str):
            return fn  # type: ignore[no-any-return]  # the spec has checked that it is callable
        try:
            found = self._find(fn)
        except PipelineError as err:
            raise PipelineError(f"{stage}: {err}") from err
        return with_settings(stage, found, {}) if makes_functions(found) and stage != fn else found

    def _function(self, spec: Any, label: str) -> Any:
        from wdskit.stages.functions import Call, Decode, MapDict, MapTuple, OnValue, Rename, ToDict, ToTuple, Transform

        match spec.name:
            case "decode":
                self._stored = self._stored.decoded(spec.images, spec.only)
                return OnValue(Decode(spec.images, spec.only, spec.max_pixels, self._masks))
            case "map":
                fn = self.resolve("map", spec.fn)
                global_rng = self._global_rng(spec)
                return Call(self.run, label, fn, global_rng=global_rng, is_map=True, layouts=self._layouts)
            case "map_dict":
                calls = {field: self.call("map_dict", fn, f"{label}:{field}") for field, fn in spec.fields.items()}
                return MapDict(calls)
            case "map_tuple":
                fns = enumerate(spec.fns)
                return MapTuple([fn and self.call("map_tuple", fn, f"{label}:{place}") for place, fn in fns])
            case "rename":
                self._images |= {new for new, olds in spec.names.items() if self._is_image(olds)}
                self._stored = self._stored.renamed(spec.names)
                self._layouts = self._layouts.renamed(spec.names)
                return OnValue(Rename(spec.names))
            case "to_tuple":
                self._layouts = self._layouts.renamed(dict(enumerate(spec.fields)))
                self._fields = tuple(spec.fields)
                return OnValue(ToTuple(spec.fields))
            case "to_dict":
                self._images |= {names.split(";")[0] for names in spec.fields if self._is_image(names)}
                chosen = {names.split(";")[0]: names for names in spec.fields}
                self._stored = self._stored.renamed(chosen)
                self._layouts = self._layouts.renamed(chosen)
                return OnValue(ToDict(spec.fields))
            case _:
                self._layouts = self._layouts.handled((*(spec.fields or ()), *(getattr(spec, "masks", None) or ())))
                return Transform(self.run, label, spec.bind(frozenset(self._images), self._stored))

    def _places(self, name: str) -> list[str | int]:
        """Where a field stands in a sample: its name, or its places in a tuple."""
        if self._fields is None:
            return [name]
        places: list[str | int] = [place for place, names in enumerate(self._fields) if name in names.split(";")]
        if not places:
            raise PipelineError(f"batched: ragged: no field `{name}` in to_tuple, which has {', '.join(self._fields)}.")
        return places

    def _global_rng(self, spec: Any) -> bool:
        if spec.global_rng and self.run.num_threads > 1:
            msg = "map: global_rng seeds one generator for the whole process, which "
            msg += f"{self.run.num_threads} threads share."
            raise PipelineError(f"{msg}\n  Take `rng` as a parameter instead, or use threads: 1.")
        return bool(spec.global_rng)

    def _is_image(self, names: str) -> bool:
        return any(name in self._images or is_image_field(name) for name in names.split(";"))


def with_settings(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """A registered function with settings as keyword arguments, or an instance of a registered class.

    Raises:
        PipelineError: It does not take them.
    """
    if settings:
        known = list(inspect.signature(function).parameters)
        unknown = next((each for each in settings if each not in known and "kwargs" not in known), None)
        if unknown is not None:
            raise PipelineError(f"{name}: {unknown_setting(unknown, f'`{name}`', known)}")
    if not makes_functions(function):
        return functools.partial(function, **settings) if settings else function
    try:
        return cast("Callable[..., Any]", function(**settings))
    except (TypeError, ValueError) as err:
        raise PipelineError(f"{name}: it cannot be made with these settings: {err}") from err


def makes_functions(function: Callable[..., Any]) -> bool:
    """Whether it is a class whose instances are called, and not one as `int`, which is called itself."""
    return isinstance(function, type) and any("__call__" in base.__dict__ for base in function.__mro__)


def _masks_of(specs: Sequence[Any]) -> frozenset[str]:
    """The fields, by the names that they have when they are decoded, that a transform takes for masks."""
    masks: set[str] = set()
    for spec in reversed(specs):
        for names in getattr(spec, "masks", None) or ():
            masks |= {*names.split(";")}
        renamed: Mapping[str, str] = {}
        if getattr(spec, "name", None) == "rename":
            renamed = spec.names
        elif getattr(spec, "name", None) == "to_dict":
            renamed = {names.split(";")[0]: names for names in spec.fields}
        masks |= {old for new, olds in renamed.items() if new in masks for old in olds.split(";")}
    return frozenset(masks)
