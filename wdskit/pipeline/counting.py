"""How many items an epoch yields, and how many samples go in before the first comes out, as the stages alone tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wdskit.config.spec import StageSpec
from wdskit.engine.sample import Each
from wdskit.order.draws import share
from wdskit.stages.batching import Batcher
from wdskit.stages.buffering import EpochCut, Shuffle, Slice

_FOREIGN_PATIENCE = 1_000_000  # samples that a stage which is not ours may hold back


def count_of(stages: Sequence[Any], cut: int | None) -> Callable[[int, int], int] | None:
    """A function (worker, workers) -> items of that worker's epoch; None where only running tells.

    Args:
        stages: The running stages.
        cut: Position of with_epoch among them, None without.
    """
    if cut is None or not all(isinstance(stage, (EpochCut, Each, Batcher, Shuffle, Slice)) for stage in stages[cut:]):
        return None
    return _Count(tuple(stages[cut:]))


class _Count:
    def __init__(self, stages: tuple[Any, ...]) -> None:
        self.stages = stages

    def __call__(self, worker: int, num_workers: int) -> int:
        """Items of one worker's epoch."""
        count = share(self.stages[0].n, worker, num_workers)
        for stage in self.stages[1:]:
            if isinstance(stage, Batcher):
                count = -(-count // stage.size) if stage.partial else count // stage.size
            elif isinstance(stage, Slice):
                stop = num_workers * count if stage.stop is None else min(stage.stop, num_workers * count)
                mine = range(worker, stop, num_workers)
                count = sum(number >= stage.start and (number - stage.start) % stage.step == 0 for number in mine)
        return count


def patience_of(specs: Sequence[Any], num_threads: int) -> int:
    """Samples that may be read without one coming out before silence is an error: those that stages hold or pass over.

    Args:
        specs: The whole pipeline; a slice counts whatever the number of workers that share it.
        num_threads: Each of them, and each value it works on ahead, holds one more.
    """
    patience, unit = 4 * num_threads, 1
    for spec in specs:
        if not isinstance(spec, StageSpec):
            patience += _FOREIGN_PATIENCE
            continue
        if spec.kind in {"batch", "stream"}:
            patience += unit * _held(spec)
        if spec.kind == "batch":
            unit *= _held(spec)
        elif spec.name == "unbatched":
            unit = 1
    return patience


def _held(spec: Any) -> int:
    """Values of its own input that a stage takes before it gives one."""
    if spec.name == "slice":
        return int(spec.start + spec.step)
    return int(getattr(spec, "size", 0) or getattr(spec, "global_size", 0))
