"""What the stages of a running pipeline share: the origin of a value (`Origin`), what its fields are (`Roles`), the
stages that are ready to run on one value (`Step`, `SampleStages`), the state of a process (`Run`), and what is known of
their progress (`Board`, `Timings`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from wdskit.codecs.fields import is_path
from wdskit.codecs.formats import is_image_field
from wdskit.errors import PROCESS_ERRORS, SampleError, WdskitError, error_text
from wdskit.order.base import PositionRng
from wdskit.storage.traffic import NO_TRAFFIC, Traffic

F = TypeVar("F", bound=Callable[..., Any])

REPORT_S = 60.0
"""Time between two reports of a wait for a batch; also the time before the first report."""

IDLE = -1
"""The value of `minor` in a slot whose thread works on no sample."""

BOARD_BYTES = 1024 * 2 * 8  # the most threads of a process, the numbers of a slot, the bytes of a number

Slot: TypeAlias = "memoryview[int]"

INTERVAL_S = 0.05
"""Shortest time between two timed tasks. A task has up to 50 laps of 3 us each, so timing takes 0.3 % of the time."""

_SKIP = "Pack it again without this sample (`--skip-bad`), or allow some: `errors: {max_bad: 10}`."


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


Numbers: TypeAlias = Literal["mask", "colours", ""]
"""What the numbers of a field mean: classes or depths, which no stage may blend; colours; unknown."""


def names_image(name: str) -> bool:
    """Return whether a field has the name of an image field, such as `jpg`."""
    return not name.startswith("__") and is_image_field(name)


@dataclass(frozen=True)
class Roles:
    """The roles of fields at one place of a pipeline. A method that takes `names` also takes alternatives: `jpg;png`.

    Attributes:
        images: The images whose name is not that of an image: `rename` moved them, or an image stage named them.
        lists: The fields that `rename` or a stage made of lists in JSON, besides paths such as `json.boxes`.
        numbers: What the numbers of a field mean.
        others: What the numbers of all fields with the name of an image mean that are not in `numbers`.
        places: The fields of each item of the tuples that `to_tuple` made; None without `to_tuple`.
    """

    images: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    others: Numbers = ""
    places: tuple[str, ...] | None = None

    def is_image(self, names: str) -> bool:
        """Return whether a field is an image: it has the name of one, was renamed from one, or an image stage named
        it.
        """
        return any(name in self.images or names_image(name) for name in names.split(";"))

    def is_list(self, names: str) -> bool:
        """Return whether a field is a value in JSON. If it is a list of numbers, it became an array."""
        return any(name in self.lists or is_path(name) for name in names.split(";"))

    def numbers_of(self, names: str) -> Numbers:
        """Return what the numbers of a field mean."""
        found = (self.numbers.get(name, self.others if names_image(name) else "") for name in names.split(";"))
        return next(filter(None, found), "")

    def is_mask(self, names: str) -> bool:
        """Return whether the numbers of a field are classes or depths."""
        return self.numbers_of(names) == "mask"

    def at_run(self) -> Roles:
        """Return only what the running stages ask for: of the numbers, those of masks."""
        masks = {name: found for name, found in self.numbers.items() if found == "mask"}
        return replace(self, numbers=masks, others="mask" if self.others == "mask" else "")

    def names_at(self, slot: object) -> str:
        """Return the field of a slot of a batch: of a key, or of a place in tuples; "" if no stage named it."""
        if isinstance(slot, str):
            return slot
        places = self.places or ()
        return places[slot] if isinstance(slot, int) and slot < len(places) else ""

    def decoded(self, only: Iterable[str], numbers: Numbers) -> Roles:
        """Return the roles after a `decode` of the images in `only`, of all if it is empty. What is decoded stays."""
        taken = {name: numbers for name in only if names_image(name) and not self.numbers_of(name)}
        return replace(self, numbers={**self.numbers, **taken}, others=self.others if only else self.others or numbers)

    def named(self, images: Iterable[str], masks: Iterable[str] = (), lists: Iterable[str] = ()) -> Roles:
        """Return the roles after an image stage that names images, masks, and fields that are lists in JSON."""
        given = (images, masks, lists)
        found, as_masks, as_lists = ({name for each in names for name in each.split(";")} for names in given)
        new: dict[str, Numbers] = dict.fromkeys(as_masks, "mask")
        numbers = {**self.numbers, **new}
        return replace(self, images=self.images | found | as_masks, lists=self.lists | as_lists, numbers=numbers)

    def renamed(self, names: Mapping[str, str]) -> Roles:
        """Return the roles after fields got new names. `names` maps each new name to the old one or to alternatives."""
        kept = {name: numbers for name, numbers in self.numbers.items() if name not in names}
        moved = {new: numbers for new, olds in names.items() if (numbers := self.numbers_of(olds)) or self.others}
        return replace(
            self,
            images=(self.images - names.keys()) | {new for new, olds in names.items() if self.is_image(olds)},
            lists=(self.lists - names.keys()) | {new for new, olds in names.items() if self.is_list(olds)},
            numbers={**kept, **moved},
        )

    def after_function(self, names: Iterable[str] | None = None) -> Roles:
        """Return the roles after a user's function for the fields `names`; for whole samples if None. A field keeps its
        layout, and a mask stays a mask: its name says so.
        """
        if names is None:
            return self.at_run()
        own: dict[str, Numbers] = {name: "" for name in names if not self.is_mask(name)}
        return replace(self, numbers={**self.numbers, **own})


@dataclass(frozen=True)
class Live:
    """The fields that later stages or the output use; a `decode` leaves all others as bytes.

    Attributes:
        names: The fields, with the JSON fields of paths. None: all fields.
        images: Whether a stage looks for the only image of a sample, so that all images are used.
    """

    names: frozenset[str] | None = None
    images: bool = False

    def has(self, field: str) -> bool:
        """Return whether a field is used."""
        return self.names is None or field in self.names or (self.images and names_image(field))

    def using(self, names: Iterable[str], *, images: bool = False, without: Iterable[str] = ()) -> Live:
        """Return the fields that are used before a stage that uses `names` and makes the fields `without` new. `names`
        are fields, paths in JSON or alternatives.
        """
        if self.names is None:
            return self
        used = {name for each in names for name in each.split(";")}
        used |= {".".join(name.split(".")[:stop]) for name in used for stop in range(1, name.count(".") + 1)}
        return Live(self.names.difference(without) | used, self.images or images)


EVERYTHING = Live()
NOTHING = Live(frozenset())
NO_ROLES = Roles()
"""What is known before the first stage."""


def merged(found: Sequence[Roles]) -> Roles:
    """Return the roles of samples from several parts of a mixture: a field is an image, or a list, if it is one in any
    part. What the numbers mean is unknown.
    """
    images = frozenset[str]().union(*(roles.images for roles in found))
    return Roles(images, frozenset[str]().union(*(roles.lists for roles in found)), places=found[0].places)


class Board:
    """Shows on which sample each thread of a process works. Every working thread has a slot of the board and writes the
    slot before it touches a sample.

    A slot has two numbers: `major` and `minor` of the sample's `Origin`. `minor` is `IDLE` if the thread works on no
    sample.

    Args:
        memory: Shared memory of `BOARD_BYTES`; None for memory of this process.

    Attributes:
        slots: All slots, int64 (slots, 2).
    """

    def __init__(self, memory: Any = None) -> None:
        self.slots = slots_in(bytearray(BOARD_BYTES) if memory is None else memory)
        self.slots[:] = (0, IDLE)
        self._free: deque[Slot] = deque(slot.data for slot in self.slots)

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return Board, ()  # each process has its own

    def claim(self) -> Slot:
        """Return a slot that only this thread uses until `release`."""
        return self._free.pop()

    def release(self, slot: Slot) -> None:
        """Mark a slot from `claim` as idle, and make it free."""
        slot[1] = IDLE
        self._free.append(slot)


def slots_in(memory: Any) -> NDArray[np.int64]:
    """Return the slots in the memory of a `Board` as a view: int64 (slots, 2). `Board` explains the numbers."""
    return np.frombuffer(memory, np.int64).reshape(-1, 2)


@dataclass(slots=True)
class Timings:
    """The time of each stage, the traffic and the bytes read, measured in one thread. The clock starts on creation.

    A lap is the time between two calls of `lap`, in which one stage works.

    Attributes:
        bytes_read: Number of bytes read from shards.
        traffic: Traffic with stores, which may include traffic for other samples.
        stages: Maps each stage to (number of timed samples, their total time in seconds), in the order of the first
            laps.
        lap_start_s: Value of `perf_counter` at the start of the running lap.
    """

    bytes_read: int = 0
    traffic: Traffic = NO_TRAFFIC
    stages: dict[str, tuple[int, float]] = field(default_factory=dict)
    lap_start_s: float = field(default_factory=perf_counter, compare=False)

    def start(self) -> None:
        """Start a lap now. The time since the end of the last lap is not counted."""
        self.lap_start_s = perf_counter()

    def lap(self, stage: str, num: int = 1) -> None:
        """End the running lap, in which `stage` worked on `num` samples, and start the next lap."""
        self._add(stage, num, perf_counter() - self.lap_start_s)
        self.start()

    def merge(self, other: Timings) -> None:
        """Add the times and counts of `other`. The running lap of this object continues."""
        self.bytes_read += other.bytes_read
        self.traffic = Traffic(*map(operator.add, self.traffic, other.traffic))
        for stage, (num, total_s) in other.stages.items():
            self._add(stage, num, total_s)

    def _add(self, stage: str, num: int, total_s: float) -> None:
        num_before, before_s = self.stages.get(stage, (0, 0.0))
        self.stages[stage] = num_before + num, before_s + total_s


class TimingSampler:
    """Decides which tasks are timed: the first task, and then at most one task in `INTERVAL_S`. Threads may share a
    sampler.
    """

    def __init__(self) -> None:
        self._next_s = 0.0

    def begin(self) -> Timings | None:
        """Return new timings for the task that starts now, with a running clock; None if it is not to be timed."""
        now_s = perf_counter()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + INTERVAL_S
        return Timings()


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


def add_advice(err: SampleError) -> None:
    """Add a second line to the error of a sample that cannot be decoded, before the error ends a run."""
    if err.stage == "decode" and not isinstance(err.__cause__, PROCESS_ERRORS):
        err.args = (f"{err}\n  {_SKIP}",)


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
class SampleStages:
    """Consecutive one-to-one stages, in their order."""

    steps: tuple[Step, ...]

    def apply(
        self,
        value: Any,
        origin: Origin,
        out: tuple[Callable[..., Any], NDArray[Any]] | None = None,
        timings: Timings | None = None,
        start: int = 0,
        num: int = 1,
    ) -> Any:
        """Return the value after all stages.

        Args:
            value: The value before the stage `start`.
            origin: Origin of the value.
            out: The stage that writes its image into given memory, and this memory; None without such a stage.
            timings: Receives the time of each stage, if not None. The time of the first stage is already running.
            start: Index of the first stage to run: 1 if the first stage has run already, else 0.
            num: Number of samples in the value, for `timings`.

        Raises:
            SampleError: A stage failed. The error names stage, shard and key.
        """
        for step in self.steps[start:] if start else self.steps:
            try:
                if out is not None and step.function is out[0]:
                    value = out[0](value, origin, out[1])
                else:
                    value = step.function(value, origin)
            except SampleError:
                raise
            except Exception as err:
                raise stage_error(step.name, origin, err) from err
            if timings is not None:
                timings.lap(step.label, num)
        return value
