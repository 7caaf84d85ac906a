"""Rows of Arrow tables, some at a time: what those of Parquet and of Hugging Face's data sets have in common."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wdskit.codecs.fields import encode_field
from wdskit.codecs.formats import field_of_bytes
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.references import FieldBytes
from wdskit.packing.row import Row, row_error
from wdskit.packing.sources.arrow_columns import ArrowColumns
from wdskit.packing.sources.class_names import Labels, labels_of, whole_number
from wdskit.packing.sources.records import CLASS_FIELD, Records, image_path, to_array

if TYPE_CHECKING:
    import pyarrow as pa

START_BYTES = 32
"""Enough to tell what an image is."""


class Image(NamedTuple):
    """What a row has of its image: a path, and the first of its bytes with a reference to all; each may be None."""

    path: Any
    start: bytes | None = None
    data: FieldBytes = b""


class ArrowTables:
    """Tables of one schema, one after the other.

    Args:
        paths: Their files.
        records: How a record becomes a row, its folder apart.
        labels: The classes, where they are known; None: those of the column, or the texts in the column of `cls`.

    Attributes:
        classes: Number of each class by name; empty where nobody knows names.

    Raises:
        PackError: The first file cannot be read, or has a column that cannot be packed.
    """

    def __init__(self, paths: Sequence[str], records: Records, labels: Labels | None) -> None:
        self._paths = paths
        self._given = records
        self._schema = self._read_schema(paths[0])
        self._columns = self._sort_columns(self._schema, paths[0], records)
        fields = {name: column for name, column in records.fields.items() if name not in self._columns.own}
        column = fields.get(CLASS_FIELD)
        if labels is not None and self._columns.class_column is not None:
            raise PackError(f"{paths[0]}: classes: its column {column!r} has names of classes already. Leave it out.")
        self.classes = self._columns.classes
        if column is not None and self._columns.class_column is None:
            labels = labels_of(self._values(column), column) if labels is None else labels
            self.classes = dict(labels.numbers)
        self._records = dataclasses.replace(records, fields=fields, labels=labels or Labels())

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a row: `json` with all columns but bytes, the image, `cls` where a column is called so or has the names
        of classes, and the fields that are made of columns.

        Raises:
            PackError: A file cannot be read, or has other columns or classes than the first.
        """
        first_of_all = 0
        for path in self._paths:
            first = 0
            self._check_schema(self._read_schema(path), path)
            records = dataclasses.replace(self._records, folder=os.path.dirname(path))
            for batch, images in self._batches(path):
                yield from self._rows_of(batch, images, records, f"{path}, row", first, first_of_all + first, keys)
                first += batch.num_rows
            first_of_all += first

    def _read_schema(self, path: str) -> pa.Schema:
        raise NotImplementedError

    def _sort_columns(self, schema: pa.Schema, path: str, records: Records) -> ArrowColumns:
        raise NotImplementedError

    def _batches(self, path: str) -> Iterator[tuple[pa.RecordBatch, Iterable[Image] | None]]:
        """Some rows at a time, with their images where these are a column of bytes."""
        raise NotImplementedError

    def _column(self, path: str, name: str) -> Iterator[pa.Array]:
        """A column, some rows at a time."""
        raise NotImplementedError

    def _check_schema(self, schema: pa.Schema, path: str) -> None:
        """Refuse a table of other columns than those of the first."""
        if not schema.equals(self._schema):
            raise PackError(f"{path}: it has other columns or types than {self._paths[0]}.")

    def _values(self, column: str) -> Iterator[Any]:
        for path in self._paths:
            self._check_schema(self._read_schema(path), path)
            for array in self._column(path, column):
                try:
                    yield from array.unique().to_pylist()
                except ValueError as err:
                    raise PackError(f"{path}: its column {column!r} holds text that is no UTF-8.") from err

    def _rows_of(
        self,
        batch: pa.RecordBatch,
        images: Iterable[Image] | None,
        records: Records,
        place: str,
        first: int,
        first_of_all: int,
        keys: str,
    ) -> Iterator[Row | RowError]:
        names = list(self._columns.to_json)
        own = [(field, column, batch.column(column)) for field, column in self._columns.own.items()]
        of_images = None if images is None else iter(images)
        for number, values in enumerate(_values(self._columns, batch)):
            where = f"{place} {first + number}"
            image = None if of_images is None else next(of_images)
            try:
                if isinstance(values, str):
                    raise row_error(where, values)
                record = dict(zip(names, values, strict=True))
                fields = self._label(record, where)
                for field, column, array in own:
                    if array[number].is_valid:
                        fields[field] = _own_field(field, column, array[number], where)
                yield self._row(record, fields, image, records, first_of_all + number, where, keys)
            except RowError as err:
                yield err

    def _row(
        self,
        record: dict[str, Any],
        fields: dict[str, FieldBytes],
        image: Image | None,
        records: Records,
        number: int,
        where: str,
        keys: str,
    ) -> Row:
        if image is None:
            row = records.row(record, number, where, keys=keys, fields=fields)
        else:
            column = str(self._columns.image)
            if image.path:
                record[column] = image.path
            if image.start is not None:
                field = field_of_bytes(image.start)
                if field is None:
                    problem = f"its image begins with {image.start[:8]!r}, as none of a known format does"
                    raise row_error(where, problem, "Mend or remove it, or use --skip-bad.")
                fields[field] = image.data
            elif image.path:
                fields.update(records.image_file(image_path(image.path, column, where), where))
            row = records.row_of(record, fields, None, number, where, keys=keys, column=column)
        json_bytes = len(dict(row.fields)["json"])  # type: ignore[arg-type]
        if json_bytes > MAX_ROW_BYTES:
            raise row_error(where, f"its json has {json_bytes} bytes, over the {MAX_ROW_BYTES} of a sample's")
        return row

    def _label(self, record: dict[str, Any], where: str) -> dict[str, FieldBytes]:
        """The class: its number as a field, its name beside its number."""
        fields: dict[str, FieldBytes] = {}
        for name, classes in self._columns.labels.items():
            number = whole_number(record[name])
            if record[name] is not None and (number is None or not -1 <= number < len(classes)):
                raise row_error(where, f"its {name!r} is {record[name]!r}, and there are {len(classes)} classes")
            record[f"{name}_name"] = None if number is None or number < 0 else classes[number]
            if number is not None and name == self._columns.class_column:
                fields[CLASS_FIELD] = b"%d" % number
        return fields


