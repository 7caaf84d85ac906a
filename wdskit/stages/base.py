"""What the stages of a pipeline share: where a value comes from, and what is known while the pipeline is built.

Stages that run are plain callables `iterator -> iterator`, so that webdataset's and ours mix freely. Values travel
through them bare; who a value is (`Origin`) travels beside it: a stage that yields sets `run.origin` to the origin of
what it yields, and a stage that keeps values back (shuffle, threads) keeps their origins with them.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.random import Generator
from pydantic import PlainValidator, WithJsonSchema

from wdskit.codecs.formats import is_image_field
from wdskit.config.messages import show, unknown_setting, wrong_kind
from wdskit.config.spec import Kind, StageSpec, refuse
from wdskit.errors import PipelineError, SampleError, WdskitError, error_text
from wdskit.order.keys import PositionRng
from wdskit.stages.layouts import NOTHING_KNOWN, Layouts, Stored, unmarked
from wdskit.stages.timing import Timings


class Place(NamedTuple):
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
        """Shard and key, of a batch those of its first and last sample, as far as they are known."""
        first = self.members[0] if self.members else self
        if first[:2] == self[:2]:
            return ": ".join(part for part in (self.url, self.key) if part) or "a value"
        return f"{first} to {self.key if first.url == self.url else ': '.join(self[:2])}"


NOWHERE = Origin("", "", 0, 0, 0)


class Run:
    """The state of one pipeline in one process. Cheap to pickle: it reaches workers before it is used.

    Attributes:
        place: Rank and world size.
        seed: Of the source.
        worker: Number of this worker process, and of how many; (0, 1) in the main process.
        first_epoch: The epoch that the running stream began with, what stages before with_epoch know.
        epoch: The epoch that runs, for those behind it.
        origin: Of the value that was yielded last.
        next_draw: The draw that is being read, or the next one.
        next_sample: How many samples of `next_draw` have been read.
        stop_draw: The draw behind the last, None for an endless stream.
        num_heard: How many values the pipeline has yielded, or its with_epoch has taken.
        timings: Of a stream's stages, since they were taken last.
    """

    def __init__(self, place: Place, seed: int, num_threads: int = 1) -> None:
        self.place = place
        self.seed = seed
        self.num_threads = num_threads
        self.worker = 0
        self.num_workers = 1
        self.first_epoch = 0
        self.epoch = 0
        self.origin = NOWHERE
        self.next_draw = 0
        self.next_sample = 0
        self.stop_draw: int | None = None
        self.num_heard = 0
        self.timings = Timings()
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def begin(self, first_epoch: int, *, draw: int, sample: int = 0, stop_draw: int | None = None) -> None:
        """Stand at a sample of a draw, before anything is read."""
        self.first_epoch = first_epoch
        self.origin = NOWHERE
        self.next_draw = draw
        self.next_sample = sample
        self.stop_draw = stop_draw

    def keep_timings(self, timings: Timings) -> None:
        """Add what was measured in this thread."""
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
        ordinal: How many of this name stand before it in the pipeline.
    """

    name: str
    function: ValueFunction
    ordinal: int = 0

    @property
    def label(self) -> str:
        """Name in statistics: the second `map` is `map:1`, as for its random numbers."""
        return f"{self.name}:{self.ordinal}" if self.ordinal else self.name


class StepFailed(Exception):
    """Which of several stages that run as one failed, and what it raised."""

    def __init__(self, stage: str, err: Exception) -> None:
        super().__init__(stage, err)
        self.stage = stage
        self.err = err


def stage_error(stage: str, origin: Origin, err: Exception) -> WdskitError:
    """The error of a stage that failed on one value, with shard and key; a PipelineError stays one."""
    if isinstance(err, PipelineError):
        return PipelineError(f"{origin}: {err}")
    text = str(err) if isinstance(err, WdskitError) else error_text(err)
    return SampleError(f"{origin}: {stage} failed: {text}", stage=stage, shard=origin.url, key=origin.key)


def note_place(stage: str, origin: Origin, err: BaseException) -> None:
    """Add what `stage_error` says to an exception that stays as it is: asyncio.CancelledError, SystemExit and others.
    Nothing to KeyboardInterrupt, which is no sample's fault.
    """
    add_note = getattr(err, "add_note", None)  # from Python 3.11 on
    if add_note is not None and not isinstance(err, KeyboardInterrupt):
        add_note(f"{origin}: {stage} failed")


