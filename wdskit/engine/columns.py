"""Make batches field by field in place of sample by sample, if only wdskit's field stages precede `batched`.

The batches are equal to the batches that the same stages make sample by sample. If the samples of a batch differ in
their fields, or a sample is bad, `engine.batch` makes the batch sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from wdskit.codecs.columns import NpyColumn, decode_column
from wdskit.codecs.fields import is_path
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.sample_columns import RawColumn
from wdskit.engine.reader import SampleReader
from wdskit.order.base import Ints
from wdskit.stages.base import NO_ORIGIN, Origin, Step
from wdskit.stages.batching import Batcher
from wdskit.stages.collate import Collate, Memory, RaggedArrays, has_torch_dtype, make_ragged, offsets_of
from wdskit.stages.fields import FieldDecoder, Rename, ToDict, ToTuple, warn_of_bytes

Column: TypeAlias = NpyColumn | list[Any]
"""One field of all samples: the bytes that were read (a `RawColumn`), arrays in these bytes, or a list of values."""

_LISTED = frozenset({str, bytes, dict, list, type(None)})
"""Types of values whose batch is a list."""


class _NotColumns(Exception):
    """This batch cannot be made by columns."""


class BatchColumns:
    """Makes batches field by field.

    Args:
        steps: The stages before `batched`.
        collate: wdskit's own collate function.
    """

    def __init__(self, steps: Sequence[FieldDecoder | Rename | ToTuple | ToDict], collate: Collate) -> None:
        self.steps = tuple(steps)
        self.collate = collate

    def make(
        self,
        reader: SampleReader,
        places: Ints,
        shards: Ints,
        samples: Ints,
        bounds: Sequence[slice],
        memory: Memory,
        *,
        has_origins: bool,
    ) -> list[tuple[Any, Origin]] | None:
        """Return (batch, origin) for each batch. The origin's `members` are the origins of its first and last sample.

        Return None if the batches must be made sample by sample: the samples differ in their fields, or an error
        occurred, for example because a sample is bad. No Exception is raised.

        Args:
            reader: Reads the samples.
            places: Positions of the samples in the endless sequence, (n,).
            shards: Numbers of the samples' shards, (n,).
            samples: Numbers of the samples in their shards, (n,).
            bounds: The rows of each batch.
            memory: Gives the memory of batches.
            has_origins: Whether the origins are needed. If False, each origin is `NO_ORIGIN`.
        """
        try:
            found = reader.read_columns(shards, samples)
            if found is None:
                return None
            columns: Any = {"__key__": found.keys, "__url__": found.paths, **found.fields}
            for step in self.steps:
                columns = _apply_step(step, columns)
            self.collate.check_ragged(columns)
            slots = list(columns.items() if isinstance(columns, dict) else enumerate(columns))
            batches: list[tuple[Any, Origin]] = []
            for bound in bounds:
                batch = {
                    slot: _collate_column(self.collate, slot, _part(column, bound), memory) for slot, column in slots
                }
                origin = NO_ORIGIN
                if has_origins:
                    first, last = (
                        Origin(found.paths[at], found.keys[at], 0, int(places[at]), reader.part(int(shards[at])))
                        for at in (bound.start, bound.stop - 1)
                    )
                    origin = last._replace(members=(first, last))
                batches.append((batch if isinstance(columns, dict) else tuple(batch.values()), origin))
        except Exception:  # noqa: BLE001 (raised again when the samples are made one by one)
            return None
        return batches


def columns_of(steps: Sequence[Step], batched: Batcher | None) -> BatchColumns | None:
    """Return the `BatchColumns` of the stages before `batched`; None if the samples must be made one by one.

    Batches can be made by columns if all stages are field stages of wdskit, no stage decodes images or reads a path in
    JSON, and `batched` has no collate function of the user.
    """
    if batched is None or not isinstance(batched.collate, Collate):
        return None
    functions = [step.function for step in steps]
    field_steps = [each for each in functions if isinstance(each, (FieldDecoder, Rename, ToTuple, ToDict))]
    decoders = [each for each in field_steps if isinstance(each, FieldDecoder) and each.images is not None]
    if len(field_steps) < len(functions):
        return None
    if any(not each.only or any(map(is_image_field, each.only)) for each in decoders):
        return None
    names = [name for each in field_steps if not isinstance(each, FieldDecoder) for name in each.sources]
    if any(is_path(name) for alternatives in names for name in alternatives.split(";")):
        return None
    return BatchColumns(field_steps, batched.collate)


def _part(column: Column, at: slice) -> Column:
    """Return the column of the samples in a slice."""
    if isinstance(column, NpyColumn):
        return column.part(at)
    return RawColumn(column[at]) if isinstance(column, RawColumn) else column[at]


def _apply_step(step: FieldDecoder | Rename | ToTuple | ToDict, columns: Any) -> Any:
    """Return the columns after a stage. `columns` is a dict by field name, or a tuple; it does not change.

    Raises:
        _NotColumns: A column has images that the stage decodes.
        Exception: The stage fails.
    """
    if not isinstance(step, FieldDecoder):
        return step(columns)
    step.check_fields(columns)
    return {name: _decoded(step, name, column) for name, column in columns.items()}


def _decoded(decode: FieldDecoder, name: str, column: Column) -> Column:
    if not isinstance(column, RawColumn) or not decode.takes(name, b""):
        return column
    if is_image_field(name):
        if decode.images is None:
            return column
        raise _NotColumns
    warn_of_bytes(name)
    return decode_column(name, column)


def _collate_column(collate: Collate, slot: str | int, column: Column, memory: Memory) -> Any:
    """Return the batch of one column, equal to the batch that `Collate` makes.

    Args:
        collate: Says which slots are ragged, and which are images.
        slot: The field name or tuple index of the column.
        column: One value for each sample. Decoded images are not allowed.
        memory: Gives the memory of the batch.

    Raises:
        _NotColumns: The column has bytes, and `slot` is ragged.
        Exception: The values cannot be collated.
    """
    if collate.is_ragged(slot):
        if isinstance(column, RawColumn):
            raise _NotColumns  # bytes cannot be ragged
        found = _ragged(column, memory) if isinstance(column, NpyColumn) else None
        return found or make_ragged(column.arrays() if isinstance(column, NpyColumn) else column, str(slot), memory)
    if isinstance(column, RawColumn):
        return [*column]
    if isinstance(column, NpyColumn) and not collate.roles.is_image(collate.roles.names_at(slot)):
        shapes = column.shapes
        if len(set(shapes)) == 1:
            stacked = _joined(column, (len(shapes), *shapes[0]), memory)
            if stacked is not None:
                return stacked
    if isinstance(column, NpyColumn):
        column = column.arrays()
    if set(map(type, column)) <= _LISTED:
        return column
    return collate.column(slot, column, memory)


def _ragged(column: NpyColumn, memory: Memory) -> RaggedArrays | None:
    """Return the arrays of a column as a ragged batch. Return None if an array has no axis, if the arrays differ in
    more than the size of the first axis, or if `_joined` cannot join them.
    """
    shapes = column.shapes
    rests = {shape[1:] if shape else None for shape in shapes}
    if len(rests) > 1 or None in rests:
        return None
    offsets = offsets_of([shape[0] for shape in shapes])
    values = _joined(column, (int(offsets[-1]), *shapes[0][1:]), memory)
    return None if values is None else RaggedArrays(values, offsets)


def _joined(column: NpyColumn, shape: tuple[int, ...], memory: Memory) -> NDArray[Any] | None:
    """Return the arrays of a column, one after the other, as one array of `shape`. Return None if `column.dtype` is
    None, or if torch has no such dtype or byte order.
    """
    dtype = column.dtype
    if dtype is None or not has_torch_dtype(dtype) or not dtype.isnative:
        return None
    joined = memory.empty(shape, dtype)
    column.copy_to(joined)
    return joined
