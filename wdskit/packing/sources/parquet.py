"""Rows from Parquet files, read by pyarrow in small batches. Images are bytes, structs of bytes and path, or paths."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from wdskit.codecs.fields import NPY_FIELDS
from wdskit.codecs.formats import field_of_bytes
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import DecodeError, PackError, RowError
from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.packing.labels import NO_CLASS
from wdskit.packing.row import Field, File, Row, Values, bad_row
from wdskit.packing.sources.base import Reading, Source
from wdskit.packing.sources.records import IMAGE_COLUMNS, Records, make_field, parse_json, to_array
from wdskit.text import install_extra

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_READ_BYTES = 1 << 20
_MAX_ROWS = 1024  # of a batch
_FEW_ROWS = 8  # of a batch whose dictionary may repeat a value of megabytes in each row
_BATCH_BYTES = 4 << 20


class Parquet(Source):
    """Parquet files with one schema. Paths in a file are relative to its folder.

    The image is in the column `how.image`, the first of `IMAGE_COLUMNS`, or the only column of structs of `bytes` and
    `path`. A column whose bytes or arrays become a field is not in `json`; the path of an image is.

    Hugging Face's `datasets` stores class names for columns of class numbers. `json` has such a name as
    `{column}_name`. If no column and no field is `cls`, `cls` is made from the column `label` or the only one with
    class names.

    Args:
        path: Path or pattern as the user wrote it.
        how: How a row becomes a sample.
        files: The files, at least one.

    Attributes:
        classes: The stored class names of the column of `cls`, in the order of their numbers; None without them.

    Raises:
        PackError: pyarrow is not installed, the first file cannot be read, or it lacks a column that `how` names.
    """

    kind: ClassVar[str] = "Parquet table"

    def __init__(self, path: str, how: Reading, files: Sequence[str]) -> None:
        super().__init__(path, how)
        self._files = files
        with _open(files[0]) as file:
            self._schema: pa.Schema = file.schema_arrow
            names: list[str] = self._schema.names
        needed = {how.image, how.key, *how.fields.values()} - {None, *names}
        if needed or len({*names}) < len(names):
            problem = f"it has no column {min(map(str, needed))!r}" if needed else "two columns have the same name"
            raise PackError(f"{files[0]}: {problem}; it has {', '.join(map(repr, names))}.")
        binary = {name: kind for name in names if (kind := _binary_kind(self._schema.field(name).type))}
        fields = {**how.fields}
        self._own = {  # fields of bytes or arrays
            name: fields.pop(name)
            for name, column in how.fields.items()
            if name.rpartition(".")[2] in NPY_FIELDS or column in binary
        }
        free = [name for name in names if name not in self._own.values()]
        structs = [name for name in free if binary.get(name) == "struct"]
        image = how.image or next((name for name in IMAGE_COLUMNS if name in free), None)
        image = structs[0] if image is None and len(structs) == 1 else image
        self._image = image if image in binary else None
        self._labels = {name: found for name, found in _class_names(self._schema, files[0]).items() if name in names}
        label = fields.get(CLASS_FIELD, CLASS_FIELD if CLASS_FIELD in names else None)
        if label is None and self._labels:
            label = "label" if "label" in self._labels else min(self._labels) if len(self._labels) == 1 else None
        self.classes = None if label is None else self._labels.get(label)
        if label is not None:
            fields[CLASS_FIELD] = label
        left_out = {self._image, *self._own.values()} - {*fields.values()}
        self._in_json = [name for name in names if name not in left_out]
        bytes_column = next((name for name in self._in_json if name in binary), None)
        if bytes_column is not None:
            msg = f"{files[0]}: its column {bytes_column!r} holds bytes, which JSON cannot."
            raise PackError(f"{msg}\n  Name its field: --field EXTENSION={bytes_column}, or --image {bytes_column}.")
        self._how = dataclasses.replace(how, fields=fields)

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per row of the files.

        Raises:
            PackError: A file cannot be read or changes, or its columns or classes differ from those of the first file.
        """
        number = 0
        for path in self._files:
            records = Records(os.path.dirname(path), self._how, os.path.basename(path))
            first = number
            with _open(path) as file:
                before = File.whole(path)
                names = _class_names(file.schema_arrow, path)
                if not file.schema_arrow.equals(self._schema) or any(names[key] != self._labels[key] for key in names):
                    raise PackError(f"{path}: its columns, types or classes differ from those of {self._files[0]}.")
                for batch in _batches(file, path):
                    for at, values in enumerate(_json_values(batch.select(self._in_json))):
                        try:
                            yield self._row(records, batch, at, values, number, f"{path}, row {number - first}")
                        except RowError as err:
                            yield err
                        number += 1
                if File.whole(path) != before:
                    raise PackError(f"{path}: the file changed while it was read.")

    def _row(
        self, records: Records, batch: pa.RecordBatch, at: int, values: Sequence[Any] | str, number: int, where: str
    ) -> Row:
        """Return row `at` of `batch`. `values` are its values for `json`, or the problem of one that cannot be read."""
        if isinstance(values, str):
            raise bad_row(where, values)
        record = dict(zip(self._in_json, values, strict=True))
        for name, classes in self._labels.items():
            label = record.get(name)
            if label is not None and not (type(label) is int and NO_CLASS <= label < len(classes)):
                raise bad_row(where, f"its {name!r} is {label!r}, but there are {len(classes)} classes")
            record[f"{name}_name"] = None if label is None or label < 0 else classes[label]
        fields: dict[str, Field] = {}
        for name, column in self._own.items():
            try:
                field = _own_field(name, batch.column(column)[at])
            except (DecodeError, ValueError, TypeError, NotImplementedError) as err:
                raise bad_row(where, f"its column {column!r}: {err}") from err
            if field is not None:
                fields[name] = field
        if self._image is not None:
            image = batch.column(self._image)[at].as_py()
            path = image.get("path") if isinstance(image, dict) else None
            data: bytes | None = image.get("bytes") if isinstance(image, dict) else image
            found = None if data is None else field_of_bytes(data[:12])
            if path:
                record[self._image] = path
            if data is None and not path:
                raise bad_row(where, f"it has no image: its column {self._image!r} is empty")
            if data is not None and found is None:
                raise bad_row(where, f"its image begins with {data[:8]!r}, which is no image format that wdskit reads")
            own = {found: data} if found and data is not None else records.image(str(path), where)
            if own.keys() & fields.keys():
                raise bad_row(where, f"two of its columns make the field {min(own)!r}", f"Name one mask.{min(own)}.")
            fields.update(own)
        return records.row(record, number, where, made=fields, takes_image=self._image is None)


