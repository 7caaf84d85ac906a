"""Rows from a manifest: a JSONL or CSV file with an image's path and any other columns."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from wdskit.codecs.images import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.packing.references import FieldBytes
from wdskit.packing.rows import Row, field_of, file_bytes, make_row, row_error, to_json

IMAGE_COLUMNS = ("image", "file_name", "path")
KEY_COLUMN = "key"
_CLASS_COLUMN = "cls"
SUFFIXES = (".jsonl", ".ndjson", ".csv")
_OTHER_SEPARATORS = (";", "\t", "|")

_Line: TypeAlias = tuple[str, Mapping[str, Any] | RowError]
"""The place of a row, and its columns or what is wrong with it."""


class _Key(NamedTuple):
    """A row's key, and what is hashed in its stead when that is asked for."""

    text: str
    origin: str


@dataclass(frozen=True)
class Manifest:
    """A manifest and how to read it.

    Attributes:
        path: The file; image paths are relative to its folder.
        image_column: Column with the image's path. None: the first of `image`, `file_name` and `path` that a row has.
        key_column: Column with the key. None: `key` where a row has it, else the image's path without extension, else
            the row's number.
    """

    path: str
    image_column: str | None = None
    key_column: str | None = None

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a line: `json` with all columns, the image, and `cls` where a column of that name holds a whole
        number.

        Yields:
            A row, or the error of one that cannot be packed.

        Raises:
            PackError: The file cannot be read, or from some line on it is no CSV.
        """
        is_csv = self.path.lower().endswith(".csv")
        try:
            # Bytes that are no UTF-8 become surrogates, so that they are the fault of their line and not of the file.
            # A line of JSON ends at \n only; those of CSV the csv module tells.
            newline = "" if is_csv else "\n"
            with open(self.path, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as file:
                lines = _csv_rows(file, self.path) if is_csv else _json_rows(file, self.path)
                for number, (where, row) in enumerate(lines):
                    if isinstance(row, RowError):
                        yield row
                        continue
                    try:
                        yield self._row(row, number, where, keys)
                    except RowError as err:
                        yield err
        except OSError as err:
            raise PackError(f"{self.path}: cannot be read: {err.strerror}.") from err

    def _row(self, row: Mapping[str, Any], number: int, where: str, keys: str) -> Row:
        image = self._image(row, where)
        fields: dict[str, FieldBytes] = {}
        try:
            fields["json"] = to_json(row)
        except ValueError as err:
            raise row_error(where, f"it cannot be written as JSON: {err}") from err
        if image is not None:
            field = field_of(image)
            if not is_image_field(field):
                raise row_error(where, f"{image!r} has no extension of an image", "Name an image, or leave it empty.")
            # Text of the manifest is UTF-8, and so is the file's name on the disk, whatever the locale says.
            path = os.path.join(os.path.dirname(self.path), os.fsdecode(image.encode()))
            fields[field] = file_bytes(path, where)
        label = _whole_number(row.get(_CLASS_COLUMN))
        if label is not None:
            fields["cls"] = b"%d" % label
        key = self._key(row, image, number, where)
        return make_row(key.text, fields, where, keys=keys, path=key.origin)

    def _image(self, row: Mapping[str, Any], where: str) -> str | None:
        """The path in the image column, None where a row has no image."""
        if self.image_column is not None and self.image_column not in row:
            problem = f"it has no column {self.image_column!r}; it has {', '.join(map(repr, row))}"
            raise row_error(where, problem, "Mend --image-column.")
        names = IMAGE_COLUMNS if self.image_column is None else (self.image_column,)
        for name in names:
            value = row.get(name)
            if value is None or value == "":
                continue
            if not isinstance(value, str) or "\x00" in value:
                raise row_error(where, f"its column {name!r} holds {value!r}, no path")
            return value
        return None

    def _key(self, row: Mapping[str, Any], image: str | None, number: int, where: str) -> _Key:
        """The key of a row: what its key column holds, else from the image's path, else from the row's number."""
        if self.key_column is not None and self.key_column not in row:
            problem = f"it has no column {self.key_column!r}; it has {', '.join(map(repr, row))}"
            raise row_error(where, problem, "Mend --key-column.")
        value = row.get(self.key_column or KEY_COLUMN)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is not None and not isinstance(value, str):
            raise row_error(where, f"its key {value!r} is neither text nor a whole number")
        if value:
            return _Key(value, value)
        if self.key_column is not None:
            raise row_error(where, f"its column {self.key_column!r} is empty", "Give each row a key.")
        if image is None:
            return _Key(f"row-{number:09d}", f"row-{number:09d}")
        return _Key(os.path.splitext(os.path.normpath(image))[0], image)  # ./a//b.jpg is a/b


def _whole_number(value: Any) -> int | None:
    """A label: an int, or decimal text as CSV has it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and value.isascii():
        try:
            return int(value)
        except ValueError:  # +-3, or thousands of digits
            return None
    return None


