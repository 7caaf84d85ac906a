"""`--split`: rows into splits by their keys, as `wdskit split` does it, each with shards of its own."""

from __future__ import annotations

from array import array

import numpy as np

from wdskit.errors import PackError, RowError
from wdskit.packing.plan import Limits, Span
from wdskit.packing.planning import divide_rows
from wdskit.packing.recorded import Ints
from wdskit.packing.spool import Spool
from wdskit.shards.shares import Shares, choose_splits, draws_of, make_draw

_SEED = 0  # the one that `wdskit split` has by default, so that both give a key the same split
_DRAWN_ROWS = 4096


class Splitter:
    """Finds the split of each key. One byte a key is kept: there are at most a hundred splits."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._draw = make_draw(_SEED)
        self._draws: list[bytes] = []
        self._splits = array("B")

    def add(self, key: str) -> None:
        """One key more."""
        self._draws.append(self._draw(key))
        if len(self._draws) == _DRAWN_ROWS:
            self._choose()

    def _choose(self) -> None:
        if not self._draws:
            return
        self._splits.frombytes(choose_splits(draws_of(self._draws), self.shares).astype(np.uint8).tobytes())
        self._draws = []

    def rows_of(self, split: int, kept: Ints | None) -> Ints:
        """The numbers of its keys, of which only `kept` count, all where that is None."""
        self._choose()
        splits = np.frombuffer(self._splits, dtype=np.uint8)
        if kept is None:
            return np.flatnonzero(splits == split)
        rows: Ints = kept[splits[kept] == split]
        return rows


def divide_splits(
    spool: Spool, kept: Ints | None, splitter: Splitter, *, limits: Limits, shuffle: int | None, by_count: bool
) -> tuple[Ints, list[list[Span]]]:
    """As `divide_rows`, split by split: the order of all rows, and the shards of each split.

    A split is shuffled and divided as if its rows were all there are. So its shards depend on its own rows only. One
    without rows has no shards.

    Raises:
        RowError: A row alone is over the limit.
        PackError: So many shards cannot be made of a split.
    """
    orders, shards, start = [], [], 0
    for number, name in enumerate(splitter.shares):
        rows = splitter.rows_of(number, kept)
        try:
            order, spans = _divide(spool, rows, limits, shuffle, by_count=by_count)
        except RowError:
            raise
        except PackError as err:
            raise PackError(f"split {name}: {err}") from err
        orders.append(order)
        shards.append([Span(start + span.start, start + span.stop, span.num_bytes) for span in spans])
        start += len(rows)
    return np.concatenate(orders), shards


def _divide(
    spool: Spool, rows: Ints, limits: Limits, shuffle: int | None, *, by_count: bool
) -> tuple[Ints, list[Span]]:
    if not len(rows):
        if limits.num_shards is not None:
            raise PackError(f"it has no sample, and num_shards asks for {limits.num_shards} shards of it.")
        return rows, []
    order, spans = divide_rows(spool, rows, limits=limits, shuffle=shuffle, by_count=by_count)
    assert order is not None
    return order, spans
