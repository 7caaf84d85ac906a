"""The keys of rows that come once: each is compared with all before it, in some eight bytes a row.

A Python dict of ten million keys and places takes over a gigabyte. So of all but the last few thousand there are only
hashes in memory, sorted, and the keys with their places stand in a draft, which is read where two hashes are equal.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import orjson
from typing_extensions import Self

from wdskit.dataset.keys import SortedRuns, is_among
from wdskit.files import DISK, Disk, Draft, draft_path, scratch
from wdskit.packing.destination import Destination
from wdskit.packing.recorded import Ints
from wdskit.packing.rows import Row, key_taken
from wdskit.packing.sources import Tell

_BATCH_KEYS = 1 << 14


class StreamedKeys:
    """Finds a key that came before. `close` ends it.

    Args:
        room: Gives the folder for the keys on disk, when there are so many.
        name: What they are called there.
        disk: What writes.
    """

    def __init__(self, room: Callable[[], Path], *, name: str = "wdskit-keys", disk: Disk = DISK) -> None:
        self._room = room
        self._name = name
        self._disk = disk
        self._stack = contextlib.ExitStack()
        self._draft: Draft | None = None
        self._new: dict[str, str] = {}
        self._num_checked = 0
        self._hashes = SortedRuns()
        self._target: Destination | None = None
        self._taken: Ints = np.empty(0, np.int64)

    def __enter__(self) -> Self:
        """Itself; it is closed when the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """Remove what is on disk."""
        self._stack.close()

    def add_taken(self, target: Destination, tell: Tell) -> None:
        """Count the keys of a folder that is added to as taken. Its shards are read.

        Raises:
            ShardError: One is damaged.
        """
        self._target = target
        self._taken = target.hashes_of_keys(tell)

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows of a shard. Once they are through, none of their keys came before.

        Raises:
            RowError: The first one has a key that came before.
            OSError: The disk does not take the keys.
        """
        for row in rows:
            if row.key in self._new:
                self._check()  # an earlier row may have a key that is on disk
                raise key_taken(row, self._new[row.key])
            self._new[row.key] = row.where
            if len(self._new) == _BATCH_KEYS:
                self._check()
                self._keep()
            yield row
        self._check()

    def _check(self) -> None:
        """Compare the keys that are not compared yet with those before them."""
        new = [*itertools.islice(self._new.items(), self._num_checked, None)]
        self._num_checked = len(self._new)
        hashes = _hashes([key for key, _ in new])
        hashes.sort()
        found = np.concatenate([self._hashes.find(hashes), hashes[is_among(hashes, self._taken)]])
        if not len(found):
            return
        twice = {*found.tolist()}
        suspects = {key: where for key, where in new if hash(key) in twice}
        before = {key: where for key, where in self._kept() if key in suspects}
        taken = self._target.taken_of(suspects) if self._target is not None else set()
        for key, where in suspects.items():
            row = Row(key, (), where)
            if key in before:
                raise key_taken(row, before[key])
            if self._target is not None and key in taken:
                raise self._target.key_taken(row)

    def _keep(self) -> None:
        """Of the new keys keep their hashes, and themselves on disk."""
        if self._draft is None:
            self._path = self._room() / self._name
            self._draft = self._stack.enter_context(scratch(self._path, disk=self._disk))
        self._draft.write(_encode([*self._new.items()]))
        hashes = _hashes(self._new)
        hashes.sort()
        self._hashes.add(hashes)
        self._new = {}
        self._num_checked = 0

    def _kept(self) -> Iterator[list[str]]:
        """Each key on disk and its place, in their order."""
        if self._draft is None:
            return
        self._draft.wait()
        with open(draft_path(self._path), "rb") as file:
            for line in file:
                yield from json.loads(line)


def _hashes(keys: Iterable[str]) -> Ints:
    return np.array([*map(hash, keys)], dtype=np.int64)


def _encode(keys: list[tuple[str, str]]) -> bytes:
    """A line of JSON."""
    try:
        return orjson.dumps(keys, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # the name of a file is no UTF-8
        return json.dumps(keys).encode() + b"\n"
