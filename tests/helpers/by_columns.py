"""Switch a planned pipeline from batches by columns to batches sample by sample, and count batches by columns."""

from __future__ import annotations

from typing import Any

from wdskit.engine.program import Program


def forgo_columns(built: Program) -> None:
    """Let a program make its batches sample by sample."""
    object.__setattr__(built, "columns", None)


def count_made(built: Program) -> list[int]:
    """Return a list that gets, for each job, the number of batches that are made by columns."""
    columns, made = built.columns, []
    if columns is None:  # without the C code
        return made
    make = columns.make

    def counted(*job: Any, **options: Any) -> Any:
        batches = make(*job, **options)
        made.append(len(job[4]) if batches is not None else 0)
        return batches

    columns.make = counted
    return made
