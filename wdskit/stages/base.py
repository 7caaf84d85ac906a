"""Classes that all stages share: the origin of a value (`Origin`), the state of a running pipeline (`Run`), the base
class of stages that map one value to one value (`PerSampleStage`), and the state while a pipeline is built (`Context`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.random import Generator
from pydantic import PlainValidator, WithJsonSchema

from wdskit.config.types import Kind, StageSpec, refuse, show, wrong_kind
from wdskit.errors import PipelineError, SampleError, WdskitError, error_text
from wdskit.order.buckets import Buckets
from wdskit.order.keys import PositionRng
from wdskit.stages.progress import Board
from wdskit.stages.roles import EVERYTHING, NO_ROLES, Live, Roles

F = TypeVar("F", bound=Callable[..., Any])


class RankInfo(NamedTuple):
    """Rank and world size, as read in the main process.

    Attributes:
        rank: Number of this process among the ranks, 0 <= rank < world_size.
        world_size: Number of ranks that share the data.
        ranks_per_node: Number of ranks on one machine; divides `world_size`. Consecutive ranks are on one machine, and
            read the same shards.
    """

    rank: int
    world_size: int
    ranks_per_node: int = 1


class Origin(NamedTuple):
    """The origin of a value: its shard, its key, and its position. The value's random numbers depend on the position.

    The position is (major, minor, part):

    - From a planned source: 0, the position in the endless sequence of all epochs, and the number of the mixture part.
    - From a stream: the number of the draw (see `StreamSource`), the number of the sample in the shard, and 0.
    - After a foreign stage, such as webdataset's: the number of the value in this process, the epoch, and a number with
      rank and worker.

    Attributes:
        url: Path or URL of the shard, for messages; empty if unknown.
        key: Key of the sample; empty if unknown.
        members: For a batch, the origins of all its samples; empty for a sample. A batch has the `url`, the `key` and
            the position of its last sample.
        epoch: The epoch of the sample.
    """

    url: str
    key: str
    major: int
    minor: int
    part: int
    members: tuple[Origin, ...] = ()
    epoch: int = 0

    def __str__(self) -> str:
        """Return "shard: key" for a sample, and "first sample to last sample" for a batch. Return "a value" if shard
        and key are empty.
        """
        first = self.members[0] if self.members else self
        if first[:2] == self[:2]:
            return ": ".join(part for part in (self.url, self.key) if part) or "a value"
        return f"{first} to {self.key if first.url == self.url else ': '.join(self[:2])}"


NO_ORIGIN = Origin("", "", 0, 0, 0)


class RejectedSample(NamedTuple):
    """A bad sample that was not used: a planned pipeline replaces the sample, a stream skips the sample.

    Attributes:
        position: Position of the sample in the epoch; in a stream, its number in the shard.
        shard: The shard of the sample.
        key: Key of the sample.
        reason: Text of the error.
    """

    position: int
    shard: str
    key: str
    reason: str


class Run:
    """The state of one pipeline in one process. It is pickled to worker processes before its first use.

    Attributes:
        rank_info: Rank and world size.
        seed: Seed of the source.
        num_threads: Number of threads in this process that run the stages.
        worker: Number of this worker process; 0 in the main process.
        num_workers: Number of worker processes of the rank; 1 in the main process.
        needs_torch: Whether worker processes import torch, and seed it, before they run the stages.
        epoch: Number of the epoch that runs in this process.
        board: The positions of the values that the threads of this process work on.
    """

    def __init__(self, rank_info: RankInfo, seed: int, num_threads: int = 1) -> None:
        self.rank_info = rank_info
        self.seed = seed
        self.num_threads = num_threads
        self.worker = 0
        self.num_workers = 1
        self.needs_torch = True
        self.epoch = 0
        self.board = Board()

    def call_lock(
        self, function: Callable[..., Any], *, global_rng: bool = False
    ) -> contextlib.AbstractContextManager[object]:
        """Return the context manager for a call of a user's `function`.

        It is the lock of this process, so that the threads of all loaders take turns. If `function` is `thread_safe`,
        it does nothing, unless `global_rng` says that the function draws from the generators of the process.
        """
        return _NULL_CONTEXT if is_thread_safe(function) and not global_rng else _turn

    def rng_at(self, stage: str, origin: Origin) -> Generator:
        """Return the random Generator for the position of `origin`, valid until the next call for `stage` in this
        thread. `stage` is the key of the random numbers (see `Context.label`).
        """
        return _rng(self.seed, stage, threading.get_ident()).at(origin.major, origin.minor, origin.part)


FunctionLookup: TypeAlias = Callable[[str], Callable[..., Any]]
"""Maps a name to its function, from `make_loader(transforms=...)` or the registry. PipelineError: Unknown name."""

ValueFunction: TypeAlias = Callable[[Any, Origin], Any]
"""The running form of a per-sample stage: maps a value and its origin to the new value."""


@dataclass(frozen=True)
class Step:
    """A per-sample stage that is ready to run.

    Attributes:
        name: Name of the stage in YAML.
        function: Maps a value and its origin to the new value.
        ordinal: Number of earlier stages with this name in the pipeline. In a part of a mixture, only the stages of the
            part count.
        part: Number of the mixture part whose samples the stage takes; None if it takes all samples.
    """

    name: str
    function: ValueFunction
    ordinal: int = 0
    part: int | None = None

    @property
    def label(self) -> str:
        """The name in statistics. The first `map` is `map`, the second `map:1`; in part 2: `mixture[2].map:1`."""
        name = f"{self.name}:{self.ordinal}" if self.ordinal else self.name
        return name if self.part is None else f"mixture[{self.part}].{name}"


@functools.lru_cache(1 << 10)
def _rng(seed: int, stage: str, thread: int) -> PositionRng:  # noqa: ARG001 (a thread has its own)
    return PositionRng(seed, stage)


_NULL_CONTEXT = contextlib.nullcontext()

_turn = threading.RLock()  # held by the thread that calls a user's function, or seeds the generators of the process


def renew_turn() -> None:
    """Replace the lock of users' functions, because the thread that holds it has hung or was not forked."""
    global _turn  # noqa: PLW0603
    _turn = threading.RLock()


