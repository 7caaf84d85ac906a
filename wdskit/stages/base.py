"""What a stage is: the base class of stages that map one value to one value (`PerSampleStage`), and the state while a
pipeline is built (`Context`).

Each stage says what it makes of the fields (`PerSampleStage.roles_after`), by their names. No value is looked at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeAlias, cast

from pydantic import PlainValidator, WithJsonSchema

from wdskit.config.types import Kind, StageSpec, refuse, show, wrong_kind
from wdskit.errors import PipelineError
from wdskit.order.buckets import Buckets
from wdskit.stages.run import EVERYTHING, NO_ROLES, BoundFunction, Live, Roles, Run, Step, ValueFunction

FunctionLookup: TypeAlias = Callable[[str], Callable[..., Any]]
"""Maps a name to its function, from `make_loader(transforms=...)` or the registry. PipelineError: Unknown name."""


def _check_function(value: object) -> object:
    if isinstance(value, str) and not value.isidentifier():
        raise refuse(f"{show(value)} is not a valid name for a function (letters, digits, _).")
    if isinstance(value, str) or callable(value):
        return value
    raise refuse(wrong_kind(value, "the name of a registered function is needed"))


Function = Annotated[str | Callable[..., Any], PlainValidator(_check_function), WithJsonSchema({"type": "string"})]
"""The type of a setting that is a function: a callable, or the name of a registered function."""


@dataclass(frozen=True)
class Context:
    """What a stage needs to know of the pipeline when it is bound. `after` returns the context of the next stage.

    Attributes:
        run: The pipeline that will run.
        find: Takes the name of a function, and returns the function.
        roles: What the stages before say of the fields.
        live: The fields that the stages after, or the output, use.
        part: Number of the mixture part whose stages are bound; None for the stages of all samples.
        ordinals: For each name, the number of earlier stages with this name.
        buckets: The buckets of a pipeline with `bucketed`; None without.
    """

    run: Run
    find: FunctionLookup
    roles: Roles = NO_ROLES
    live: Live = EVERYTHING
    part: int | None = None
    ordinals: Mapping[str, int] = field(default_factory=dict)
    buckets: Buckets | None = None

    def ordinal(self, stage: StageSpec) -> int:
        """Return the number of earlier stages with the name of `stage`."""
        return self.ordinals.get(stage.name, 0)

    def label(self, stage: StageSpec) -> str:
        """Return the key of a stage's random numbers: the name and the ordinal of the stage, after "part " if the stage
        belongs to a part of a mixture.
        """
        return f"{'' if self.part is None else 'part '}{stage.name}:{self.ordinal(stage)}"

    def after(self, stage: StageSpec) -> Context:
        """Return the context of the stage after `stage`."""
        return replace(
            self,
            roles=stage.roles_after(self.roles) if isinstance(stage, PerSampleStage) else self.roles,
            ordinals={**self.ordinals, stage.name: self.ordinal(stage) + 1},
        )

    def resolve(self, stage: str, fn: Any, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """Return the callable for the setting `fn`.

        If `fn` is a callable, return `fn`; `settings` have no effect. If `fn` is the name of a function, return the
        function with `settings` as keyword arguments. If `fn` is the name of a class with `__call__`, return an
        instance that is made with `settings`.

        Raises:
            PipelineError: The name is unknown, or the function or class does not accept the settings. The message
                starts with `stage`.
        """
        if not isinstance(fn, str):
            return fn  # type: ignore[no-any-return]  # its setting has checked that it is callable
        function = self.find(fn)
        settings = settings or {}
        # A class with `__call__` is instantiated; another class, such as `int`, is called for each value.
        if not (isinstance(function, type) and any("__call__" in base.__dict__ for base in function.__mro__)):
            return functools.partial(function, **settings) if settings else function
        try:
            instance: Callable[..., Any] = function(**settings)
        except (TypeError, ValueError) as err:
            raise PipelineError(f"{stage}: it cannot be created with these settings: {err}") from err
        return instance

    def call(self, stage: str, fn: Any, label: str, *, global_rng: bool = False, is_map: bool = False) -> BoundFunction:
        """Return `fn`, a callable or the name of a function, as a `BoundFunction`.

        `label` is the key of the random numbers. `global_rng` and `is_map` are arguments of `BoundFunction`.

        Raises:
            PipelineError: The name is unknown. The message starts with `stage`.
        """
        function = self.resolve(stage, fn)
        wants = frozenset(name for name in ("rng", "epoch") if _wants(function, name))
        return BoundFunction(self.run, stage, label, function, wants, global_rng, is_map)


class PerSampleStage(StageSpec):
    """The settings of a stage that maps one value to one value. A subclass defines `bind` or `__call__`."""

    kind: ClassVar[Kind] = "each"

    def bind(self, context: Context, label: str) -> ValueFunction:  # noqa: ARG002 (for stages that draw or look up)
        """Return the function that maps a value and its origin to the new value. The function can be pickled if the
        user's functions in it can. By default, it is the stage, which then needs a method `__call__(value, origin)`.

        Args:
            context: The pipeline before this stage.
            label: The key of the stage's random numbers (see `Context.label`).

        Raises:
            PipelineError: The stage cannot run in this pipeline, for example because a function's name is unknown.
        """
        return cast("ValueFunction", self)

    def step(self, context: Context) -> tuple[Step, Context]:
        """Return the stage as a `Step`, and the context of the next stage. PipelineError: The stage cannot run in this
        pipeline.
        """
        for names in self.mask_names:
            if context.roles.numbers_of(names) == "colours":
                msg = f"{self.name}: `{names}` cannot be a mask: a stage before it has made colours of the numbers."
                raise PipelineError(f"{msg}\n  Put `decode: {{images: index, only: ...}}` before that stage.")
        step = Step(self.name, self.bind(context, context.label(self)), context.ordinal(self), context.part)
        return step, context.after(self)

    def roles_after(self, roles: Roles) -> Roles:
        """Return the roles of the fields after this stage; `roles` are those before it."""
        return roles.after_function() if self.takes_any else roles

    def live_before(self, live: Live) -> Live:
        """Return the fields that this stage or later stages use; `live` are those of the later stages."""
        return EVERYTHING if self.takes_any else live

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The fields that the stage takes as masks. In an item such as `a.png;b.png`, `;` separates alternatives."""
        return ()


