"""Rows from text: a table (JSONL, CSV, TSV) with an image's path and any other columns, or a list of paths."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

from wdskit.codecs.formats import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.json_merge import refuse_constant, to_json, unique
from wdskit.packing.references import FieldBytes
from wdskit.packing.row import Row, field_of, file_bytes, make_row, row_error
from wdskit.packing.sources.class_names import classes_of
from wdskit.packing.sources.records import CLASS_FIELD, Records, is_utf8, key_of_path

STDIN = "-"
_MAX_PATH_BYTES = 4096  # Linux's PATH_MAX
_READ_BYTES = 1 << 16
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_PLAIN_SUFFIXES = (*_JSON_SUFFIXES, ".csv", ".tsv")
SUFFIXES = (*_PLAIN_SUFFIXES, *(f"{suffix}.gz" for suffix in _PLAIN_SUFFIXES))

TableRow: TypeAlias = tuple[str, Mapping[str, Any] | RowError, str | None]
"""The place of a row, its columns or what is wrong with it, and its JSON if it is a line of that."""


class TextTable:
    """A table of text. Its suffix says what it is; with `.gz` behind that, it is compressed.

    Args:
        path: The file; image paths are relative to its folder. `-` is standard input, which is JSONL.
        records: How a record becomes a row, its folder apart. Without classes, the texts in the column of `cls` are
            the classes; they are read first.

    Attributes:
        classes: Number of each class by name; empty where nobody knows names.
    """

    def __init__(self, path: str, records: Records) -> None:
        self._path = path
        classes, column = records.classes, records.fields.get(CLASS_FIELD)
        if classes is None and column is not None and path != STDIN:
            there = (record for _, record, _ in self._table_rows() if not isinstance(record, RowError))
            classes = classes_of((record.get(column) for record in there), column)
        self._records = dataclasses.replace(records, folder=os.path.dirname(path), classes=classes)
        self.classes = classes.numbers if classes is not None else {}

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a line: `json` with all columns, the image, and the fields that are made of columns.

        Raises:
            PackError: The file cannot be read, or from some line on it is no CSV.
        """
        for number, (where, record, text) in enumerate(self._table_rows()):
            if isinstance(record, RowError):
                yield record
                continue
            try:
                yield self._records.row(record, number, where, keys=keys, text=text)
            except RowError as err:
                yield err

    def _table_rows(self) -> Iterator[TableRow]:
        path, suffix = self._path, os.path.splitext(self._path.lower().removesuffix(".gz"))[1]
        if path == STDIN:
            path, suffix = "standard input", ".jsonl"
        is_json = suffix in _JSON_SUFFIXES
        try:
            # A line of JSON ends at \n only; those of CSV end where the csv module says.
            with _open_text(self._path, newline="\n" if is_json else "") as file:
                yield from _json_rows(file, path) if is_json else _csv_rows(file, path, is_tsv=suffix == ".tsv")
        except EOFError as err:
            raise PackError(f"{path}: the compressed file stops before its end. Fetch it again.") from err
        except (OSError, zlib.error) as err:
            raise PackError(f"{path}: cannot be read: {getattr(err, 'strerror', None) or err}.") from err


@contextlib.contextmanager
def _open_text(path: str, *, newline: str) -> Iterator[IO[str]]:
    """A file as text. Bytes that are no UTF-8 become surrogates, so that they are the fault of their line only."""
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(_open_bytes(path))
        if path.lower().endswith(".gz"):
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
        try:
            yield text
        finally:
            text.detach()


