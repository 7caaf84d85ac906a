"""Assign the columns of an Arrow table to the image, the class, fields, and JSON; and convert cells to these values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from wdskit.codecs.fields import NPY_FIELDS, decode_field, encode_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import DecodeError, PackError
from wdskit.packing.references import FieldBytes
from wdskit.packing.row import row_error
from wdskit.packing.sources.records import CORRECT_OR_SKIP, IMAGE_COLUMNS, KEY_COLUMN, Records, to_array

if TYPE_CHECKING:
    import pyarrow as pa

    Converters: TypeAlias = Mapping[str, Callable[[pa.Array], list[Any]]]

START_BYTES = 32  # enough to detect the format of an image
_YEAR_DIGITS = 4


class Image(NamedTuple):
    """The image of a row.

    Attributes:
        path: The path in the table, not checked; None if the row has no path.
        start: The first `START_BYTES` bytes of the image; None if the row has no bytes.
        data: The bytes of the image, or a reference that reads these bytes later. Empty if `start` is None.
    """

    path: Any
    start: bytes | None = None
    data: FieldBytes = b""


@dataclass(frozen=True)
class ArrowColumns:
    """How each column of a table is used.

    Attributes:
        image: The column with the bytes of the images; None if the table has no such column.
        labels: Maps each column with class numbers to its class names, in the order of their numbers.
        class_column: The column of `labels` that becomes `cls`; None if no column of `labels` becomes `cls`.
        own: Maps the name of each field that is made from bytes or arrays to its column.
        to_json: Maps each column that goes into `json` to the function that converts its values.
    """

    image: str | None
    labels: Mapping[str, list[str]]
    class_column: str | None
    own: Mapping[str, str]
    to_json: Converters


def assign_columns(schema: pa.Schema, features: Mapping[str, Any], path: str, records: Records) -> ArrowColumns:
    """Decide how each column of a table is used.

    Args:
        schema: Names and types of the columns.
        features: Description of each column by `datasets`, by name; see `features_of`.
        path: The file, for messages.
        records: The options that name columns.

    Raises:
        PackError: A column that an option names is missing. A name of a column is repeated, is not UTF-8, or is
            `X_name`, which the class names of a column `X` need. Or `cls` or `json` cannot store the type of a column.
    """
    from pyarrow import types

    try:
        names = schema.names
    except UnicodeDecodeError as err:
        raise PackError(f"{path}: the name of one of its columns is not UTF-8.") from err
    if len({*names}) < len(names):
        raise PackError(f"{path}: two of its columns have the same name: {', '.join(map(repr, names))}.")
    for option, column in (
        ("image-column", records.image_column),
        *(("field", each) for each in records.fields.values()),
        *(("omit", each) for each in records.omit),
    ):
        if column is not None and column not in names:
            known = ", ".join(map(repr, names))
            raise PackError(f"{path}: it has no column {column!r}; it has {known}. Correct --{option}.")
    labels = class_labels(schema, features)
    for name in labels:
        if f"{name}_name" in names:
            msg = f"{path}: the class names of {name!r} become '{name}_name', but the table has such a column."
            raise PackError(f"{msg} Rename it.")
    kinds = {name: _image_kind(schema.field(name).type) for name in names}
    taken = {*records.fields.values(), *records.omit}
    image = records.image_column or next(
        (name for name in IMAGE_COLUMNS if kinds.get(name) and (name not in taken or kinds[name] == "path")), None
    )
    structs = [name for name in names if kinds[name] == "struct" and name not in taken]
    if image is None and len(structs) == 1:
        image = structs[0]
    encoded = image if image is not None and kinds[image] in {"bytes", "struct"} else None
    own = {
        field: column
        for field, column in records.fields.items()
        if field.rpartition(".")[2] in NPY_FIELDS or kinds[column] in {"bytes", "struct"}
    }
    class_column = records.fields.get(CLASS_FIELD)
    if class_column is None and "cls" in {*names} - {*records.omit}:
        class_column = "cls"
    elif class_column is None:
        left = [name for name in labels if name not in records.omit]
        class_column = "label" if "label" in left else left[0] if len(left) == 1 else None
    if class_column is not None and (
        kinds[class_column] in {"bytes", "struct"} or types.is_nested(schema.field(class_column).type)
    ):
        msg = (
            f"{path}: its column {class_column!r} has the type {schema.field(class_column).type}, which is not a label."
        )
        remedy = f"Write a class number or a name per row. To leave the values out of `cls`: --omit {class_column}"
        raise PackError(f"{msg}\n  {remedy}; or use --field cls=COLUMN with another column.")
    used = {*records.fields.values(), records.image_column, records.key_column, *IMAGE_COLUMNS, KEY_COLUMN}
    in_json = {column for field, column in records.fields.items() if field not in own}
    left_out = {encoded, *({*own.values()} - in_json), *({*records.omit} - used)}
    to_json = {name: _converter(path, name, schema.field(name).type) for name in names if name not in left_out}
    return ArrowColumns(encoded, labels, class_column if class_column in labels else None, own, to_json)


def class_labels(schema: pa.Schema, features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the class names, in the order of their numbers, of each column that `features` describes as a ClassLabel.
    The list of a column is empty if its names are unknown.
    """
    labels = {}
    for column in schema.names:
        feature = features.get(column)
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            names = feature.get("names")
            labels[column] = [str(name) for name in names] if isinstance(names, list) else []
    return labels