def _json_rows(lines: Iterable[str], path: str) -> Iterator[_Line]:
    """Place and object of each line; empty lines are passed over."""
    decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant).decode
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if not _is_utf8(line):
            yield where, _no_utf8(where)
            continue
        try:
            row = decode(line)
        except (ValueError, RecursionError) as err:
            yield where, row_error(where, f"it is no JSON: {err}", "One JSON object a line.")
            continue
        if isinstance(row, dict):
            yield where, row
        else:
            yield where, row_error(where, f"it holds a {type(row).__name__}", "One JSON object a line.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice!r} stands twice")
    return row


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _csv_rows(lines: Iterable[str], path: str) -> Iterator[_Line]:
    """Place and columns of each row below the header; the place is the line that a row begins on.

    Raises:
        PackError: The header is not right; or a row cannot be told from those behind it, as after a quote that is never
            closed.
    """
    reader = csv.reader(_without_nul(lines, path), strict=True)
    start = 1
    try:
        header = next(reader, [])
        _check_header(header, path)
        start = reader.line_num + 1
        for cells in reader:
            where = f"{path}:{start}"
            start = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                yield where, row_error(where, f"it has {len(cells)} columns, the header {len(header)}", "Mend the row.")
            elif not all(map(_is_utf8, cells)):
                yield where, _no_utf8(where)
            else:
                yield where, dict(zip(header, cells, strict=True))
    except csv.Error as err:
        remedy = "Look for a quote that is not doubled or not closed; or write it as JSONL."
        raise PackError(f"{path}:{start}: it is no CSV: {err}.\n  {remedy}") from err


def _check_header(header: list[str], path: str) -> None:
    """Refuse names of columns that would be read as others than they were meant."""
    where = f"{path}:1: the header {header}"
    if not header or len(set(header)) < len(header) or not all(header):
        raise PackError(f"{where} must name each column once.")
    if not all(map(_is_utf8, header)):
        raise PackError(f"{path}:1: the header is no UTF-8. Save it as UTF-8.")
    padded = next((name for name in header if name != name.strip()), None)
    if padded is not None:
        raise PackError(f"{where}: {padded!r} has white space around it, which belongs to the name. Remove it.")
    if len(header) == 1 and any(mark in header[0] for mark in _OTHER_SEPARATORS):
        raise PackError(f"{where} is one column. Separate columns by commas.")


def _without_nul(lines: Iterable[str], path: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if "\x00" in line:
            raise PackError(f"{path}:{number}: it holds a NUL, as text in UTF-16 does. Save it as UTF-8.")
        yield line


def _is_utf8(text: str) -> bool:
    """Whether the text came from bytes in UTF-8: others were read as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_utf8(where: str) -> RowError:
    return row_error(where, "it is no UTF-8", "Save the manifest as UTF-8.")
