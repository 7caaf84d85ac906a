"""Rows that are read and treated in threads, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from wdskit.packing.rows import Row
from wdskit.packing.treatment import Field, Treatment

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
