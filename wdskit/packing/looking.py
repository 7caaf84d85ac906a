"""Reading all rows of a plan before the first is packed: what is wrong with each, and the digests of their images."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from wdskit.errors import RowError, WdskitError
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.fill import check_rows
from wdskit.packing.recorded import Rows
from wdskit.packing.sources import Progress, Tell
from wdskit.packing.store import Spool
from wdskit.packing.transforms import Treatment
from wdskit.shards.parallel import map_shards

_CHECK_ROWS = 256  # rows that a process checks at a time


def look_at_rows(
    spool: Spool, treatment: Treatment, workers: int, tell: Tell, *, treats: bool
) -> Iterator[tuple[int, RowError | bytes | None]]:
    """What is wrong with each row, or where nothing is and duplicates count, the digest of its images.

    Args:
        spool: All rows.
        treatment: What happens to them.
        workers: Processes that read them.
        tell: Told how far it is.
        treats: Whether to treat them as packing will; otherwise they are read only.

    Yields:
        Number of the row and what was found, in their order.
    """
    check = functools.partial(check_rows, treatment=treatment, treats=treats)
    blocks = np.frombuffer(spool.blocks, dtype=np.uint32)
    total = int(blocks.sum(dtype=np.int64)) * BLOCK_BYTES
    number = num_bytes = 0
    for verdicts in map_shards(check, _Pieces(spool), workers=workers):
        if isinstance(verdicts, WdskitError):
            raise verdicts
        yield from enumerate(verdicts, start=number)
        num_bytes += int(blocks[number : number + len(verdicts)].sum(dtype=np.int64)) * BLOCK_BYTES
        number += len(verdicts)
        tell(Progress("checking", number, num_bytes, len(spool), total))


class _Pieces(Sequence[Rows]):
    """All rows of a spool, some hundred at a time."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def __len__(self) -> int:
        return (len(self._spool) + _CHECK_ROWS - 1) // _CHECK_ROWS

    @overload
    def __getitem__(self, number: int) -> Rows: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Rows]: ...

    def __getitem__(self, number: int | slice) -> Rows | Sequence[Rows]:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * _CHECK_ROWS
        return self._spool.take(np.arange(start, min(start + _CHECK_ROWS, len(self._spool))))
