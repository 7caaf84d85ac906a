"""Epochs of a stream that workers of torch's DataLoader, or of webdataset's WebLoader, share."""

from __future__ import annotations

import torch

from wdskit.engine.stream_position import Position


class SharedEpochs:
    """Epochs and positions in memory that all processes of a torch DataLoader share: workers that do not persist are
    gone when their epoch ends. Two slots a worker, by the parity of the epoch: the start of the epoch that runs, which
    a repeated epoch goes back to, and the start of the next one.

    Args:
        max_workers: Worker processes that can use it; the main process counts as one.
        num_numbers: Most numbers of a position.
    """

    _HEAD = 4  # of a slot: epoch + 1, rank, world size, workers

    def __init__(self, max_workers: int, num_numbers: int) -> None:
        self.max_workers = max_workers
        self._set = torch.zeros(2, dtype=torch.int64).share_memory_()  # calls of `set` so far, and the last epoch
        # For each worker: calls of `set` that it has followed, its next epoch, and the one behind its last.
        self._workers = torch.zeros((max_workers, 3), dtype=torch.int64).share_memory_()
        slots = torch.zeros((max_workers, 2, self._HEAD + num_numbers), dtype=torch.int64)
        self._slots = slots.share_memory_()

    def set(self, epoch: int) -> None:
        """Make `epoch` the next one to run in every worker."""
        self._set[1] = epoch
        self._set[0] += 1

    def next(self, worker: int) -> int:
        """The epoch that a worker is to run: the one set last, or the one behind its last."""
        if self._workers[worker, 0] != self._set[0]:
            self._workers[worker, :2] = self._set
        return int(self._workers[worker, 1])

    def finish(self, worker: int, epoch: int) -> None:
        """Note that a worker has finished `epoch`."""
        self._workers[worker, 1:] = epoch + 1

    def last_finished(self, worker: int) -> int:
        """The epoch that a worker has finished last, -1 before the first."""
        return int(self._workers[worker, 2]) - 1

    def save(self, worker: int, epoch: int, ranks: tuple[int, int, int], position: Position) -> None:
        """Keep where a worker stands at the start of `epoch`; `ranks` is (rank, world size, workers)."""
        slot = self._slots[worker, epoch % 2]
        slot[0] = 0
        numbers = [*ranks, *position.numbers()]
        slot[1 : len(numbers) + 1] = torch.tensor(numbers, dtype=torch.int64)
        slot[0] = epoch + 1

    def load(self, worker: int, epoch: int, ranks: tuple[int, int, int]) -> Position | None:
        """What was kept for the start of `epoch` under the same ranks; None where nothing was."""
        slot = self._slots[worker, epoch % 2].tolist()
        return Position.of_numbers(slot[self._HEAD :]) if slot[: self._HEAD] == [epoch + 1, *ranks] else None
