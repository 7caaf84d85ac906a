"""Planned pipelines whose batches are made by columns, and the same sample by sample."""

from __future__ import annotations

from typing import Any

from wdskit.engine.planned import PlannedPipeline


def forgo_columns(built: PlannedPipeline) -> None:
    """Let it make its batches sample by sample."""
    object.__setattr__(built.program, "columns", None)


def count_made(built: PlannedPipeline) -> list[int]:
    """Filled with the number of batches of each job that is made by columns."""
    columns, made = built.program.columns, []
    assert columns is not None
    make = columns.make

    def counted(*job: Any) -> Any:
        batches = make(*job)
        made.append(len(batches or ()))
        return batches

    columns.make = counted
    return made