def parse_json(data: bytes, path: str) -> dict[str, Any]:
    """Parse JSON from `datasets` and return the object. `path` is the file, for messages.
    PackError: The data are not JSON, or not an object.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise PackError(f"{path}: it is not JSON from `datasets`: {err}.") from err
    if not isinstance(found, dict):
        raise PackError(f"{path}: it holds a {type(found).__name__}, but `datasets` writes an object.")
    return found


def features_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of each column, by name, from `found`, a JSON object that `datasets` wrote. The dict is
    empty if `found` has no descriptions.
    """
    for place in (found, found.get("info")):
        if isinstance(place, dict) and isinstance(place.get("features"), dict):
            return {**place["features"]}
    return {}


def _image_kind(kind: pa.DataType) -> str:
    """Return how a column of the type `kind` can hold images: "path", "bytes", "struct" (bytes and path), or "" for no
    images.
    """
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        is_image = {part.name: _image_kind(part.type) for part in kind} == {"bytes": "bytes", "path": "path"}
        return "struct" if is_image else ""
    name = str(kind).partition("[")[0]
    if name in {"string", "large_string", "string_view"}:
        return "path"
    return "bytes" if name in {"binary", "large_binary", "binary_view", "fixed_size_binary"} else ""


def _converter(path: str, name: str, kind: pa.DataType) -> Callable[[pa.Array], list[Any]]:
    """Return the function that converts a column of the type `kind` to JSON values. `path` and `name`, the file and the
    column, are for the message. PackError: JSON does not have the type.
    """
    import pyarrow as pa
    from pyarrow import types

    storage = getattr(kind, "storage_type", None)
    if storage is not None:
        convert = _converter(path, name, storage)
        if isinstance(kind, pa.FixedShapeTensorType):
            return lambda array: [
                None if each is None else _shape_tensor(each, kind).tolist() for each in convert(array.storage)
            ]
        return lambda array: convert(array.storage)
    if types.is_timestamp(kind) or types.is_date(kind):
        return _times
    if types.is_decimal(kind):
        return lambda array: [None if value is None else format(value, "f") for value in array.to_pylist()]
    if _image_kind(kind) == "bytes":
        msg = f"{path}: its column {name!r} holds bytes ({kind}), which JSON does not have."
        remedy = f"If these are the images, use --image-column {name}. If not, name their field: --field EXT={name}"
        raise PackError(f"{msg}\n  {remedy}, or leave them out: --omit {name}.")
    if not _is_plain(kind):
        msg = f"{path}: its column {name!r} has the type {kind}, which JSON does not have."
        remedy = f"arrays become fields: --field npy={name}"
        if _image_kind(kind) == "struct":
            remedy = f"further images become fields: --image-column COLUMN --field right.jpg={name}"
        raise PackError(f"{msg}\n  Leave it out (--omit {name}), or write it as text or numbers; {remedy}.")
    return _to_list


def _shape_tensor(flat: Any, kind: pa.FixedShapeTensorType) -> np.ndarray[Any, Any]:
    """Return a tensor of type `kind` as an array, with its axes in the order that `kind.permutation` gives.

    `flat` has the elements in the order in which they are stored. If `flat` is an array with one axis, the result has
    its dtype. If `flat` is a list, the result is an array of objects, so that None and text stay.
    """
    array: np.ndarray[Any, Any] = np.asarray(flat, None if isinstance(flat, np.ndarray) else object)
    array = array.reshape(kind.shape)
    return array if kind.permutation is None else array.transpose(kind.permutation)


