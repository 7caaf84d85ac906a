"""Rows that are read and treated in threads, in their order."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from wdskit.errors import DecodeError, RowError
from wdskit.packing.row import Row, row_error
from wdskit.packing.transforms import Field, Treatment

_log = logging.getLogger(__name__)
_SHOWN_MISSING = 5
_AHEAD = 2
"""Rows a thread that are read or treated before it is their turn: enough that a large image holds nobody up."""


def read_treated(
    rows: Iterable[Row], treatment: Treatment, *, threads: int
) -> Generator[tuple[Row, list[Field]], None, None]:
    """Each row with the fields to pack, in the order of `rows` whatever the number of threads.

    Args:
        rows: What to read.
        treatment: What happens to each.
        threads: With 1 it is done in this one. Others hold some rows each, decoded images among them.

    Raises:
        RowError: The first row, in order, that cannot be packed.
    """
    if threads == 1:
        for row in rows:
            yield row, row.read(treatment)
        return
    if treatment.resize is not None:
        import torch  # noqa: F401 (once, before several threads would want it)
    pool = ThreadPoolExecutor(threads, initializer=treatment.prepare_thread)
    try:
        pending: deque[tuple[Row, Future[list[Field]]]] = deque()
        for row in rows:
            pending.append((row, pool.submit(row.read, treatment)))
            if len(pending) >= _AHEAD * threads:
                row, future = pending.popleft()
                yield row, future.result()
        while pending:
            row, future = pending.popleft()
            yield row, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def required_rows(
    rows: Iterable[Row | RowError], treatment: Treatment, rejected: list[RowError]
) -> Generator[Row | RowError, None, None]:
    """The rows; of those without a field that is required the error, or as `missing` says.

    Args:
        rows: Rows, or what is wrong with them.
        treatment: What is required, of the names that fields have when they are packed.
        rejected: Where rows that are left out are noted.
    """
    if not treatment.require:
        yield from rows
        return
    num_missing = 0
    try:
        for row in rows:
            lacks = None if isinstance(row, RowError) else _lacks(row, treatment)
            if isinstance(row, RowError) or lacks is None:
                yield row
                continue
            problem = f"it has no {lacks.replace(';', ' or ')}; it has {', '.join(name for name, _ in row.fields)}"
            err = row_error(row.where, problem, "Give it one, or use --missing warn or skip.")
            if treatment.missing == "skip":
                rejected.append(err)
            elif treatment.missing == "warn":
                num_missing += 1
                if num_missing <= _SHOWN_MISSING:
                    _log.warning("%s: %s.", err.where, err.problem)
                yield row
            else:
                yield err
    finally:
        if isinstance(rows, Generator):
            rows.close()
    if num_missing > _SHOWN_MISSING:
        _log.warning("%d rows in all lack a field that is required.", num_missing)


def _lacks(row: Row, treatment: Treatment) -> str | None:
    return treatment.lacks(packed_names([name for name, _ in row.fields], treatment))


def packed_names(names: Sequence[str], treatment: Treatment) -> Sequence[str]:
    """Names that fields of these names have when they are packed, as far as that is known without reading them."""
    try:
        return treatment.field_names(names)
    except DecodeError:  # told when the row is read
        return names
