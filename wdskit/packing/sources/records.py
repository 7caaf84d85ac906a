"""Rows from records, as tables have them: an image, a key, and columns that become the sample's JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, NPY_FIELDS, TEXT_FIELDS, decode_field, encode_field
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.keys import check_field
from wdskit.errors import DecodeError, KeyRuleError, PackError, RowError
from wdskit.packing.json_merge import to_json
from wdskit.packing.references import FieldBytes
from wdskit.packing.row import SAME_FIELD, Row, field_of, file_bytes, make_row, row_error
from wdskit.packing.sources.class_names import ClassNames, class_number, whole_number

IMAGE_COLUMNS = ("image", "file_name", "path", "filepath")
CLASS_FIELD = "cls"
MEND = "Correct it, or use --skip-bad."
_KEY_COLUMN = "key"
_ENCODED = TEXT_FIELDS | INT_FIELDS | JSON_FIELDS | NPY_FIELDS


@dataclass(frozen=True)
class Records:
    """How a record becomes a row.

    Attributes:
        folder: Image paths are relative to it.
        image_column: Column with the image's path. None: the first of `IMAGE_COLUMNS` that a row has.
        key_column: Column with the key. None: `key` where a row has it, else the image's path without extension, else
            the row's number.
        allow_no_image: A row without an image is a sample too, and not an error.
        fields: Column of each field that is made of one, by the field's name; see `parse_fields`.
        classes: The classes that the column of `cls` names; None where it holds their numbers.
    """

    folder: str
    image_column: str | None = None
    key_column: str | None = None
    allow_no_image: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    classes: ClassNames | None = None

    def row(
        self,
        record: Mapping[str, Any],
        number: int,
        where: str,
        *,
        keys: str,
        fields: Mapping[str, FieldBytes] | None = None,
        text: str | None = None,
        image_column: str | None = None,
    ) -> Row:
        """The row of a record: `json` with all columns, the image, the fields that are made of columns, and `cls` where
        a column of that name holds a whole number.

        Args:
            record: Values by column.
            number: Of the record in its source.
            where: For messages.
            keys: As `make_row` takes it.
            fields: More fields.
            text: The JSON that the record was read from; it is kept as it is.
            image_column: The image's column, where `fields` has the image already, as far as there is one.

        Raises:
            RowError: It cannot be packed.
        """
        made = dict(fields or {})
        path = self._image_path(record, where) if image_column is None else None
        if path is not None:
            made.update(self.image_file(path, where))
        try:
            encoded = to_json(record)
        except (ValueError, TypeError) as err:
            raise row_error(where, f"it cannot be written as JSON: {err}", MEND) from err
        made["json"] = encoded if text is None else text.encode()
        made.update(self.column_fields(record, {*made}, where))
        label = None if CLASS_FIELD in self.fields else whole_number(record.get(CLASS_FIELD))
        if label is not None:
            made.setdefault(CLASS_FIELD, b"%d" % label)
        given = self._key(record, where)
        origin = given or path or f"row-{number:09d}"
        key = key_of_path(origin) if path and not given else origin
        row = make_row(key, made, where, keys=keys, path=origin)
        if not self.allow_no_image and not any(map(is_image_field, made)):
            raise self._no_image(record, image_column, where)
        return row

    def column_fields(
        self, record: Mapping[str, Any], there: AbstractSet[str], where: str
    ) -> Iterator[tuple[str, FieldBytes]]:
        """The fields that are made of columns and not there yet; none of a column that is empty in this row.

        Raises:
            RowError: The field is not made of such a value, or names a file that is not there.
        """
        for name, column in self.fields.items():
            value = None if name in there else _column(record, column, "field", where)
            if value is None or value == "":
                continue
            kind = name.rpartition(".")[2]
            try:
                if name == CLASS_FIELD:
                    yield name, b"%d" % class_number(value, self.classes)
                elif isinstance(value, str) and kind not in _ENCODED:
                    yield name, self._file(image_path(value, column, where), where)
                elif kind in NPY_FIELDS and not isinstance(value, bytes):
                    yield name, encode_field(name, to_array(value))
                else:
                    label = whole_number(value) if kind in INT_FIELDS else None
                    yield name, encode_field(name, value if label is None else label)
            except (DecodeError, ValueError) as err:
                raise row_error(where, f"its column {column!r}: {err}", MEND) from err

    def image_file(self, path: str, where: str) -> dict[str, FieldBytes]:
        """The field of an image by its path; a RowError where that is none."""
        field = field_of(path)
        if not is_image_field(field):
            raise row_error(
                where, f"{path!r} does not have the extension of an image", "Name an image, or leave it empty."
            )
        return {field: self._file(path, where)}

    def _file(self, path: str, where: str) -> FieldBytes:
        # Text of a table is UTF-8, and so is the file's name on the disk, whatever the locale says.
        return file_bytes(os.path.join(self.folder, os.fsdecode(path.encode())), where)

    def _image_path(self, record: Mapping[str, Any], where: str) -> str | None:
        if self.image_column is not None:
            _column(record, self.image_column, "image-column", where)
        for name in IMAGE_COLUMNS if self.image_column is None else (self.image_column,):
            value = record.get(name)
            if value is not None and value != "":
                return image_path(value, name, where)
        return None

    def _no_image(self, record: Mapping[str, Any], column: str | None, where: str) -> RowError:
        column = column or self.image_column or next((name for name in IMAGE_COLUMNS if name in record), None)
        if column is not None:
            remedy = "Give it one, pack it without an image (--allow-no-image), or leave it out (--skip-bad)."
            return row_error(where, f"it has no image: its column {column!r} is empty", remedy)
        listed = f"{', '.join(IMAGE_COLUMNS[:-1])} or {IMAGE_COLUMNS[-1]}"
        problem = f"it has no image: among its columns ({', '.join(map(repr, record))}), none is called {listed}"
        images = (name for name, value in record.items() if isinstance(value, str) and is_image_field(field_of(value)))
        remedy = f"Name the one with the image: --image-column {next(images, 'NAME')}. Or pack samples without one: "
        return row_error(where, problem, f"{remedy}--allow-no-image.")

    def _key(self, record: Mapping[str, Any], where: str) -> str | None:
        if self.key_column is None:
            value = record.get(_KEY_COLUMN)
        else:
            value = _column(record, self.key_column, "key-column", where)
            if value is None or value == "":
                raise row_error(where, f"its column {self.key_column!r} is empty", "Give each row a key.")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value is not None and not isinstance(value, str):
            raise row_error(where, f"its key {value!r} is neither text nor a whole number")
        return value


def _column(record: Mapping[str, Any], column: str, option: str, where: str) -> Any:
    """The value of a column that an option names."""
    if column not in record:
        problem = f"it has no column {column!r}; it has {', '.join(map(repr, record))}"
        raise row_error(where, problem, f"Correct --{option}.")
    return record[column]


def parse_fields(fields: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    """Which field is made of which column, from a mapping or from texts as `txt=caption`.

    `cls` takes class numbers or names; `txt`, `json` and `npy` fields what their names say, also behind a dot
    (`a.txt`); any other is the file whose path the column holds, or its bytes.

    Raises:
        PackError: One is no field, or stands twice, or is `json`, which holds all columns.
    """
    if isinstance(fields, Mapping):
        pairs = [(str(name), str(column)) for name, column in fields.items()]
    else:
        pairs = [(text.partition("=")[0].strip(), text.partition("=")[2].strip()) for text in fields]
    found: dict[str, str] = {}
    for given, column in pairs:
        name = SAME_FIELD.get(given, given)
        try:
            check_field(name)
        except KeyRuleError as err:
            raise PackError(f"field: {err}\n  Write FIELD=COLUMN: txt=caption.") from err
        if not column:
            raise PackError(f"field: {name!r} names no column. Write FIELD=COLUMN: txt=caption.")
        if name in found or name == "json":
            why = "holds all columns already" if name == "json" else "appears twice"
            raise PackError(f"field: {name!r} {why}. Leave it out, or give it another name.")
        found[name] = column
    return found


def check_json_fields(records: Records) -> None:
    """Refuse fields that no value in a sample's JSON can be made to.

    Raises:
        PackError: Names one.
    """
    for name in records.fields:
        if name.rpartition(".")[2] not in _ENCODED:
            raise PackError(f"field: {name!r} cannot be made from JSON. Fields such as txt, cls and npy can.")
    if records.classes is not None and CLASS_FIELD not in records.fields:
        raise PackError("classes: nothing becomes `cls`. Name the value in the samples' JSON: --field cls=NAME.")


def json_fields(records: Records, own: FieldBytes | None, there: AbstractSet[str]) -> dict[str, bytes]:
    """The fields that are made of a sample's JSON.

    Args:
        records: Which field is made of which name in it.
        own: The sample's field `json`; None where it has none.
        there: The fields that the sample has.

    Raises:
        ValueError: There is no JSON object, or one of the names is not in it, or a field is there already.
        OSError: The JSON cannot be read.
    """
    if own is None:
        raise ValueError("it has no json from which to make fields")
    try:
        record = decode_field("json", own if isinstance(own, bytes) else own.read())
    except DecodeError as err:
        raise ValueError(str(err)) from err
    if not isinstance(record, dict):
        raise ValueError(f"its json holds a {type(record).__name__} and no names")  # noqa: TRY004
    if taken := sorted(there & records.fields.keys()):
        raise ValueError(f"it already has the field {taken[0]!r}")
    try:
        made = records.column_fields(record, frozenset(), "json")
        return {name: data for name, data in made if isinstance(data, bytes)}  # which all are
    except RowError as err:
        raise ValueError(err.problem) from err


def to_array(value: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
    """A list of numbers, or of equally long lists of such, as an array; a ValueError of all else."""
    array = np.asarray(value, dtype)
    if array.dtype.kind not in "biuf" or not isinstance(value, list):
        raise ValueError(f"it holds {str(value)[:60]}, not a list of numbers")
    return array


def key_of_path(path: str) -> str:
    """The key that a file's path gives: without extension, `./a//b.jpg` is `a/b`."""
    return os.path.splitext(os.path.normpath(path))[0]


def image_path(value: Any, column: str, where: str) -> str:
    """The path that a column holds; a RowError where it holds none."""
    if not isinstance(value, str) or "\x00" in value or not is_utf8(value):
        raise row_error(where, f"its column {column!r} holds {value!r}, not a path")
    return value


def is_utf8(text: str) -> bool:
    """Whether a text has no half of a surrogate pair: JSON can write one, and `surrogateescape` leaves one for a byte
    that was no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
