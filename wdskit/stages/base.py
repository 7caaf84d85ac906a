"""Classes that all stages share: the origin of a value, the running pipeline, and the context while it is built.

Stages that run are plain callables `iterator -> iterator`, so that webdataset's and ours mix freely. Values travel
through them bare. The origin of a value (`Origin`) travels separately: a stage sets `run.origin` before it yields a
value. A stage that delays values (shuffle, threads) stores their origins with them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import keyword
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.random import Generator
from pydantic import PlainValidator, WithJsonSchema

from wdskit.config.messages import show, unknown_setting, wrong_kind
from wdskit.config.spec import Kind, StageSpec, refuse
from wdskit.errors import PipelineError, SampleError, WdskitError, error_text
from wdskit.order.buckets import Buckets
from wdskit.order.keys import PositionRng
from wdskit.stages.marks import hand_on, marks_in
from wdskit.stages.progress import IDLE, Board, Slot
from wdskit.stages.timing import Timings

F = TypeVar("F", bound=Callable[..., Any])


class RankInfo(NamedTuple):
    """Which rank of how many, as captured in the main process.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: Ranks that share the data.
        ranks_per_node: Neighbouring ranks of one machine, which read the same shards: a divisor of `world_size`.
    """

    rank: int
    world_size: int
    ranks_per_node: int = 1


class Origin(NamedTuple):
    """Where a value comes from. `major`, `minor` and `part` are its position, the key of its random numbers.

    For a sample of a planned source: 0, its position in the endless sequence, and the number of its part in a mixture.
    For one of a stream: the draw, its number in the shard, and 0 (or, behind `unbatched`, its number in the batch + 1).
    Behind a stage that is not ours: its number among what that stage yielded, the epoch, and rank and worker. A batch
    has the origin of its last sample, and `members`, those of all its samples.
    """

    url: str
    key: str
    major: int
    minor: int
    part: int
    members: tuple[Origin, ...] = ()

    def __str__(self) -> str:
        """Return the known ones of shard and key; for a batch, those of its first and its last sample."""
        first = self.members[0] if self.members else self
        if first[:2] == self[:2]:
            return ": ".join(part for part in (self.url, self.key) if part) or "a value"
        return f"{first} to {self.key if first.url == self.url else ': '.join(self[:2])}"


FOREIGN = 1 << 63
"""`part` of values that a stage which is not wdskit's has numbered, and more."""

NOWHERE = Origin("", "", 0, 0, 0)


