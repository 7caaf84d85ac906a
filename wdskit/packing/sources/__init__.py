"""Find the kind of a source, such as an image folder or a table, by its name and by the names in a folder."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable
from typing import Any

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.patterns import expand_patterns, has_wildcards, split_parts, split_url
from wdskit.errors import PackError
from wdskit.files import describe_missing
from wdskit.packing.row import field_of
from wdskit.packing.sources.base import Reading, Source
from wdskit.packing.sources.coco import Coco
from wdskit.packing.sources.folder import Folder, list_names
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
    if isinstance(source, (str, os.PathLike)):
        return _find(os.fsdecode(source), how)
    if isinstance(source, Iterable):
        return Python(source, how)
    raise PackError(f"{source!r} is not a source. Pass a folder, a table, or an iterable of rows.")


def _find(path: str, how: Reading) -> Source:
    first = split_parts(path)[0]
    if "://" in first and not os.path.lexists(first) and not is_local(first):
        name = split_url(first)[1]
        if name and not has_wildcards(name) and not name.lower().endswith(".tar"):
            raise PackError(f"{first}: only tars are packed from a store. Copy other files to a local disk first.")
        return Tars(path, how)
    if os.path.isdir(first):
        suffix = _suffix_of_folder(first, how)
        if not suffix:
            return Folder(path, how)
    elif not os.path.exists(first) and not has_wildcards(first) and "{" not in first:
        raise PackError(f"{path or 'an empty path'}: {describe_missing(first, 'folder or file')}")
    else:
        suffix = next((each for each in SUFFIXES if first.lower().endswith(each)), os.path.splitext(first.lower())[1])
    if suffix in SUFFIXES:
        return Table(path, how)
    if suffix == ".json":
        return Table(path, how) if _is_list(path) else Coco(path, how)
    if suffix == ".parquet":
        return Parquet(path, how, expand_files(path, suffix))
    if suffix == ".tar":
        return Tars(path, how)
    if suffix == ".zip":
        raise PackError(f"{path}: a zip is a recipe: extract it, and pack the folder (docs/pack.md).")
    known = ", ".join((*SUFFIXES, ".json", ".parquet", ".tar"))
    raise PackError(f"{path}: this is neither a folder nor a file with a known suffix ({known}).")


def _is_list(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    return False


def _suffix_of_folder(path: str, how: Reading) -> str:
    """Return ".parquet" or ".tar" for a folder with such files, but no images or sub-folders; "" for others."""
    files, folders = list_names(path)
    if {"state.json", "dataset_info.json"} <= {*files} or "dataset_dict.json" in files:
        way = 'Write each split as Parquet, and pack it: datasets.load_from_disk(FOLDER).to_parquet("data.parquet").'
        raise PackError(
            f"{path}: a folder that `save_to_disk` of Hugging Face's `datasets` wrote is not read.\n  {way}"
        )
    if folders or how.files or any(is_image_field(field_of(name)) for name in files):
        return ""
    found = [suffix for suffix in (".parquet", ".tar") if any(name.lower().endswith(suffix) for name in files)]
    if len(found) > 1:
        raise PackError(f"{path}: there are {' and '.join(found)} in this folder. Name one kind: {path}/*{found[0]}.")
    return found[0] if found else ""


def expand_files(path: str, suffix: str) -> list[str]:
    """Return the files that a path names: files, patterns or folders, joined by `::`. A folder gives its files that end
    in `suffix`. The files of each part are sorted by the bytes of their paths.

    Raises:
        PackError: No file matches a part, or a folder cannot be listed.
        StorageError: A pattern is invalid.
    """
    found = []
    for pattern in expand_patterns(path):
        if os.path.isdir(pattern):
            names = [os.path.join(pattern, name) for name in list_names(pattern)[0] if name.lower().endswith(suffix)]
        else:
            names = [pattern] if os.path.exists(pattern) else glob.glob(pattern)
        if not names:
            raise PackError(f"{pattern}: there is no {suffix} file with this name or in this folder.")
        found += sorted(names, key=os.fsencode)
    return found
