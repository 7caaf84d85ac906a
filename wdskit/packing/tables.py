"""Rows from a manifest: a JSONL or CSV file with an image's path and any other columns."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from wdskit.codecs.images import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.packing.rows import FileBytes, Row, field_of, file_bytes, make_row, row_error, to_json

IMAGE_COLUMNS = ("image", "file_name", "path")
KEY_COLUMN = "key"
_CLASS_COLUMN = "cls"
SUFFIXES = (".jsonl", ".ndjson", ".csv")


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
        """
        try:
            with open(self.path, encoding="utf-8-sig", newline="") as file:
                lines = (
                    _csv_rows(file, self.path) if self.path.lower().endswith(".csv") else _json_rows(file, self.path)
                )
                for number, (where, row) in enumerate(lines):
                    if isinstance(row, RowError):
                        yield row
                        continue
                    try:
                        yield self._row(row, number, where, keys)
                    except RowError as err:
                        yield err
        except UnicodeDecodeError as err:
            raise PackError(
                f"{self.path}: it is no UTF-8 ({err.reason} at byte {err.start}). Save it as UTF-8."
            ) from err
        except OSError as err:
            raise PackError(f"{self.path}: cannot be read: {err.strerror}.") from err

    def _row(self, row: Mapping[str, Any], number: int, where: str, keys: str) -> Row:
        image = self._image(row, where)
        fields: dict[str, bytes | FileBytes] = {}
        try:
            fields["json"] = to_json(row)
        except ValueError as err:
            raise row_error(where, f"it cannot be written as JSON: {err}") from err
        if image is not None:
            path = os.path.join(os.path.dirname(self.path), image)
            field = field_of(image)
            if not is_image_field(field):
                raise row_error(where, f"{image!r} has no extension of an image", "Name an image, or leave it empty.")
            fields[field] = file_bytes(path, where)
        label = _whole_number(row.get(_CLASS_COLUMN))
        if label is not None:
            fields["cls"] = b"%d" % label
        key = self._key(row, image, number, where)
        return make_row(key, fields, where, keys=keys, path=image or key)

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

    def _key(self, row: Mapping[str, Any], image: str | None, number: int, where: str) -> str:
        if self.key_column is not None and self.key_column not in row:
            problem = f"it has no column {self.key_column!r}; it has {', '.join(map(repr, row))}"
            raise row_error(where, problem, "Mend --key-column.")
        value = row.get(self.key_column or KEY_COLUMN)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if value is not None and not isinstance(value, str):
            raise row_error(where, f"its key {value!r} is neither text nor a whole number")
        if value:
            return value
        if self.key_column is not None:
            raise row_error(where, f"its column {self.key_column!r} is empty", "Give each row a key.")
        return os.path.splitext(image)[0] if image is not None else f"row-{number:09d}"


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


def _json_rows(lines: Iterable[str], path: str) -> Iterator[tuple[str, Mapping[str, Any] | RowError]]:
    """Place and object of each line; empty lines are passed over."""
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_unique, parse_constant=_refuse_constant)
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
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice")
    return row


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _csv_rows(file: IO[str], path: str) -> Iterator[tuple[str, Mapping[str, Any] | RowError]]:
    """Place and columns of each row below the header; the place is the line that a row begins on."""
    reader = csv.reader(file, strict=True)
    try:
        header = next(reader, None)
        if not header or len(set(header)) < len(header) or not all(header):
            raise PackError(f"{path}:1: the header {header} must name each column once.")
        start = reader.line_num + 1
        for cells in reader:
            where = f"{path}:{start}"
            start = reader.line_num + 1
            if not cells:
                continue
            if len(cells) == len(header):
                yield where, dict(zip(header, cells, strict=True))
            else:
                yield where, row_error(where, f"it has {len(cells)} columns, the header {len(header)}", "Mend the row.")
    except csv.Error as err:
        raise PackError(f"{path}:{reader.line_num}: it is no CSV: {err}.") from err
