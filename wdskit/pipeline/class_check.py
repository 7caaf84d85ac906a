"""Check that labels mean the same classes in all pipelines of a configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wdskit.dataset.classes import CLASSES_NAME, first_conflict, read_classes
from wdskit.dataset.index import folder_has_labels, join_url
from wdskit.dataset.patterns import expand_patterns, find_folders
from wdskit.errors import FolderIndexError, StorageError
from wdskit.storage.urls import is_local

_log = logging.getLogger(__name__)


def check_pipelines(pipelines: Mapping[str, Sequence[Any]], *, local_only: bool = False) -> None:
    """Check that a label means the same class in the shard folders of all pipelines.

    The class names come from the `classes.json` of each folder. Sources with `classes: any` are skipped, and so are
    folders that do not exist on this machine. A `classes.json` that cannot be read is skipped with a warning. A folder
    with labels but no `classes.json` gives a warning if a folder of another pipeline has class names. A single pipeline
    is not checked.

    Args:
        pipelines: The stages of each pipeline, its source first.
        local_only: Whether remote folders are skipped too.

    Raises:
        FolderIndexError: Two folders use the same number for different classes, or a `classes.json` is invalid.
    """
    if len(pipelines) < 2:
        return
    seen: list[tuple[str, str, tuple[str, ...]]] = []
    unnamed: list[tuple[str, str]] = []
    for pipeline, stages in pipelines.items():
        for folder in dict.fromkeys(_folders_of(stages)):
            if local_only and not is_local(folder):
                continue
            try:
                names = read_classes(folder)
            except StorageError as err:
                _log.warning("pipeline %s: its classes are not compared with those of the others: %s", pipeline, err)
                continue
            if names is None:
                unnamed.append((pipeline, folder))
                continue
            for other, where, others in seen:
                number = first_conflict(others, names)
                if number is not None:
                    paths = join_url(folder, CLASSES_NAME), join_url(where, CLASSES_NAME)
                    msg = f"pipeline {pipeline}: {paths[0]}: class {number} is {names[number]!r}, but "
                    msg += f"{others[number]!r} in {paths[1]} of pipeline {other}: one label would mean two classes."
                    way = "Pack one of them again with the numbers of the other (`wdskit pack --classes`), or set "
                    raise FolderIndexError(f"{msg}\n  {way}`classes: any` in one of the sources.", folder=folder)
            seen.append((pipeline, folder, names))
    for pipeline, folder in unnamed:
        named = next(((other, where) for other, where, _ in seen if other != pipeline), None)
        if named is not None and _has_labels(folder):
            msg = "pipeline %s: %s has labels but no %s, which %s of pipeline %s has. It is not known whether their "
            msg += "labels mean the same classes.\n  If they do, copy that file into the folder without it; or set "
            msg += "`classes: any` in the source."
            _log.warning(msg, pipeline, folder or ".", CLASSES_NAME, named[1] or ".", named[0])


def _has_labels(folder: str) -> bool:
    """Return True if the index of a folder lists a field of labels (`cls` or `*.cls`). Return False if the index lists
    no such field or cannot be read.
    """
    try:
        return folder_has_labels(folder)
    except (FolderIndexError, StorageError):
        return False


def _folders_of(stages: Sequence[Any]) -> Iterator[str]:
    """Yield the shard folders whose classes are compared. The same folder may be yielded several times.

    A source with `classes: any`, or from outside wdskit, has no such folder. A folder that does not exist on this
    machine is left out.
    """
    source = stages[0]
    if getattr(source, "classes", None) != "same":
        return
    parts = [source.shards] if source.shards else [part.shards for part in source.mixture]
    heads = set()
    for shards in parts:
        for pattern in expand_patterns(shards):
            head, name = os.path.split(pattern)
            if head in heads and name.endswith(".tar"):
                continue
            heads.add(head)
            try:
                yield from (found.folder for found in find_folders(pattern))
            except StorageError:  # the folder does not exist on this machine
                continue
