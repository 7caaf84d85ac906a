"""What the stages of one running pipeline share in one process: rank, worker, epoch, and where the current sample comes
from.

Stages are plain callables `iterator -> iterator`, so that webdataset's and ours mix freely. Values travel through them
bare; who a value is (`Origin`) travels beside it: a stage that yields sets `run.origin` to the origin of what it
yields, and a stage that keeps values back (shuffle, threads) keeps their origins with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.random import Generator

from wdskit.errors import PipelineError, SampleError, WdskitError
from wdskit.order.keys import PositionRng
from wdskit.stages.timing import Timings


class Place(NamedTuple):
    """Which rank of how many, as captured in the main process."""

    rank: int
    world_size: int


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


Function = Callable[[Any, Origin], Any]


@dataclass(frozen=True)
class Step:
    """A one-to-one stage.

    Attributes:
        name: As the user wrote it.
        function: What it does to a value of known origin.
        ordinal: How many of this name stand before it in the pipeline.
    """

    name: str
    function: Function
    ordinal: int = 0

    @property
    def label(self) -> str:
        """Name in statistics: the second `map` is `map:1`, as for its random numbers."""
        return f"{self.name}:{self.ordinal}" if self.ordinal else self.name


class StepFailed(Exception):
    """Tells which of several stages that run as one step failed, and what it raised."""

    def __init__(self, stage: str, err: Exception) -> None:
        super().__init__(stage, err)
        self.stage = stage
        self.err = err


def stage_error(stage: str, origin: Origin, err: Exception) -> WdskitError:
    """The error of a stage that failed on one value, with shard and key; a PipelineError stays one."""
    if isinstance(err, PipelineError):
        return PipelineError(f"{origin}: {err}")
    told = str(err) if isinstance(err, WdskitError) else f"{type(err).__name__}: {err}"
    return SampleError(f"{origin}: {stage} failed: {told}", stage=stage, shard=origin.url, key=origin.key)


def note_place(stage: str, origin: Origin, err: BaseException) -> None:
    """Add what `stage_error` says to an exception that stays as it is: asyncio.CancelledError, SystemExit and others.
    Nothing to KeyboardInterrupt, which is no sample's fault.
    """
    add_note = getattr(err, "add_note", None)  # from Python 3.11 on
    if add_note is not None and not isinstance(err, KeyboardInterrupt):
        add_note(f"{origin}: {stage} failed")
