"""Rows from a manifest: a JSONL, CSV or TSV file with an image's path and any other columns."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.facts import refuse_constant, unique
from wdskit.packing.paths import STDIN, open_list
from wdskit.packing.records import Records
from wdskit.packing.rows import Row, row_error

_JSON_SUFFIXES = (".jsonl", ".ndjson")
_PLAIN_SUFFIXES = (*_JSON_SUFFIXES, ".csv", ".tsv")
SUFFIXES = (*_PLAIN_SUFFIXES, *(f"{suffix}.gz" for suffix in _PLAIN_SUFFIXES))
_OTHER_SEPARATORS = (";", "\t", "|", ",")

_Line: TypeAlias = tuple[str, Mapping[str, Any] | RowError, str | None]
"""The place of a row, its columns or what is wrong with it, and its JSON if it is a line of that."""


@dataclass(frozen=True)
class Manifest:
    """A manifest and how to read it. Its suffix says what it is; with `.gz` behind that, it is compressed.

    Attributes:
        path: The file; image paths are relative to its folder. `-` is standard input, which is JSONL.
        image_column: As `records.Records` takes it.
        key_column: As `records.Records` takes it.
        allow_no_image: As `records.Records` takes it.
    """

    path: str
    image_column: str | None = None
    key_column: str | None = None
    allow_no_image: bool = False

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a line: `json` with all columns, the image, and `cls` where a column of that name holds a whole
        number.

        Yields:
            A row, or the error of one that cannot be packed.

        Raises:
            PackError: The file cannot be read, or from some line on it is no CSV.
        """
        path = "standard input" if self.path == STDIN else self.path
        suffix = ".jsonl" if self.path == STDIN else os.path.splitext(path.lower().removesuffix(".gz"))[1]
        is_json = suffix in _JSON_SUFFIXES
        records = Records(os.path.dirname(self.path), self.image_column, self.key_column, self.allow_no_image)
        try:
            # A line of JSON ends at \n only; those of CSV the csv module tells.
            with _open_text(self.path, newline="\n" if is_json else "") as file:
                lines = _json_rows(file, path) if is_json else _csv_rows(file, path, is_tsv=suffix == ".tsv")
                yield from _rows_of(lines, records, keys)
        except EOFError as err:
            raise PackError(f"{path}: the compressed file stops before its end. Fetch it again.") from err
        except (OSError, zlib.error) as err:
            raise PackError(f"{path}: cannot be read: {getattr(err, 'strerror', None) or err}.") from err


@contextlib.contextmanager
def _open_text(path: str, *, newline: str) -> Iterator[IO[str]]:
    """A file as text, compressed or not. Bytes that are no UTF-8 become surrogates, so that they are the fault of their
    line and not of the file.
    """
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(open_list(path))
        if path.lower().endswith(".gz"):
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
        try:
            yield text
        finally:
            text.detach()


def _rows_of(lines: Iterable[_Line], records: Records, keys: str) -> Iterator[Row | RowError]:
    """The rows of records, numbered with those that are bad."""
    for number, (where, record, text) in enumerate(lines):
        if isinstance(record, RowError):
            yield record
            continue
        try:
            yield records.row(record, number, where, keys=keys, text=text)
        except RowError as err:
            yield err


def _json_rows(file: IO[str], path: str) -> Iterator[_Line]:
    """Place and object of each line; empty lines are passed over."""
    decode = json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse_constant).decode
    for number, line in enumerate(_lines(file, path), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if not _is_utf8(line):
            yield where, _no_utf8(where), None
            continue
        try:
            row = decode(line)
        except (ValueError, RecursionError) as err:
            yield where, row_error(where, f"it is no JSON: {err}", "One JSON object a line."), None
            continue
        if isinstance(row, dict):
            yield where, row, line.strip()
        else:
            yield where, row_error(where, f"it holds a {type(row).__name__}", "One JSON object a line."), None


def _lines(file: IO[str], path: str) -> Iterator[str]:
    """The lines of a file, none of which fills the memory."""
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            msg = f"{path}:{number}: this line is longer than the {MAX_ROW_BYTES} bytes that a row may have"
            raise PackError(f"{msg}. Is this one row a line?")
        yield line


def _csv_rows(file: IO[str], path: str, *, is_tsv: bool) -> Iterator[_Line]:
    """Place and columns of each row below the header; the place is the line that a row begins on.

    A TSV has no quotes: what looks like one is text, and no cell holds a tab or a line's end (IANA's
    text/tab-separated-values).

    Raises:
        PackError: The header is not right; or a row cannot be told from those behind it, as after a quote that is never
            closed.
    """
    lines = _without_nul(_lines(file, path), path)
    if is_tsv:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.reader(lines, strict=True)
    start = 1
    limit = csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process: 131,072 characters unless somebody says more
    try:
        header = next(reader, [])
        _check_header(header, path, "\t" if is_tsv else ",")
        start = reader.line_num + 1
        for cells in reader:
            where = f"{path}:{start}"
            start = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                problem = f"it has {len(cells)} columns, the header {len(header)}"
                yield where, row_error(where, problem, "Mend the row."), None
            elif not all(map(_is_utf8, cells)):
                yield where, _no_utf8(where), None
            else:
                yield where, dict(zip(header, cells, strict=True)), None
    except csv.Error as err:
        what, remedy = ("TSV", "W") if is_tsv else ("CSV", "Look for a quote that is not doubled or not closed; or w")
        raise PackError(f"{path}:{start}: it is no {what}: {err}.\n  {remedy}rite it as JSONL.") from err
    finally:
        csv.field_size_limit(limit)


def _check_header(header: list[str], path: str, separator: str) -> None:
    """Refuse names of columns that would be read as others than they were meant."""
    where = f"{path}:1: the header {header}"
    if not header or len(set(header)) < len(header) or not all(header):
        raise PackError(f"{where} must name each column once.")
    if not all(map(_is_utf8, header)):
        raise PackError(f"{path}:1: the header is no UTF-8. Save it as UTF-8.")
    padded = next((name for name in header if name != name.strip()), None)
    if padded is not None:
        raise PackError(f"{where}: {padded!r} has white space around it, which belongs to the name. Remove it.")
    if len(header) == 1 and any(mark in header[0] for mark in _OTHER_SEPARATORS if mark != separator):
        raise PackError(f"{where} is one column. Separate columns by {'tabs' if separator != ',' else 'commas'}.")


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
