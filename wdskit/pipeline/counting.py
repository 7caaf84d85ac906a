"""How many items an epoch yields, where that follows from the stages alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wdskit.order.draws import share
from wdskit.pipeline.buffering import Batched, EpochCut, Shuffle, Slice
from wdskit.pipeline.each import Each


def count_of(stages: Sequence[Any], cut: int | None) -> Callable[[int, int], int] | None:
    """A function (worker, workers) -> items of that worker's epoch; None where only running tells.

    Args:
        stages: The running stages.
        cut: Position of with_epoch among them, None without.
    """
    if cut is None or not all(isinstance(stage, (EpochCut, Each, Batched, Shuffle, Slice)) for stage in stages[cut:]):
        return None
    return _Count(tuple(stages[cut:]))


class _Count:
    def __init__(self, stages: tuple[Any, ...]) -> None:
        self.stages = stages

    def __call__(self, worker: int, num_workers: int) -> int:
        """Items of one worker's epoch."""
        count = share(self.stages[0].n, worker, num_workers)
        for stage in self.stages[1:]:
            if isinstance(stage, Batched):
                count = -(-count // stage.size) if stage.partial else count // stage.size
            elif isinstance(stage, Slice):
                stop = num_workers * count if stage.stop is None else min(stage.stop, num_workers * count)
                mine = range(worker, stop, num_workers)
                count = sum(number >= stage.start and (number - stage.start) % stage.step == 0 for number in mine)
        return count
