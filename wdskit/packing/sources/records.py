"""The class of all sources, and fields from records, such as the rows of a table: an image, a key, and columns that
become the sample's JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, NPY_FIELDS, TEXT_FIELDS, encode_field
from wdskit.codecs.formats import field_of_bytes, is_image_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import DecodeError, KeyRuleError, PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.labels import read_label
from wdskit.packing.row import Field, File, LabelledJson, Reading, Row, SourceFiles, Values, bad_row, field_of, size_of
from wdskit.shards.make_columns import parse_names

IMAGE_COLUMNS = ("image", "file_name", "path", "filepath")
KEY_COLUMN = "key"
ENCODED = TEXT_FIELDS | INT_FIELDS | JSON_FIELDS | NPY_FIELDS
"""Last components of the names of fields that are made from values. A text in another field is the path of a file."""

_MAX_FLOAT = 1 << 53  # whole numbers up to here are exact as floats


def _text_of(value: Any) -> str:
    """Return the text in JSON of a date, a time or a decimal, which Parquet has."""
    if isinstance(value, bytes):
        raise TypeError(f"bytes, such as {value[:8]!r}, cannot be in json: make them a field of their own")
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_text_of).encode


def to_json(value: Any, text: str | None = None) -> bytes:
    """Return compact JSON in UTF-8 with the keys in the order of `value`. NaN becomes null.

    `text` is the JSON text that `value` was read from; it is returned unless it has a NaN.

    Raises:
        ValueError: The value contains infinity or a lone surrogate.
        TypeError: JSON cannot represent the type of a value or of a key.
        RecursionError: The value is nested too deeply.
    """
    try:
        encoded = _encode(value).encode()
    except ValueError:
        return _encode(without_nan(value)).encode()
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
        raise ValueError(f"a name appears twice in one object: {sorted(name for name, _ in pairs)}")
    return found


parse_json = json.JSONDecoder(object_pairs_hook=_unique_members).decode
"""Return the value of JSON, with NaN as a float.

Raises:
    ValueError: The text is not JSON, or an object has a name twice.
    RecursionError: The text is nested too deeply.
"""


def read_json(field: Field, *, limit: int = MAX_ROW_BYTES) -> Any:
    """Return the value of JSON in UTF-8: bytes or a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has more than `limit` bytes, or is not JSON.
    """
    try:
        if size_of(field) > limit:
            raise ValueError(f"it has more than the {limit} bytes that are read at once")  # noqa: TRY301
        with contextlib.closing(SourceFiles()) as files:
            data = files.read(field) if isinstance(field, File) else field
        assert isinstance(data, bytes)
        return parse_json(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as err:
        name = field.path if isinstance(field, File) else "json"
        raise ValueError(f"{name}: its JSON: {err}") from err


def read_object(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the object in the field `json` of a row; an empty object without the field.

    Raises:
        OSError, ValueError: As for `read_json`, or the JSON is not an object.
    """
    found = read_json(fields["json"]) if "json" in fields else {}
    if not isinstance(found, dict):
        raise ValueError(f"its json is a {type(found).__name__}, not an object")  # noqa: TRY004
    return found


def labelled_json(own: Mapping[str, Any], about: Mapping[str, str], *, has_label: bool) -> bytes | LabelledJson:
    """Return a JSON object with the members of `own`, then `cls` if `has_label` is True, then the members of `about`.

    A member that `own` has with the same value is not added again. In the result, a NUL stands for the number of the
    class.

    Raises:
        ValueError: `own` has one of these members with another value, or a `cls`, or cannot be written as JSON.
    """
    others = [n for n in own if (n in about and own[n] != about[n]) or (n == CLASS_FIELD and has_label)]
    if others:
        raise ValueError(f"its json has another {others[0]!r}: {own[others[0]]!r}")
    added = {name: value for name, value in about.items() if name not in own}
    parts = to_json(own)[1:-1] if own else b"", b'"cls":\0' if has_label else b"", to_json(added)[1:-1]
    data = b"{%b}" % b",".join(filter(None, parts))
    return LabelledJson(data) if has_label else data


def add_field(fields: dict[str, Field], name: str, field: Field | None) -> None:
    """Add a field to the fields of a row, unless it is None. ValueError: The row has the field already."""
    if field is None:
        return
    if name in fields:
        raise ValueError(f"it has the field {name!r} twice. Name one of them NAME.{name}")
    fields[name] = field


