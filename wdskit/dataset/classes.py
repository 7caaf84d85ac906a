"""Read, write and compare `classes.json`, the class names of a folder of shards. Find the fields that hold labels, and
say which labels are equal.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wdskit.dataset.index import join_url, read_index
from wdskit.errors import FolderIndexError, StorageError
from wdskit.storage.urls import ABSENT_STATUSES, is_local, read_bytes

CLASS_FIELD = "cls"
CLASSES_NAME = "classes.json"
MAX_CLASSES_BYTES = 64 << 20
_NUMERAL = re.compile(r"\s*[+-]?(0|[1-9][0-9]{0,18})(\.[0-9]+)?\s*", re.ASCII)
_MAX_EXACT = 1 << 53  # floats represent all whole numbers up to this one
_log = logging.getLogger(__name__)


def plain_value(value: Any) -> Any:
    """Return the value by which labels and groups are compared: 17, 17.0, "17" and " 17.0" are 17; NaN and blank text
    are None. Other text is unchanged, also numbers with a leading zero, such as "007".
    """
    if isinstance(value, str):
        if not value or value.isspace():
            return None
        if _NUMERAL.fullmatch(value):
            value = float(value) if "." in value else int(value)
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if value.is_integer() and abs(value) <= _MAX_EXACT:
            return int(value)
    return value


def read_classes(folder: str | Path) -> tuple[str, ...] | None:
    """Return the class names of a local or remote folder in the order of their numbers; None if the folder has no
    `classes.json`, or if a store forbids reading it.

    Raises:
        FolderIndexError: `classes.json` is invalid.
        StorageError: `classes.json` cannot be read for another reason.
    """
    path = str(folder / CLASSES_NAME) if isinstance(folder, Path) else join_url(folder, CLASSES_NAME)
    if (isinstance(folder, Path) or is_local(path)) and not os.path.isfile(path):  # noqa: PTH113 (never an error)
        return None
    try:
        return parse_classes(read_bytes(path, limit=MAX_CLASSES_BYTES), path, folder=str(folder))
    except StorageError as err:
        if err.status in ABSENT_STATUSES:
            return None
        raise


def classes_json(numbers: Mapping[str, int]) -> bytes:
    """Return the bytes of a `classes.json`. `numbers` maps the name of each class to its number."""
    return (json.dumps(dict(numbers), ensure_ascii=False, indent=0) + "\n").encode()


def parse_classes(data: bytes, path: str, *, folder: str = "") -> tuple[str, ...]:
    """Return the class names in the bytes of a `classes.json`, in the order of their numbers. `path` and `folder` are
    for the error.

    Raises:
        FolderIndexError: The bytes are neither a JSON list of names, nor a JSON object that maps n names to the numbers
            0 to n-1.
    """
    try:
        names = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise FolderIndexError(f"{path}: it is not JSON: {err}.", folder=folder) from err
    if isinstance(names, dict) and all(type(number) is int for number in names.values()):
        numbers, names = sorted(names.values()), sorted(names, key=names.__getitem__)
        if numbers != [*range(len(names))]:
            msg = f"{path}: the numbers of its {len(names)} classes are not 0 to {len(names) - 1}, each once."
            raise FolderIndexError(f"{msg} Correct it, or remove it.", folder=folder)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FolderIndexError(f"{path}: it is not a list of class names in the order of their numbers.", folder=folder)
    return tuple(names)


class CommonClasses(NamedTuple):
    """The class names of several folders.

    Attributes:
        names: Class names in the order of their numbers; None if no folder has a `classes.json`.
        folder: The folder whose `classes.json` has all of these names; empty if `names` is None.
        problem: Message about a folder that may have labels but no `classes.json`, if another folder has a
            `classes.json`. Empty if there is no such folder.
    """

    names: tuple[str, ...] | None
    folder: str
    problem: str


def is_label(field: str) -> bool:
    """Return True if a field of this name has the number of a class: the name is `cls` or ends in `.cls`."""
    return field.rpartition(".")[2] == "cls"


def folder_has_labels(folder: str) -> bool:
    """Return whether any shard of a folder has a field `cls` or `*.cls`, according to the folder's index. The folder is
    a path or a URL. Raises FolderIndexError and StorageError as `read_index` does.
    """
    index = read_index(folder)
    return any(is_label(field) for shard in range(len(index)) for field in index.fields(shard))


def common_classes(folders: Iterable[str], has_labels: Callable[[str], bool], *, way_out: str) -> CommonClasses:
    """Return the class names of several folders. Each class number must have one name in all `classes.json`.

    Args:
        folders: Paths or URLs.
        has_labels: Returns whether samples of a folder may have the field `cls`. Called only for folders without a
            `classes.json`, and only if another folder has one.
        way_out: What the user can do instead of packing a folder again, for the error message.

    Raises:
        FolderIndexError: A class number has two names, or a `classes.json` is invalid.
        StorageError: A `classes.json` cannot be read.
    """
    names: tuple[str, ...] | None = None
    named = ""
    without = []
    for folder in dict.fromkeys(folders):
        found = read_classes(folder)
        if found is None:
            without.append(folder)
            continue
        pairs = enumerate(zip(names or (), found, strict=False))  # numbers that both lists have
        number = next((number for number, pair in pairs if pair[0] != pair[1]), None)
        if names is not None and number is not None:
            paths = join_url(folder, CLASSES_NAME), join_url(named, CLASSES_NAME)
            msg = f"{paths[0]}: class {number} is {found[number]!r}, but {names[number]!r} in {paths[1]}"
            remedy = f"Pack one of them again with the numbers of the other (`wdskit pack --classes`), or {way_out}"
            raise FolderIndexError(f"{msg}: one label would mean two classes.\n  {remedy}", folder=folder)
        if names is None or len(found) > len(names):
            names, named = found, folder
    unnamed = None if names is None else next(filter(has_labels, without), None)
    problem = ""
    if unnamed is not None:
        problem = f"{unnamed or '.'} has labels but no {CLASSES_NAME}, which {named or '.'} has"
    return CommonClasses(names, named, problem)


def check_labels(folders: Iterable[str], has_labels: Callable[[str], bool]) -> None:
    """Check that the labels of all folders of a pipeline mean the same classes. Do nothing for fewer than two folders.
    Log a warning if a folder with labels has no `classes.json` but another folder has.

    Args:
        folders: Paths or URLs.
        has_labels: Returns whether samples of a folder may have the field `cls`. Its exceptions are not caught.

    Raises:
        FolderIndexError: A class number has two names, or a `classes.json` is invalid.
        StorageError: A `classes.json` cannot be read.
    """
    several = [*dict.fromkeys(folders)]
    if len(several) > 1:
        way_out = "set `classes: any` in the source if labels are not used or stages make them agree."
        problem = common_classes(several, has_labels, way_out=way_out).problem
        if problem:
            remedy = f"If they do, copy that {CLASSES_NAME} there; or set `classes: any` in the source."
            _log.warning("%s: whether their labels mean the same classes is not known.\n  %s", problem, remedy)
