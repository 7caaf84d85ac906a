"""Find folders that `pack` or `reshard` has not finished. Their shards must not be used as the whole data set.

A run fills its shards in a staging folder, `.wdskit-run/<digest>/`, and moves all shards into place at the end
(`packing.publish`). During the move, the folder has some of the shards but not its index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wdskit.dataset.braces import expand_patterns
from wdskit.dataset.index import INDEX_NAME, RUN_FOLDER
from wdskit.dataset.patterns import ShardList
from wdskit.errors import FolderIndexError, StorageError
from wdskit.files import read_own
from wdskit.storage.urls import is_local, local_path

DESCRIPTION_NAME = "run.json"
JOURNAL_NAME = "journal.json"
RUN_NAME = re.compile(r"[0-9a-f]{16}")
"""Name of a staging folder: a digest of what the run packs."""
MAX_DESCRIPTION_BYTES = 1 << 30  # enough for 10**7 shards


@dataclass(frozen=True)
class UnfinishedRun:
    """The progress of a run that is active or was stopped.

    Attributes:
        folder: The folder into which the run writes.
        command: The command of the run, `pack` or `reshard`.
        num_filled: Number of shards that the run has filled.
        num_shards: Number of all shards of the run; None if unknown before the end.
        num_parts: Number of parts (`--part`); 0 for an undivided run.
        is_publishing: Whether all shards are filled, and the run has started to move them into the folder.
    """

    folder: Path
    command: str = "pack"
    num_filled: int = 0
    num_shards: int | None = None
    num_parts: int = 0
    is_publishing: bool = False

    @property
    def problem(self) -> str:
        """The state of the run as a clause for a message, without a full stop."""
        if self.is_publishing:
            return f"`wdskit {self.command}` was stopped here while it moved its shards into place"
        of = "" if self.num_shards is None else f" of {self.num_shards:,}"
        is_filled = "shard is" if (self.num_shards or self.num_filled) == 1 else "shards are"
        return f"a run of `wdskit {self.command}` here is unfinished: {self.num_filled:,}{of} {is_filled} filled"

    @property
    def remedy(self) -> str:
        """The advice for a message: which command to run next."""
        if self.is_publishing:
            return f"Run the same `wdskit {self.command}` again, or `wdskit pack-finish {self.folder}`."
        if self.num_parts:
            return f"Run the parts that are missing, then `wdskit pack-finish {self.folder}`."
        return f"Run the same `wdskit {self.command}` again to continue it."

    def error(self, more: str = "") -> FolderIndexError:
        """Return the FolderIndexError for an incomplete folder. `more` is added to the end of the message."""
        msg = f"{self.folder}: {self.problem}.\n  {self.remedy}{more}"
        return FolderIndexError(msg, folder=str(self.folder))


def run_folders(folder: Path) -> list[Path]:
    """Return the staging folders of all runs in `folder`, sorted; empty without a run. Links are ignored.

    Raises StorageError if the folder cannot be read.
    """
    root = folder / RUN_FOLDER
    try:
        paths = [] if root.is_symlink() else list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # no run, or it has just ended
        return []
    except OSError as err:
        raise StorageError(f"{root}: cannot be read: {err.strerror}.", url=str(folder)) from err
    return sorted(path for path in paths if RUN_NAME.fullmatch(path.name) and is_own_folder(path))


def is_own_folder(path: Path) -> bool:
    """Return whether `path` is a folder; False for a link to a folder."""
    return path.is_dir() and not path.is_symlink()


def find_unfinished(folder: Path, *, with_journals: bool = False) -> UnfinishedRun | None:
    """Return the progress of an unfinished run in a folder; None if no run is unfinished. If the run's description
    cannot be read, only `folder` is set in the result.

    A run that has published the folder's index counts as finished. If `with_journals` is True, the run counts as
    unfinished as long as its staging folder has the journal and `index.json`, because the same command, run again,
    would repeat the moves of the journal.
    """
    for path in run_folders(folder):
        try:
            data = read_own(path / DESCRIPTION_NAME, limit=MAX_DESCRIPTION_BYTES)
            if data is None:
                continue  # the run was stopped before it began, or in the middle of its removal
            document = json.loads(data)
            command = "reshard" if document["options"].get("command") == "reshard" else "pack"
            num_shards = None if document["shards"] is None else len(document["shards"])
            num_parts = int(document["parts"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError, FolderIndexError):
            return UnfinishedRun(folder)
        is_publishing = (path / JOURNAL_NAME).exists()
        staged, index = path / INDEX_NAME, folder / INDEX_NAME
        is_published = not staged.exists() or (index.exists() and read_own(index) == read_own(staged))
        if is_publishing and is_published and not (with_journals and staged.exists()):
            continue  # the run has published the folder's index
        try:
            num_filled = sum(file.suffix == ".tar" for file in path.iterdir())
        except FileNotFoundError:
            continue  # the run has just ended
        return UnfinishedRun(folder, command, num_filled, num_shards, num_parts, is_publishing)
    return None


def refuse_unfinished(folder: Path) -> None:
    """Raise FolderIndexError if a run in the folder is unfinished. A run with a journal that can still be repeated is
    unfinished too, because the repeat would undo later changes of the folder's columns.
    """
    unfinished = find_unfinished(folder, with_journals=True)
    if unfinished is not None:
        raise unfinished.error(f" To keep this folder as it is, remove {folder / RUN_FOLDER} first.")


def refuse_part(source: str | Sequence[str], found: ShardList) -> None:
    """Raise FolderIndexError if a pattern or folder finds shards in the folder of an unfinished run. Shards that are
    named one by one or are in an index are accepted. Remote shards are not checked.

    Args:
        source: The paths, patterns or folders that the user named.
        found: The shards of `source`.
    """
    named = set(expand_patterns(source))
    pairs = zip(found.urls, found.entries, strict=True)
    parts = (url for url, entry in pairs if entry is None and url not in named and is_local(url))
    for parent in dict.fromkeys(map(os.path.dirname, parts)):
        unfinished = find_unfinished(Path(local_path(parent)))
        if unfinished is not None:
            raise unfinished.error(" Or name these shards individually.")