def _is_plain(kind: pa.DataType) -> bool:
    """Return True if JSON can store values of the type `kind`: null, booleans, integers, floats, text, and lists,
    structs and maps of these types.
    """
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if types.is_nested(kind):
        return all(_is_plain(kind.field(number).type) for number in range(kind.num_fields))
    checks = (types.is_null, types.is_boolean, types.is_integer, types.is_floating)
    return _image_kind(kind) == "path" or any(check(kind) for check in checks)


def _to_list(array: pa.Array) -> list[Any]:
    """Return the values of an array as Python objects. Equal values may be the same object."""
    # Otherwise a page of a few bytes could make a million copies of a text of one megabyte.
    indices = getattr(array, "indices", None)
    if indices is None:
        values: list[Any] = array.to_pylist()
        return values
    if len(indices) == 1:  # the text of another row may be invalid UTF-8
        return [array[0].as_py()]
    known = array.dictionary.to_pylist()
    return [None if at is None else known[at] for at in indices.to_pylist()]


def _times(array: pa.Array) -> list[str | None]:
    """Return dates and times as ISO 8601 text, with the decimals of the array's unit; None for null. Times with a time
    zone are in UTC and end in `Z`.

    Raises:
        ValueError: A year does not have four digits.
    """
    import pyarrow as pa

    zone = ""
    if pa.types.is_timestamp(array.type):
        zone = "Z" if array.type.tz else ""
        array = array.view(pa.timestamp(array.type.unit))
    texts: list[str | None] = array.cast(pa.string()).to_pylist()
    for text in texts:
        if text is not None and text.find("-") != _YEAR_DIGITS:
            raise ValueError(f"the year of {text} does not have four digits")
    return [None if text is None else text.replace(" ", "T") + zone for text in texts]


def encode_cell(field: str, column: str, cell: pa.Scalar, where: str) -> bytes:
    """Return the bytes of the field `field` for a cell that is not null.

    A cell of bytes, or the member `bytes` of a struct, is checked and returned. A list of numbers is encoded. `column`
    and `where` (the place of the row) are for messages.

    Raises:
        RowError: The cell contains neither bytes nor a list of numbers, a number is null, or the cell does not fit the
            field's name.
    """
    import pyarrow as pa

    value = cell.as_py()
    if isinstance(value, dict):  # an image of `datasets`
        value = value["bytes"]
        if value is None:
            raise row_error(where, f"its column {column!r} holds no bytes, only a path", "Save the images as bytes.")
    if isinstance(value, bytes):
        try:
            decode_field(field, value)
        except DecodeError as err:
            raise row_error(where, f"its column {column!r}: {err}", CORRECT_OR_SKIP) from err
        return value
    try:
        dtype = None
        if isinstance(value, list):
            numbers = (cell.value if isinstance(cell, pa.ExtensionScalar) else cell).values
            if isinstance(numbers, pa.ExtensionArray):
                raise ValueError(f"it is a list of {numbers.type}, not of numbers")  # noqa: TRY301, TRY004
            while hasattr(numbers.type, "value_type") and not numbers.null_count:
                numbers = numbers.flatten()
            if numbers.null_count:
                raise ValueError("one of its numbers is null")  # noqa: TRY301
            dtype = numbers.type.to_pandas_dtype()
        array = to_array(value, dtype)
        if isinstance(cell.type, pa.FixedShapeTensorType):
            array = _shape_tensor(array, cell.type)
        return encode_field(field, array)
    except (ValueError, TypeError, NotImplementedError) as err:
        raise row_error(where, f"its column {column!r}: {err}", CORRECT_OR_SKIP) from err


def json_values(converters: Converters, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...] | str]:
    """Yield for each row of `batch` the tuple of its JSON values, in the order of `converters`. For a row with a value
    that JSON cannot store, yield an error message (str) instead of the tuple.
    """
    parts = [(batch.column(name), convert) for name, convert in converters.items()]
    try:
        found = [convert(array) for array, convert in parts]
    except (ValueError, OverflowError):  # invalid UTF-8 or a year 200,000 is an error of one row
        for number in range(batch.num_rows):
            try:
                yield tuple(convert(array.slice(number, 1))[0] for array, convert in parts)
            except (ValueError, OverflowError) as err:
                yield f"one of its values cannot be written as JSON: {err}"
    else:
        yield from zip(*found, strict=True) if found else ((),) * batch.num_rows
