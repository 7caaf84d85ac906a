"""Shards by name in the mapped indexes of their folders: what `dataset.patterns` finds, for planned sources."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import BinaryIndex
from wdskit.dataset.index import join_url
from wdskit.dataset.patterns import expand_braces, has_wildcards, no_such, not_listed, nothing_matches, split_parts
from wdskit.errors import FolderIndexError, StorageError
from wdskit.storage.urls import is_local, local_path

MAX_COMPARED = 100_000  # shards of a folder up to which its files are listed too: 10**6 take 0.7 s


@dataclass(frozen=True)
class Segment:
    """Shards of one folder that stand side by side, by their numbers in its index."""

    index: BinaryIndex
    numbers: NDArray[np.int64]


def find_mapped(shards: str | Sequence[str]) -> list[Segment]:
    """The shards that a user's words name, in their order.

    Args:
        shards: As `dataset.patterns.list_shards` takes it.

    Raises:
        StorageError: Nothing matches, a shard is missing, or one is remote.
        FolderIndexError: A folder has no index, or one that does not match its shards.
    """
    return _merged(_Folders().find(shards))


def _merged(segments: list[Segment]) -> list[Segment]:
    """Neighbours of one folder as one: each shard named for itself is a segment otherwise."""
    merged: list[Segment] = []
    run: list[Segment] = []
    for segment in [*segments, None]:
        if run and (segment is None or segment.index is not run[0].index):
            merged.append(Segment(run[0].index, np.concatenate([each.numbers for each in run])))
            run = []
        if segment is not None:
            run.append(segment)
    return merged


class _Folders:
    """Finds shards in the indexes of their folders, each mapped once."""

    def __init__(self) -> None:
        self._known: dict[str, BinaryIndex] = {}
        self._numbers: dict[str, dict[str, int]] = {}

    def find(self, shards: str | Sequence[str]) -> list[Segment]:
        """The shards that a user's words name."""
        items = [shards] if isinstance(shards, str) else list(shards)
        found = [
            segment
            for item in items
            for part in split_parts(item)
            for pattern in expand_braces(part)
            for segment in self._match(pattern)
        ]
        if not found:
            raise StorageError("no shards: the list is empty. Name a path, a glob, a brace pattern or a folder.")
        return found

    def _match(self, pattern: str) -> Iterator[Segment]:
        if not is_local(pattern):
            msg = f"{pattern}: a planned source reads samples one by one, which takes a local shard."
            raise StorageError(f"{msg}\n  Copy the shards here, or use `stream`.", url=pattern)
        path = local_path(pattern)
        if os.path.isdir(path):
            yield self._matching(path.rstrip("/") or "/", "*.tar", pattern)
        elif has_wildcards(path) and not os.path.lexists(path):
            parent, name = os.path.split(path)
            is_plain = os.path.lexists(parent) or not has_wildcards(parent)
            parents = [parent] if is_plain else sorted(filter(os.path.isdir, glob.glob(parent)))
            if not parents:
                nothing_matches(pattern)
            if is_plain and not os.path.isdir(parent or "."):
                raise no_such(pattern, parent)
            for folder in parents:
                yield self._matching(folder, name or "*.tar", pattern)
        else:
            yield self._named(*os.path.split(path), pattern)

    def _named(self, folder: str, name: str, pattern: str) -> Segment:
        if not os.path.exists(os.path.join(folder, name)):
            raise no_such(pattern, os.path.join(folder, name))
        index = self._index(folder)
        if folder not in self._numbers:
            every = itertools.chain.from_iterable(index.names())
            self._numbers[folder] = {each: number for number, each in enumerate(every)}
        number = self._numbers[folder].get(name)
        if number is None:
            raise not_listed(folder, name)
        return Segment(index, np.array([number]))

    def _matching(self, folder: str, name: str, pattern: str) -> Segment:
        is_new = folder not in self._known
        index = self._index(folder)
        if is_new and len(index) <= MAX_COMPARED:
            _compare_with_disk(folder, index)
        numbers = np.arange(len(index))
        if name not in ("*", "*.tar"):
            matches = re.compile(fnmatch.translate(name)).match
            found = (matches(each) is not None for names in index.names() for each in names)
            numbers = np.flatnonzero(np.fromiter(found, dtype=np.bool_, count=len(index)))
        if not len(numbers):
            nothing_matches(pattern)
        return Segment(index, numbers)

    def _index(self, folder: str) -> BinaryIndex:
        if folder not in self._known:
            self._known[folder] = BinaryIndex(Path(folder))
        return self._known[folder]


def _compare_with_disk(folder: str, index: BinaryIndex) -> None:
    """Refuse shards that the index does not know, and those that only it knows."""
    with os.scandir(folder or ".") as files:
        on_disk = {file.name for file in files if file.name.endswith(".tar") and not file.name.startswith(".")}
    listed = set(itertools.chain.from_iterable(index.names()))
    if on_disk - listed:
        raise not_listed(folder, min(on_disk - listed))
    missing = {name for name in listed - on_disk if not os.path.exists(os.path.join(folder, name))}
    if missing:
        msg = f"{join_url(folder, min(missing))}: the folder's index lists this shard, but there is no such file."
        raise FolderIndexError(msg, folder=folder)
