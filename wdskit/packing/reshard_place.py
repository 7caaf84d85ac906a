"""The folder that `reshard` writes to, made and locked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from wdskit.dataset.index import INDEX_NAME
from wdskit.errors import PackError
from wdskit.files import Disk, make_folders, remove_drafts
from wdskit.packing.destination import Destination
from wdskit.packing.places import tidied, told_as_pack_errors
from wdskit.packing.record import RECORD_NAME
from wdskit.shards.locking import lock_folder, wait_for_workers


def look_at_place(folder: Path) -> Destination:
    """The folder, in which no finished shards are.

    Raises:
        PackError: It is indexed, or `pack` has begun there.
    """
    if (folder / INDEX_NAME).exists():
        raise PackError(f"{folder}: this folder is packed and indexed already.\n  Write to another folder.")
    if (folder / RECORD_NAME).exists():
        raise PackError(f"{folder}: a run of `wdskit pack` that was stopped began here.\n  Write to another folder.")
    return Destination(folder)


@contextlib.contextmanager
def open_place(folder: Path, *, disk: Disk) -> Iterator[Destination]:
    """The folder, made and locked while the block runs."""
    with told_as_pack_errors(folder):
        make_folders(folder, disk=disk)
    with lock_folder(folder), tidied(folder, disk):
        with told_as_pack_errors(folder):
            wait_for_workers(folder)
            target = look_at_place(folder)
            remove_drafts(folder, disk=disk)
        yield target
