"""Planned pipelines whose batches are made by columns, and the same sample by sample."""

from __future__ import annotations

from typing import Any

from wdskit.engine.program import Program


def forgo_columns(built: Program) -> None:
    """Let it make its batches sample by sample."""
    object.__setattr__(built, "columns", None)


def count_made(built: Program) -> list[int]:
    """Filled with the number of batches of each job that is made by columns."""
    columns, made = built.columns, []
    assert columns is not None
    make = columns.make

    def counted(*job: Any) -> Any:
        batches = make(*job)
        made.append(len(batches or ()))
        return batches

    columns.make = counted
    return made
