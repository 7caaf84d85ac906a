"""Make batches field by field in place of sample by sample, if only wdskit's field stages precede `batched`.

The batches are equal to the batches that the same stages make sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from wdskit.codecs.columns import NpyColumn, RawColumn, decode_column
from wdskit.codecs.fields import is_path
from wdskit.codecs.formats import is_image_field
from wdskit.engine.reader import SampleReader
from wdskit.errors import WdskitError
from wdskit.order.base import Ints
from wdskit.stages.collate import Batcher, Collate, Memory, Ragged, has_torch_dtype
from wdskit.stages.fields import FieldDecoder, Rename, ToDict, ToTuple
from wdskit.stages.run import NO_ORIGIN, NOTHING, Origin, SampleStages

FieldColumn: TypeAlias = NpyColumn | list[Any]
"""One field of all samples: the bytes that were read (a `RawColumn`), arrays in these bytes, or a list of values."""

_LISTED = frozenset({str, bytes, dict, list, type(None)})
"""Types of values whose batch is a list."""


class BatchColumns:
    """Makes batches field by field.

    Args:
        stages: The stages before `batched`: only field stages of wdskit.
        collate: wdskit's own collate function.
        has_origins: Whether stages after `batched` need the origins of batches. Otherwise all are `NO_ORIGIN`.
    """

    def __init__(self, stages: SampleStages, collate: Collate, *, has_origins: bool) -> None:
        self.has_origins = has_origins
        self.stages = stages
        self.collate = collate

    def make(
        self,
        reader: SampleReader,
        positions: Ints,
        shards: Ints,
        samples: Ints,
        bounds: Sequence[slice],
        memory: Memory,
        *,
        epoch: int,
    ) -> list[tuple[Any, Origin]] | None:
        """Return (batch, origin) for each batch. The origin's `members` are those of its first and last sample.

        Return None if the batches must be made sample by sample: C cannot read the samples together, because they
        differ in their fields or one has a header that is not plain; or there is an error, which then has the name of
        its sample and comes after the batches before it.

        Args:
            reader: Reads the samples.
            positions: Positions of the samples in the endless sequence, (n,).
            shards: Numbers of the samples' shards, (n,).
            samples: Numbers of the samples in their shards, (n,).
            bounds: The rows of each batch.
            memory: Gives the memory of batches.
            epoch: Number of the epoch, for the origins.
        """
        try:
            found = reader.read_columns(shards, samples)
            if found is None:
                return None
            columns: Any = {"__key__": found.keys, "__url__": found.paths, **found.fields}
            for step in self.stages.steps:
                columns = _apply(step.function, columns)
            self.collate.check_ragged(columns)
            is_dict = isinstance(columns, dict)
            # True stands for `__valid__`.
            slots = [
                (slot, [True] * len(positions) if column is True else column)
                for slot, column in (columns.items() if is_dict else enumerate(columns))
            ]
            values = [{slot: self._collate(slot, column[bound], memory) for slot, column in slots} for bound in bounds]
        except (WdskitError, OSError):
            return None

        def origin_of(at: int) -> Origin:
            part = reader.part(int(shards[at]))
            return Origin(found.paths[at], found.keys[at], 0, int(positions[at]), part, epoch=epoch)

        made = []
        for bound, value in zip(bounds, values, strict=True):
            origin = NO_ORIGIN
            if self.has_origins:
                ends = origin_of(bound.start), origin_of(bound.stop - 1)
                origin = ends[1]._replace(members=ends)
            made.append((value if is_dict else tuple(value.values()), origin))
        return made

    def _collate(self, slot: str | int, column: FieldColumn, memory: Memory) -> Any:
        """Return the batch of one column, equal to the batch that `Collate` makes."""
        if isinstance(column, NpyColumn):
            is_ragged = self.collate.is_ragged(slot)
            joined = _ragged(column, memory) if is_ragged else _stacked(column, memory)
            if joined is not None:
                return joined
            column = column.arrays()
        elif set(map(type, column)) <= _LISTED and not self.collate.is_ragged(slot):
            return [*column]
        return self.collate.column(slot, column, memory)


def columns_of(stages: SampleStages, batched: Batcher | None, *, has_origins: bool) -> BatchColumns | None:
    """Return the `BatchColumns` of the stages before `batched`; None if the samples must be made one by one.
    `has_origins` is its argument.

    Batches can be made by columns if all stages are field stages of wdskit, no stage decodes images, gives a field the
    name of an image or reads a path in JSON, and `batched` has no collate function of the user.
    """
    if batched is None or not isinstance(batched.collate, Collate):
        return None
    if not all(_is_columnar(step.function) for step in stages.steps):
        return None
    return BatchColumns(stages, batched.collate, has_origins=has_origins)


def _is_columnar(function: object) -> bool:
    if isinstance(function, FieldDecoder):
        return function.images is None or (bool(function.only) and not any(map(is_image_field, function.only)))
    if not isinstance(function, (Rename, ToTuple, ToDict)):
        return False
    if isinstance(function, Rename) and any(map(is_image_field, function.names)):
        return False
    return not any(map(is_path, function.live_before(NOTHING).names or ()))


def _apply(function: Any, columns: Any) -> Any:
    """Return the columns after a stage. `columns` is a dict by field name, or a tuple; it does not change."""
    if not isinstance(function, FieldDecoder):
        return function(columns)
    function.check_fields(columns)
    return {name: _decoded(function, name, column) for name, column in columns.items()}


def _decoded(decode: FieldDecoder, name: str, column: FieldColumn) -> FieldColumn:
    if not isinstance(column, RawColumn) or not decode.takes(name, b"") or is_image_field(name):
        return column
    return decode_column(name, column)


def _stacked(column: NpyColumn, memory: Memory) -> Any:
    """Return the arrays of a column as one array. Return None if their shapes differ, or if `_joined` cannot."""
    shapes = column.shapes
    return _joined(column, (len(shapes), *shapes[0]), memory) if len(set(shapes)) == 1 else None


def _ragged(column: NpyColumn, memory: Memory) -> Ragged | None:
    """Return the arrays of a column as a ragged batch. Return None if an array has no axis, if the arrays differ in
    more than the size of the first axis, or if `_joined` cannot join them.
    """
    shapes = column.shapes
    if not all(shapes) or len({shape[1:] for shape in shapes}) > 1:
        return None
    offsets: Any = np.cumsum([0, *(shape[0] for shape in shapes)], dtype=np.int64)
    values = _joined(column, (int(offsets[-1]), *shapes[0][1:]), memory)
    return None if values is None else Ragged(values, offsets)


def _joined(column: NpyColumn, shape: tuple[int, ...], memory: Memory) -> Any:
    """Return the arrays of a column, one after the other, as one array of `shape`. Return None if `column.dtype` is
    None, or if torch has no such dtype or byte order.
    """
    dtype = column.dtype
    if dtype is None or not has_torch_dtype(dtype) or not dtype.isnative:
        return None
    joined = memory.empty(shape, dtype)
    column.copy_to(joined)
    return joined
