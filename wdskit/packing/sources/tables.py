"""Rows from text: a table (JSONL, CSV, TSV) with the path of an image and other columns, or a list of paths."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from collections.abc import Generator, Iterator, Mapping
from typing import IO, Any, TypeAlias

from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.json_merge import refuse_constant, unique_members
from wdskit.packing.labels import ClassNames, classes_of, is_utf8
from wdskit.packing.row import Row, row_error
from wdskit.packing.sources.records import Records, column_value

STDIN = "-"
_MAX_PATH_BYTES = 4096  # Linux's PATH_MAX
_READ_BYTES = 1 << 16
_SHOWN_CHARS = 60
_AS_CSV = "Name the file .csv: there cells may be quoted, and tabs may separate them. Or write it as JSONL."
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_PLAIN_SUFFIXES = (*_JSON_SUFFIXES, ".csv", ".tsv")
SUFFIXES = (*_PLAIN_SUFFIXES, *(f"{suffix}.gz" for suffix in _PLAIN_SUFFIXES))

TableRow: TypeAlias = tuple[str, Mapping[str, Any] | RowError, str | None]
"""The place of a row, its columns or its error, and its JSON text if the row is a line of JSON."""


class TextTable:
    """Reader of a table of text, or of a list of paths.

    Paths in a table are relative to the folder of the table. Paths in a list are relative to the current folder.

    Args:
        path: The file. The suffix gives the format of a table; a further `.gz` means compressed. `-` reads JSONL or a
            list from standard input.
        records: Converts records to rows. Its `folder` has no effect.
        is_list: True for a list, with one path per line.

    Attributes:
        classes: Number of each class by name: the classes of `records`. If `records` has no classes and `path` is the
            file of a table: the class names in the column of `cls`. Otherwise empty.

    Raises:
        PackError: The file cannot be read, or the column of `cls` mixes numbers and names.
    """

    def __init__(self, path: str, records: Records, *, is_list: bool = False) -> None:
        self._path = path
        self._name = "standard input" if path == STDIN else path
        self._is_list = is_list
        classes = records.classes
        if classes is None and path != STDIN and not is_list:
            classes = self._column_classes(records)
        folder = "" if is_list else os.path.dirname(path)
        self._records = dataclasses.replace(records, folder=folder, classes=classes)
        self.classes = classes.numbers if classes is not None else {}

    def _column_classes(self, records: Records) -> ClassNames | None:
        """Return the class names in the column that becomes the field `cls`. Return None if the table has no such
        column, or if the column has numbers in place of names.

        `records.fields` gives this column; otherwise it is a column `cls` that is not omitted. PackError: The file
        cannot be read, or the column mixes numbers and names.
        """
        with contextlib.closing(self._table_rows()) as rows:
            valid = ((record, where) for where, record, _ in rows if not isinstance(record, RowError))
            first = next(valid, None)
            implied = CLASS_FIELD if first and CLASS_FIELD in first[0] and CLASS_FIELD not in records.omit else None
            column = records.fields.get(CLASS_FIELD, implied)
            if first is None or column is None:
                return None
            values = ((record.get(column), where) for record, where in itertools.chain([first], valid))
            try:
                return classes_of(values, column)
            except PackError as err:
                raise PackError(f"{self._name}: {err}") from err

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Yield one row per record, or the `RowError` of a row that cannot be packed.

        A row has the image, the fields that are made from columns, and `json` with the columns. `keys` is the option
        `--keys`: "given", "clean" or "hashed".

        Raises:
            PackError: The file cannot be read, a line is too long, or a table is not valid CSV or TSV.
        """
        for number, (where, record, text) in enumerate(self._table_rows()):
            if isinstance(record, RowError):
                yield record
                continue
            try:
                for column in self._records.omit:
                    column_value(record, column, "omit", where)
                yield self._records.row(record, number, where, keys=keys, text=text)
            except RowError as err:
                yield err

    def _table_rows(self) -> Generator[TableRow, None, None]:
        lower = self._path.lower()
        suffix = ".jsonl" if self._path == STDIN else os.path.splitext(lower.removesuffix(".gz"))[1]
        try:
            with contextlib.ExitStack() as stack:
                # Standard input stays open.
                file: Any = sys.stdin.buffer if self._path == STDIN else stack.enter_context(open(self._path, "rb"))
                if self._is_list:
                    yield from _path_rows(file, self._name)
                    return
                if lower.endswith(".gz"):
                    file = stack.enter_context(gzip.GzipFile(fileobj=file))
                # A line of JSON ends only at \n. The csv module decides where a line of CSV ends.
                is_json = suffix in _JSON_SUFFIXES
                # Invalid UTF-8 becomes surrogates, so that it is an error of its row only.
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
    """Yield (place, object, text) for each line with a JSON object, and (place, error, None) for each invalid line.
    Empty lines are skipped. PackError: A line is too long.
    """
    decode = json.JSONDecoder(object_pairs_hook=unique_members, parse_constant=refuse_constant).decode
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
    """Yield the lines of a file, with their line ends.
    PackError: A line is too long, or has a NUL and `refuse_nul` is True.
    """
    for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), ""), start=1):
        if len(line) > MAX_ROW_BYTES:
            msg = f"{path}:{number}: this line is longer than the {MAX_ROW_BYTES} bytes that a row can have"
            raise PackError(f"{msg}. Is there one row per line?")
        if refuse_nul and "\x00" in line:
            raise PackError(f"{path}:{number}: it holds a NUL, like text in UTF-16. Save it as UTF-8.")
        yield line


