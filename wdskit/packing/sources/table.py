"""Rows from a table of text: .csv, .tsv, .jsonl or .ndjson, also with .gz, or a .json with a list of objects."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, ClassVar, TypeAlias

from wdskit.codecs.formats import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.row import Row, bad_row, field_of
from wdskit.packing.sources.base import Source
from wdskit.packing.sources.records import Records, is_utf8, parse_json, read_document

_JSON_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = tuple(f"{each}{gz}" for gz in ("", ".gz") for each in (*_JSON_SUFFIXES, ".csv", ".tsv"))
_SHOWN_CHARS = 60
_AS_CSV = "Name the file .csv: there cells may be quoted, and tabs may separate them. Or write it as JSONL."
_NOT_UTF8 = "it is not UTF-8"

_Record: TypeAlias = tuple[str, Mapping[str, Any] | RowError, str | None]
"""The place of a record, its columns or its error, and its JSON text if the record is a line of JSON."""

# Of the whole process, so it is never set back: other tables may be open.
csv.field_size_limit(max(MAX_ROW_BYTES, csv.field_size_limit()))


class Table(Source):
    """A table. Paths in it are relative to its folder."""

    kind: ClassVar[str] = "table"

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per record.

        Raises:
            PackError: The file cannot be read, its header is invalid, a line is too long, or it is not CSV or TSV.
        """
        records = Records(os.path.dirname(self.path), self.how, self.name)
        for number, (where, record, text) in enumerate(self._records()):
            try:
                if isinstance(record, RowError):
                    raise record
                yield records.row(record, number, where, text=text)
            except RowError as err:
                yield err

    def _records(self) -> Iterator[_Record]:
        lower = self.path.lower()
        suffix = os.path.splitext(lower.removesuffix(".gz"))[1]
        if suffix == ".json":
            yield from self._items(read_document(self.path))
            return
        try:
            with contextlib.ExitStack() as stack:
                file: Any = stack.enter_context(open(self.path, "rb"))
                if lower.endswith(".gz"):
                    file = stack.enter_context(gzip.GzipFile(fileobj=file))
                # A line of JSON ends only at \n. The csv module decides where a line of CSV ends.
                newline = "\n" if suffix in _JSON_SUFFIXES else ""
                # Invalid UTF-8 becomes surrogates, so that it is an error of its row only.
                lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
                yield from self._json(lines) if suffix in _JSON_SUFFIXES else self._csv(lines, is_tsv=suffix == ".tsv")
        except EOFError as err:
            raise PackError(f"{self.path}: the compressed file stops before its end.") from err
        except (OSError, zlib.error) as err:
            raise PackError(f"{self.path}: cannot be read: {getattr(err, 'strerror', None) or err}.") from err

    def _items(self, items: Sequence[Any]) -> Iterator[_Record]:
        for number, item in enumerate(items):
            where = f"{self.path}, item {number}"
            yield where, item if isinstance(item, dict) else _no_object(where, item), None

    def _json(self, file: IO[str]) -> Iterator[_Record]:
        for number, line in enumerate(self._lines(file), start=1):
            where, text = f"{self.path}:{number}", line.strip()
            if not text:
                continue
            try:
                record = parse_json(text) if is_utf8(text) else bad_row(where, _NOT_UTF8)
            except ValueError as err:
                record = bad_row(where, f"it is not JSON: {err}")
            yield where, record if isinstance(record, dict | RowError) else _no_object(where, record), text

    def _lines(self, file: IO[str], *, refuse_nul: bool = False) -> Iterator[str]:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), ""), start=1):
            if len(line) > MAX_ROW_BYTES:
                msg = f"{self.path}:{number}: this line is longer than the {MAX_ROW_BYTES} bytes that a row can have"
                raise PackError(f"{msg}. Is there one row per line?")
            if refuse_nul and "\x00" in line:
                raise PackError(f"{self.path}:{number}: it holds a NUL, like text in UTF-16. Save it as UTF-8.")
            yield line

    def _csv(self, file: IO[str], *, is_tsv: bool) -> Iterator[_Record]:
        """Yield the rows after the header. The place has the number of the row's first line. Empty lines are skipped.

        In a TSV, quotes are ordinary text (IANA's text/tab-separated-values). A cell that starts and ends with a quote
        and has doubled quotes between them, as CSV writes it, is an error of its row. A .csv may have tabs between its
        columns, if its header has tabs and no comma.
        """
        lines = self._lines(file, refuse_nul=True)
        first = next(lines, "")
        delimiter = "\t" if is_tsv or ("\t" in first and "," not in first) else ","
        quoting: Any = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
        reader = csv.reader(itertools.chain([first], lines), strict=True, delimiter=delimiter, quoting=quoting)
        start = 1
        try:
            header = next(reader, [])
            self._check_header(header, is_tsv=is_tsv)
            start = reader.line_num + 1
            for cells in reader:
                where = f"{self.path}:{start}"
                start = reader.line_num + 1
                quoted = next((cell for cell in cells if '""' in cell[1:-1] and _is_quoted(cell)), "") if is_tsv else ""
                if not cells:
                    continue
                if len(cells) != len(header):
                    is_quoted = is_tsv and any(cell.startswith('"') for cell in cells)
                    problem = f"it has {len(cells)} columns, but the header has {len(header)}"
                    yield where, bad_row(where, problem, _AS_CSV if is_quoted else ""), None
                elif not all(map(is_utf8, cells)):
                    yield where, bad_row(where, _NOT_UTF8), None
                elif quoted:
                    problem = (
                        f"its column {header[cells.index(quoted)]!r} is quoted as in CSV ({quoted[:_SHOWN_CHARS]})"
                    )
                    yield where, bad_row(where, f"{problem}, but a .tsv has no quotes", _AS_CSV), None
                else:
                    yield where, dict(zip(header, cells, strict=True)), None
        except csv.Error as err:
            what = "TSV" if is_tsv else "CSV, as if a quote is not doubled or not closed"
            raise PackError(f"{self.path}:{start}: it is not {what}: {err}.\n  Write it as JSONL.") from err

    def _check_header(self, header: list[str], *, is_tsv: bool) -> None:
        """Raise PackError if the first line is not a line of column names."""
        folder = os.path.dirname(self.path)
        problem = ""
        if len(header) > 1 and not header[0] and all(header[1:]):
            problem = "the first column has no name, like the index that pandas writes. Write it with index=False"
        elif len(header) == 1 and ";" in header[0]:
            problem = "the header has ; and no comma. Separate the columns by commas, or by tabs"
        elif not all(map(is_utf8, header)):
            problem = "the header is not UTF-8. Save it as UTF-8"
        elif any(is_image_field(field_of(cell)) or os.path.isfile(os.path.join(folder, cell)) for cell in header):
            problem = "the first line looks like data, not like a header; write a line of column names first"
        elif not header or len({*header}) < len(header) or not all(header):
            problem = f"the header {header} must name each column once"
        elif is_tsv and any(map(_is_quoted, header)):
            problem = f"the header is quoted as in CSV, but a .tsv has no quotes. {_AS_CSV.rstrip('.')}"
        if problem:
            raise PackError(f"{self.path}:1: {problem}.")


def _is_quoted(cell: str) -> bool:
    """Return True if a cell is quoted as in CSV: in quotes, and each quote inside is doubled."""
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def _no_object(where: str, value: Any) -> RowError:
    return bad_row(where, f"it holds a {type(value).__name__}, not an object of columns")
