"""Weights for the samples of a `ShardTable`: the values of a column, or weights that make all values equally likely."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.columns import Column
from wdskit.dataset.shard_table import ShardTable
from wdskit.dataset.subset import Subset

_CHUNK = 1 << 20

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def are_whole(values: NDArray[Any]) -> bool:
    """Return True if all stored values of a column are whole numbers. Texts and bools count as whole; NaN, which is a
    missing number, and infinity do not.
    """
    return values.dtype.kind != "f" or bool((np.isfinite(values) & (values == np.floor(values))).all())


class SampleWeights:
    """The weights of all samples of a table. Samples that the table does not use have weight 0. A pickle does not
    contain the values of the column.

    Args:
        table: The shards. The constructor calls `table.number_all()`, because the weights are those of all samples.
        name: Name of the column.
        balance: If True, the weight of a sample is 1 / number of used samples with the same value, so that all values
            are equally likely. If False, the values of the column are the weights.

    Attributes:
        digest: Hex sha256 of the column and of which samples are used.

    Raises:
        SelectionError: The column does not exist or is damaged. Without `balance`: the column has text, or a used
            sample's weight is negative or not finite. With `balance`: a used sample's value is missing or not whole.
        StorageError: A remote file cannot be copied.
    """

    def __init__(self, table: ShardTable, name: str, *, balance: bool) -> None:
        self._view, columns = table.column(name)
        mask = None if table.counts.sum() == table.file_counts.sum() else table.used()
        self._used = None if mask is None else Subset(table.file_counts, mask)
        table.number_all()
        self._values: NDArray[Any] = np.zeros(0)  # for `balance`: the distinct values
        self._scale: Floats | None = None
        digest = hashlib.sha256("".join(column.sha256 for column in columns).encode())
        digest.update(b"" if self._used is None else self._used.digest())
        digest.update(b"balance" if balance else b"")
        self.digest = digest.hexdigest()
        if balance:
            self._balance(columns[0], mask)
        elif columns[0].values is not None:
            raise columns[0].unfit(f"it is text, which is no weight; use `balance: {name}`")
        else:
            self._check(columns[0])

    def _balance(self, column: Column, mask: NDArray[np.bool_] | None) -> None:
        """Set the weight of each value to 1 / number of used samples with the value. `mask` is True for used samples;
        None if all are used. Raises SelectionError if the value of a used sample is missing or not whole.
        """
        values = self._view.all()
        used = values if mask is None else values[mask]
        if not are_whole(used):
            raise column.unfit("`balance` needs whole numbers or text, and some of its values are fractions or missing")
        self._values, counts = np.unique(used, return_counts=True)
        self._scale = 1.0 / counts

    def _check(self, column: Column) -> None:
        """Raise SelectionError if a weight is negative or not finite, or their sum is 0 or not finite. `column` is for
        the error.
        """
        total = 0.0
        for first in range(0, len(self._view), _CHUNK):
            weights = self(np.arange(first, min(len(self._view), first + _CHUNK)))
            bad = ~(np.isfinite(weights) & (weights >= 0))
            if bad.any():
                at = first + int(np.argmax(bad))
                what = f"the weight of sample {at} (counted over all shards from 0) is {weights[at - first]}"
                raise column.unfit(f"{what}; weights are 0 or more. Leave such samples out with `where`")
            total += float(weights.sum())
        if not 0 < total < np.inf:
            raise column.unfit(f"the sum of its weights is {total}, which is no number above 0")

    def __call__(self, numbers: Ints) -> Floats:
        """Return the weights of samples, float64 (n,). `numbers`, int64 (n,), are sample numbers over all shards."""
        values = self._view.take(numbers)
        if self._scale is None:
            weights = values.astype(np.float64)
        else:  # an unused sample may have a value that is not in `_values`
            at = np.searchsorted(self._values, values)
            weights = self._scale[np.minimum(at, len(self._scale) - 1)]
        if self._used is not None:
            weights[~self._used.contains(numbers)] = 0
        return weights
