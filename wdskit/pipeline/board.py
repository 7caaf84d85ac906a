"""Where workers leave what the next epoch needs: memory shared with the main process.

Workers that do not persist are gone when their epoch ends; the stream goes on where it ended all the same, because each
leaves its position and the origins of what its stages held. Two slots a worker, by the parity of the epoch: the start
of the epoch that runs, which a repeated epoch goes back to, and the start of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_HEAD = 2  # set_epoch calls so far, and the epoch that the last one set
_WORKER_HEAD = 3  # set_epoch calls that this worker has followed, its next epoch, and the one behind its last
_SLOT_HEAD = 8  # epoch + 1, rank, world size, workers, first epoch, draw, sample, number of stages that keep values


@dataclass(frozen=True)
class Standing:
    """Where one worker's stream stands between two epochs.

    Attributes:
        first_epoch: The epoch that the stream began with.
        draw: The draw to read next, and
        sample: how many of its samples have been read.
        counts: For each stage that keeps values: how many it has given.
        kept: For each of them: the (draw, sample) of what it holds, in its order.
    """

    first_epoch: int
    draw: int
    sample: int
    counts: tuple[int, ...]
    kept: tuple[tuple[tuple[int, int], ...], ...]


class Board:
    """Epoch and standings, shared by all processes that the pipeline is sent to.

    Args:
        max_workers: Worker processes that can use it; the main process counts as one.
        num_buffers: Stages that keep values.
        capacity: Values that all of them together can hold.
    """

    def __init__(self, max_workers: int, num_buffers: int, capacity: int) -> None:
        self.max_workers = max_workers
        self._slot = _SLOT_HEAD + 2 * num_buffers + 2 * capacity
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

    def finish(self, worker: int, epoch: int) -> None:
        """Note that a worker has finished `epoch`."""
        self._rows[worker, 1:3] = epoch + 1

    def last_finished(self, worker: int) -> int:
        """The epoch that a worker has finished last, -1 before the first."""
        return int(self._rows[worker, 2]) - 1

    def save(self, worker: int, epoch: int, ranks: tuple[int, int, int], standing: Standing) -> None:
        """Keep where a worker stands at the start of `epoch`; `ranks` is (rank, world size, workers)."""
        numbers = [epoch + 1, *ranks, standing.first_epoch, standing.draw, standing.sample, len(standing.kept)]
        numbers += [*standing.counts, *map(len, standing.kept)]
        numbers += [number for part in standing.kept for pair in part for number in pair]
        slot = self._slot_of(worker, epoch)
        slot[0] = 0
        slot[1 : len(numbers)] = torch.tensor(numbers[1:], dtype=torch.int64)
        slot[0] = numbers[0]

    def load(self, worker: int, epoch: int, ranks: tuple[int, int, int]) -> Standing | None:
        """What was kept for the start of `epoch` under the same ranks; None where nothing was."""
        slot = self._slot_of(worker, epoch)
        head = slot[:_SLOT_HEAD].tolist()
        if head[:4] != [epoch + 1, *ranks]:
            return None
        _, _, _, _, first_epoch, draw, sample, num_parts = head
        start = _SLOT_HEAD + 2 * num_parts
        counts = slot[_SLOT_HEAD : _SLOT_HEAD + num_parts].tolist()
        kept = []
        for length in slot[_SLOT_HEAD + num_parts : start].tolist():
            pairs = slot[start : start + 2 * length].reshape(length, 2).tolist()
            kept.append(tuple((major, minor) for major, minor in pairs))
            start += 2 * length
        return Standing(first_epoch, draw, sample, tuple(counts), tuple(kept))

    def _slot_of(self, worker: int, epoch: int) -> torch.Tensor:
        start = _WORKER_HEAD + epoch % 2 * self._slot
        slot: torch.Tensor = self._rows[worker, start : start + self._slot]
        return slot
