"""Rows from records, such as the rows of a table: an image, a key, and columns that become the sample's JSON."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, NPY_FIELDS, TEXT_FIELDS, decode_field, encode_field
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.keys import check_field
from wdskit.errors import DecodeError, KeyRuleError, PackError, RowError
from wdskit.packing.json_merge import refuse_constant, to_json
from wdskit.packing.labels import ClassNames, is_utf8, label_number, read_label
from wdskit.packing.references import FieldBytes
from wdskit.packing.row import SAME_FIELD, Row, field_of, file_bytes, make_row, row_error

IMAGE_COLUMNS = ("image", "file_name", "path", "filepath")
CORRECT_OR_SKIP = "Correct it, or use --skip-bad."
KEY_COLUMN = "key"
_MAX_FLOAT = 1 << 53  # whole numbers up to here are exact as floats
_ENCODED = TEXT_FIELDS | INT_FIELDS | JSON_FIELDS | NPY_FIELDS


@dataclass(frozen=True)
class Records:
    """Options that decide how a record, such as a row of a table, becomes a row to pack.

    Attributes:
        folder: Folder to which the paths of images and other files are relative.
        image_column: Column with the image's path. None: the first of `IMAGE_COLUMNS` that is not empty in the record.
            A column from which `fields` takes another file does not count.
        key_column: Column with the key. None: the value of the column `key` if it is not empty; else the path, without
            its extension, of the image or of another file; else the row's number. The path of an image does not count
            if the column of the images has bytes.
        allow_no_image: True accepts a row without an image field. False makes such a row an error.
        fields: The column that each additional field is made from, by field name; see `parse_fields`.
        classes: The classes in the column of `cls`; None if the column has class numbers.
        omit: Columns that `json` leaves out. An omitted column `cls` gives no label, unless `fields` uses the column.
    """

    folder: str
    image_column: str | None = None
    key_column: str | None = None
    allow_no_image: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    classes: ClassNames | None = None
    omit: Sequence[str] = ()

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
        """Return the row of a record: `json` with its columns, the image, the fields of `self.fields`, and `cls` from a
        column `cls`.

        Args:
            record: Values by column.
            number: Number of the record in its source, for a row without another key (see `key_column`).
            where: Place of the record, for messages.
            keys: The option `--keys`: "given", "clean" or "hashed".
            fields: Fields that the row already has, such as an image whose bytes are in the table; None for no fields.
            text: The JSON text of the record, stored as `json` unless a column is omitted; None if there is no such
                text.
            image_column: The column from which the caller has read the image. `fields` then has the image, unless the
                row has no image. None: this method finds the image by its path in the record.

        Raises:
            RowError: A column is missing, a value is invalid or cannot be written as JSON, a file does not exist, two
                fields have the same name, or the record has no image and `allow_no_image` is False.
        """
        made = dict(fields or {})
        path = self._image_path(record, where) if image_column is None else None
        if path is not None:
            image = self.image_file(path, where)
            if image.keys() & made.keys():
                raise field_taken(min(image), where)
            made.update(image)
        made["json"] = self._json(record, text, where)
        made.update(self.column_fields(record, {*made}, where))
        if CLASS_FIELD in record and not {CLASS_FIELD} & {*self.fields, *self.omit, *made}:
            made.update(self._label(record[CLASS_FIELD], CLASS_FIELD, where))
        given = self._key(record, where)
        if path is None and image_column is None:  # the path of another file, such as a sound
            path = _first_path(record, [name for name in IMAGE_COLUMNS if name in self._file_columns], where)
        origin = given or path or f"row-{number:09d}"
        key = key_of_path(origin) if path and not given else origin
        row = make_row(key, made, where, keys=keys, path=origin)
        if not self.allow_no_image and not any(map(is_image_field, made)):
            raise self._no_image(record, image_column, where)
        return row

    def column_fields(
        self, record: Mapping[str, Any], existing: AbstractSet[str], where: str
    ) -> Iterator[tuple[str, FieldBytes]]:
        """Yield name and data of each field in `self.fields`. A column with an empty value gives no field.

        `existing` has the names of the fields that the row already has. An existing `cls` is kept: no other `cls` is
        made.

        Raises:
            RowError: The record lacks the column, a value does not fit its field, the file of a value does not exist,
                or a field other than `cls` is in `existing`.
        """
        for name, column in self.fields.items():
            if name in existing:
                if name == CLASS_FIELD:
                    continue
                raise field_taken(name, where)
            value = column_value(record, column, "field", where)
            if name == CLASS_FIELD:
                yield from self._label(value, column, where)
                continue
            if value is None or value == "":
                continue
            kind = name.rpartition(".")[2]
            try:
                if isinstance(value, str) and kind not in _ENCODED:
                    yield name, self._file(image_path(value, column, where), where)
                elif kind in NPY_FIELDS:
                    yield name, encode_field(name, to_array(value))
                elif kind in INT_FIELDS:
                    number = read_label(value)
                    if number is not None:
                        yield name, encode_field(name, number)
                else:
                    yield name, encode_field(name, value)
            except (DecodeError, ValueError) as err:
                raise row_error(where, f"its column {column!r}: {err}", CORRECT_OR_SKIP) from err

    def _label(self, value: Any, column: str, where: str) -> Iterator[tuple[str, bytes]]:
        """Yield ("cls", bytes) for the value of a column. Yield nothing if the value is None, NaN or blank text.
        RowError: The value is not a label, or not one of the classes.
        """
        try:
            number = label_number(value, self.classes)
        except ValueError as err:
            remedy = CORRECT_OR_SKIP
            if column not in self.fields.values():
                remedy += f" Without a label: --omit {CLASS_FIELD}."
            raise row_error(where, f"its column {column!r}: {err}", remedy) from err
        if number is not None:
            yield CLASS_FIELD, b"%d" % number

    def _json(self, record: Mapping[str, Any], text: str | None, where: str) -> bytes:
        """Return the record as JSON, without the omitted columns. `text` is the JSON text of the record, or None. If no
        column is omitted, `text` is returned. RowError: A value cannot be written as JSON.
        """
        kept = {name: value for name, value in record.items() if name not in self.omit} if self.omit else record
        try:
            encoded = to_json(kept)
        except (ValueError, TypeError) as err:
            column = next((name for name, value in kept.items() if not _is_json(value)), "")
            remedy = f"{CORRECT_OR_SKIP} Or leave the column out of json: --omit {column}."
            raise row_error(where, f"its column {column!r} cannot be written as JSON: {err}", remedy) from err
        return encoded if text is None or self.omit else text.encode()

    def image_file(self, path: str, where: str) -> dict[str, FieldBytes]:
        """Return the field of the image at `path`, with a reference to the file. `where` names the row in messages.
        RowError: The path does not have the extension of an image, or no file has this path. The file is not opened.
        """
        field = field_of(path)
        if not is_image_field(field):
            raise row_error(
                where,
                f"{path!r} does not have the extension of an image",
                "Name an image, or leave it empty. Other files become fields: --field wav=COLUMN --allow-no-image.",
            )
        return {field: self._file(path, where)}

    def _file(self, path: str, where: str) -> FieldBytes:
        # The path in a table is UTF-8, and names its file by these bytes in any locale.
        return file_bytes(os.path.join(self.folder, os.fsdecode(path.encode())), where)

    def _image_path(self, record: Mapping[str, Any], where: str) -> str | None:
        if self.image_column is None:
            return _first_path(record, [name for name in IMAGE_COLUMNS if name not in self._file_columns], where)
        column_value(record, self.image_column, "image-column", where)
        return _first_path(record, [self.image_column], where)

    @cached_property
    def _file_columns(self) -> set[str]:
        """The columns of `fields` that contain paths of files, not texts, numbers or JSON values."""
        return {column for name, column in self.fields.items() if name.rpartition(".")[2] not in _ENCODED}

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
            value = record.get(KEY_COLUMN)
        else:
            value = column_value(record, self.key_column, "key-column", where)
            if value is None or value == "":
                raise row_error(where, f"its column {self.key_column!r} is empty", "Give each row a key.")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value is not None and not isinstance(value, str):
            raise row_error(where, f"its key {value!r} is neither text nor a whole number")
        return value


def _first_path(record: Mapping[str, Any], columns: Iterable[str], where: str) -> str | None:
    """Return the path in the first of `columns` that is not empty in the record; None if all are empty or missing.
    RowError: The value is not text in UTF-8, or has a NUL.
    """
    for name in columns:
        value = record.get(name)
        if value is not None and value != "":
            return image_path(value, name, where)
    return None


def field_taken(name: str, where: str) -> RowError:
    """Return the error for a row whose field `name`, made from a column, has the same name as its image."""
    problem = f"its image is {name!r}, and --field makes {name!r} of another column"
    return row_error(where, problem, f"Give that field another name, such as mask.{name}.")


def _is_json(value: Any) -> bool:
    try:
        to_json(value)
    except (ValueError, TypeError):
        return False
    return True


def column_value(record: Mapping[str, Any], column: str, option: str, where: str) -> Any:
    """Return the value of the column that the option `option` names. RowError: The record does not have the column."""
    if column not in record:
        problem = f"it has no column {column!r}; it has {', '.join(map(repr, record))}"
        raise row_error(where, problem, f"Correct --{option}.")
    return record[column]


def parse_fields(fields: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    """Return the column of each field, by field name. `fields` is such a mapping, texts such as `txt=caption`, or one
    text with commas between the pairs.

    The name of a field decides how its column is used. `cls` is a class number or name. `txt`, `npy`, and names such as
    `a.txt` and `a.json`, encode the value in the column. Any other field takes the bytes in the column, or the file at
    the path in the column.

    Raises:
        PackError: A name is invalid, appears twice, has no column, or is `json`, which always contains all columns.
    """
    if isinstance(fields, Mapping):
        pairs = [(str(name), str(column)) for name, column in fields.items()]
    else:
        if isinstance(fields, str):
            fields = [part.strip() for part in fields.split(",")]
        pairs = [(text.partition("=")[0].strip(), text.partition("=")[2]) for text in fields]
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


def check_json_fields(records: Records, *, takes_label: bool = False) -> None:
    """Check that all fields of `records` can be made from values in a sample's JSON.

    `takes_label` is True if the classes of `records` are also for the field `cls` that the samples already have.

    Raises:
        PackError: A field needs a file. Or `records` has classes but no field `cls`, and `takes_label` is False.
    """
    for name in records.fields:
        if name.rpartition(".")[2] not in _ENCODED:
            raise PackError(f"field: {name!r} cannot be made from JSON. Fields such as txt, cls and npy can.")
    if records.classes is not None and CLASS_FIELD not in records.fields and not takes_label:
        msg = "classes: nothing becomes `cls`. Name the value in the samples' JSON: --field cls=NAME."
        raise PackError(f"{msg}\n  To number classes anew by their names in json: --drop cls --field cls=class.")


def json_fields(records: Records, own: FieldBytes | None, existing: AbstractSet[str]) -> dict[str, bytes]:
    """Return the fields that are made from values in a sample's JSON, by name.

    Args:
        records: Maps each field to a name in the JSON.
        own: The sample's field `json`; None for a sample without the field.
        existing: Names of the fields of the sample.

    Raises:
        ValueError: The sample has no JSON object, the object lacks a name, a value does not fit its field, or a field
            to make is in `existing`.
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
    if taken := sorted(existing & records.fields.keys()):
        raise ValueError(f"it already has the field {taken[0]!r}")
    try:
        made = records.column_fields(record, frozenset(), "json")
        return {name: data for name, data in made if isinstance(data, bytes)}  # all are bytes
    except RowError as err:
        raise ValueError(err.problem) from err


