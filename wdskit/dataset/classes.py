"""`classes.json`: the names of the classes beside the shards, as `pack` writes them."""

from __future__ import annotations

import json
from pathlib import Path

from wdskit.errors import FolderIndexError
from wdskit.storage.urls import read_bytes

CLASSES_NAME = "classes.json"
MAX_CLASSES_BYTES = 64 << 20


def read_classes(folder: Path) -> tuple[str, ...] | None:
    """The class names of a local folder by class number, None where it has none.

    Raises:
        FolderIndexError: The file is no list of names and no numbers by name.
    """
    path = folder / CLASSES_NAME
    if not path.is_file():
        return None
    try:
        names = json.loads(read_bytes(str(path), limit=MAX_CLASSES_BYTES))
    except (ValueError, RecursionError) as err:
        raise FolderIndexError(f"{path}: it is no JSON: {err}.", folder=str(folder)) from err
    if isinstance(names, dict) and all(type(number) is int for number in names.values()):
        numbers, names = sorted(names.values()), sorted(names, key=names.__getitem__)
        if numbers != [*range(len(names))]:
            msg = f"{path}: the numbers of its {len(names)} classes are not 0 to {len(names) - 1}, each once."
            raise FolderIndexError(f"{msg} Mend it, or remove it.", folder=str(folder))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FolderIndexError(
            f"{path}: it is no list of class names in the order of their numbers.", folder=str(folder)
        )
    return tuple(names)
