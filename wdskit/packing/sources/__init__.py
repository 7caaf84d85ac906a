"""Find the kind of a source, such as an image folder or a table, by its name and by the names in a folder."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.patterns import expand_patterns, has_wildcards, split_parts, split_url
from wdskit.errors import PackError
from wdskit.files import describe_missing
from wdskit.packing.row import field_of
from wdskit.packing.sources.base import Reading, Source
from wdskit.packing.sources.coco import Coco
from wdskit.packing.sources.folder import ImageFolder, list_names
from wdskit.packing.sources.parquet import Parquet
from wdskit.packing.sources.python import Python
from wdskit.packing.sources.table import SUFFIXES, Table
from wdskit.packing.sources.tars import Tars
from wdskit.storage.urls import is_local, shown_url


def find_source(source: Any, how: Reading) -> Source:
    """Return the source for a path, a URL or pattern of tars, or an iterable of rows as dicts.

    Raises:
        PackError: The source does not exist or cannot be read, its kind is unknown.
        StorageError: A URL or pattern is invalid, or no tar matches.
        FolderIndexError: An index or `classes.json` of the tars is invalid.
    """
    if not isinstance(source, (str, os.PathLike)):
        if not isinstance(source, Iterable):
            raise PackError(f"{source!r} is not a source. Pass a folder, a table, or an iterable of rows.")
        return Python(source, how)
    path = os.fsdecode(source)
    first = split_parts(path)[0]
    if "://" in first and not os.path.lexists(first) and not is_local(first):
        name = split_url(first)[1]  # empty for a folder
        if name and not has_wildcards(name) and not name.lower().endswith(".tar"):
            raise PackError(f"{shown_url(first)}: only tars are packed from a store. A folder ends with a slash.")
        return Tars(path, how)
    if os.path.isdir(first):
        files, folders = list_names(first)
        others = {end for end in (".parquet", ".tar") if any(name.lower().endswith(end) for name in files)}
        has_images = bool(folders or how.files) or any(is_image_field(field_of(name)) for name in files)
        if has_images or len(others) != 1:
            return ImageFolder(path, how)
        suffix = others.pop()
    elif not os.path.exists(first) and not has_wildcards(first) and "{" not in first:
        raise PackError(f"{path or 'an empty path'}: {describe_missing(first, 'folder or file')}")
    else:
        suffix = next((each for each in _KINDS if first.lower().endswith(each)), "")
    if not suffix:
        msg = f"{path}: this is neither a folder nor a file with a known suffix ({', '.join(_KINDS)})."
        raise PackError(f"{msg}\n  Other sources, such as zips, are rows from Python: docs/recipes.md.")
    return _KINDS[suffix](path, how)


def _table_or_coco(path: str, how: Reading) -> Source:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return Table(path, how)
    return Coco(path, how)


def _parquet(path: str, how: Reading) -> Source:
    """Return the Parquet files that a path names: files, patterns or folders, joined by `::`. The files of each part
    are sorted by the bytes of their paths.
    """
    found = []
    for pattern in expand_patterns(path):
        if os.path.isdir(pattern):
            pattern = os.path.join(glob.escape(pattern), "*.parquet")
        names = [pattern] if os.path.exists(pattern) else glob.glob(pattern)
        if not names:
            raise PackError(f"{pattern}: there is no Parquet file with this name.")
        found += sorted(names, key=os.fsencode)
    return Parquet(path, how, found)


_KINDS: Mapping[str, Callable[[str, Reading], Source]] = {
    **dict.fromkeys(SUFFIXES, Table),
    ".json": _table_or_coco,
    ".parquet": _parquet,
    ".tar": Tars,
}