def _open_bytes(path: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    """A file, or standard input, which stays open."""
    return contextlib.nullcontext(sys.stdin.buffer) if path == STDIN else open(path, "rb")


def _json_rows(file: IO[str], path: str) -> Iterator[TableRow]:
    """Place and object of each line; empty lines are passed over."""
    decode = json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse_constant).decode
    for number, line in enumerate(_lines(file, path), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if not is_utf8(line):
            yield where, _no_utf8(where), None
            continue
        row: Any = None
        try:
            row = decode(line)
            problem = f"it holds a {type(row).__name__}"
        except (ValueError, RecursionError) as err:
            problem = f"it is no JSON: {err}"
        if isinstance(row, dict):
            yield where, row, line.strip()
        else:
            yield where, row_error(where, problem, "One JSON object a line."), None


def _lines(file: IO[str], path: str, *, refuse_nul: bool = False) -> Iterator[str]:
    """The lines of a file, none of which fills the memory."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), ""), start=1):
        if len(line) > MAX_ROW_BYTES:
            msg = f"{path}:{number}: this line is longer than the {MAX_ROW_BYTES} bytes that a row may have"
            raise PackError(f"{msg}. Is this one row a line?")
        if refuse_nul and "\x00" in line:
            raise PackError(f"{path}:{number}: it holds a NUL, as text in UTF-16 does. Save it as UTF-8.")
        yield line


def _csv_rows(file: IO[str], path: str, *, is_tsv: bool) -> Iterator[TableRow]:
    """Place and columns of each row below the header; the place is the line that a row begins on.

    A TSV has no quotes: what looks like one is text, and no cell holds a tab or a line's end (IANA's
    text/tab-separated-values).

    Raises:
        PackError: The header is invalid; or a row cannot be parted from those behind it, as after a quote that is never
            closed.
    """
    quoting: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}
    reader = csv.reader(_lines(file, path, refuse_nul=True), strict=True, **quoting)
    start = 1
    limit = csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process: 131,072 characters unless somebody says more
    try:
        header = next(reader, [])
        _check_header(header, path, is_tsv=is_tsv)
        start = reader.line_num + 1
        for cells in reader:
            where = f"{path}:{start}"
            start = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                problem = f"it has {len(cells)} columns, the header {len(header)}"
                yield where, row_error(where, problem, "Mend the row."), None
            elif not all(map(is_utf8, cells)):
                yield where, _no_utf8(where), None
            else:
                yield where, dict(zip(header, cells, strict=True)), None
    except csv.Error as err:
        what, remedy = ("TSV", "W") if is_tsv else ("CSV", "Look for a quote that is not doubled or not closed; or w")
        raise PackError(f"{path}:{start}: it is no {what}: {err}.\n  {remedy}rite it as JSONL.") from err
    finally:
        csv.field_size_limit(limit)


def _check_header(header: list[str], path: str, *, is_tsv: bool) -> None:
    """Refuse names of columns that would be read as others than they were meant."""
    where = f"{path}:1: the header {header}"
    if not header or len(set(header)) < len(header) or not all(header):
        raise PackError(f"{where} must name each column once.")
    if not all(map(is_utf8, header)):
        raise PackError(f"{path}:1: the header is no UTF-8. Save it as UTF-8.")
    padded = next((name for name in header if name != name.strip()), None)
    if padded is not None:
        raise PackError(f"{where}: {padded!r} has white space around it, which belongs to the name. Remove it.")
    if len(header) == 1 and any(mark in header[0] for mark in (";|," if is_tsv else ";|\t")):
        raise PackError(f"{where} is one column. Separate columns by {'tabs' if is_tsv else 'commas'}.")


def _no_utf8(where: str) -> RowError:
    return row_error(where, "it is no UTF-8", "Save the manifest as UTF-8.")


@dataclass(frozen=True)
class PathList:
    """A list of paths, relative to the current folder.

    Attributes:
        path: The list's file; `-` is standard input.
        end: What ends a path: a newline, or NUL as `find -print0` writes it.
    """

    path: str
    end: bytes = b"\n"

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a path, in their order: the image, and `json` with its path. Empty lines are passed over.

        Raises:
            PackError: The list cannot be read, or something in it is too long for a path.
        """
        name = "standard input" if self.path == STDIN else self.path
        try:
            with _open_bytes(self.path) as file:
                for number, path in enumerate(self._paths(file, name), start=1):
                    try:
                        if path:
                            yield _path_row(path, f"{name}:{number}", keys)
                    except RowError as err:
                        yield err
        except OSError as err:
            raise PackError(f"{name}: cannot be read: {err.strerror}.") from err

    def _paths(self, file: IO[bytes], name: str) -> Iterator[bytes]:
        """The paths, as they come: a pipe is not waited for longer than it takes."""
        rest, number = b"", 1
        while part := os.read(file.fileno(), _READ_BYTES):
            *whole, rest = (rest + part).split(self.end)
            yield from whole
            number += len(whole)
            if len(rest) > _MAX_PATH_BYTES:
                msg = f"{name}:{number}: this is longer than the {_MAX_PATH_BYTES} bytes that a path may have."
                raise PackError(f"{msg}\n  One path a line; or NUL behind each, with --from list0.")
        if rest:
            yield rest


def _path_row(raw: bytes, where: str, keys: str) -> Row:
    path = os.fsdecode(raw)
    try:
        text = raw.decode()
    except UnicodeDecodeError as err:
        raise row_error(where, f"the path {path!r} is no UTF-8", "Rename it.") from err
    field = field_of(path)
    if "\x00" in path or not is_image_field(field):
        raise row_error(where, f"{path!r} has no extension of an image", "List images only: find -name '*.jpg'.")
    fields: dict[str, FieldBytes] = {"json": to_json({"path": text}), field: file_bytes(path, where)}
    return make_row(key_of_path(text), fields, where, keys=keys, path=text)
