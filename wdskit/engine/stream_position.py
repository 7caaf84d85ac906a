"""Where a stream stands between two values, how it comes to stand there again, and the state that says so as JSON."""

from __future__ import annotations

import base64
import binascii
import enum
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wdskit.engine.sample import Each
from wdskit.errors import PipelineError, StateError
from wdskit.order.draws import Draws
from wdskit.stages.base import NOWHERE, Origin, Run
from wdskit.stages.shard_reader import OpenTars
from wdskit.stages.stream_source import StreamSource
from wdskit.stages.streaming import EpochCut, Keeps, ShuffleBuffer

STATE_VERSION = 1
_HEAD = 5  # first epoch, draw, sample, left, number of stages that keep values
_MAX_NUMBERS = 1 << 26
_MAX_EPOCH = 1 << 30  # its draws are numbers of 63 bits


@dataclass(frozen=True)
class Position:
    """Where the stream of one worker stands between two values.

    Attributes:
        first_epoch: The epoch that the stream began with.
        draw: The draw to read next, and
        sample: how many of its samples have been read.
        counts: For each stage that keeps values: how many it has given.
        kept: For each of them: the (draw, sample) of what it holds, in its order.
        left: Inside an epoch: values that with_epoch is still to take.
    """

    first_epoch: int
    draw: int
    sample: int
    counts: tuple[int, ...]
    kept: tuple[tuple[tuple[int, int], ...], ...]
    left: int = 0

    def numbers(self) -> list[int]:
        """As whole numbers in a row; `of_numbers` takes them back, and passes over what follows them."""
        pairs = [number for part in self.kept for pair in part for number in pair]
        head = [self.first_epoch, self.draw, self.sample, self.left, len(self.kept)]
        return [*head, *self.counts, *map(len, self.kept), *pairs]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Position:
        """The opposite of `numbers`."""
        first_epoch, draw, sample, left, num_parts = numbers[:_HEAD]
        start = _HEAD + 2 * num_parts
        counts = numbers[_HEAD : _HEAD + num_parts]
        kept = []
        for length in numbers[_HEAD + num_parts : start]:
            stop = start + 2 * length
            kept.append(tuple(zip(numbers[start:stop:2], numbers[start + 1 : stop : 2], strict=True)))
            start = stop
        return cls(first_epoch, draw, sample, tuple(counts), tuple(kept), left)


def max_numbers(stages: list[Any]) -> int:
    """Most numbers of a position of these stages."""
    keepers = _keepers(stages)
    return _HEAD + 2 * len(keepers) + 2 * sum(stage.capacity + 2 for stage in keepers)


def spacing(stages: list[Any], batch: int) -> int:
    """Of how many items one comes with a position: it costs as much as what it holds, this is one value a sample."""
    return -(-sum(stage.capacity + 2 for stage in _keepers(stages)) // batch) or 1


class EpochPosition(NamedTuple):
    """A position inside an epoch: behind how many items of one worker, and how to go on there."""

    num_items: int
    position: Position


class How(enum.Enum):
    """How a worker starts an epoch."""

    NEXT = "next"  # behind the one that it finished last, with the stream that runs if there is one
    RESUME = "resume"  # inside, behind items that the consumer has received
    LEAVE = "leave"  # where one before was left by its consumer, behind items of that which it has received
    ANEW = "anew"  # as the first of a stream


class Start(NamedTuple):
    """How a worker starts an epoch.

    Attributes:
        how: See `How`.
        epoch: Of what follows: this one, or the one that was left.
        num_items: Items of it that the consumer has received.
        mark: The worker's last position before those; None where that is the beginning of `epoch`.
        begun: Where it stood at the beginning of `epoch`; None where that began a stream.
    """

    how: How
    epoch: int = 0
    num_items: int = 0
    mark: EpochPosition | None = None
    begun: Position | None = None

    @property
    def position(self) -> Position | None:
        """Where to begin: at the mark, or at the beginning of the epoch."""
        return self.begun if self.mark is None else self.mark.position

    @property
    def num_skipped(self) -> int:
        """Items that are made once more and not given."""
        return self.num_items - (0 if self.mark is None else self.mark.num_items)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "how": self.how.value,
            "epoch": self.epoch,
            "received": self.num_items,
            "begun": self.begun and _packed(self.begun),
            "mark": self.mark and [self.mark.num_items, _packed(self.mark.position)],
        }

    @classmethod
    def of_json(cls, worker: Mapping[str, Any]) -> Start:
        """The opposite of `to_json`."""
        begun, mark = worker["begun"], worker["mark"]
        return cls(
            how=How(worker["how"]),
            epoch=_natural("a worker's epoch", worker["epoch"], _MAX_EPOCH),
            num_items=_natural("received", worker["received"]),
            mark=mark and EpochPosition(_natural("mark", mark[0]), _unpacked("mark", mark[1])),
            begun=begun and _unpacked("begun", begun),
        )


