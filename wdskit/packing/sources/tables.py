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
from typing import IO, Any, TypeAlias

from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.json_merge import refuse_constant, unique
from wdskit.packing.row import Row, row_error
from wdskit.packing.sources.class_names import classes_of
from wdskit.packing.sources.records import CLASS_FIELD, Records, is_utf8

STDIN = "-"
_MAX_PATH_BYTES = 4096  # Linux's PATH_MAX
_READ_BYTES = 1 << 16
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_PLAIN_SUFFIXES = (*_JSON_SUFFIXES, ".csv", ".tsv")
SUFFIXES = (*_PLAIN_SUFFIXES, *(f"{suffix}.gz" for suffix in _PLAIN_SUFFIXES))

TableRow: TypeAlias = tuple[str, Mapping[str, Any] | RowError, str | None]
"""The place of a row, its columns or what is wrong with it, and its JSON if it is a line of that."""


class TextTable:
    """A table of text, or a list of paths, relative to the table's folder or to the current one.

    Args:
        path: The file. A table's suffix says what it is; with `.gz` behind that, it is compressed. `-` is standard
            input, whose table is JSONL.
        records: How a record becomes a row, its folder apart.
        end: Of a list: what ends a path, a newline, or NUL as `find -print0` writes it.

    Attributes:
        classes: Number of each class by name: those given, or the texts in the column of `cls`, which are read first.
    """

    def __init__(self, path: str, records: Records, end: bytes = b"") -> None:
        self._path = path
        self._name = "standard input" if path == STDIN else path
        self._end = end
        classes, column = records.classes, records.fields.get(CLASS_FIELD)
        if classes is None and column is not None and path != STDIN:
            there = (record for _, record, _ in self._table_rows() if not isinstance(record, RowError))
            classes = classes_of((record.get(column) for record in there), column)
        folder = "" if end else os.path.dirname(path)
        self._records = dataclasses.replace(records, folder=folder, classes=classes)
        self.classes = classes.numbers if classes is not None else {}

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a line: `json` with all columns, the image, and the fields that are made of columns.

        Raises:
            PackError: The file cannot be read, or from some line on it is no CSV or no list of paths.
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
        lower = self._path.lower()
        suffix = ".jsonl" if self._path == STDIN else os.path.splitext(lower.removesuffix(".gz"))[1]
        try:
            with contextlib.ExitStack() as stack:
                # Standard input stays open.
                file: Any = sys.stdin.buffer if self._path == STDIN else stack.enter_context(open(self._path, "rb"))
                if self._end:
                    yield from _path_rows(file, self._name, self._end)
                    return
                if lower.endswith(".gz"):
                    file = stack.enter_context(gzip.GzipFile(fileobj=file))
                # A line of JSON ends at \n only; those of CSV end where the csv module says.
                is_json = suffix in _JSON_SUFFIXES
                # Bytes that are no UTF-8 become surrogates, so that they are the fault of their line only.
                how: Any = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": "\n" if is_json else ""}
                lines = io.TextIOWrapper(file, **how)
                stack.callback(lines.detach)
                if is_json:
                    yield from _json_rows(lines, self._name)
                else:
                    yield from _csv_rows(lines, self._name, is_tsv=suffix == ".tsv")
        except EOFError as err:
            raise PackError(f"{self._name}: the compressed file stops before its end. Fetch it again.") from err
        except (OSError, zlib.error) as err:
            raise PackError(f"{self._name}: cannot be read: {getattr(err, 'strerror', None) or err}.") from err


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
            problem = f"it is not JSON: {err}"
        if isinstance(row, dict):
            yield where, row, line.strip()
        else:
            yield where, row_error(where, problem, "Write one JSON object per line."), None


def _lines(file: IO[str], path: str, *, refuse_nul: bool = False) -> Iterator[str]:
    """The lines of a file, none of which fills the memory."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), ""), start=1):
        if len(line) > MAX_ROW_BYTES:
            msg = f"{path}:{number}: this line is longer than the {MAX_ROW_BYTES} bytes that a row can have"
            raise PackError(f"{msg}. Is there one row per line?")
        if refuse_nul and "\x00" in line:
            raise PackError(f"{path}:{number}: it holds a NUL, like text in UTF-16. Save it as UTF-8.")
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
        if not header or len({*header}) < len(header) or not all(header):
            raise PackError(f"{path}:1: the header {header} must name each column once.")
        if not all(map(is_utf8, header)):
            raise PackError(f"{path}:1: the header is not UTF-8. Save it as UTF-8.")
        start = reader.line_num + 1
        for cells in reader:
            where = f"{path}:{start}"
            start = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                problem = f"it has {len(cells)} columns, but the header has {len(header)}"
                yield where, row_error(where, problem, "Correct the row."), None
            elif not all(map(is_utf8, cells)):
                yield where, _no_utf8(where), None
            else:
                yield where, dict(zip(header, cells, strict=True)), None
    except csv.Error as err:
        what, remedy = ("TSV", "W") if is_tsv else ("CSV", "Look for a quote that is not doubled or not closed; or w")
        raise PackError(f"{path}:{start}: it is not {what}: {err}.\n  {remedy}rite it as JSONL.") from err
    finally:
        csv.field_size_limit(limit)


def _no_utf8(where: str) -> RowError:
    return row_error(where, "it is not UTF-8", "Save the manifest as UTF-8.")


def _path_rows(file: IO[bytes], name: str, end: bytes) -> Iterator[TableRow]:
    """The paths, as they come: a pipe is not waited for longer than it takes. Empty lines are passed over."""
    rest, number = b"", 1
    while part := os.read(file.fileno(), _READ_BYTES):
        *whole, rest = (rest + part).split(end)
        yield from _places(whole, name, number)
        number += len(whole)
        if len(rest) > _MAX_PATH_BYTES:
            msg = f"{name}:{number}: this is longer than the {_MAX_PATH_BYTES} bytes that a path can have."
            raise PackError(f"{msg}\n  Write one path per line, or end each path with NUL and use --from list0.")
    yield from _places([rest], name, number)


def _places(paths: list[bytes], name: str, number: int) -> Iterator[TableRow]:
    for at, path in enumerate(paths, start=number):
        if path:
            yield f"{name}:{at}", {"path": path.decode(errors="surrogateescape")}, None