def to_array(value: Any, dtype: Any = None) -> np.ndarray[Any, Any]:
    """Convert a list of numbers, or nested lists of equal length, to an array. `value` may be the JSON text of a list,
    as in a cell of a CSV. `dtype` is the NumPy dtype of the array; None takes the dtype that NumPy infers.

    Raises:
        ValueError: `value` is not a list of numbers, or an integer would be rounded to a float.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value, parse_constant=refuse_constant)
    array = np.asarray(value, dtype)
    if array.dtype.kind not in "biuf" or not isinstance(value, list):
        raise ValueError(f"it holds {str(value)[:60]}, not a list of numbers")
    if array.dtype.kind == "f" and float(np.abs(array).max(initial=0)) >= _MAX_FLOAT:
        exact = np.asarray(value, object).ravel()
        rounded = (each for each, kept in zip(exact, array.ravel().tolist(), strict=True) if each != kept)
        number = next((each for each in rounded if isinstance(each, int)), None)
        if number is not None:
            raise ValueError(f"{number} would be rounded, because the list has floats or numbers over 64 bits")
    return array


def key_of_path(path: str) -> str:
    """Return the normalized path without its last suffix: `./a//b.jpg` gives `a/b`, and `b.seg.png` gives `b.seg`."""
    return os.path.splitext(os.path.normpath(path))[0]


def image_path(value: Any, column: str, where: str) -> str:
    """Return `value`, the path in a column. RowError: The value is not text in UTF-8, or has a NUL."""
    if not isinstance(value, str) or "\x00" in value or not is_utf8(value):
        raise row_error(where, f"its column {column!r} holds {value!r}, not a path")
    return value
