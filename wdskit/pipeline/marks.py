"""Where workers stand inside an epoch: what a stream is resumed from.

Each worker marks its place now and then, in memory shared with the main process, as (items given so far, standing). A
worker is ahead of its consumer by the items that wait for it. So the last few marks are kept, of which the newest that
is not ahead is taken; what the consumer had received behind it is passed over when the stream is resumed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from wdskit.pipeline.board import Standing, standing_size

_ROW_HEAD = 5  # what is told: epoch + 1, items; epoch + 1, shift of the workers' numbers; and how
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
    LEAVE = 2  # where the one before was left by its consumer, behind items that it has received
    ANEW = 3  # as the first of a stream


class Start(NamedTuple):
    """What a worker is told at the start of an epoch.

    Attributes:
        how: See `How`.
        mark: Its last place before the items it is to leave behind; None where that is the beginning of the epoch.
        num_items: How many those are.
    """

    how: How
    mark: Mark | None = None
    num_items: int = 0

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
        self._size = _SLOT_HEAD + standing_size(num_keepers, capacity)
        rows = torch.zeros((num_workers, _ROW_HEAD + self._num_slots * self._size), dtype=torch.int64)
        self._rows = rows.share_memory_()

    def put(self, worker: int, epoch: int, mark: Mark) -> None:
        """Note where a worker stands."""
        slot = self._slot(worker, mark.num_items // self.spacing)
        slot[0] = 0
        numbers = mark.standing.numbers()
        slot[_SLOT_HEAD : _SLOT_HEAD + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        slot[1] = mark.num_items
        slot[0] = epoch + 1

    def last(self, worker: int, epoch: int, num_items: int) -> Mark | None:
        """The newest mark of a worker with at most `num_items` given; None before the first."""
        heads = [(number, self._slot(worker, number)[:_SLOT_HEAD].tolist()) for number in range(self._num_slots)]
        known = [(items, number) for number, (tag, items) in heads if tag == epoch + 1 and items <= num_items]
        if not known:
            return None
        items, number = max(known)
        return Mark(items, Standing.of_numbers(self._slot(worker, number)[_SLOT_HEAD:].tolist()))

    def tell(self, worker: int, epoch: int, how: How, num_items: int = 0) -> None:
        """Say how a worker is to start `epoch`; with nothing said it is `NEXT`."""
        self._rows[worker, 1] = num_items
        self._rows[worker, 4] = how
        self._rows[worker, 0] = epoch + 1

    def told(self, worker: int, epoch: int) -> Start:
        """What was said to a worker for `epoch`. Once: the next time it is `NEXT` again."""
        row = self._rows[worker]
        if row[0] != epoch + 1:
            return Start(How.NEXT)
        row[0] = 0
        how, num_items = How(int(row[4])), int(row[1])
        if how not in (How.RESUME, How.LEAVE):
            return Start(how)
        return Start(how, self.last(worker, epoch - (how is How.LEAVE), num_items), num_items)

    def set_shift(self, epoch: int, shift: int) -> None:
        """Let worker process p be worker p + shift in `epoch`, and only there: the first to be asked is the next."""
        self._rows[:, 3] = shift
        self._rows[:, 2] = epoch + 1

    def shift(self, worker: int, epoch: int) -> int:
        """What is added to the number of a worker process in `epoch`."""
        row = self._rows[worker]
        return int(row[3]) if row[2] == epoch + 1 else 0

    def forget_shift(self) -> None:
        """Let workers be themselves again."""
        self._rows[:, 2] = 0

    def _slot(self, worker: int, number: int) -> torch.Tensor:
        start = _ROW_HEAD + number % self._num_slots * self._size
        slot: torch.Tensor = self._rows[worker, start : start + self._size]
        return slot
