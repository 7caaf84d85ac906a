"""What the columns of an Arrow table become: an image, a key, a class, and JSON."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wdskit.codecs.fields import NPY_FIELDS
from wdskit.errors import PackError
from wdskit.packing.sources.records import CLASS_FIELD, IMAGE_COLUMNS, Records

if TYPE_CHECKING:
    import pyarrow as pa

_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 (plain arithmetic; the zone is written behind it)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
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
    to_json: Mapping[str, Callable[[pa.Array], list[Any]]] = field(repr=False)

    @property
    def classes(self) -> dict[str, int]:
        """Number of each class by name; empty where the table has none."""
        names = self.labels.get(self.class_column or "", [])
        return {name: number for number, name in enumerate(names)}


def need_pyarrow(path: str) -> Any:
    """The module.

    Raises:
        PackError: It is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as err:
        raise PackError(f"{path}: this is read by pyarrow. Install it: pip install 'wdskit[tables]'.") from err
    return pa


def sort_columns(schema: pa.Schema, features: Mapping[str, Any], path: str, records: Records) -> ArrowColumns:
    """What the columns of a table are.

    Args:
        schema: Their names and types.
        features: What Hugging Face's `datasets` says of them; empty where it says nothing.
        path: Of the table, for messages.
        records: Column with the image, by default one of `IMAGE_COLUMNS`, or the only one of Image features; and which
            fields are made of columns.

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
    labels = {name: _class_names(features[name]) for name in names if _is_class_label(features.get(name))}
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


def read_features(text: bytes | None, path: str) -> dict[str, Any]:
    """The features in the JSON that `datasets` writes, below `features` or `info`.

    Raises:
        PackError: It is no such JSON.
    """
    try:
        found = json.loads(text or b"{}")
        features = found.get("features") or (found.get("info") or {}).get("features") or {}
    except (ValueError, RecursionError, AttributeError) as err:
        raise PackError(f"{path}: what it says of its features is no JSON of `datasets`: {err}.") from err
    return features if isinstance(features, dict) else {}


def _find_image(schema: pa.Schema) -> str | None:
    names = [name for name in IMAGE_COLUMNS if name in schema.names and _image_kind(schema.field(name).type)]
    if names:
        return names[0]
    structs = [name for name in schema.names if _image_kind(schema.field(name).type) == "struct"]
    return structs[0] if len(structs) == 1 else None


def _image_kind(kind: pa.DataType) -> str:
    """`path`, `bytes`, `struct`, or nothing where a column of this type has no image."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        below = {kind.field(number).name: _image_kind(kind.field(number).type) for number in range(kind.num_fields)}
        return "struct" if below == {"bytes": "bytes", "path": "path"} else ""
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    if is_bytes or types.is_fixed_size_binary(kind):
        return "bytes"
    return "path" if _is_text(kind) else ""


def _is_text(kind: pa.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_class_label(feature: Any) -> bool:
    return isinstance(feature, dict) and feature.get("_type") == "ClassLabel"


def _class_names(feature: Mapping[str, Any]) -> list[str]:
    names = feature.get("names")
    return [str(name) for name in names] if isinstance(names, list) else []


def _class_column(labels: Mapping[str, list[str]], names: list[str]) -> str | None:
    if "cls" in names:
        return "cls" if "cls" in labels else None
    if "label" in labels:
        return "label"
    return next(iter(labels)) if len(labels) == 1 else None


# Values for JSON.


def _converter(path: str, name: str, kind: pa.DataType) -> Callable[[pa.Array], list[Any]]:
    from pyarrow import types

    storage = getattr(kind, "storage_type", None)
    if storage is not None:
        return _of_storage(_converter(path, name, storage))
    if types.is_timestamp(kind):
        return _timestamps(kind.unit, "Z" if kind.tz else "")
    if types.is_date(kind):
        return lambda array: [value and value.isoformat() for value in array.to_pylist()]
    if types.is_decimal(kind):
        return lambda array: [None if value is None else format(value, "f") for value in array.to_pylist()]
    if _image_kind(kind) == "bytes":
        msg = f"{path}: its column {name!r} holds bytes ({kind}), which JSON has not."
        remedy = (
            f"If these are the images, say so: --image-column {name}. If not, name their field: --field EXT={name}."
        )
        raise PackError(f"{msg}\n  {remedy}")
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
    return bool(
        types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    ) or _is_text(kind)


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


def _of_storage(convert: Callable[[pa.Array], list[Any]]) -> Callable[[pa.Array], list[Any]]:
    return lambda array: convert(array.storage)


def _timestamps(unit: str, zone: str) -> Callable[[pa.Array], list[Any]]:
    """ISO 8601 with as many digits as the unit has; instants of a zone in UTC. No zone's table is asked."""
    per_second = _PER_SECOND[unit]
    digits = len(str(per_second)) - 1

    def text(value: int) -> str:
        seconds, part = divmod(value, per_second)
        stamp = (_EPOCH + dt.timedelta(seconds=seconds)).isoformat()
        return f"{stamp}.{part:0{digits}d}{zone}" if digits else f"{stamp}{zone}"

    def convert(array: pa.Array) -> list[Any]:
        values = array.view("int64").to_pylist()
        return [None if value is None else text(value) for value in values]

    return convert
