"""The files below a folder in the order of their paths' bytes, without a list of them all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from wdskit.errors import PackError
from wdskit.packing.sorting import SortedBytes


@dataclass(frozen=True)
class _Level:
    """A folder that is being walked.

    Attributes:
        prefix: Its path below the root, with a slash at its end; empty for the root.
        real: Its real path and those of the folders above it.
        groups: What is left of its names.
    """

    prefix: str
    real: tuple[str, ...]
    groups: Iterator[list[bytes]]


def walk_files(root: str, *, together: bool = False) -> Iterator[list[str]]:
    """Paths of the files below `root`, `/` between their parts, sorted by their bytes.

    Hidden files and folders are passed over. Links to files are followed, and links to folders as long as they lead
    nowhere that is being walked already. Memory holds the names of the largest folder.

    Args:
        root: The folder.
        together: Give the files of a folder whose names are the same up to their first dot at once.

    Yields:
        One path, or those that belong together.

    Raises:
        PackError: A folder cannot be listed.
    """
    levels = [_level(root, "", (), together=together)]
    while levels:
        level = levels[-1]
        names = next(level.groups, None)
        if names is None:
            levels.pop()
        elif not names[0].endswith(b"/"):
            yield [level.prefix + os.fsdecode(name) for name in names]
        else:
            levels.append(_level(root, level.prefix + os.fsdecode(names[0]), level.real, together=together))


def _level(root: str, prefix: str, above: tuple[str, ...], *, together: bool) -> _Level:
    folder = os.path.join(root, prefix.rstrip("/")) if prefix else root
    real = os.path.realpath(folder)
    if real in above:
        return _Level(prefix, (*above, real), iter(()))
    names = SortedBytes()
    for entry in list_folder(folder):
        # A slash behind a folder's name, as it stands in the paths below it, puts it between the others.
        names.add(os.fsencode(entry.name) + (b"/" if is_folder(entry) else b""))
    in_order = iter(names)
    return _Level(prefix, (*above, real), _groups(in_order) if together else ([name] for name in in_order))


def _groups(names: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Names of files that are the same up to their first dot; folders between them come behind them, alone."""
    files: list[bytes] = []
    folders: list[bytes] = []
    stem = None
    for name in names:
        own = name.partition(b".")[0]
        if own != stem:
            yield from _group(files, folders)
            files, folders, stem = [], [], own
        (folders if name.endswith(b"/") else files).append(name)
    yield from _group(files, folders)


def _group(files: list[bytes], folders: list[bytes]) -> Iterator[list[bytes]]:
    if files:
        yield files
    for folder in folders:
        yield [folder]


def list_folder(folder: str) -> Iterator[os.DirEntry[str]]:
    """What stands in a folder, in no order, hidden entries left out.

    Raises:
        PackError: It cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    yield entry
    except OSError as err:
        raise PackError(f"{folder}: cannot be listed: {err.strerror}.") from err


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, or where this user may not look: a file that cannot be read
        return False


def utf8_name(name: str) -> str:
    """The name of a file as its bytes read in UTF-8, whatever the locale makes of them.

    Raises:
        UnicodeDecodeError: They are no UTF-8.
    """
    return name if name.isascii() else os.fsencode(name).decode()
