"""What the columns of an Arrow table become: an image, a key, a class, fields, and JSON."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from wdskit.codecs.fields import NPY_FIELDS, encode_field
from wdskit.errors import PackError
from wdskit.packing.row import row_error
from wdskit.packing.sources.records import CLASS_FIELD, IMAGE_COLUMNS, Records, to_array

if TYPE_CHECKING:
    import pyarrow as pa

    Converters: TypeAlias = Mapping[str, Callable[[pa.Array], list[Any]]]

_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 (plain arithmetic; the zone is written behind it)
_IMAGE_STRUCT = {"bytes": "bytes", "path": "path"}
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclasses.dataclass(frozen=True)
class ArrowColumns:
    """What each column of a table is.

    Attributes:
        image: The column of encoded images; None where there is none, or where it holds paths, as a table of text does.
        labels: Names of the classes of each column that holds their numbers.
        class_column: That of them which is the sample's `cls`.
        own: Column of each field that is made of bytes or numbers that the JSON has not.
        to_json: The other columns, and what makes values for JSON of theirs.
    """

    image: str | None
    labels: Mapping[str, list[str]]
    class_column: str | None
    own: Mapping[str, str]
    to_json: Converters


def sort_columns(schema: pa.Schema, features: Mapping[str, Any], path: str, records: Records) -> ArrowColumns:
    """What the columns of a table are.

    Raises:
        PackError: A column is missing, stands twice, or has a type that JSON has not.
    """
    try:
        names = schema.names
    except UnicodeDecodeError as err:
        raise PackError(f"{path}: the name of one of its columns is no UTF-8.") from err
    if len(set(names)) < len(names):
        raise PackError(f"{path}: two of its columns have one name: {', '.join(map(repr, names))}.")
    image_column, fields = records.image_column, records.fields
    for option, column in (("image-column", image_column), *(("field", column) for column in fields.values())):
        if column is not None and column not in names:
            there = ", ".join(map(repr, names))
            raise PackError(f"{path}: it has no column {column!r}; it has {there}. Mend --{option}.")
    image = image_column if image_column is not None else _find_image(schema)
    kind = _image_kind(schema.field(image).type) if image is not None else ""
    labels = {name: found for name in names if (found := _class_names(features.get(name))) is not None}
    for name in labels:
        if f"{name}_name" in names:
            raise PackError(f"{path}: its column '{name}_name' stands where the name of {name!r} should. Rename it.")
    encoded = image if kind in {"bytes", "struct"} else None
    own = {
        field: column
        for field, column in fields.items()
        if field.rpartition(".")[2] in NPY_FIELDS or _image_kind(schema.field(column).type) == "bytes"
    }
    left_out = {encoded, *own.values()}
    to_json = {name: _converter(path, name, schema.field(name).type) for name in names if name not in left_out}
    class_column = fields.get(CLASS_FIELD) or _class_column(labels, names)
    return ArrowColumns(encoded, labels, class_column if class_column in labels else None, own, to_json)


def _find_image(schema: pa.Schema) -> str | None:
    kinds = {name: _image_kind(schema.field(name).type) for name in schema.names}
    structs = [name for name, kind in kinds.items() if kind == "struct"]
    named = next((name for name in IMAGE_COLUMNS if kinds.get(name)), None)
    return named or (structs[0] if len(structs) == 1 else None)


def _image_kind(kind: pa.DataType) -> str:
    """`path`, `bytes`, `struct`, or nothing where a column of this type has no image."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        return "struct" if {part.name: _image_kind(part.type) for part in kind} == _IMAGE_STRUCT else ""
    if any(check(kind) for check in _checks("binary large_binary binary_view fixed_size_binary")):
        return "bytes"
    return "path" if any(check(kind) for check in _checks("string large_string string_view")) else ""


def _checks(names: str) -> list[Callable[[pa.DataType], bool]]:
    from pyarrow import types

    return [getattr(types, f"is_{name}") for name in names.split()]


def _class_names(feature: Any) -> list[str] | None:
    """The names of the classes, by number; None where this is no feature of classes."""
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names")
    return [str(name) for name in names] if isinstance(names, list) else []


