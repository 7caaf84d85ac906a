"""Rows from a table of text: .csv, .tsv, .jsonl or .ndjson, also with .gz, or a .json with a list of objects. Of each
record, also of Parquet, `records.Records.row` makes a sample: the column of the image, the column of the key, the
fields of `--field` (`records.make_field`), and `json` with all columns but those of bytes.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

from wdskit.codecs.formats import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.row import Field, Reading, Row, field_of
from wdskit.packing.sources.records import Records, Source

_JSON_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = tuple(f"{each}{gz}" for gz in ("", ".gz") for each in (*_JSON_SUFFIXES, ".csv", ".tsv"))

# Of the whole process, so it is never set back: other tables may be open.
csv.field_size_limit(max(MAX_ROW_BYTES, csv.field_size_limit()))


class Table(Source):
    """A table. Paths in it are relative to its folder. `items` are the items of a .json with a list, else None."""

    reads = frozenset({"image", "key", "fields"})

    def __init__(self, path: str, how: Reading, *, items: Sequence[object] | None = None) -> None:
        super().__init__(path, how)
        self._items = items
        self._records = Records(os.path.dirname(path), how)

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per record.

        Raises:
            PackError: The file cannot be read, its header is invalid, a line is too long, or it is not CSV or TSV.
        """
        for number, item in enumerate(self._items or ()):
            yield self.row(f"{self.path}, item {number}", self._records.row, item, number)
        if self._items is not None:
            return
        lower = self.path.lower()
        suffix = os.path.splitext(lower.removesuffix(".gz"))[1]
        try:
            open_text: Any = gzip.open if lower.endswith(".gz") else open
            # A line of JSON ends only at \n. The csv module decides where a line of CSV ends.
            newline = "\n" if suffix in _JSON_SUFFIXES else ""
            # Invalid UTF-8 becomes surrogates, so that it is an error of its row only.
            with open_text(self.path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline) as lines:
                yield from self._json(lines) if suffix in _JSON_SUFFIXES else self._csv(lines, is_tsv=suffix == ".tsv")
        except (OSError, EOFError, ValueError, zlib.error) as err:
            raise PackError(f"{self.path}: cannot be read: {err}.") from err

    def _json(self, file: IO[str]) -> Iterator[Row | RowError]:
        texts = ((line, text.strip()) for line, text in enumerate(self._lines(file), start=1) if not text.isspace())
        for number, (line, text) in enumerate(texts):
            yield self.row(f"{self.path}:{line}", self._records.row, text, number)

    def _lines(self, file: IO[str]) -> Iterator[str]:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), ""), start=1):
            if len(line) > MAX_ROW_BYTES:
                raise PackError(f"{self.path}:{number}: this line is longer than the limit of {MAX_ROW_BYTES} bytes.")
            if "\0" in line:
                raise PackError(f"{self.path}:{number}: it holds a NUL, as UTF-16 does. Save it as UTF-8.")
            yield line

    def _csv(self, file: IO[str], *, is_tsv: bool) -> Iterator[Row | RowError]:
        """Yield the rows after the header. The place has the number of the row's first line. Empty lines are skipped.

        In a TSV, quotes are ordinary text (IANA's text/tab-separated-values). A .csv may have tabs between its columns,
        if its header has tabs and no comma.
        """
        lines = self._lines(file)
        first = next(lines, "")
        delimiter = "\t" if is_tsv or ("\t" in first and "," not in first) else ","
        quoting: Any = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
        reader = csv.reader(itertools.chain([first], lines), strict=True, delimiter=delimiter, quoting=quoting)
        start, numbers = 1, itertools.count()
        try:
            header = next(reader, [])
            is_one = len(header) == 1 and ";" in header[0]
            if is_one or len({*header} - {""}) < max(1, len(header)) or any(map(self._is_data, header)):
                msg = f"{self.path}:1: {header} looks like data, not like a header."
                raise PackError(f"{msg} Write a line with one name for each column, separated by {delimiter!r}.")
            start = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield self.row(f"{self.path}:{start}", self._of_cells, header, cells, next(numbers))
                start = reader.line_num + 1
        except csv.Error as err:
            raise PackError(f"{self.path}:{start}: {err}.") from err

    def _of_cells(self, header: list[str], cells: list[str], number: int) -> tuple[str, dict[str, Field]]:
        if len(cells) != len(header):
            raise ValueError(f"it has {len(cells)} cells, and the header has {len(header)}")
        return self._records.row(dict(zip(header, cells, strict=True)), number)

    def _is_data(self, name: str) -> bool:
        """Return whether a cell of the first line is not the name of a column."""
        path = os.path.join(os.path.dirname(self.path), name)
        return name.startswith('"') or is_image_field(field_of(name)) or os.path.isfile(path)
