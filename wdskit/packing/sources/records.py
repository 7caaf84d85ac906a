"""Rows from records, such as the rows of a table: an image, a key, and columns that become the sample's JSON."""

from __future__ import annotations

import contextlib
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, NPY_FIELDS, TEXT_FIELDS, encode_field
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.keys import check_field
from wdskit.errors import DecodeError, KeyRuleError, PackError
from wdskit.limits import MAX_COCO_BYTES, MAX_ROW_BYTES
from wdskit.packing.labels import read_label
from wdskit.packing.row import (
    SAME_FIELD,
    Field,
    File,
    LabelledJson,
    Row,
    SourceFiles,
    Values,
    bad_row,
    field_of,
    file_field,
    make_row,
    size_of,
)
from wdskit.packing.sources.base import Reading

IMAGE_COLUMNS = ("image", "file_name", "path", "filepath")
KEY_COLUMN = "key"
ENCODED = TEXT_FIELDS | INT_FIELDS | JSON_FIELDS | NPY_FIELDS
"""Last components of the names of fields that are made from values. A text in another field is the path of a file."""

_MAX_FLOAT = 1 << 53  # whole numbers up to here are exact as floats
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def to_json(value: Any, text: str | None = None) -> bytes:
    """Return compact JSON in UTF-8 with the keys in the order of `value`. NaN becomes null.

    `text` is the JSON text that `value` was read from; it is returned unless it has a NaN.

    Raises:
        ValueError: The value contains infinity or a lone surrogate, or is nested too deeply.
        TypeError: JSON cannot represent the type of a value or of a key.
    """
    try:
        try:
            encoded = _encode(value).encode()
        except UnicodeEncodeError:
            raise
        except ValueError:
            return _encode(without_nan(value)).encode()
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err
    return encoded if text is None else text.encode()


def without_nan(value: Any) -> Any:
    """Return a JSON value with None in place of each NaN. The value itself is not changed."""
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r} appears twice")
    return found


def _only_nan(text: str) -> float:
    if text != "NaN":
        raise ValueError(f"{text} is not JSON")
    return float(text)


_decode = json.JSONDecoder(object_pairs_hook=_unique_members, parse_constant=_only_nan).decode


def parse_json(text: str) -> Any:
    """Return the value of JSON, with NaN as a float. ValueError: It is not JSON, or an object has a name twice."""
    try:
        return _decode(text)
    except RecursionError as err:
        raise ValueError("it is nested too deeply") from err


def read_document(path: str) -> Any:
    """Return the value of a JSON file, which is read as a whole. PackError: It cannot be read, or is not JSON."""
    try:
        if os.path.getsize(path) > MAX_COCO_BYTES:
            raise PackError(f"{path}: it has more than the {MAX_COCO_BYTES} bytes that wdskit reads at once.")
        with open(path, encoding="utf-8-sig") as file:
            return parse_json(file.read())
    except OSError as err:
        raise PackError(f"{path}: cannot be read: {err.strerror}.") from err
    except ValueError as err:
        raise PackError(f"{path}: it is not JSON: {err}.") from err


