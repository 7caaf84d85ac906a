"""Rows from batches of an Arrow table, a batch at a time: Parquet files and data sets of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wdskit.codecs.formats import field_of_bytes
from wdskit.errors import RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.arrow_cells import image_parts, image_paths
from wdskit.packing.arrow_columns import ArrowColumns
from wdskit.packing.records import Records, image_path, whole_number
from wdskit.packing.references import FieldBytes
from wdskit.packing.rows import Row, row_error

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ArrowRows:
    """How batches become rows.

    Attributes:
        columns: What the columns are.
        records: How a record becomes a row.
        keys: As `rows.make_row` takes it.
        refer: From the cells of a batch's images, a cell's number in the batch and in the table, and its bytes' number:
            the reference to it.
        place: From a row's number in the table, what messages call it.
    """

    columns: ArrowColumns
    records: Records
    keys: str
    refer: Callable[[Any, int, int, int], FieldBytes]
    place: Callable[[int], str]

    def rows(self, batch: pa.RecordBatch, first: int, first_of_all: int, cells: Any = None) -> Iterator[Row | RowError]:
        """The rows of a batch.

        Args:
            batch: Some rows of a table.
            first: The number of the first one in its table.
            first_of_all: The number of the first one in all tables.
            cells: Those of the images, where these are not in the batch; with the methods of `Cells` that `refer` uses,
                `size` and `start`.
        """
        names = list(self.columns.to_json)
        image = self.columns.image
        paths = None
        at = -1 if image is None else batch.schema.get_field_index(image)
        if cells is not None:
            paths = image_paths(batch.column(at)) if at >= 0 else None
        elif at >= 0:
            paths, cells = image_parts(batch.column(at))
        for number, values in enumerate(_values(self.columns, batch)):
            where = self.place(first + number)
            try:
                if isinstance(values, str):
                    raise row_error(where, values)
                record = dict(zip(names, values, strict=True))
                yield self._row(record, paths, cells, (number, first + number, first_of_all + number), where)
            except RowError as err:
                yield err

    def _row(
        self, record: dict[str, Any], paths: list[Any] | None, cells: Any, at: tuple[int, int, int], where: str
    ) -> Row:
        number, in_table, in_all = at
        fields = self._label(record, where)
        if cells is None:
            row = self.records.row(record, in_all, where, keys=self.keys, fields=fields)
        else:
            path = None if paths is None else paths[number]
            size = cells.size(number)
            if path and self.columns.image is not None:
                record[self.columns.image] = path
            if size is not None:
                field = field_of_bytes(cells.start(number))
                if field is None:
                    problem = f"its image begins with {cells.start(number)[:8]!r}, as none of a known format does"
                    raise row_error(where, problem, "Mend or remove it, or use --skip-bad.")
                fields[field] = self.refer(cells, number, in_table, size)
            elif path:
                fields.update(self.records.image_file(image_path(path, str(self.columns.image), where), where))
            column = self.columns.image
            row = self.records.row_of(record, fields, None, in_all, where, keys=self.keys, column=column)
        json_bytes = len(dict(row.fields)["json"])  # type: ignore[arg-type]
        if json_bytes > MAX_ROW_BYTES:
            raise row_error(where, f"its json has {json_bytes} bytes, over the {MAX_ROW_BYTES} of a sample's")
        return row

    def _label(self, record: dict[str, Any], where: str) -> dict[str, FieldBytes]:
        """The class: its number as a field, its name beside its number."""
        fields: dict[str, FieldBytes] = {}
        for name, classes in self.columns.labels.items():
            number = whole_number(record[name])
            if record[name] is not None and (number is None or not -1 <= number < len(classes)):
                raise row_error(where, f"its {name!r} is {record[name]!r}, and there are {len(classes)} classes")
            record[f"{name}_name"] = None if number is None or number < 0 else classes[number]
            if number is not None and name == self.columns.class_column:
                fields["cls"] = b"%d" % number
        return fields


def _values(columns: ArrowColumns, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...] | str]:
    """The values of each row for its JSON, or what is wrong with them."""
    parts = [(batch.column(batch.schema.get_field_index(name)), convert) for name, convert in columns.to_json.items()]
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
