"""Rows from Python: dicts with a key and fields, the form that webdataset's writers take."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from wdskit.errors import PackError, RowError
from wdskit.packing.row import SAME_FIELD, Field, File, Row, make_row
from wdskit.packing.sources.base import Reading, Source, attempt
from wdskit.packing.sources.records import add_field, keep_key, make_field


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
        """Yield one row per dict. An error of the iterable is raised; an OSError as a PackError."""
        rows = iter(self._rows)
        for number in itertools.count():
            try:
                row = next(rows)
            except StopIteration:
                return
            except OSError as err:  # not an error of DEST
                raise PackError(f"the rows raised {err!r} after {number} of them") from err
            yield attempt(self._row, f"row {number}", row)

    def _row(self, where: str, row: Any) -> Row:
        key = row.get("__key__") if isinstance(row, Mapping) else None
        if not isinstance(key, str) or not all(isinstance(name, str) for name in row):
            shown = [*row] if isinstance(row, Mapping) else type(row).__name__
            raise TypeError(f"it is not a dict of fields by name with a text `__key__`: {shown}")
        fields: dict[str, Field] = {}
        for given, value in row.items():
            name = SAME_FIELD.get(given.lower(), given.lower())
            if not name.startswith("__"):
                field = File.whole(str(value)) if isinstance(value, Path) else make_field(name, value)
                if field is not None:
                    add_field(fields, name, field)
        made = make_row(key, fields, f"{where} ({key!r})", keys=self.how.keys, source=self.name)
        return keep_key(made, key)