def _class_column(labels: Mapping[str, list[str]], names: list[str]) -> str | None:
    if "cls" in names:
        return "cls"
    return "label" if "label" in labels else next(iter(labels)) if len(labels) == 1 else None


def _converter(path: str, name: str, kind: pa.DataType) -> Callable[[pa.Array], list[Any]]:
    """What makes values for JSON of a column of this type."""
    from pyarrow import types

    storage = getattr(kind, "storage_type", None)
    if storage is not None:
        convert = _converter(path, name, storage)
        return lambda array: convert(array.storage)
    if types.is_timestamp(kind):
        return _timestamps(kind.unit, "Z" if kind.tz else "")
    if types.is_date(kind):
        return lambda array: [value and value.isoformat() for value in array.to_pylist()]
    if types.is_decimal(kind):
        return lambda array: [None if value is None else format(value, "f") for value in array.to_pylist()]
    if _image_kind(kind) == "bytes":
        msg = f"{path}: its column {name!r} holds bytes ({kind}), which JSON has not."
        raise PackError(
            f"{msg}\n  If these are the images, say so: --image-column {name}. "
            f"If not, name their field: --field EXT={name}."
        )
    if not _is_plain(kind):
        msg = f"{path}: its column {name!r} has the type {kind}, which JSON has not."
        raise PackError(
            f"{msg}\n  Write it as text or numbers, or leave it out; arrays become fields: --field npy={name}."
        )
    return _to_list


def _is_plain(kind: pa.DataType) -> bool:
    """Whether JSON has it: null, truth values, numbers, text; lists, structs and maps (as lists of pairs) of these."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if types.is_nested(kind):
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    return _image_kind(kind) == "path" or any(check(kind) for check in _checks("null boolean integer floating"))


def _to_list(array: pa.Array) -> list[Any]:
    """Values as Python has them; those of a dictionary once each: a page may say in a few bytes that a million rows
    hold the same megabyte.
    """
    indices = getattr(array, "indices", None)
    if indices is None:
        values: list[Any] = array.to_pylist()
        return values
    if len(indices) == 1:  # where the text of another row may be no UTF-8
        return [array[0].as_py()]
    known = array.dictionary.to_pylist()
    return [None if at is None else known[at] for at in indices.to_pylist()]


def _timestamps(unit: str, zone: str) -> Callable[[pa.Array], list[Any]]:
    """ISO 8601 with as many digits as the unit has; instants of a zone in UTC. No zone's table is asked."""
    per_second = _PER_SECOND[unit]
    digits = len(str(per_second)) - 1

    def text(value: int) -> str:
        seconds, part = divmod(value, per_second)
        stamp = (_EPOCH + dt.timedelta(seconds=seconds)).isoformat()
        return f"{stamp}.{part:0{digits}d}{zone}" if digits else f"{stamp}{zone}"

    return lambda array: [None if value is None else text(value) for value in array.view("int64").to_pylist()]


def encode_cell(field: str, column: str, cell: pa.Scalar, where: str) -> bytes:
    """The bytes of a field that is made of a column of bytes, or of one of numbers.

    Raises:
        RowError: It holds neither, or not a number everywhere.
    """
    value = cell.as_py()
    if isinstance(value, bytes):
        return value
    try:
        dtype = None
        if isinstance(value, list):
            numbers = cell.values
            while hasattr(numbers.type, "value_type") and not numbers.null_count:
                numbers = numbers.flatten()
            if numbers.null_count:
                raise ValueError("one of its numbers is null")  # noqa: TRY301
            dtype = numbers.type.to_pandas_dtype()
        return encode_field(field, to_array(value, dtype))
    except (ValueError, TypeError, NotImplementedError) as err:
        raise row_error(where, f"its column {column!r}: {err}", "Mend it, or use --skip-bad.") from err


def json_values(converters: Converters, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...] | str]:
    """The values of each row for its JSON, or what is wrong with them."""
    parts = [(batch.column(name), convert) for name, convert in converters.items()]
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