os.register_at_fork(after_in_child=renew_turn)

_SAFE = "__thread_safe__"


def thread_safe(function: F) -> F:
    """Declare that several threads may call a function, or an object, at the same time.

    Without this, the threads of a process take turns to call the functions of `map`, `map_dict`, `map_tuple`, `select`,
    `collate` and registered stages, because many objects keep state between calls: a Hugging Face tokenizer keeps its
    padding, an albumentations pipeline its random state. Use `thread_safe` as a decorator, with or without
    `wdskit.register`, or call it: `map(wdskit.thread_safe(my_object))`.

    Returns:
        The same object; if no attribute can be set on the object, a `functools.partial` of the object.
    """
    try:
        setattr(function, _SAFE, True)
    except (AttributeError, TypeError):  # a builtin, a bound method
        marked: Any = functools.partial(function)
        setattr(marked, _SAFE, True)
        return cast("F", marked)
    return function


def is_thread_safe(function: Callable[..., Any]) -> bool:
    """Return True if `function` was declared `thread_safe`, or is a `functools.partial` of a declared function."""
    while not getattr(function, _SAFE, False):
        if not isinstance(function, functools.partial):
            return False
        function = function.func
    return True


def stage_error(stage: str, origin: Origin, err: Exception, *, is_function: bool = False) -> SampleError:
    """Return the SampleError that says which stage failed on which shard and key. The caller raises it from `err`.

    `is_function` says whether a user's function raised `err`, and is an attribute of the SampleError.
    """
    text = str(err) if isinstance(err, WdskitError) else error_text(err)
    what = text if text.startswith(f"{stage}: ") else f"{stage} failed: {text}"
    failed = SampleError(f"{origin}: {what}", stage=stage, shard=origin.url, key=origin.key)
    failed.is_function = is_function
    return failed


def _check_function(value: object) -> object:
    if isinstance(value, str) and not value.isidentifier():
        raise refuse(f"{show(value)} is not a valid name for a function (letters, digits, _).")
    if isinstance(value, str) or callable(value):
        return value
    raise refuse(wrong_kind(value, "the name of a registered function is needed"))


Function = Annotated[str | Callable[..., Any], PlainValidator(_check_function), WithJsonSchema({"type": "string"})]
"""The type of a setting that is a function: a callable, or the name of a registered function."""


@dataclass(frozen=True)
class BoundFunction:
    """A user's function in a pipeline. If it has a parameter `rng`, it gets the Generator of the value's position; with
    a parameter `epoch`, the number of the value's epoch.

    Attributes:
        run: The running pipeline.
        stage: Name of the stage.
        label: The key of the stage's random numbers; see `Context.label`.
        function: Takes the value, and the parameters `wants`.
        wants: "rng" and "epoch", if the function has these parameters.
        global_rng: Whether to seed random, numpy and torch by position before each call.
        is_map: Whether the result replaces the value. If so, a result of None (a forgotten `return`) is an error.
    """

    run: Run
    stage: str
    label: str
    function: Callable[..., Any]
    wants: frozenset[str]
    global_rng: bool
    is_map: bool

    def __call__(self, value: Any, origin: Origin) -> Any:
        """Return the function's result for `value`.

        Raises:
            SampleError: The function raised an Exception, or it returned None and `is_map` is set.
        """
        options: dict[str, Any] = {"rng": self.run.rng_at(self.label, origin)} if "rng" in self.wants else {}
        if "epoch" in self.wants:
            options["epoch"] = origin.epoch
        try:
            with (
                self.run.call_lock(self.function, global_rng=self.global_rng),
                self._seeded_globals(origin) if self.global_rng else _NULL_CONTEXT,
            ):
                result = self.function(value, **options)
        except Exception as err:
            raise stage_error(self.stage, origin, err, is_function=True) from err
        if result is None and self.is_map:
            forgotten = WdskitError("the function returned None. Return the value; to leave samples out, use `select`.")
            raise stage_error(self.stage, origin, forgotten, is_function=True) from forgotten
        return result

    @contextlib.contextmanager
    def _seeded_globals(self, origin: Origin) -> Iterator[None]:
        """Seed the global generators of random, numpy and torch (CPU) by the position of `origin`. At the end of the
        context, restore the earlier states of the generators.
        """
        import torch

        words = self.run.rng_at(f"{self.label}:global", origin).integers(0, 1 << 32, 3)
        # Without workers, the user's training loop uses the same generators.
        before = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002 (users' libraries draw from it)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int(words[2]))
                yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


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
