"""Where workers stand inside an epoch: what a stream is resumed from.

Each worker marks its place now and then, in memory shared with the main process, as (items given so far, standing). A
worker is ahead of its consumer by the items that wait for it. So the last few marks are kept, of which the newest that
is not ahead is taken; what the consumer had received behind it is passed over when the stream is resumed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from wdskit.engine.board import Standing, standing_size

_SHIFT_HEAD = 3  # epoch + 1, shift of the workers' numbers, and what `give` notes
_EPOCH_SHIFT = 33  # bits of the items of an epoch, in what `give` notes
_TOLD_HEAD = 6  # epoch + 1, how, epoch of the items, items, those of the mark or -1, whether a standing follows
_SLOT_HEAD = 2  # epoch + 1, items


@dataclass(frozen=True)
class Mark:
    """A worker's place: how many items of the epoch it has given, and how to go on behind them."""

    num_items: int
    standing: Standing


class How(enum.IntEnum):
    """How a worker starts an epoch."""

    NEXT = 0  # behind the one that it finished last; or the same again, from its beginning
    RESUME = 1  # inside, behind items that the consumer has received
    LEAVE = 2  # where one before was left by its consumer, behind items of that which it has received
    ANEW = 3  # as the first of a stream


class Start(NamedTuple):
    """What a worker is told at the start of an epoch.

    Attributes:
        how: See `How`.
        epoch: Of what follows: this one, or the one that was left.
        num_items: Items of it that the consumer has received.
        mark: The worker's last place before those; None where that is the beginning of `epoch`.
        begun: Where it stood at the beginning of `epoch`; None where that began a stream.
    """

    how: How
    epoch: int = 0
    num_items: int = 0
    mark: Mark | None = None
    begun: Standing | None = None

    @property
    def standing(self) -> Standing | None:
        """Where to begin: at the mark, or at the beginning of the epoch."""
        return self.begun if self.mark is None else self.mark.standing

    @property
    def num_skipped(self) -> int:
        """Items that are made once more and not given."""
        return self.num_items - (0 if self.mark is None else self.mark.num_items)


class Marks:
    """The places of all workers.

    Args:
        num_workers: Worker processes; the main process counts as one.
        num_keepers: Stages that keep values.
        capacity: Values that all of them together can hold.
        batch: Samples of an item.
        ahead: Items that a worker may have ready before the consumer has asked for them.
    """

    def __init__(self, num_workers: int, num_keepers: int, capacity: int, *, batch: int, ahead: int) -> None:
        self.spacing = -(-capacity // batch) or 1  # a mark costs as much as what it holds: this is one value a sample
        self._num_slots = 2 + -(-(ahead + 2) // self.spacing)
        self._standing = standing_size(num_keepers, capacity)
        self._size = _SLOT_HEAD + self._standing
        self._first = _SHIFT_HEAD + _TOLD_HEAD + self._standing
        rows = torch.zeros((num_workers, self._first + self._num_slots * self._size), dtype=torch.int64)
        self._rows = rows.share_memory_()
        self._numbers: Any = None

    def put(self, worker: int, epoch: int, mark: Mark) -> None:
        """Note where a worker stands."""
        slot = self._slot(worker, mark.num_items // self.spacing)
        slot[0] = 0
        numbers = mark.standing.numbers()
        slot[_SLOT_HEAD : _SLOT_HEAD + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        slot[1] = mark.num_items
        slot[0] = epoch + 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_numbers": None}

    def give(self, worker: int, epoch: int, num_items: int) -> None:
        """Note how many items of an epoch a worker has made."""
        if self._numbers is None:
            self._numbers = self._rows.numpy()  # 0.1 us to write a number into, where a tensor takes 2
        self._numbers[worker, 2] = epoch + 1 << _EPOCH_SHIFT | num_items

    def given(self, worker: int, epoch: int) -> int:
        """What was noted last, 0 where that is of another epoch."""
        of_epoch, num_items = divmod(int(self._rows[worker, 2]), 1 << _EPOCH_SHIFT)
        return num_items if of_epoch == epoch + 1 else 0

    def last(self, worker: int, epoch: int, num_items: int) -> Mark | None:
        """The newest mark of a worker with at most `num_items` given; None before the first."""
        heads = [(number, self._slot(worker, number)[:_SLOT_HEAD].tolist()) for number in range(self._num_slots)]
        known = [(items, number) for number, (tag, items) in heads if tag == epoch + 1 and items <= num_items]
        if not known:
            return None
        items, number = max(known)
        return Mark(items, Standing.of_numbers(self._slot(worker, number)[_SLOT_HEAD:].tolist()))

    def tell(self, worker: int, epoch: int, start: Start) -> None:
        """Say how a worker is to start `epoch`."""
        row, standing = self._rows[worker], start.standing
        row[_SHIFT_HEAD] = 0
        numbers = [] if standing is None else standing.numbers()
        marked = -1 if start.mark is None else start.mark.num_items
        told = [start.how, start.epoch, start.num_items, marked, int(standing is not None), *numbers]
        row[_SHIFT_HEAD + 1 : _SHIFT_HEAD + 1 + len(told)] = torch.tensor(told, dtype=torch.int64)
        row[_SHIFT_HEAD] = epoch + 1

    def told(self, worker: int, epoch: int) -> Start:
        """What was said last to a worker for `epoch`. It stays said: a worker that is slow to start one iteration may
        hear what is meant for the next, and must hear it again then.
        """
        row = self._rows[worker]
        if row[_SHIFT_HEAD] != epoch + 1:
            return Start(How.NEXT)
        first = _SHIFT_HEAD + _TOLD_HEAD
        how, of_epoch, num_items, marked, is_known = row[_SHIFT_HEAD + 1 : first].tolist()
        standing = Standing.of_numbers(row[first : first + self._standing].tolist()) if is_known else None
        if marked < 0 or standing is None:
            return Start(How(how), of_epoch, num_items, None, standing)
        return Start(How(how), of_epoch, num_items, Mark(marked, standing))

    def set_shift(self, epoch: int, shift: int) -> None:
        """Let worker process p be worker p + shift in `epoch`, and only there: the first to be asked is the next. None
        has given an item yet.
        """
        self._rows[:, 2] = 0
        self._rows[:, 1] = shift
        self._rows[:, 0] = epoch + 1

    def shift(self, worker: int, epoch: int) -> int:
        """What is added to the number of a worker process in `epoch`."""
        row = self._rows[worker]
        return int(row[1]) if row[0] == epoch + 1 else 0

    def _slot(self, worker: int, number: int) -> torch.Tensor:
        start = self._first + number % self._num_slots * self._size
        slot: torch.Tensor = self._rows[worker, start : start + self._size]
        return slot
