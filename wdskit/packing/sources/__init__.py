"""Find the kind of a source, such as an image folder or a table, by its name and by the names in a folder; a .json by
what it holds. Rows from Python are a source of their own. A new kind is a subclass of `records.Source`, and its suffix
in `_KINDS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.patterns import split_parts
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_COCO_BYTES
from wdskit.packing.row import SAME_FIELD, Field, File, Reading, Row, field_of
from wdskit.packing.sources.coco import Coco
from wdskit.packing.sources.folder import ImageFolder, list_names
from wdskit.packing.sources.parquet import Parquet
from wdskit.packing.sources.records import Source, add_field, make_field, read_json
from wdskit.packing.sources.table import SUFFIXES, Table
from wdskit.packing.sources.tars import Tars
from wdskit.storage.urls import is_local


def find_source(source: Any, how: Reading) -> Source:
    """Return the source for a path, a URL or pattern of tars, or an iterable of rows as dicts.

    Raises:
        PackError: The source does not exist, its kind is unknown, or the file cannot be read.
        StorageError: A URL or pattern is invalid, or no tar matches.
        FolderIndexError: An index or `classes.json` of the tars is invalid.
        OSError: A folder cannot be listed.
    """
    if not isinstance(source, (str, os.PathLike)):
        return Python(source, how)
    path = os.fsdecode(source)
    first = split_parts(path)[0]
    if os.path.isdir(first):
        files, folders = list_names(first)
        others = {end for end in (".parquet", ".tar") if any(name.lower().endswith(end) for name in files)}
        has_images = bool(folders or how.files) or any(is_image_field(field_of(name)) for name in files)
        if has_images or len(others) != 1:
            return ImageFolder(path, how)
        suffix = others.pop()
    else:
        suffix = next((each for each in _KINDS if first.lower().endswith(each)), "") if is_local(first) else ".tar"
    if not suffix:
        shown, known = path or "an empty path", ", ".join(_KINDS)
        msg = f"{shown}: there is no such folder, nor a file with a known suffix ({known})."
        raise PackError(f"{msg}\n  Other sources, such as zips, are rows from Python: docs/recipes.md.")
    return _KINDS[suffix](path, how)


def _table_or_coco(path: str, how: Reading) -> Source:
    try:
        document = read_json(File.whole(path), limit=MAX_COCO_BYTES)
    except (OSError, ValueError) as err:
        raise PackError(f"{path}: {str(err).removeprefix(f'{path}: ')}.") from err
    return Table(path, how, items=document) if isinstance(document, list) else Coco(path, how, document)


_KINDS: Mapping[str, Callable[[str, Reading], Source]] = {
    **dict.fromkeys(SUFFIXES, Table),
    ".json": _table_or_coco,
    ".parquet": Parquet,
    ".tar": Tars,
}


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
