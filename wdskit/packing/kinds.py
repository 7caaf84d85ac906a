"""What kind of source a path names: by what it is and its suffix, never by a guess at what stands in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from wdskit.errors import PackError, RowError
from wdskit.packing.folder import ImageFolder
from wdskit.packing.paths import STDIN, PathList
from wdskit.packing.rows import Row, python_rows
from wdskit.packing.sources import Source
from wdskit.packing.tables import SUFFIXES, Manifest


class Reader(Protocol):
    """What knows how to read a source."""

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Its rows, and what is wrong with those that cannot be packed."""


@dataclass(frozen=True)
class SourceOptions:
    """How a source is to be read.

    Attributes:
        from_: What kind it is; None where that shall be seen from its path.
        keys: "given" or "hashed"; see `rows.make_row`.
        image_column: See `records.Records`.
        key_column: See `records.Records`.
        side_cars: Extensions of files beside an image that belong to its sample; see `side_cars.SideCars`.
    """

    from_: str | None = None
    keys: str = "given"
    image_column: str | None = None
    key_column: str | None = None
    side_cars: Sequence[str] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of source.

    Attributes:
        told: What it is called in messages.
        read: Makes its reader.
        options: Those of `SourceOptions` that belong to it alone.
        is_folder: Whether its path is a folder's.
        takes_stdin: Whether it may come through standard input.
    """

    told: str
    read: Callable[[str, SourceOptions], Reader]
    options: tuple[str, ...] = ()
    is_folder: bool = False
    takes_stdin: bool = False


def _read_folder(path: str, how: SourceOptions) -> Reader:
    return ImageFolder(path, side_cars=how.side_cars)


def _read_table(path: str, how: SourceOptions) -> Reader:
    return Manifest(path, how.image_column, how.key_column)


_NOT_GIVEN: tuple[object, ...] = (None, (), [])
_COLUMNS = ("image_column", "key_column")

KINDS: dict[str, Kind] = {
    "folder": Kind("an image folder", _read_folder, ("side_cars",), is_folder=True),
    "table": Kind("a manifest", _read_table, _COLUMNS, takes_stdin=True),
    "list": Kind("a list of paths", lambda path, _: PathList(path), takes_stdin=True),
    "list0": Kind("a list of paths", lambda path, _: PathList(path, b"\x00"), takes_stdin=True),
}
"""The kinds, by the name that `--from` takes."""


def find_source(source: Any, how: SourceOptions) -> Source:
    """What kind of source this is, and its rows.

    Raises:
        PackError: It is not there, of no known kind, or an option does not belong to it.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _python_source(source, how)
    path = os.fsdecode(source)
    name = how.from_ or _kind_of(path)
    if name not in KINDS:
        raise PackError(f"from: {name!r} is no kind of source. There are {', '.join(KINDS)}.")
    kind = KINDS[name]
    _check_options(path, f"this is {kind.told}", kind.options, how)
    _check_path(path, kind)
    reader = kind.read(path, how)
    classes: Mapping[str, int] = getattr(reader, "classes", {})
    shown = "standard input" if path == STDIN else path
    return Source(shown, reader.rows(keys=how.keys), is_stream=path == STDIN, classes=dict(classes), reader=reader)


def _python_source(source: Any, how: SourceOptions) -> Source:
    if how.from_ is not None:
        raise PackError("the rows: from belongs to a path, and these are rows from Python.")
    _check_options("the rows", "these are rows from Python", (), how)
    if not isinstance(source, Iterable):
        raise PackError(f"{source!r} is no source. Give a folder, a manifest, or an iterable of rows.")
    is_stream = not isinstance(source, Sequence)
    return Source("the rows", python_rows(source, keys=how.keys), is_stream=is_stream, is_held=not is_stream)


def _kind_of(path: str) -> str:
    if path == STDIN:
        return "list"
    if os.path.isdir(path):
        return "folder"
    if not os.path.exists(path):
        raise PackError(f"{path or 'an empty path'}: there is no such folder or file.")
    if path.lower().endswith(SUFFIXES):
        return "table"
    msg = f"{path}: this is neither a folder nor a manifest ({', '.join(SUFFIXES)})."
    raise PackError(f"{msg}\n  Write it as one of these, or give its rows from Python.")


def _check_options(path: str, what: str, own: tuple[str, ...], how: SourceOptions) -> None:
    """Refuse an option that would be ignored."""
    for option in sorted({option for kind in KINDS.values() for option in kind.options} - {*own}):
        if getattr(how, option) not in _NOT_GIVEN:
            owners = " or ".join(dict.fromkeys(kind.told for kind in KINDS.values() if option in kind.options))
            raise PackError(f"{path}: {option} belongs to {owners}, and {what}.")


def _check_path(path: str, kind: Kind) -> None:
    """Refuse a path that cannot be of its kind, as far as that needs no look inside."""
    if path == STDIN:
        if not kind.takes_stdin:
            able = ", ".join(name for name, kind in KINDS.items() if kind.takes_stdin)
            raise PackError(f"standard input: {kind.told} is not read from there. --from can be {able}.")
    elif not os.path.exists(path):
        raise PackError(f"{path or 'an empty path'}: there is no such folder or file.")
    elif os.path.isdir(path) != kind.is_folder:
        raise PackError(f"{path}: this is a {'file' if kind.is_folder else 'folder'}, and {kind.told} is none.")
