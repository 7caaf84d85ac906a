"""Positions of the rows of planned batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from wdskit.engine.program import Job


def with_positions(loader: Any) -> Iterator[tuple[Any, list[int]]]:
    """Yield the batches of one epoch of a planned loader, each with the positions of its rows in the epoch.

    The position of a padded row is the number of samples in the epoch.
    """
    running = copy.copy(loader._counter).begin()
    for step, batch in enumerate(loader):
        job = Job(running.start, running.steps, step, step + 1)
        yield batch, loader.program.locate(job).epoch_positions.tolist()
        del batch