def _own_field(field: str, column: str, cell: pa.Scalar, where: str) -> bytes:
    """The bytes of a field that is made of a column of bytes, or of one of numbers.

    Raises:
        RowError: It holds neither, or not a number everywhere.
    """
    value = cell.as_py()
    if isinstance(value, bytes):
        return value
    try:
        dtype = _number_type(cell.values) if isinstance(value, list) else None
        return encode_field(field, to_array(value, dtype))
    except (ValueError, TypeError, NotImplementedError) as err:
        raise row_error(where, f"its column {column!r}: {err}", "Mend it, or use --skip-bad.") from err


def _number_type(values: pa.Array) -> Any:
    """The type of the numbers in lists of lists.

    Raises:
        ValueError: One is null.
    """
    while hasattr(values.type, "value_type") and not values.null_count:
        values = values.flatten()
    if values.null_count:
        raise ValueError("one of its numbers is null")
    return values.type.to_pandas_dtype()


def _values(columns: ArrowColumns, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...] | str]:
    """The values of each row for its JSON, or what is wrong with them."""
    parts = [(batch.column(name), convert) for name, convert in columns.to_json.items()]
    try:
        found = [convert(array) for array, convert in parts]
    except (ValueError, OverflowError):  # text that is no UTF-8, a year 200,000: one row's fault
        for number in range(batch.num_rows):
            try:
                yield tuple(convert(array.slice(number, 1))[0] for array, convert in parts)
            except (ValueError, OverflowError) as err:
                yield f"one of its values cannot be written as JSON: {err}"
    else:
        yield from zip(*found, strict=True) if found else ((),) * batch.num_rows