class Run:
    """The state of one pipeline in one process. Cheap to pickle: it reaches workers before it is used.

    Attributes:
        rank_info: Rank and world size.
        seed: Seed of the source.
        worker: Number of this worker process, and of how many; (0, 1) in the main process.
        first_epoch: The epoch in which the running stream began, for stages before with_epoch.
        epoch: The running epoch, for stages after with_epoch.
        origin: Origin of the value that was yielded last.
        first_draw: The draw with which the running stream began.
        stop_draw: The number after the last draw; None for an endless stream.
        num_heard: How many values the pipeline has yielded, or its with_epoch has taken.
        board: What the threads of this process are working on.
        is_watched: Whether a loader in another thread or process reads `board`, and reports a wait that is too long.
        timings: Timings of a stream's stages since they were last taken.
        max_bad: Bad samples that a stream skips in an epoch; 0 skips none.
        forgives_functions: Whether it also skips those on which a transform or a user's function fails.
        num_bad: Skipped samples of the running epoch.
        bad: Those that were not taken yet.
    """

    def __init__(self, rank_info: RankInfo, seed: int, num_threads: int = 1) -> None:
        self.rank_info = rank_info
        self.seed = seed
        self.num_threads = num_threads
        self.worker = 0
        self.num_workers = 1
        self.first_epoch = 0
        self.epoch = 0
        self.origin = NOWHERE
        self.first_draw = 0
        self.stop_draw: int | None = None
        self.num_heard = 0
        self.is_watched = False
        self.timings = Timings()
        self.max_bad = 0
        self.forgives_functions = False
        self.num_bad = 0
        self.bad: list[Any] = []
        self._start()

    def _start(self) -> None:
        """Make what belongs to this process alone."""
        self.board = Board()
        self._local = threading.local()
        self._functions = threading.RLock()  # held by the thread that calls a function of the user's

    def __getstate__(self) -> dict[str, Any]:
        own = ("board", "_local", "_functions")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def take_bad(self) -> tuple[Any, ...]:
        """Return the samples that were skipped since the last call."""
        bad, self.bad = tuple(self.bad), []
        return bad

    def note(self, slot: Slot, origin: Origin) -> None:
        """Say on the board that a thread now works on this value of a stream."""
        slot[0] = origin.major if origin.part < FOREIGN else -1
        slot[1] = origin.minor if origin.part < FOREIGN else 0

    def turn_of(self, function: Callable[..., Any], origin: Origin) -> contextlib.AbstractContextManager[object]:
        """Hold this while `function` runs on a value: the user's functions run in one thread at a time, except those
        that are declared `thread_safe`.
        """
        return _AT_ANY_TIME if self.num_threads == 1 or is_thread_safe(function) else self._turn(origin)

    @contextlib.contextmanager
    def _turn(self, origin: Origin) -> Iterator[None]:
        with self._functions:
            self.note(self.board.turn, origin)
            try:
                yield
            finally:
                self.board.turn[1] = IDLE

    def begin(self, first_epoch: int, *, first_draw: int, stop_draw: int | None = None) -> None:
        """Stand at the first sample of a draw, before anything is read."""
        self.first_epoch = first_epoch
        self.origin = NOWHERE
        self.first_draw = first_draw
        self.stop_draw = stop_draw

    def keep_timings(self, timings: Timings) -> None:
        """Add timings of this thread."""
        self.timings.merge(timings)

    def take_timings(self) -> Timings | None:
        """What was measured since this was called last; None where nothing was, as of most small samples."""
        timings = self.timings
        if not timings.stages and not timings.bytes_read:
            return None
        self.timings = Timings()
        return timings

    def rng_of(self, stage: str) -> Callable[[Origin], Generator]:
        """Random numbers by position for one stage; each thread has a generator of its own."""
        known: dict[str, PositionRng] | None = getattr(self._local, "known", None)
        if known is None:
            known = self._local.known = {}
        rng = known.get(stage)
        if rng is None:
            rng = known[stage] = PositionRng(self.seed, stage)
        return lambda origin: rng.at(origin.major, origin.minor, origin.part)


Find: TypeAlias = Callable[[str], Callable[..., Any]]
"""Gives the function of a name, of those that were given and those that are registered."""

ValueFunction: TypeAlias = Callable[[Any, Origin], Any]
"""What a per-sample stage does to a value of known origin."""


@dataclass(frozen=True)
class Step:
    """A per-sample stage that runs.

    Attributes:
        name: As the user wrote it.
        function: What it does to a value.
        ordinal: Number of stages of this name before it in the pipeline, or in its part of a mixture.
        part: Number of its part of a mixture; None if it takes all samples.
    """

    name: str
    function: ValueFunction
    ordinal: int = 0
    part: int | None = None

    @property
    def label(self) -> str:
        """Name in statistics: the second `map` is `map:1`, that of part 2 of a mixture `mixture[2].map:1`."""
        name = f"{self.name}:{self.ordinal}" if self.ordinal else self.name
        return name if self.part is None else f"mixture[{self.part}].{name}"


_AT_ANY_TIME = contextlib.nullcontext()

_SAFE = "__thread_safe__"


def thread_safe(function: F) -> F:
    """Declare that several threads may call a function, or an object, at the same time.

    Without this, the threads of a process take turns to call the functions of `map`, `map_dict`, `map_tuple`, `select`
    and `collate`, because many objects keep values from call to call: a Hugging Face tokenizer its padding, an
    albumentations pipeline its random state. Use it as a decorator, before `wdskit.register` too, or call it:
    `map(wdskit.thread_safe(my_object))`.

    Returns:
        The same object; if it cannot be marked, a `functools.partial` of it.
    """
    try:
        setattr(function, _SAFE, True)
    except (AttributeError, TypeError):  # a builtin, a bound method
        marked: Any = functools.partial(function)
        setattr(marked, _SAFE, True)
        return cast("F", marked)
    return function


def is_thread_safe(function: Callable[..., Any]) -> bool:
    """True if `function`, or the function or class that it was made from, was declared `thread_safe`."""
    while not getattr(function, _SAFE, False):
        if not isinstance(function, functools.partial):
            return False
        function = function.func
    return True


class StepFailed(Exception):
    """One of several fused stages failed: its name and its error."""

    def __init__(self, stage: str, err: Exception) -> None:
        super().__init__(stage, err)
        self.stage = stage
        self.err = err