def make_field(name: str, value: Any) -> Field | None:
    """Return the field `name` of a value: bytes, or what `encode_field` takes for the name; None for an empty label.

    `cls` becomes a `Label`. An `npy` field also takes a list of numbers, or its JSON text.

    Raises:
        ValueError, DecodeError: The value does not fit the field.
    """
    kind = name.rpartition(".")[2]
    if name == CLASS_FIELD:
        return read_label(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if kind in NPY_FIELDS:
        array = value if isinstance(value, np.ndarray) else to_array(value)
        data = encode_field(name, array)
        return Values(data) if array.dtype.kind in "biufc" else data
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
    value = parse_json(value) if isinstance(value, str) else value
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or not isinstance(value, list):
        raise ValueError(f"{str(value)[:60]} is not a list of numbers")
    large = np.abs(array) >= _MAX_FLOAT  # never NaN
    if array.dtype.kind == "f" and large.any() and (array[large] != np.asarray(value, object)[large]).any():
        raise ValueError("a number would be rounded, because the list has floats or numbers over 64 bits")
    return array if dtype is None else array.astype(dtype)


def parse_pairs(pairs: Mapping[str, str] | str | Iterable[str], option: str) -> dict[str, str]:
    """Return the pairs of an option as a mapping: from a mapping, from texts such as `txt=caption`, or from one text
    with commas between the pairs.

    Raises:
        PackError: A text is not two names with `=` between them, or the first name of two pairs is the same.
    """
    if isinstance(pairs, Mapping):
        return dict(pairs)
    found = [[name.strip() for name in pair.split("=", 1)] for pair in parse_names(pairs)]
    if not all(len(names) == 2 and all(names) for names in found) or len({names[0] for names in found}) < len(found):
        raise PackError(f"{option}: {pairs!r} is not a list of NAME=NAME, each with a first name of its own.")
    return dict(found)


def key_of_path(path: str) -> str:
    """Return the normalized path without its last suffix: `./a//b.jpg` gives `a/b`, and `b.seg.png` gives `b.seg`."""
    return os.path.splitext(os.path.normpath(path))[0]


class Source(ABC):
    """A source of rows. It knows no option of the run.

    Args:
        path: Path, URL or pattern of the source; "" for rows from Python.
        how: How it becomes rows.

    Attributes:
        reads: The settings of `how` that it reads, besides `keys`.
        copies: Whether fields are copied as they are, also `cls`.
        keeps_keys: Whether `json` gets the key of the source, if the key is changed. Other sources have the path there.
        classes: Class names of the source's labels in the order of their numbers; None if its rows name them.
        num_other: Files or members so far that belong to no row.
        notes: Sentences for the user, complete after the last row.

    Raises:
        PackError: `how` has a setting that is not in `reads`.
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    copies: ClassVar[bool] = False
    keeps_keys: ClassVar[bool] = False

    def __init__(self, path: str, how: Reading) -> None:
        if unread := {name for name, value in vars(how).items() if value} - {"keys", *self.reads}:
            raise PackError(f"{path or 'the rows'}: {min(unread)}: it has no effect on this kind of source. Remove it.")
        self.path = path
        self.how = how
        self.name = os.path.basename(os.path.normpath(path)) if path else ""
        self.classes: Sequence[str] | None = None
        self.num_other = 0
        self.notes: list[str] = []

    @abstractmethod
    def rows(self) -> Iterator[Row | RowError]:
        """Yield each row, or the error of a row that cannot be packed, in an order that depends on the source alone.

        Raises:
            PackError: The source cannot be read as a whole.
        """

    def row(
        self, where: str, make: Callable[..., tuple[str, dict[str, Field]]], *args: Any, name: str | None = None
    ) -> Row | RowError:
        """Return the row at `where` with the key and the fields that `make(*args)` returns. Any error of its values
        becomes the error of this row.

        `name` is the name of the file that holds the row; None for the name of the source.
        """
        try:
            key, fields = make(*args)
            row = Row.make(key, fields, where, keys=self.how.keys, source=name or self.name)
            if self.keeps_keys and row.is_cleaned:
                fields = {**fields, "json": labelled_json(read_object(fields), {"key": key}, has_label=False)}
                row = Row.make(key, fields, where, keys=self.how.keys, source=name or self.name)
        except KeyError as err:
            return bad_row(where, f"it has no {err}")
        except OSError as err:
            return bad_row(where, f"{err.filename}: {err.strerror}")
        except (DecodeError, KeyRuleError, RecursionError, TypeError, ValueError) as err:
            return bad_row(where, str(err))
        return row


class Records:
    """Makes the fields of the records of one table.

    Args:
        folder: Folder to which the paths of images and other files are relative.
        how: Names the columns of the image, the key and the fields. Without a name for the image's column, the image is
            in the first of `images` that is not empty in a record, and the first record decides whether the table has
            images.

    Attributes:
        images: `how.image`, or the columns of `IMAGE_COLUMNS` that do not name the file of a further field.
    """

    def __init__(self, folder: str, how: Reading) -> None:
        self._folder = folder
        self._how = how
        files = {column for name, column in how.fields.items() if name.rpartition(".")[2] not in ENCODED}
        self.images = (how.image,) if how.image else tuple(name for name in IMAGE_COLUMNS if name not in files)
        self._others = tuple(name for name in IMAGE_COLUMNS if name in files)  # such as sounds
        self._has_images = True if how.image else None

    def row(self, record: Any, number: int, shown: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Field]]:
        """Return key and fields of a record: `json` with its columns, the image, the further fields, and `cls` from a
        column `cls`.

        Args:
            record: Values by column, or their JSON text, which is stored as `json`. An image is a path, or bytes.
            number: Number of the record, for a row without another key.
            shown: The columns for `json`; None for all columns.

        Raises:
            KeyError: A column is missing.
            DecodeError, OSError, TypeError, ValueError: A value does not fit its field or JSON, a file cannot be found,
                two columns make one field, or the record has no image although the table has images.
        """
        text = record if isinstance(record, str) else None
        record = record if text is None else parse_json(text)
        if not isinstance(record, Mapping):
            raise TypeError(f"it holds a {type(record).__name__}, not an object of columns")
        if self._has_images is None:
            self._has_images = any(name in record for name in self.images)
        image = record.get(self.image_column(record))
        if (image is not None) != self._has_images:
            raise ValueError(f"it has {'no' if image is None else 'an'} image: all rows of a table have one or none")
        fields = {} if image is None else self.image(image)
        own = {CLASS_FIELD: CLASS_FIELD, **self._how.fields} if CLASS_FIELD in record else self._how.fields
        self.add_fields(fields, record, own)
        add_field(fields, "json", to_json(record if shown is None else shown, text))
        key = record.get(KEY_COLUMN) if self._how.key is None else record[self._how.key]
        if key in (None, "") and self._how.key is None:
            paths = [image, *(record.get(name) for name in self._others)]
            path = next((path for path in paths if path and isinstance(path, str)), None)
            key = f"row-{number:09d}" if path is None else key_of_path(path)
        if type(key) not in (str, int):
            raise TypeError(f"its key {key!r} is neither text nor a whole number")
        return str(key), fields

    def image_column(self, record: Mapping[str, Any]) -> str | None:
        """Return the first column of `images` that is not empty in a record; None if all are empty."""
        return next((name for name in self.images if record.get(name) not in (None, "")), None)

    def add_fields(self, fields: dict[str, Field], record: Mapping[str, Any], columns: Mapping[str, str]) -> None:
        """Add the fields that are made from columns, which are given by field name. An empty value makes no field. The
        errors are those of `row`.
        """
        for name, column in columns.items():
            value = record[column]
            if value is None or (isinstance(value, str) and not value):
                continue
            is_path = isinstance(value, str) and name.rpartition(".")[2] not in ENCODED
            add_field(fields, name, self._file(value) if is_path else make_field(name, value))

    def image(self, value: Any) -> dict[str, Field]:
        """Return the field of an image: bytes, or the path of a file.

        Raises:
            OSError, ValueError: The value is not an image or the path of an image, or there is no such file.
        """
        if isinstance(value, bytes):
            found = field_of_bytes(value[:12])
            if found is None:
                raise ValueError(f"its image begins with {value[:8]!r}, which is no image format that wdskit reads")
            return {found: value}
        name = field_of(value) if isinstance(value, str) else ""
        if not is_image_field(name):
            raise ValueError(f"its image is not the path of a file with an image's extension: {value!r}")
        return {name: self._file(value)}

    def _file(self, path: str) -> File:
        # The path in a table is UTF-8, and names its file by these bytes in any locale.
        full = os.path.join(self._folder, os.fsdecode(path.encode()))
        if not path.isascii() and not os.path.lexists(full):  # macOS writes NFD: names that look equal differ
            raise ValueError(f"{full}: there is no such file. In Unicode the name is {path!a}")
        return File.whole(full)