def read_object(field: Field, where: str) -> dict[str, Any]:
    """Return the object in a field `json`: bytes or a file.

    Raises:
        RowError: The field of the row at `where` cannot be read, has more than `MAX_ROW_BYTES`, is not JSON in UTF-8,
            or is not an object.
    """
    assert isinstance(field, bytes | File)
    try:
        if size_of(field) > MAX_ROW_BYTES:
            raise ValueError(f"it has more than the {MAX_ROW_BYTES} bytes of a sample's JSON")  # noqa: TRY301
        with contextlib.closing(SourceFiles()) as files:
            data = field if isinstance(field, bytes) else files.read([field])[0]
        found = parse_json(data.decode("utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")  # noqa: TRY301, TRY004
    except (OSError, ValueError) as err:
        raise bad_row(where, f"its json: {getattr(err, 'strerror', None) or err}") from err
    return found


def labelled_json(
    own: Mapping[str, Any], about: Mapping[str, Any], where: str, *, has_label: bool
) -> bytes | LabelledJson:
    """Return a JSON object with the members of `own`, then `cls` if `has_label` is True, then the members of `about`.

    A member that `own` has with the same value is not added again. In the result, a NUL stands for the number of the
    class.

    Raises:
        RowError: `own` has one of these members with another value, or a `cls`, or cannot be written as JSON.
    """
    for name, value in about.items():
        if name in own and (type(own[name]) is not type(value) or own[name] != value):
            raise bad_row(where, f"its json says {name!r} is {own[name]!r}, but it is {value!r}")
    if has_label and CLASS_FIELD in own:
        raise bad_row(where, f"its json has a {CLASS_FIELD!r}, but classes are numbered by their names")
    label = [b'"cls":\0'] if has_label else []
    added = {name: value for name, value in about.items() if name not in own}
    try:
        parts = [to_json(own)[1:-1], *label, to_json(added)[1:-1]]
    except ValueError as err:
        raise bad_row(where, f"its json: {err}") from err
    data = b"{%b}" % b",".join(filter(None, parts))
    return LabelledJson(data) if has_label else data


def keep_key(row: Row, given: str) -> Row:
    """Return the row with the key that the source gave as the member `key` of its `json`, if its own key was changed.
    RowError: The row's `json` is not an object, or has another `key`.
    """
    if not row.is_cleaned:
        return row
    own = read_object(row.fields["json"], row.where) if "json" in row.fields else {}
    both = labelled_json(own, {KEY_COLUMN: given}, row.where, has_label=False)
    return row._replace(fields=dict(sorted({**row.fields, "json": both}.items())))


def make_field(name: str, value: Any) -> Field | None:
    """Return the field `name` of a value: bytes, or what `encode_field` takes for the name; None for an empty label.

    `cls` becomes a `Label`. An `npy` field also takes a list of numbers, or its JSON text.

    Raises:
        ValueError, DecodeError: The value does not fit the field.
    """
    kind = name.rpartition(".")[2]
    if name == CLASS_FIELD:
        return read_label(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if kind in NPY_FIELDS:
        array = value if isinstance(value, np.ndarray) else to_array(value)
        is_plain = array.dtype.kind in "biufc" and not isinstance(array, np.ma.MaskedArray)
        return Values(array) if is_plain else encode_field(name, array)
    if kind in INT_FIELDS:
        label = read_label(value)
        return None if label is None else encode_field(name, label.value)
    return encode_field(name, without_nan(value) if kind in JSON_FIELDS else value)


def to_array(value: Any, dtype: Any = None) -> NDArray[Any]:
    """Convert a list of numbers, or nested lists of equal length, to an array. `value` may be the JSON text of a list.
    `dtype` is the dtype of the array; None for the dtype that NumPy infers.

    Raises:
        ValueError: `value` is not a list of numbers, or an integer would be rounded to a float.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = parse_json(value)
    array = np.asarray(value, dtype)
    if array.dtype.kind not in "biuf" or not isinstance(value, list):
        raise ValueError(f"it holds {str(value)[:60]}, not a list of numbers")
    if array.dtype.kind == "f" and float(np.abs(array).max(initial=0)) >= _MAX_FLOAT:
        exact = np.asarray(value, object).ravel()
        pairs = zip(exact, array.ravel().tolist(), strict=True)
        number = next((each for each, kept in pairs if isinstance(each, int) and each != kept), None)
        if number is not None:
            raise ValueError(f"{number} would be rounded, because the list has floats or numbers over 64 bits")
    return array


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
        texts = [part.strip() for part in fields.split(",")] if isinstance(fields, str) else fields
        pairs = [(text.partition("=")[0].strip(), text.partition("=")[2]) for text in texts]
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


def is_utf8(text: str) -> bool:
    """Return False if a text has lone surrogates, as text from bytes that are not UTF-8 has."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def key_of_path(path: str) -> str:
    """Return the normalized path without its last suffix: `./a//b.jpg` gives `a/b`, and `b.seg.png` gives `b.seg`."""
    return os.path.splitext(os.path.normpath(path))[0]


class Records:
    """Makes the rows of one table.

    Args:
        folder: Folder to which the paths of images and other files are relative.
        how: Names the columns of the image, the key and the fields. Without a name for the image's column, the image is
            in the first of `IMAGE_COLUMNS` that is not empty in a record.
        source: Name of the table.
    """

    def __init__(self, folder: str, how: Reading, source: str) -> None:
        self._folder = folder
        self._how = how
        self._source = source
        self._has_images: bool | None = None  # known after the first record
        # Columns with paths of other files, such as sounds
        self._files = {column for name, column in how.fields.items() if name.rpartition(".")[2] not in ENCODED}

    def row(
        self,
        record: Mapping[str, Any],
        number: int,
        where: str,
        *,
        text: str | None = None,
        made: Mapping[str, Field] | None = None,
        takes_image: bool = True,
    ) -> Row:
        """Return the row of a record: `json` with its columns, the image, the further fields, and `cls` from a column
        `cls`.

        Args:
            record: Values by column.
            number: Number of the record, for a row without another key.
            where: Place of the record, for messages.
            text: The JSON text of the record, stored as `json`; None if there is no such text.
            made: Fields that the row already has; None for no fields.
            takes_image: False if the columns of the record do not name the image, because `made` has it.

        Raises:
            RowError: A column is missing, a value does not fit its field or JSON, a file does not exist, two columns
                make one field, or the record has no image although the table has images.
        """
        fields = dict(made or {})
        path = self._image_path(record, where) if takes_image else None
        if path is not None:
            fields.update(self.image(path, where))
        for name, value in self.fields(record, where).items():
            if name in fields:
                raise bad_row(where, f"two of its columns make the field {name!r}", f"Name one mask.{name}.")
            fields[name] = value
        if CLASS_FIELD not in fields and CLASS_FIELD not in self._how.fields:
            label = self._field(CLASS_FIELD, record.get(CLASS_FIELD), CLASS_FIELD, where)
            fields.update({} if label is None else {CLASS_FIELD: label})
        fields["json"] = _json(record, text, where)
        given = self._key(record, where)
        if path is None and takes_image:
            path = _first_path(record, [name for name in IMAGE_COLUMNS if name in self._files], where)
        key = given or (f"row-{number:09d}" if path is None else key_of_path(path))
        return make_row(key, fields, where, keys=self._how.keys, source=self._source)

    def fields(self, record: Mapping[str, Any], where: str) -> dict[str, Field]:
        """Return the fields that are made from columns. An empty value makes no field. RowError: As for `row`."""
        made = {}
        for name, column in self._how.fields.items():
            field = self._field(name, _value(record, column, where), column, where)
            if field is not None:
                made[name] = field
        return made

    def _field(self, name: str, value: Any, column: str, where: str) -> Field | None:
        if value is None or (isinstance(value, str) and not value):
            return None
        if isinstance(value, str) and name.rpartition(".")[2] not in ENCODED:
            return self._file(_path(value, column, where), where)
        try:
            return make_field(name, value)
        except (DecodeError, ValueError) as err:
            raise bad_row(where, f"its column {column!r}: {err}") from err

    def image(self, path: str, where: str) -> dict[str, Field]:
        """Return the field of the image at `path`. RowError: It is not the path of an image, or there is no file."""
        field = field_of(path)
        if not is_image_field(field):
            problem = f"{path!r} is not the path of an image: it does not end like an image format that wdskit reads"
            raise bad_row(where, problem, "Write the path with its extension. Other files: --field wav=COLUMN.")
        return {field: self._file(path, where)}

    def _file(self, path: str, where: str) -> File:
        # The path in a table is UTF-8, and names its file by these bytes in any locale.
        full = os.path.join(self._folder, os.fsdecode(path.encode()))
        if not path.isascii() and not os.path.lexists(full):
            for form in ("NFC", "NFD"):  # macOS writes NFD
                if os.path.lexists(other := unicodedata.normalize(form, full)):
                    raise bad_row(where, f"{path!r}: there is no such file, but {other!r}, another form in Unicode")
        return file_field(full, where)

    def _image_path(self, record: Mapping[str, Any], where: str) -> str | None:
        own = self._how.image
        columns = [name for name in IMAGE_COLUMNS if name in record and name not in self._files]
        if own is not None:
            _value(record, own, where)
            columns = [own]
        if self._has_images is None:
            self._has_images = bool(columns)
        path = _first_path(record, columns, where)
        if path is None and self._has_images:
            raise bad_row(where, f"it has no image: its column {(columns or IMAGE_COLUMNS)[0]!r} is empty or missing")
        if path is not None and not self._has_images:
            raise bad_row(where, "it has an image, but the first row of the table has no column of images")
        return path

    def _key(self, record: Mapping[str, Any], where: str) -> str:
        own = self._how.key
        value = record.get(KEY_COLUMN) if own is None else _value(record, own, where)
        if value is None or value == "":
            if own is not None:
                raise bad_row(where, f"its column {own!r} is empty, but holds the keys")
            return ""
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise bad_row(where, f"its key {value!r} is neither text nor a whole number")
        return str(value)


def _json(record: Mapping[str, Any], text: str | None, where: str) -> bytes:
    try:
        data = to_json(record, text)
    except (ValueError, TypeError) as err:
        name = next((name for name, value in record.items() if not _is_json(value)), "")
        raise bad_row(where, f"its column {name!r} cannot be written as JSON: {err}") from err
    if len(data) > MAX_ROW_BYTES:
        raise bad_row(where, f"its json has {len(data)} bytes, more than the {MAX_ROW_BYTES} of a sample")
    return data


def _is_json(value: Any) -> bool:
    try:
        to_json(value)
    except (ValueError, TypeError):
        return False
    return True


def _value(record: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in record:
        raise bad_row(where, f"it has no column {column!r}; it has {', '.join(map(repr, record))}")
    return record[column]


def _first_path(record: Mapping[str, Any], columns: Sequence[str], where: str) -> str | None:
    """Return the path in the first of `columns` that is not empty; None if all are empty or missing."""
    column = next((name for name in columns if record.get(name) not in (None, "")), None)
    return None if column is None else _path(record[column], column, where)


def _path(value: Any, column: str, where: str) -> str:
    if isinstance(value, str) and "\x00" not in value and is_utf8(value):
        return value
    way = "A row has one image. Several are a recipe in docs/pack.md." if isinstance(value, list) else ""
    raise bad_row(where, f"its column {column!r} holds {value!r}, not a path", way)
