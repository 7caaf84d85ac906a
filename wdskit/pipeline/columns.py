"""A batch by columns: where nothing but built-in field stages stand before `batched`, one loop a field, not a sample.

It gives what the same stages give sample by sample. Where it cannot (the samples differ in their fields, one is bad,
whatever is raised), it gives nothing, and the samples are made one by one: then the error, or the sample that stands in
for a bad one, is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from wdskit.codecs.columns import NpyColumn, decode_column
from wdskit.codecs.fields import NPY_FIELDS
from wdskit.codecs.images import is_image_field
from wdskit.dataset.many import Spans
from wdskit.order.base import Ints
from wdskit.pipeline.buffering import Batched
from wdskit.pipeline.collate import Collate, collate
from wdskit.pipeline.each import Each
from wdskit.pipeline.functions import Decode, OnValue, Rename, ToDict, ToTuple
from wdskit.pipeline.run import Origin
from wdskit.pipeline.shards import OpenShards

Empty: TypeAlias = Callable[[Sequence[int], torch.dtype], torch.Tensor]
Column: TypeAlias = Spans | NpyColumn | list[Any]
"""One field of all samples: bytes that are still where they were read, arrays that are, or values."""

_LISTED = frozenset({str, bytes, dict, list, type(None)})
"""Types of which a batch is a list."""

_MOST_MISSES = 8  # batches in a row that could not be made so, before it is not tried any more


def fresh(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of undefined values in memory of its own."""
    return torch.empty(tuple(shape), dtype=dtype)


class _NotColumns(Exception):
    """This batch is not one that can be made by columns."""


class Columns:
    """Makes batches by columns.

    Args:
        shards: Where samples are read.
        steps: The stages before `batched`.
        collate: The default one.

    Attributes:
        num_made: Batches that were made so.
    """

    def __init__(
        self, shards: OpenShards, steps: Sequence[Decode | Rename | ToTuple | ToDict], collate: Collate
    ) -> None:
        self.shards = shards
        self.steps = tuple(steps)
        self.collate = collate
        self.num_made = 0
        self._misses = 0

    def make(self, places: Ints, shards: Ints, samples: Ints, empty: Empty = fresh) -> tuple[Any, Origin] | None:
        """The batch of some samples and its origin, whose `members` are the first and the last; None where it has to be
        made of samples one by one.

        Args:
            places: Positions in the endless sequence, (n,).
            shards: Their shards.
            samples: Their numbers in these.
            empty: Makes the tensors that arrays are stacked into.
        """
        if self._misses >= _MOST_MISSES:
            return None
        try:
            made = self._make(places, shards, samples, empty)
        except Exception:  # noqa: BLE001 (it comes again sample by sample, where it is told or forgiven)
            made = None
        self._misses = self._misses + 1 if made is None else 0
        self.num_made += made is not None
        return made

    def _make(self, places: Ints, shards: Ints, samples: Ints, empty: Empty) -> tuple[Any, Origin] | None:
        found = self.shards.read_many(shards, samples, viewed=_is_viewed)
        if found is None:
            return None
        columns: Any = {"__key__": found.keys, "__url__": found.paths, **found.fields}
        for step in self.steps:
            columns = _run(step, columns)
        first, last = (
            Origin(found.paths[at], found.keys[at], 0, int(places[at]), self.shards.part(int(shards[at])))
            for at in (0, -1)
        )
        if isinstance(columns, dict):
            images = {name for name in columns if name in self.collate.fields or is_image_field(name)}
            batch: Any = {name: _batch(column, name in images, empty) for name, column in columns.items()}
        else:
            slots = self.collate.slots
            batch = tuple(_batch(column, place in slots, empty) for place, column in enumerate(columns))
        return batch, last._replace(members=(first, last))


def columns_of(shards: OpenShards, each: Each, batched: Batched | None) -> Columns | None:
    """What makes the batches of a planned pipeline by columns; None where its stages or its collate are not such."""
    if batched is None or not isinstance(batched.collate, Collate) or each.parts:
        return None
    steps = [step.function.function if isinstance(step.function, OnValue) else None for step in each.steps]
    fit = [step for step in steps if isinstance(step, (Decode, Rename, ToTuple, ToDict))]
    return Columns(shards, fit, batched.collate) if len(fit) == len(steps) else None


def _is_viewed(field: str) -> bool:
    return field.rpartition(".")[2] in NPY_FIELDS


def _run(step: Decode | Rename | ToTuple | ToDict, columns: Any) -> Any:
    """The columns behind a step. The steps but `decode` take fields by their names, whatever the values are."""
    if not isinstance(step, Decode):
        return step(columns)
    return {name: _decoded(step, name, column) for name, column in columns.items()}


def _decoded(decode: Decode, name: str, column: Column) -> Column:
    if not isinstance(column, Spans) or not decode.takes(name, b""):
        return column
    if is_image_field(name):
        if decode.spec is None:
            return column
        raise _NotColumns
    return decode_column(name, column)


def _batch(column: Column, is_image: bool, empty: Empty) -> Any:  # noqa: FBT001 (private)
    """What `collate` makes of the column's values."""
    if isinstance(column, Spans):
        return column.cut()
    if isinstance(column, NpyColumn):
        stacked = None if is_image else _stacked(column, empty)
        if stacked is not None:
            return stacked
        column = column.arrays()
    if set(map(type, column)) <= _LISTED:
        return column.copy()  # a field may stand at two places
    return collate([(value,) for value in column], frozenset({0} if is_image else ()))[0]


def _stacked(column: NpyColumn, empty: Empty) -> torch.Tensor | None:
    """Arrays of one shape and a common dtype as one tensor, each copied once; None for others."""
    if column.shape is None or column.dtype.kind not in "biufc" or not column.dtype.isnative:
        return None
    dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
    stacked = empty((len(column), *column.shape), dtype)
    column.copy_to(stacked.numpy())
    return stacked
