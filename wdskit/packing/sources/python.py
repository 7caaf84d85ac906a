"""Rows from Python: dicts with a key and fields, the form that webdataset's writers take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from wdskit.errors import RowError
from wdskit.packing.row import SAME_FIELD, Field, File, Reading, Row
from wdskit.packing.sources.base import Source
from wdskit.packing.sources.records import add_field, make_field


class Python(Source):
    """An iterable of `{"__key__": key, field: value, ...}`.

    Names of fields become lower case, and `jpeg` becomes `jpg`. Names that begin with two underscores are skipped. A
    value is bytes, a `pathlib.Path` whose file is packed, or a value that `records.make_field` takes for the name.
    """

    keeps_keys: ClassVar[bool] = True

    def __init__(self, rows: Iterable[Any], how: Reading) -> None:
        super().__init__("", how)
        self._rows = rows

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per dict. An error of the iterable is raised."""
        for number, row in enumerate(self._rows):
            made = self.row(f"row {number}", self._fields, row)
            yield made._replace(where=f"row {number} ({row['__key__']!r})") if isinstance(made, Row) else made

    def _fields(self, row: Any) -> tuple[str, dict[str, Field]]:
        key = row.get("__key__") if isinstance(row, Mapping) else None
        if not isinstance(key, str) or not all(isinstance(name, str) for name in row):
            raise TypeError("it is not a dict of fields by name with a text `__key__`")
        fields: dict[str, Field] = {}
        for given, value in row.items():
            name = SAME_FIELD.get(given.lower(), given.lower())
            if not name.startswith("__"):
                add_field(fields, name, File.whole(str(value)) if isinstance(value, Path) else make_field(name, value))
        return key, fields