@dataclass(frozen=True)
class StreamState:
    """Where the consumer of one rank stands.

    Attributes:
        epoch: The epoch that is to go on.
        next_worker: The worker whose turn it is.
        workers: How each goes on.
    """

    epoch: int
    next_worker: int
    workers: tuple[Start, ...]

    @property
    def received(self) -> list[int]:
        """Items of `epoch` that each worker has given to the consumer."""
        return [worker.num_items if worker.how is How.RESUME else 0 for worker in self.workers]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, tens of KB for the values that shuffles hold."""
        workers = [worker.to_json() for worker in self.workers]
        return {"version": STATE_VERSION, "epoch": self.epoch, "next_worker": self.next_worker, "workers": workers}

    @classmethod
    def of_json(cls, state: Mapping[str, Any]) -> StreamState:
        """The opposite of `to_json`.

        Raises:
            StateError: It is damaged.
        """
        try:
            return cls(
                epoch=_natural("epoch", state["epoch"], _MAX_EPOCH),
                next_worker=_natural("next_worker", state["next_worker"], len(state["workers"])),
                workers=tuple(map(Start.of_json, state["workers"])),
            )
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, zlib.error, binascii.Error) as err:
            raise StateError(f"state: it is damaged: {type(err).__name__}: {err}.") from err


def _packed(position: Position) -> str:
    """The numbers of a position: those it holds are near each other, so that differences are small."""
    numbers = np.array(position.numbers(), dtype="<i8")
    return base64.b64encode(zlib.compress(np.diff(numbers, prepend=0).tobytes(), 9)).decode()


def _unpacked(name: str, text: str) -> Position:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), 8 * _MAX_NUMBERS)
    numbers = np.cumsum(np.frombuffer(data, dtype="<i8"))
    if len(numbers) and numbers.min() < 0:
        msg = f"{name} holds {numbers.min()}, not a whole number of 0 or more"
        raise ValueError(msg)
    position = Position.of_numbers(numbers.tolist())
    _natural(f"{name}: first epoch", position.first_epoch, _MAX_EPOCH)
    return position


def _natural(name: str, value: object, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value < most:
        msg = f"{name} is {value!r}, not a whole number from 0 to {most - 1}"
        raise ValueError(msg)
    return value


class Positions:
    """Takes positions of a running stream, and puts it where they say.

    Args:
        stages: All of the pipeline.
        run: Of the pipeline.
        draws: The order of its shards; None where the source is not ours.
        cut: Place of with_epoch among the stages, None without.
        tars: Place of the stage that opens the shards, None where it is not ours.
    """

    def __init__(self, stages: list[Any], run: Run, draws: Draws | None, cut: int | None, tars: int | None) -> None:
        self._stages = stages
        self._run = run
        self._draws = draws
        self._cut = cut
        self._tars = tars or 0

    def take(self, stages: list[Any], left: int = 0) -> Position:
        """Where these stages stand, between two values."""
        keepers = _keepers(stages)
        kept = tuple(tuple((origin.major, origin.minor) for origin, _ in stage.kept) for stage in keepers)
        counts = tuple(stage.count for stage in keepers)
        return Position(self._run.first_epoch, self._run.next_draw, self._run.next_sample, counts, kept, left)

    def begin(self, epoch: int, position: Position | None, stages: list[Any]) -> None:
        """Stand where `stages` stood at a position, or at the first draw of `epoch`."""
        clear(self._stages)
        draws = self._draws
        stop = None if draws is None or self._cut is not None else draws.stop(epoch)
        if position is None:
            self._run.begin(epoch, draw=0 if draws is None else draws.first(epoch), stop_draw=stop)
            return
        keepers = _keepers(stages)
        rebuilt = [
            self._rebuild(self._stages.index(stage), pairs) for stage, pairs in zip(keepers, position.kept, strict=True)
        ]
        for stage, kept, count in zip(keepers, rebuilt, position.counts, strict=True):
            stage.kept, stage.count = kept, count
        if len(stages) == len(self._stages) and self._cut is not None:
            self._stages[self._cut].resumed = position.left
        self._run.begin(position.first_epoch, draw=position.draw, sample=position.sample, stop_draw=stop)

    def _rebuild(self, at: int, pairs: tuple[tuple[int, int], ...]) -> list[tuple[Origin, Any]]:
        """The values that reached the stage at place `at`, by their (draw, sample), read again."""
        values: Iterator[Any] = self._reread(pairs)
        for stage in self._stages[self._tars + 1 : at]:
            if not isinstance(stage, (ShuffleBuffer, EpochCut)):
                values = iter(stage(values))
        found = {}
        for value in values:
            origin = self._run.origin
            found[origin.major, origin.minor] = (origin, value)
        missing = [pair for pair in pairs if pair not in found]
        if missing:
            raise PipelineError(
                f"draw {missing[0][0]}: sample {missing[0][1]} is gone. Did the shards change in the meantime?"
            )
        return [found[pair] for pair in pairs]

    def _reread(self, pairs: tuple[tuple[int, int], ...]) -> Iterator[Any]:
        """The samples of these (draw, sample), each shard opened once, in the order of the draws."""
        source, tars, draws = self._stages[0], self._stages[self._tars], self._draws
        assert isinstance(source, StreamSource)
        assert isinstance(tars, OpenTars)
        assert draws is not None
        wanted: dict[int, set[int]] = {}
        for draw, sample in pairs:
            wanted.setdefault(draw, set()).add(sample)
        for draw, samples in sorted(wanted.items()):
            url = source.shards.urls[draws.shard(draw)]
            last = max(samples)
            for index, fields in enumerate(tars.read(url)):
                if index in samples:
                    self._run.origin = Origin(url, fields["__key__"], draw, index, 0)
                    yield fields
                if index == last:
                    break
        self._run.origin = NOWHERE


def _keepers(stages: list[Any]) -> list[Keeps]:
    return [stage for stage in stages if isinstance(stage, (ShuffleBuffer, Each))]


def clear(stages: list[Any]) -> None:
    """Let stages begin with nothing."""
    for stage in _keepers(stages):
        stage.kept = []
        stage.count = 0