def lives(stages: Sequence[Any], live: Live = EVERYTHING) -> list[Live]:
    """Return the fields that are used before each stage, and at the end `live`, those that are used after the last. A
    stage that is not per sample uses everything if it calls a function of the user, or is not wdskit's.
    """
    found = [live]
    for stage in reversed(stages):
        if isinstance(stage, PerSampleStage):
            live = stage.live_before(live)
        elif not isinstance(stage, StageSpec) or stage.calls_user:
            live = EVERYTHING
        found.append(live)
    return found[::-1]


def bind_steps(stages: Sequence[Any], context: Context) -> tuple[tuple[Step, ...], Context]:
    """Bind per-sample stages in order. Return their steps, and the context after the last stage. PipelineError: A stage
    cannot run in this pipeline.
    """
    steps = []
    for stage, live in zip(stages, lives(stages, context.live)[1:], strict=True):
        step, context = stage.step(replace(context, live=live))
        steps.append(step)
    return tuple(steps), context


def _wants(function: Callable[..., Any], name: str) -> bool:
    """Return True if `function` has the parameter `name`, keyword-only or after its first parameter. A keyword that a
    partial has set does not count.
    """
    if isinstance(function, functools.partial) and name in function.keywords:
        return False
    parameters = _signature(function) or {}
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return name in list(parameters)[1:] or (name in parameters and parameters[name].kind is keyword_only)


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of the parameters of a function or class that settings may set; None if it takes any name, or
    has no known signature.
    """
    parameters = _signature(function)
    if parameters is None or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name, each in parameters.items() if each.kind in by_name)


def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return None
