"""The folder that a run writes to: named, made, locked, and tidied when the run fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from wdskit.dataset.index import INDEX_NAME
from wdskit.errors import PackError
from wdskit.files import Disk, make_folders, remove_drafts
from wdskit.packing.destination import Destination
from wdskit.packing.plan import Names
from wdskit.shards.locking import lock_folder, wait_for_workers
from wdskit.storage.urls import is_local, local_path


def parse_folder(dest: str) -> Path:
    """The folder to write to.

    Raises:
        PackError: It is none, or remote.
    """
    if not dest or "\x00" in dest:
        raise PackError(f"{dest!r} is no folder to pack into. Write . for this one.")
    if not is_local(dest):
        raise PackError(f"{dest}: only a local folder can be packed into.")
    folder = Path(local_path(dest))
    if folder.exists() and not folder.is_dir():
        raise PackError(f"{dest}: this is a file, not a folder to pack into.")
    return folder


def choose_names(folder: Path, pattern: str | None) -> Names:
    """What the shards are called: by default as the folder, so that basenames differ between folders.

    Raises:
        PackError: The pattern is none, or the folder's name makes none.
    """
    if pattern is not None:
        return Names(pattern)
    try:
        return Names(f"{os.path.basename(os.path.abspath(folder)) or 'shard'}-%06d.tar")
    except PackError as err:
        raise PackError(
            f"{folder}: shards cannot be called after this folder. Name them: --pattern train-%06d.tar."
        ) from err


def look_at_place(folder: Path) -> Destination:
    """The folder, in which no finished shards are.

    Raises:
        PackError: It is indexed.
    """
    if (folder / INDEX_NAME).exists():
        raise PackError(f"{folder}: this folder is packed and indexed already.\n  Write to another folder.")
    return Destination(folder)


@contextlib.contextmanager
def open_place(folder: Path, *, disk: Disk) -> Iterator[Destination]:
    """The folder, made and locked while the block runs."""
    with told_as_pack_errors(folder):
        make_folders(folder, disk=disk)
    with lock_folder(folder), _tidied(folder, disk):
        with told_as_pack_errors(folder):
            wait_for_workers(folder)
            target = look_at_place(folder)
            remove_drafts(folder, disk=disk)
        yield target


@contextlib.contextmanager
def _tidied(folder: Path, disk: Disk) -> Iterator[None]:
    """After a fault or Ctrl-C remove drafts, which workers that were stopped leave."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            remove_drafts(folder, disk=disk)
        raise


@contextlib.contextmanager
def told_as_pack_errors(folder: Path) -> Iterator[None]:
    """Faults of the disk as an error with the folder's name."""
    try:
        yield
    except OSError as err:
        raise PackError(f"{folder}: cannot be written: {err.strerror or err}.") from err
