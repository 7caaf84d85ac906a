"""Where workers leave what the next epoch needs: memory shared with the main process.

Workers that do not persist are gone when their epoch ends; the stream goes on where it ended all the same, because each
leaves its position and the origins of what its stages held. Two slots a worker, by the parity of the epoch: the start
of the epoch that runs, which a repeated epoch goes back to, and the start of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_HEAD = 2  # set_epoch calls so far, and the epoch that the last one set
_WORKER_HEAD = 3  # set_epoch calls that this worker has followed, its next epoch, and the one behind its last
_SLOT_HEAD = 4  # epoch + 1, rank, world size, workers
_STANDING_HEAD = 5  # first epoch, draw, sample, left, number of stages that keep values


@dataclass(frozen=True)
class Standing:
    """Where one worker's stream stands between two epochs.

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
    def of_numbers(cls, numbers: Sequence[int]) -> Standing:
        """The opposite of `numbers`."""
        first_epoch, draw, sample, left, num_parts = numbers[:_STANDING_HEAD]
        start = _STANDING_HEAD + 2 * num_parts
        counts = numbers[_STANDING_HEAD : _STANDING_HEAD + num_parts]
        kept = []
        for length in numbers[_STANDING_HEAD + num_parts : start]:
            stop = start + 2 * length
            kept.append(tuple(zip(numbers[start:stop:2], numbers[start + 1 : stop : 2], strict=True)))
            start = stop
        return cls(first_epoch, draw, sample, tuple(counts), tuple(kept), left)


def standing_size(num_keepers: int, capacity: int) -> int:
    """Most numbers of a standing of so many stages that keep values, so many together."""
    return _STANDING_HEAD + 2 * num_keepers + 2 * capacity


class Board:
    """Epoch and standings, shared by all processes that the pipeline is sent to.

    Args:
        max_workers: Worker processes that can use it; the main process counts as one.
        num_buffers: Stages that keep values.
        capacity: Values that all of them together can hold.
    """

    def __init__(self, max_workers: int, num_buffers: int, capacity: int) -> None:
        self.max_workers = max_workers
        self._slot = _SLOT_HEAD + standing_size(num_buffers, capacity)
        self._head = torch.zeros(_HEAD, dtype=torch.int64).share_memory_()
        rows = torch.zeros((max_workers, _WORKER_HEAD + 2 * self._slot), dtype=torch.int64)
        self._rows = rows.share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one to run in every worker."""
        self._head[1] = epoch
        self._head[0] += 1

    def next_epoch(self, worker: int) -> int:
        """The epoch that a worker is to run: the one set last, or the one behind its last."""
        row = self._rows[worker]
        if row[0] != self._head[0]:
            row[0] = self._head[0]
            row[1] = self._head[1]
        return int(row[1])

    def set_one(self) -> int:
        """The epoch that was set last, whatever a worker has finished since: one that is slow to start an iteration may
        start when the next one is set, and finish that one before anybody listens.
        """
        return int(self._head[1])

    def finish(self, worker: int, epoch: int) -> None:
        """Note that a worker has finished `epoch`."""
        self._rows[worker, 1:3] = epoch + 1

    def last_finished(self, worker: int) -> int:
        """The epoch that a worker has finished last, -1 before the first."""
        return int(self._rows[worker, 2]) - 1

    def save(self, worker: int, epoch: int, ranks: tuple[int, int, int], standing: Standing) -> None:
        """Keep where a worker stands at the start of `epoch`; `ranks` is (rank, world size, workers)."""
        slot = self._slot_of(worker, epoch)
        slot[0] = 0
        numbers = [*ranks, *standing.numbers()]
        slot[1 : len(numbers) + 1] = torch.tensor(numbers, dtype=torch.int64)
        slot[0] = epoch + 1

    def load(self, worker: int, epoch: int, ranks: tuple[int, int, int]) -> Standing | None:
        """What was kept for the start of `epoch` under the same ranks; None where nothing was."""
        slot = self._slot_of(worker, epoch)
        if slot[:_SLOT_HEAD].tolist() != [epoch + 1, *ranks]:
            return None
        return Standing.of_numbers(slot[_SLOT_HEAD:].tolist())

    def _slot_of(self, worker: int, epoch: int) -> torch.Tensor:
        start = _WORKER_HEAD + epoch % 2 * self._slot
        slot: torch.Tensor = self._rows[worker, start : start + self._slot]
        return slot