@contextlib.contextmanager
def _open(path: str) -> Iterator[pq.ParquetFile]:
    """Open a file for a `with` block. PackError: pyarrow is not installed, or the file cannot be read."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as err:
        raise PackError(f"{path}: reading it needs pyarrow. {install_extra('tables')}") from err
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
        raise PackError(f"{path}: it cannot be read as Parquet: {str(err).splitlines()[0]}.") from err


def _batches(file: pq.ParquetFile, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at most 1,024 rows and about 4 MB, also of large row groups."""
    import pyarrow as pa

    for group in range(file.num_row_groups):
        about = file.metadata.row_group(group)
        parts = [about.column(number) for number in range(about.num_columns)]
        for part in parts:
            packed_bytes, num_bytes = part.total_compressed_size, part.total_uncompressed_size
            if num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * packed_bytes):
                msg = f"{path}: row group {group}, column {part.path_in_schema!r} claims to unpack {packed_bytes} bytes"
                raise PackError(f"{msg} to {num_bytes}, like a decompression bomb.")
        row_bytes = sum(part.total_uncompressed_size for part in parts) // max(1, about.num_rows)
        # A value is at most as long as its column, and a dictionary can repeat the value in each row.
        longest = max((part.total_uncompressed_size for part in parts if part.physical_type == "BYTE_ARRAY"), default=0)
        few = max(_FEW_ROWS, _BATCH_BYTES // max(1, longest))
        num_rows = max(1, min(_MAX_ROWS, few, _BATCH_BYTES // max(1, row_bytes)))
        for batch in file.iter_batches(num_rows, row_groups=[group], use_threads=False):
            yield batch
            if batch.nbytes >= _BATCH_BYTES // 2:  # otherwise the pool keeps the memory of freed pages
                pa.default_memory_pool().release_unused()


def _binary_kind(kind: pa.DataType) -> str:
    """Return "struct" for the type of an image with `bytes` and `path`, "bytes" for bytes, and "" for other types."""
    from pyarrow import types

    if types.is_struct(kind):
        return (
            "struct" if {part.name: _binary_kind(part.type) for part in kind} == {"bytes": "bytes", "path": ""} else ""
        )
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return "bytes" if "binary" in str(kind).partition("[")[0] and not types.is_nested(kind) else ""


def _class_names(schema: pa.Schema, path: str) -> dict[str, tuple[str, ...]]:
    """Return the class names that `datasets` stored in a schema, by column."""
    data = (schema.metadata or {}).get(b"huggingface", b'{"info":{"features":{}}}')
    try:
        features = parse_json(data.decode())["info"]["features"]
        found = {name: each for name, each in features.items() if each.get("_type") == "ClassLabel"}
        return {name: tuple(map(str, each["names"])) for name, each in found.items() if name in schema.names}
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise PackError(f"{path}: its metadata of `datasets` cannot be read: {err!r}.") from err


def _json_values(batch: pa.RecordBatch) -> Iterator[Sequence[Any] | str]:
    """Yield the values of each row for `json`; the problem if one cannot be read, such as text that is not UTF-8."""
    if not batch.num_columns:
        yield from ((),) * batch.num_rows
        return
    try:
        found = [_to_list(column) for column in batch.columns]
    except ValueError as err:
        if batch.num_rows == 1:
            yield f"one of its values cannot be read: {err}"
            return
        for number in range(batch.num_rows):
            yield from _json_values(batch.slice(number, 1))
    else:
        yield from zip(*found, strict=True)


def _to_list(array: pa.Array) -> list[Any]:
    """Return the values of a column: dates and times as ISO 8601 text, in UTC with `Z` if they have a zone, decimals as
    text, and all others as Python objects.
    """
    import pyarrow as pa

    kind = array.type
    if pa.types.is_decimal(kind):
        return [None if value is None else format(value, "f") for value in array.to_pylist()]
    if not pa.types.is_timestamp(kind) and not pa.types.is_date(kind):
        values: list[Any] = array.to_pylist()
        return values
    zone = "Z" if pa.types.is_timestamp(kind) and kind.tz else ""
    plain = array.view(pa.timestamp(kind.unit)) if zone else array
    return [None if text is None else text.replace(" ", "T") + zone for text in plain.cast(pa.string()).to_pylist()]


def _own_field(name: str, cell: pa.Scalar) -> Field | None:
    """Return the field of a cell with bytes, an image or a list of numbers, whose type is the dtype of the array."""
    import pyarrow as pa

    value = cell.as_py()
    if isinstance(value, dict):
        value = value.get("bytes")
        if value is None:
            raise ValueError("it has no bytes")
    if value is None or not isinstance(value, list):
        return None if value is None else make_field(name, value)
    if isinstance(cell, pa.ExtensionScalar):
        raise ValueError(f"it is a {cell.type}, not a list of numbers")  # noqa: TRY004
    numbers = cell.values
    while hasattr(numbers.type, "value_type") and not numbers.null_count:
        numbers = numbers.flatten()
    if numbers.null_count or isinstance(numbers, pa.ExtensionArray):
        raise ValueError("one of its numbers is null, or it is not a list of numbers")
    return Values(to_array(value, numbers.type.to_pandas_dtype()))
