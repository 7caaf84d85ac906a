"""Find the kind of a source, such as an image folder or a table, by its name and by the names in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.patterns import split_parts
from wdskit.errors import PackError
from wdskit.packing.row import Reading, field_of
from wdskit.packing.sources.base import Source
from wdskit.packing.sources.coco import Coco
from wdskit.packing.sources.folder import ImageFolder, list_names
from wdskit.packing.sources.parquet import Parquet
from wdskit.packing.sources.python import Python
from wdskit.packing.sources.table import SUFFIXES, Table
from wdskit.packing.sources.tars import Tars
from wdskit.storage.urls import is_local


def find_source(source: Any, how: Reading) -> Source:
    """Return the source for a path, a URL or pattern of tars, or an iterable of rows as dicts.

    Raises:
        PackError: The source does not exist or cannot be read, its kind is unknown.
        StorageError: A URL or pattern is invalid, or no tar matches.
        FolderIndexError: An index or `classes.json` of the tars is invalid.
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
    elif is_local(first):
        suffix = next((each for each in _KINDS if first.lower().endswith(each)), "")
    else:
        suffix = ".tar"
    if not suffix:
        msg = (
            f"{path or 'an empty path'}: there is no such folder, nor a file with a known suffix ({', '.join(_KINDS)})."
        )
        raise PackError(f"{msg}\n  Other sources, such as zips, are rows from Python: docs/recipes.md.")
    return _KINDS[suffix](path, how)


def _table_or_coco(path: str, how: Reading) -> Source:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return Table(path, how)
    return Coco(path, how)


_KINDS: Mapping[str, Callable[[str, Reading], Source]] = {
    **dict.fromkeys(SUFFIXES, Table),
    ".json": _table_or_coco,
    ".parquet": Parquet,
    ".tar": Tars,
}
