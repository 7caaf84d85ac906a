"""Rows from Python: dicts with a key and fields, the form that webdataset's writers take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from wdskit.errors import DecodeError, RowError
from wdskit.packing.row import SAME_FIELD, Field, Row, bad_row, file_field, make_row
from wdskit.packing.sources.base import Reading, Source
from wdskit.packing.sources.records import keep_key, make_field


class Python(Source):
    """An iterable of `{"__key__": key, field: value, ...}`.

    Names of fields become lower case, and `jpeg` becomes `jpg`. Names that begin with two underscores are skipped. A
    value is bytes, a `pathlib.Path` whose file is packed, or a value that `records.make_field` takes for the name.
    """

    kind: ClassVar[str] = "rows from Python"

    def __init__(self, rows: Iterable[Any], how: Reading) -> None:
        super().__init__("", how)
        self._rows = rows

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per dict. An error of the iterable is raised."""
        for number, row in enumerate(self._rows):
            try:
                yield self._row(row, f"row {number}")
            except RowError as err:
                yield err

    def _row(self, row: Any, where: str) -> Row:
        key = row.get("__key__") if isinstance(row, Mapping) else None
        if not isinstance(key, str):
            what = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise bad_row(where, f"it is not a dict with a text `__key__` and fields: {what}")
        where = f"{where} ({key!r})"
        fields: dict[str, Field] = {}
        for given, value in row.items():
            if not isinstance(given, str):
                raise bad_row(where, f"its field {given!r} is not text")
            if given.startswith("__"):
                continue
            name = SAME_FIELD.get(given.lower(), given.lower())
            if name in fields:
                raise bad_row(where, f"it has the field {name!r} twice")
            try:
                field = file_field(str(value), where) if isinstance(value, Path) else make_field(name, value)
            except (DecodeError, ValueError) as err:
                raise bad_row(where, f"its field {name!r}: {err}") from err
            if field is not None:
                fields[name] = field
        return keep_key(make_row(key, fields, where, keys=self.how.keys, source=self.name), key)