def _csv_rows(file: IO[str], path: str, *, is_tsv: bool) -> Iterator[TableRow]:
    """Yield (place, columns, None) for each row after the header, or (place, error, None) for an invalid row. The place
    has the number of the row's first line. Empty lines are skipped.

    In a TSV, quotes are ordinary text (IANA's text/tab-separated-values). A cell that starts and ends with a quote and
    has doubled quotes between them, as CSV writes it, is an error of its row. A `.csv` may have tabs between its
    columns, if its header has tabs and no comma.

    Raises:
        PackError: The header is invalid, a line is too long or has a NUL, or a quote is not doubled or not closed.
    """
    lines = _lines(file, path, refuse_nul=True)
    first = next(lines, "")
    quoting: Any = {"delimiter": "\t"} if is_tsv or ("\t" in first and "," not in first) else {}
    quoting |= {"quoting": csv.QUOTE_NONE} if is_tsv else {}
    reader = csv.reader(itertools.chain([first], lines), strict=True, **quoting)
    start = 1
    limit = csv.field_size_limit(MAX_ROW_BYTES)  # of the whole process; 131,072 by default
    try:
        header = next(reader, [])
        if len(header) > 1 and not header[0] and all(header[1:]):
            msg = f"{path}:1: the first column of the header has no name, like the index that pandas writes."
            raise PackError(f"{msg}\n  Write the table with index=False, or name the column.")
        if not header or len({*header}) < len(header) or not all(header):
            raise PackError(f"{path}:1: the header {header} must name each column once.")
        if not all(map(is_utf8, header)):
            raise PackError(f"{path}:1: the header is not UTF-8. Save it as UTF-8.")
        if is_tsv and any(map(_is_quoted, header)):
            raise PackError(f"{path}:1: the header is quoted as in CSV, but a .tsv has no quotes. {_AS_CSV}")
        start = reader.line_num + 1
        for cells in reader:
            where = f"{path}:{start}"
            start = reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                problem = f"it has {len(cells)} columns, but the header has {len(header)}"
                is_quoted = is_tsv and any(cell.startswith('"') for cell in cells)
                yield where, row_error(where, problem, _AS_CSV if is_quoted else "Correct the row."), None
            elif not all(map(is_utf8, cells)):
                yield where, _no_utf8(where), None
            elif is_tsv and (quoted := next((cell for cell in cells if '""' in cell[1:-1] and _is_quoted(cell)), None)):
                problem = f"its column {header[cells.index(quoted)]!r} is quoted as in CSV ({quoted[:_SHOWN_CHARS]})"
                yield where, row_error(where, f"{problem}, but a .tsv has no quotes", _AS_CSV), None
            else:
                yield where, dict(zip(header, cells, strict=True)), None
    except csv.Error as err:
        what, remedy = ("TSV", "W") if is_tsv else ("CSV", "Look for a quote that is not doubled or not closed; or w")
        raise PackError(f"{path}:{start}: it is not {what}: {err}.\n  {remedy}rite it as JSONL.") from err
    finally:
        csv.field_size_limit(limit)


def _is_quoted(cell: str) -> bool:
    """Return True if a cell is quoted as in CSV: in quotes, and each quote inside is doubled."""
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def _no_utf8(where: str) -> RowError:
    return row_error(where, "it is not UTF-8", "Save the manifest as UTF-8.")


def _path_rows(file: IO[bytes], name: str) -> Iterator[TableRow]:
    """Yield (place, {"path": path}, None) for each line as soon as the line arrives, also from a pipe. Empty lines are
    skipped. `name` is the name of the file, for messages.

    Raises:
        PackError: A line is longer than a path can be. A long line that arrives as a whole may be yielded instead.
    """
    rest, number, is_end = b"", 1, False
    while not is_end:
        part = os.read(file.fileno(), _READ_BYTES)
        is_end = not part
        *lines, rest = (rest + (part or b"\n")).split(b"\n")  # the last line may have no newline
        for path in lines:
            if path:
                yield f"{name}:{number}", {"path": path.decode(errors="surrogateescape")}, None
            number += 1
        if len(rest) > _MAX_PATH_BYTES:
            msg = f"{name}:{number}: this is longer than the {_MAX_PATH_BYTES} bytes that a path can have."
            raise PackError(f"{msg}\n  Write one path per line.")
