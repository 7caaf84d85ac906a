"""Read many samples of local shards at once into columns, in C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.shard import IndexedShard
from wdskit.native import native


class RawColumn(list[bytes]):
    """The bytes of one field of many samples."""


class SampleColumns(NamedTuple):
    """Samples as columns: the key of each sample, and each field of all samples by name. All samples have the same
    fields in the same order.
    """

    keys: list[str]
    fields: dict[str, RawColumn]


def read_natively(
    shards: Sequence[IndexedShard], rows: NDArray[np.int64], numbers: NDArray[np.int64]
) -> SampleColumns | None:
    """Read sample `numbers[i]` of the local shard `shards[rows[i]]`, for each i. Return None if `IndexedShard.read`
    must read the samples instead: the C code is missing, a header is not plain, a sample cannot be read, or
    the samples differ in their fields.
    """
    module = native()
    found = module.read_samples([shard.handle for shard in shards], rows, numbers) if module else None
    if found is None:
        return None
    keys, names, columns = found
    return SampleColumns(keys, dict(zip(names, map(RawColumn, columns), strict=True)))