class FunctionFailed(Exception):
    """A function of the user's raised `err`."""

    def __init__(self, err: Exception) -> None:
        super().__init__(err)
        self.err = err


def cause_of(err: Exception) -> Exception:
    """The error that a stage or a function of the user's raised."""
    return err.err if isinstance(err, FunctionFailed) else err


def stage_error(stage: str, origin: Origin, err: Exception) -> SampleError:
    """The error of a stage that failed on one value, with shard and key, to be raised from `cause_of(err)`.

    It is always a SampleError: only building a pipeline raises errors that no sample can cause.
    """
    cause = cause_of(err)
    text = str(cause) if isinstance(cause, WdskitError) else error_text(cause)
    what = text if text.startswith(f"{stage}: ") else f"{stage} failed: {text}"
    failed = SampleError(f"{origin}: {what}", stage=stage, shard=origin.url, key=origin.key)
    failed.is_function = cause is not err
    return failed


def note_place(stage: str, origin: Origin, err: BaseException) -> None:
    """Add the origin and the stage to an exception that is raised unchanged, such as asyncio.CancelledError or
    SystemExit. KeyboardInterrupt gets no note, because no sample causes it.
    """
    add_note = getattr(err, "add_note", None)  # from Python 3.11 on
    if add_note is not None and not isinstance(err, KeyboardInterrupt):
        add_note(f"{origin}: {stage} failed")