def is_function_name(name: object) -> bool:
    """Whether a function may be registered as `name`."""
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
        is_map: Whether what it returns goes on, so that None can only be a forgotten `return`.
        layouts: What is known of the values that it takes.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        function: Callable[..., Any],
        *,
        global_rng: bool = False,
        is_map: bool = False,
        layouts: Layouts = NOTHING_KNOWN,
    ) -> None:
        self.run = run
        self.stage = stage
        self.function = function
        self.global_rng = global_rng
        self.is_map = is_map
        self.layouts = layouts
        self.wants_rng = _wants_rng(function)

    def __call__(self, value: Any, origin: Origin) -> Any:
        """The function's result for `value`.

        Raises:
            PipelineError: `is_map`, and it returned nothing.
        """
        if self.global_rng:
            self._seed_globals(origin)
        known = self.layouts.known(value)
        value = unmarked(value) if known else value
        if self.wants_rng:
            result = self.function(value, rng=self.run.rng_of(self.stage)(origin))
        else:
            result = self.function(value)
        if result is None and self.is_map:
            msg = "map: the function returned None. Return the value; to leave samples out, use `select`."
            raise PipelineError(msg)
        return self.layouts.mark(result, known) if known else result

    def _seed_globals(self, origin: Origin) -> None:
        import torch

        words = self.run.rng_of(f"{self.stage}:global")(origin).integers(0, 1 << 32, 3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002 (users' libraries draw from it; that is what it is for)
        torch.manual_seed(int(words[2]))


class Context:
    """What is known at one place of a pipeline while it is built. A stage reads it and says what it changes.

    Args:
        run: Of the pipeline.
        find: See `Find`.
        stages: All of the pipeline, those of a mixture's parts included.

    Attributes:
        masks: Fields, by the names that they have when they are decoded, that a transform takes for masks.
        images: Fields that hold images under names that do not say so.
        stored: Image fields that hold the numbers that their files store.
        layouts: Where images are, as a batch has to know it.
        places: Fields of a tuple by their places, None while values are dicts.
    """

    def __init__(self, run: Run, find: Find, stages: Sequence[Any] = ()) -> None:
        self.run = run
        self.masks: frozenset[str] = frozenset()
        for stage in reversed(stages):
            if isinstance(stage, PerSampleStage):
                self.masks = self.masks.union(*(names.split(";") for names in stage.mask_names))
                renamed = (olds.split(";") for new, olds in stage.new_names.items() if new in self.masks)
                self.masks = self.masks.union(*renamed)
        self.images: frozenset[str] = frozenset()
        self.stored = Stored()
        self.layouts = NOTHING_KNOWN
        self.places: tuple[str, ...] | None = None
        self._find = find
        self._seen: Counter[str] = Counter()

    def label(self, stage: StageSpec) -> str:
        """The stage's name with how many of that name stand before it: a key of its random numbers. Once a stage."""
        number = self._seen[stage.name]
        self._seen[stage.name] += 1
        return f"{stage.name}:{number}"

    def resolve(self, stage: str, fn: Any, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """A function as it is, or the one of a name with its settings bound; of a class, an instance made with them.

        Raises:
            PipelineError: There is none of this name, or it does not take the settings; `stage` is said first.
        """
        if not isinstance(fn, str):
            return fn  # type: ignore[no-any-return]  # its setting has checked that it is callable
        try:
            found = self._find(fn)
        except PipelineError as err:
            raise PipelineError(f"{stage}: {err}") from err
        return _with_settings(stage, found, settings or {})

    def call(self, stage: str, fn: Any, label: str, *, global_rng: bool = False, is_map: bool = False) -> Call:
        """A function of the user's, or the name of one, at work on the values of this place."""
        function = self.resolve(stage, fn)
        return Call(self.run, label, function, global_rng=global_rng, is_map=is_map, layouts=self.layouts)

    def rename(self, names: Mapping[str, str]) -> None:
        """Fields get new names; `;` stands between alternatives."""
        self.images |= {new for new, olds in names.items() if any(map(self._is_image, olds.split(";")))}
        self.stored = self.stored.renamed(names)
        self.layouts = self.layouts.renamed(names)

    def _is_image(self, name: str) -> bool:
        return name in self.images or is_image_field(name)


class PerSampleStage(StageSpec):
    """A stage that makes one value of one: settings, and `bind`, which gives what runs."""

    kind: ClassVar[Kind] = "each"

    def bind(self, context: Context, label: str) -> ValueFunction:
        """What this stage does to a value; it can be pickled. `context` is then what is known behind the stage.

        Raises:
            PipelineError: A function is unknown, or cannot run with the threads there are.
        """
        raise NotImplementedError

    def step(self, context: Context) -> Step:
        """`bind` with the stage's name and ordinal."""
        label = context.label(self)
        return Step(self.name, self.bind(context, label), int(label.rpartition(":")[2]))

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The fields that it takes for masks, `;` between alternatives."""
        return ()

    @property
    def new_names(self) -> Mapping[str, str]:
        """The fields that it gives other names: new name to old ones, `;` between alternatives."""
        return {}


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


def _with_settings(stage: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    if settings:
        known = list(inspect.signature(function).parameters)
        unknown = next((each for each in settings if each not in known and "kwargs" not in known), None)
        if unknown is not None:
            raise PipelineError(f"{stage}: {unknown_setting(unknown, f'`{stage}`', known)}")
    # A class whose instances are called; others, such as `int`, are called themselves.
    if not (isinstance(function, type) and any("__call__" in base.__dict__ for base in function.__mro__)):
        return functools.partial(function, **settings) if settings else function
    try:
        instance: Callable[..., Any] = function(**settings)
    except (TypeError, ValueError) as err:
        raise PipelineError(f"{stage}: it cannot be created with these settings: {err}") from err
    return instance
