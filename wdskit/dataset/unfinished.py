"""A folder that `pack` or `reshard` has not finished: what is there is a part, and must not pass for the whole.

Until its index is there, a run keeps a record in the folder that it writes to (`packing.record`). An index of the
shards that it has come to would stand in the way of the run that goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.braces import expand_patterns
from wdskit.dataset.index import INDEX_NAME, read_index
from wdskit.dataset.patterns import ShardList
from wdskit.errors import FolderIndexError, StorageError, WdskitError
from wdskit.storage.urls import is_local, local_path, read_bytes

RECORD_NAME = ".wdskit-pack.json"
"""What a run knows of itself, while it is at work or was stopped."""
MAX_RECORD_BYTES = 1 << 30  # 10**7 shards


@dataclass(frozen=True)
class Unfinished:
    """What a run that is at work, or was stopped, has come to.

    Attributes:
        folder: Where.
        command: What it is a run of: `pack`, ...
        num_there: Its shards that are there.
        num_shards: All that it is to write; None where it does not know that before.
        num_parts: Into how many parts it is divided; 0 where it is not.
        is_replacing: It is still removing the shards that it replaces, and has written none.
    """

    folder: Path
    command: str = "pack"
    num_there: int = 0
    num_shards: int | None = None
    num_parts: int = 0
    is_replacing: bool = False

    @property
    def problem(self) -> str:
        """What is wrong with the folder."""
        if self.is_replacing:
            return f"`wdskit {self.command} --overwrite` has begun to remove the shards here, and to replace them"
        of = "" if self.num_shards is None else f" of {self.num_shards:,}"
        is_there = "shard is" if (self.num_shards or self.num_there) == 1 else "shards are"
        return f"`wdskit {self.command}` has begun here and is not finished: {self.num_there:,}{of} {is_there} there"

    @property
    def remedy(self) -> str:
        """What to do."""
        if self.num_parts:
            return f"Run the parts that are missing, then `wdskit pack-finish {self.folder}`."
        return f"Run the same `wdskit {self.command}` again; it goes on with what is there."


def find_unfinished(folder: Path) -> Unfinished | None:
    """What a run that has not finished has come to, None where there is no such run.

    None too where its index is there: it was stopped a moment before it removed its record.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        return None
    try:
        document = json.loads(read_bytes(str(path), limit=MAX_RECORD_BYTES))
        options, shards = document["options"], document["shards"]
        names = None if shards is None else [str(shard[0]) for shard in shards]
        is_replacing = bool(document["replaces"])
        num_parts = int(document["parts"])
        command = "reshard" if options.get("command") == "reshard" else "pack"
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, StorageError):
        return None if (folder / INDEX_NAME).is_file() else Unfinished(folder)
    indexed = _indexed(folder)
    if is_replacing:  # as long as the index is there, nothing was removed
        return None if indexed is not None else Unfinished(folder, command, is_replacing=True)
    there = {one.name for one in folder.glob("*.tar")}
    if names is None:  # rows that came once: nobody knew them before
        names = _noted(folder) or sorted(there.difference(indexed or ()))
    if indexed is not None and indexed.issuperset(names):
        return None
    num_shards = None if shards is None else len(names)
    return Unfinished(folder, command, len(there.intersection(names)), num_shards, num_parts)


def _indexed(folder: Path) -> set[str] | None:
    """The shards that the folder's index lists; None without one that reads."""
    try:
        return {entry.name for entry in read_index(folder).entries}
    except WdskitError:
        return None


def _noted(folder: Path) -> list[str]:
    """The shards that a run whose source comes once has noted."""
    names: list[str] = []
    for path in folder.glob(".wdskit-pack*.log"):
        for line in path.read_bytes().splitlines():
            names += _name_in(line)
    return names


def _name_in(line: bytes) -> Iterable[str]:
    try:
        noted: Any = json.loads(line)
    except (ValueError, RecursionError):
        return ()  # cut short
    return (noted[1],) if isinstance(noted, list) and len(noted) > 1 and isinstance(noted[1], str) else ()


def refuse_unfinished(folder: Path) -> None:
    """Refuse to index a part as if it were the whole.

    Raises:
        FolderIndexError: A run has not finished here, and has written something.
    """
    found = find_unfinished(folder)
    if found is None or found.is_replacing:  # the shards that are left are whole, and an index is their way back
        return
    msg = f"{folder}: {found.problem}.\n  {found.remedy} To keep these shards as they are, remove {RECORD_NAME} first."
    raise FolderIndexError(msg, folder=str(folder))


def refuse_part(source: str | Sequence[str], found: ShardList) -> None:
    """Refuse to read a part as if it were the whole; shards that are named one by one are taken.

    Args:
        source: What the user wrote.
        found: Its shards; of remote ones nothing is known.

    Raises:
        FolderIndexError: They are what a run has come to that is not finished.
    """
    named = {path for item in ([source] if isinstance(source, str) else source) for path in expand_patterns(item)}
    pairs = zip(found.urls, found.entries, strict=True)
    parts = (url for url, entry in pairs if entry is None and url not in named and is_local(url))
    for parent in dict.fromkeys(map(os.path.dirname, parts)):
        begun = find_unfinished(Path(local_path(parent) or "."))
        if begun is not None:
            msg = f"{parent}: {begun.problem}.\n  {begun.remedy} Or name these shards one by one."
            raise FolderIndexError(msg, folder=parent)