def is_function_name(name: object) -> bool:
    """True if `name` is valid for a registered function."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _check_function(value: object) -> object:
    if isinstance(value, str):
        if not is_function_name(value):
            raise refuse(f"{show(value)} is not a valid name for a function (letters, digits, _).")
        return value
    if callable(value):
        return value
    raise refuse(wrong_kind(value, "the name of a registered function is needed"))


Function = Annotated[str | Callable[..., Any], PlainValidator(_check_function), WithJsonSchema({"type": "string"})]
"""A function as a setting: a callable, or the name that one is registered under."""


class Call:
    """A function of the user's at work; one with a parameter `rng` gets the Generator of the value's position.

    Args:
        run: Gives the random numbers.
        stage: Name and ordinal of the stage, their key.
        function: Takes the value.
        global_rng: Whether to seed random, numpy and torch by position before each call.
        is_map: Whether the result is the next value, so that None can only be a forgotten `return`.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        function: Callable[..., Any],
        *,
        global_rng: bool = False,
        is_map: bool = False,
    ) -> None:
        self.run = run
        self.stage = stage
        self.function = function
        self.global_rng = global_rng
        self.is_map = is_map
        self.wants_rng = _wants_rng(function)

    def __call__(self, value: Any, origin: Origin) -> Any:
        """The function's result for `value`.

        Raises:
            FunctionFailed: It raised an Exception; or it returned None, and `is_map`.
        """
        known = marks_in(value)
        options = {"rng": self.run.rng_of(self.stage)(origin)} if self.wants_rng else {}
        try:
            with (
                self.run.turn_of(self.function, origin),
                self._seeded_globals(origin) if self.global_rng else _AT_ANY_TIME,
            ):
                result = self.function(value, **options)
        except Exception as err:
            raise FunctionFailed(err) from err
        if result is None and self.is_map:
            msg = "the function returned None. Return the value; to leave samples out, use `select`."
            raise FunctionFailed(WdskitError(msg))
        return hand_on(known, result)

    @contextlib.contextmanager
    def _seeded_globals(self, origin: Origin) -> Iterator[None]:
        """Seed the CPU's global generators by position; afterwards they are as before, because
        without workers they are those of the user's training loop.
        """
        import torch

        words = self.run.rng_of(f"{self.stage}:global")(origin).integers(0, 1 << 32, 3)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002 (users' libraries draw from it)
        torch.default_generator.manual_seed(int(words[2]))
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            torch.set_rng_state(before[2])


@dataclass(frozen=True)
class Context:
    """The state of building at one place of a pipeline. Binding a stage returns the context of the next place.

    Attributes:
        run: The running pipeline.
        find: See `Find`.
        has_masks: Whether a transform takes fields for masks, so that `decode` must find out which images it changes.
        part: Number of the part of a mixture whose stages are bound; None for the stages of all samples.
        places: The fields of a tuple by their places; None where values are dicts, or came from a function.
        ordinals: Number of stages of each name before this place.
        buckets: The buckets of a pipeline with `bucketed`; None without.
    """

    run: Run
    find: Find
    has_masks: bool = False
    part: int | None = None
    places: tuple[str, ...] | None = None
    ordinals: Mapping[str, int] = field(default_factory=dict)
    buckets: Buckets | None = None

    def ordinal(self, stage: StageSpec) -> int:
        """Return the number of stages of the same name before this one."""
        return self.ordinals.get(stage.name, 0)

    def label(self, stage: StageSpec) -> str:
        """Name and ordinal of a stage: the key of its random numbers. Those of a part depend on no other part."""
        return f"{'' if self.part is None else 'part '}{stage.name}:{self.ordinal(stage)}"

    def after(self, stage: StageSpec) -> Context:
        """Return the context of the place after this stage."""
        return replace(
            self,
            places=stage.places_after(self.places) if isinstance(stage, PerSampleStage) else self.places,
            ordinals={**self.ordinals, stage.name: self.ordinal(stage) + 1},
        )

    def resolve(self, stage: str, fn: Any, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """Return a function unchanged; for a name, its function with the settings bound, or an instance of its class.

        Raises:
            PipelineError: The name is unknown, or the function does not accept the settings. The message starts with
                `stage`.
        """
        if not isinstance(fn, str):
            return fn  # type: ignore[no-any-return]  # its setting has checked that it is callable
        try:
            found = self.find(fn)
        except PipelineError as err:
            raise PipelineError(f"{stage}: {err}") from err
        return _with_settings(stage, found, settings or {})

    def call(self, stage: str, fn: Any, label: str, *, global_rng: bool = False, is_map: bool = False) -> Call:
        """A function of the user's, or the name of one, at work on the values of this place."""
        return Call(self.run, label, self.resolve(stage, fn), global_rng=global_rng, is_map=is_map)


class PerSampleStage(StageSpec):
    """A stage that makes one value of one: settings, and `bind`, which gives what runs."""

    kind: ClassVar[Kind] = "each"

    def bind(self, context: Context, label: str) -> ValueFunction:
        """What this stage does to a value; it can be pickled.

        Raises:
            PipelineError: A function is unknown, or cannot run with the threads there are.
        """
        raise NotImplementedError

    def step(self, context: Context) -> tuple[Step, Context]:
        """Return the bound stage with its name and ordinal, and the context after it."""
        step = Step(self.name, self.bind(context, context.label(self)), context.ordinal(self), context.part)
        return step, context.after(self)

    def places_after(self, places: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """`Context.places` after this stage, which is None after a user's function for whole samples."""
        return None if self.takes_any else places

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The fields that it takes for masks, `;` between alternatives."""
        return ()


def takes_masks(stages: Sequence[Any]) -> bool:
    """Whether one of the stages takes fields for masks."""
    return any(isinstance(stage, PerSampleStage) and stage.mask_names for stage in stages)


def bind_steps(stages: Sequence[Any], context: Context) -> tuple[tuple[Step, ...], Context]:
    """Return the steps of per-sample stages, and the context after them."""
    steps = []
    for stage in stages:
        step, context = stage.step(context)
        steps.append(step)
    return tuple(steps), context


def _wants_rng(function: Callable[..., Any]) -> bool:
    """Whether a parameter `rng` is free: neither the first one, which gets the value, nor bound by a partial."""
    if isinstance(function, functools.partial) and "rng" in function.keywords:
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return "rng" in list(parameters)[1:] or ("rng" in parameters and parameters["rng"].kind is keyword_only)


def check_settings(stage: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Compare settings with the parameters of a function, or of a class.

    Raises:
        PipelineError: It does not take one of them; `stage` is said first.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [name for name, each in parameters.items() if each.kind in by_name]
    unknown = next((each for each in settings if each not in known), None)
    if unknown is not None:
        raise PipelineError(f"{stage}: {unknown}: {unknown_setting(unknown, f'`{stage}`', known)}")


def _with_settings(stage: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    check_settings(stage, function, settings)
    # A class whose instances are called; others, such as `int`, are called themselves.
    if not (isinstance(function, type) and any("__call__" in base.__dict__ for base in function.__mro__)):
        return functools.partial(function, **settings) if settings else function
    try:
        instance: Callable[..., Any] = function(**settings)
    except (TypeError, ValueError) as err:
        raise PipelineError(f"{stage}: it cannot be created with these settings: {err}") from err
    return instance
