"""Rows from a table of text: .csv, .tsv, .jsonl or .ndjson, also with .gz, or a .json with a list of objects."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import getitem
from typing import IO, Any, ClassVar, TypeAlias

from wdskit.codecs.formats import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_COCO_BYTES, MAX_ROW_BYTES
from wdskit.packing.row import Row, field_of, file_field
from wdskit.packing.sources.base import Source, attempt
from wdskit.packing.sources.records import Records, parse_json, read_json

_JSON_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = tuple(f"{each}{gz}" for gz in ("", ".gz") for each in (*_JSON_SUFFIXES, ".csv", ".tsv"))
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"', re.DOTALL)
"""A cell that CSV quotes because it has a quote, which is doubled."""

_Record: TypeAlias = tuple[str, Callable[[], Any], str | None]
"""The place of a record, a function that returns its columns, and its JSON text if the record is a line of JSON."""

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

        def make(where: str, read: Callable[[], Any], number: int, text: str | None) -> Row:
            return records.row(where, read(), number, text=text)

        for number, (where, read, text) in enumerate(self._records()):
            yield attempt(make, where, read, number, text)

    def _records(self) -> Iterator[_Record]:
        lower = self.path.lower()
        suffix = os.path.splitext(lower.removesuffix(".gz"))[1]
        if suffix == ".json":
            items = read_json(file_field(self.path, self.path), self.path, limit=MAX_COCO_BYTES)
            for number in range(len(items)):
                yield f"{self.path}, item {number}", partial(getitem, items, number), None
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
        except (OSError, EOFError, zlib.error) as err:
            raise PackError(f"{self.path}: cannot be read: {err}.") from err

    def _json(self, file: IO[str]) -> Iterator[_Record]:
        for number, line in enumerate(self._lines(file), start=1):
            if text := line.strip():
                yield f"{self.path}:{number}", partial(parse_json, text), text

    def _lines(self, file: IO[str]) -> Iterator[str]:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), ""), start=1):
            if len(line) > MAX_ROW_BYTES:
                raise PackError(f"{self.path}:{number}: this line is longer than the limit of {MAX_ROW_BYTES} bytes.")
            if "\0" in line:
                raise PackError(f"{self.path}:{number}: it holds a NUL, as UTF-16 does. Save it as UTF-8.")
            yield line

    def _csv(self, file: IO[str], *, is_tsv: bool) -> Iterator[_Record]:
        """Yield the rows after the header. The place has the number of the row's first line. Empty lines are skipped.

        In a TSV, quotes are ordinary text (IANA's text/tab-separated-values). A .csv may have tabs between its columns,
        if its header has tabs and no comma.
        """
        lines = self._lines(file)
        first = next(lines, "")
        delimiter = "\t" if is_tsv or ("\t" in first and "," not in first) else ","
        quoting: Any = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
        reader = csv.reader(itertools.chain([first], lines), strict=True, delimiter=delimiter, quoting=quoting)
        start = 1
        try:
            header = next(reader, [])
            is_one = len(header) == 1 and ";" in header[0]
            if is_one or len({*header} - {""}) < max(1, len(header)) or any(map(self._is_data, header)):
                msg = f"{self.path}:1: {header} looks like data, not like a header."
                raise PackError(f"{msg} Write a line with one name for each column, separated by {delimiter!r}.")
            start = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield f"{self.path}:{start}", partial(_columns, header, cells, is_tsv), None
                start = reader.line_num + 1
        except csv.Error as err:
            raise PackError(f"{self.path}:{start}: {err}.") from err

    def _is_data(self, name: str) -> bool:
        """Return whether a cell of the first line is not the name of a column."""
        path = os.path.join(os.path.dirname(self.path), name)
        return name.startswith('"') or is_image_field(field_of(name)) or os.path.isfile(path)


def _columns(header: list[str], cells: list[str], is_tsv: bool) -> Mapping[str, str]:  # noqa: FBT001
    if len(cells) != len(header):
        raise ValueError(f"it has {len(cells)} columns, but the header has {len(header)}")
    quoted = next(filter(_QUOTED.fullmatch, cells), None) if is_tsv else None
    if quoted is not None:
        raise ValueError(f"{quoted} is quoted as in CSV, but a .tsv has no quotes. Name the file .csv")
    return dict(zip(header, cells, strict=True))
