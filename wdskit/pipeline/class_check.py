"""Check that labels mean the same classes in all pipelines of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from wdskit.dataset.classes import check_labels, folder_has_labels
from wdskit.dataset.patterns import expand_patterns, find_folders
from wdskit.errors import FolderIndexError, StorageError
from wdskit.storage.urls import is_local


def check_pipelines(pipelines: Iterable[Sequence[Any]]) -> None:
    """Check that a label means the same class in the local shard folders of all pipelines, whose stages are given.
    Folders that do not exist on this machine, and sources with `classes: any`, are skipped.

    Raises:
        FolderIndexError: Two folders use the same number for different classes, or a `classes.json` is invalid.
        StorageError: A `classes.json` cannot be read.
    """
    check_labels([folder for stages in pipelines for folder in _folders_of(stages[0])], _has_labels)


def _has_labels(folder: str) -> bool:
    try:
        return folder_has_labels(folder)
    except (FolderIndexError, StorageError):  # no index
        return False


def _folders_of(source: Any) -> Iterator[str]:
    """Yield the local shard folders of a source, some several times."""
    if getattr(source, "classes", None) == "same":
        for shards in [source.shards] if source.shards else [part.shards for part in source.mixture]:
            for pattern in filter(is_local, expand_patterns(shards)):
                with suppress(StorageError):  # the folder does not exist on this machine
                    yield from (found.folder for found in find_folders(pattern))
