"""Where a run works: the folder that it packs into, made and locked when that is needed."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from wdskit.dataset.lock import lock_folder, share_folder, wait_for_workers
from wdskit.errors import PackError
from wdskit.files import Disk, make_folders, remove_drafts, told_of
from wdskit.packing.destination import Destination, look_at_destination
from wdskit.packing.options import PackOptions
from wdskit.packing.plan import Names
from wdskit.packing.record import log_path, log_paths
from wdskit.packing.started import clear_if_nothing_is_there
from wdskit.storage.urls import is_local, local_path

_PLAN = "wdskit-plan"
_BEGINS = ".wdskit-pack.lock"
_PART = ".wdskit-pack-{}-of-{}.lock"


class Place(NamedTuple):
    """Where a run works.

    Attributes:
        folder: The folder that is packed into.
        name: What a plan that is too large for memory is called.
        room: A folder for such a plan.
        open: Looks at the folder that is packed into.
        held: What the worker processes hold as long as they live.
    """

    folder: Path
    name: str
    room: Callable[[], Path]
    open: Callable[[], Destination]
    held: Path


def find_place(
    stack: contextlib.ExitStack, folder: Path, classes: Mapping[str, int], options: PackOptions, disk: Disk
) -> Place:
    """Where to work. The folder is made, and locked, when the plan is whole or goes to disk, so that what is wrong
    before leaves no trace; it is locked until `stack` is closed.
    """
    if options.dry_run:
        only_look = functools.partial(look_at_destination, folder, options, classes)
        return Place(folder, _PLAN, lambda: Path(stack.enter_context(tempfile.TemporaryDirectory())), only_look, folder)
    part = options.part

    @functools.cache
    def lock() -> Path:
        return stack.enter_context(opened(folder, part, disk))

    def look() -> Destination:
        with told_as_pack_errors(folder):
            return look_at_destination(lock(), options, classes)

    name = _PLAN if part is None else f"{_PLAN}-{part[0]}-of-{part[1]}"
    return Place(folder, name, lock, look, folder if part is None else log_path(folder, part))


@contextlib.contextmanager
def opened(folder: Path, part: tuple[int, int] | None, disk: Disk) -> Iterator[Path]:
    """The folder, made; and as long as the block runs locked, or, of a part of a run, that part."""
    with told_as_pack_errors(folder):
        make_folders(folder, disk=disk)
    if part is not None:
        with lock_folder(folder, _PART.format(*part), f"part {part[0]}/{part[1]} is running already"):
            with told_as_pack_errors(folder):
                disk.close(disk.open_log(log_path(folder, part)))
                wait_for_workers(log_path(folder, part))
            yield folder
        return
    with lock_folder(folder), tidied(folder, disk):
        with told_as_pack_errors(folder):
            for path in (folder, *log_paths(folder)):
                wait_for_workers(path)
            remove_drafts(folder, disk=disk)
        yield folder


@contextlib.contextmanager
def begins_part(stack: contextlib.ExitStack, folder: Path) -> Iterator[Callable[[], bool]]:
    """Let one part begin at a time, and share the folder's lock until `stack` is closed.

    Yields:
        What tells whether no other part is at work.
    """
    with lock_folder(folder, _BEGINS, wait=True):
        yield stack.enter_context(share_folder(folder))


@contextlib.contextmanager
def tidied(folder: Path, disk: Disk) -> Iterator[None]:
    """After a fault or Ctrl-C remove drafts, which workers that were stopped leave."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, PackError):
            remove_drafts(folder, disk=disk)
            clear_if_nothing_is_there(folder, disk)
        raise


@contextlib.contextmanager
def told_as_pack_errors(folder: Path) -> Iterator[None]:
    """Faults of the disk as an error with the folder's name."""
    try:
        yield
    except OSError as err:
        raise PackError(f"{folder}: cannot be written: {told_of(err)}") from err


def folder_of(dest: str) -> Path:
    """The folder to write to."""
    if not dest or "\x00" in dest:
        raise PackError(f"{dest!r} is no folder to pack into. Write . for this one.")
    if not is_local(dest):
        raise PackError(f"{dest}: only a local folder can be packed into.")
    folder = Path(local_path(dest))
    if folder.exists() and not folder.is_dir():
        raise PackError(f"{dest}: this is a file, not a folder to pack into.")
    return folder


def names_of_all(folder: Path, pattern: str | None, splits: Iterable[str] | None) -> Sequence[Names]:
    """What the shards are called, those of each split after it."""
    if splits is None:
        return [names_of(folder, pattern)]
    if pattern is not None:
        raise PackError("pattern and split do not go together: the shards are called after their splits.")
    return [Names(f"{split}-%06d.tar") for split in splits]


def names_of(folder: Path, pattern: str | None) -> Names:
    """What the shards are called: by default as the folder, so that basenames differ between folders."""
    if pattern is not None:
        return Names(pattern)
    try:
        return Names(f"{os.path.basename(os.path.abspath(folder)) or 'shard'}-%06d.tar")
    except PackError as err:
        raise PackError(
            f"{folder}: shards cannot be called after this folder. Name them: --pattern train-%06d.tar."
        ) from err
