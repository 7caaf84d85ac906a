"""What kind of source a path names: by what it is and its suffix, never by a guess at what stands in it."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.braces import expand_patterns, split_parts
from wdskit.dataset.patterns import has_wildcards
from wdskit.errors import PackError, RowError
from wdskit.packing.class_names import ClassNames
from wdskit.packing.coco import Coco
from wdskit.packing.folder import ImageFolder
from wdskit.packing.hf import INFO_NAME, SPLITS_NAME, STATE_NAME, SavedDataset
from wdskit.packing.parquet import Parquet
from wdskit.packing.paths import STDIN, PathList
from wdskit.packing.rows import Row, field_of, python_rows
from wdskit.packing.sources import Source
from wdskit.packing.tables import SUFFIXES, Manifest
from wdskit.packing.tars import Tars
from wdskit.packing.walking import is_folder, list_folder
from wdskit.packing.zips import Zips


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
        allow_no_image: See `records.Records`; of other sources every sample may be without.
        side_cars: Extensions of files beside an image that belong to its sample; see `side_cars.SideCars`.
        images: Folder of a COCO file's images.
        classes: The classes of an image folder; None: its sub-folders.
    """

    from_: str | None = None
    keys: str = "given"
    image_column: str | None = None
    key_column: str | None = None
    allow_no_image: bool = False
    side_cars: Sequence[str] = ()
    images: str | None = None
    classes: ClassNames | None = None

    def told(self) -> dict[str, Any]:
        """All of them by name, for the record of the run."""
        return {**asdict(self), "classes": self.classes and self.classes.digest}


@dataclass(frozen=True)
class Kind:
    """A kind of source.

    Attributes:
        told: What it is called in messages.
        takes: What names one: a `file`, a `folder`, a `pattern` of files, `stdin`.
        read: Makes its reader.
        options: Those of `SourceOptions` that belong to it alone.
    """

    told: str
    takes: tuple[str, ...]
    read: Callable[[str, SourceOptions], Reader]
    options: tuple[str, ...] = ()


def _read_folder(path: str, how: SourceOptions) -> Reader:
    return ImageFolder(path, side_cars=how.side_cars, classes=how.classes)


def _read_table(path: str, how: SourceOptions) -> Reader:
    return Manifest(path, how.image_column, how.key_column, how.allow_no_image)


def _read_parquet(path: str, how: SourceOptions) -> Reader:
    files = expand_files(path, ".parquet")
    columns = {"image_column": how.image_column, "key_column": how.key_column}
    return Parquet(files, **columns, allow_no_image=how.allow_no_image)


def _read_saved(path: str, how: SourceOptions) -> Reader:
    columns = {"image_column": how.image_column, "key_column": how.key_column}
    return SavedDataset(path, **columns, allow_no_image=how.allow_no_image)


_NOT_GIVEN: tuple[object, ...] = (None, (), [])
_COLUMNS = ("image_column", "key_column")

KINDS: dict[str, Kind] = {
    "folder": Kind("an image folder", ("folder",), _read_folder, ("side_cars", "classes")),
    "table": Kind("a table of text", ("file", "stdin"), _read_table, _COLUMNS),
    "list": Kind("a list of paths", ("file", "stdin"), lambda path, _: PathList(path)),
    "list0": Kind("a list of paths", ("file", "stdin"), lambda path, _: PathList(path, b"\x00")),
    "parquet": Kind("a Parquet table", ("file", "folder", "pattern"), _read_parquet, _COLUMNS),
    "hf": Kind("a saved data set of Hugging Face", ("folder",), _read_saved, _COLUMNS),
    "coco": Kind("COCO annotations", ("file",), lambda path, how: Coco(path, images=how.images), ("images",)),
    "tar": Kind("tars", ("file", "folder", "pattern"), lambda path, _: Tars(path)),
    "zip": Kind("zips", ("file", "folder", "pattern"), lambda path, _: Zips(expand_files(path, ".zip"))),
}
"""The kinds, by the name that `--from` takes."""

_SUFFIXES = {".parquet": "parquet", ".json": "coco", ".tar": "tar", ".zip": "zip", **dict.fromkeys(SUFFIXES, "table")}
_FOLDERS_OF = (".parquet", ".tar")  # a folder of these alone is not one of images


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
    return Source(
        shown,
        reader.rows(keys=how.keys),
        kind=kind.told.removeprefix("a ").removeprefix("an "),
        is_stream=path == STDIN,
        classes=dict(classes),
        reader=reader,
    )


def _python_source(source: Any, how: SourceOptions) -> Source:
    if how.from_ is not None:
        raise PackError("the rows: from belongs to a path, and these are rows from Python.")
    _check_options("the rows", "these are rows from Python", (), how)
    if not isinstance(source, Iterable):
        raise PackError(f"{source!r} is no source. Give a folder, a manifest, or an iterable of rows.")
    is_stream = not isinstance(source, Sequence)
    return Source("the rows", python_rows(source, keys=how.keys), is_stream=is_stream, is_held=not is_stream)


def _kind_of(path: str) -> str:
    """The kind that a path names."""
    if path == STDIN:
        return "list"
    if os.path.isdir(path):
        return _kind_of_folder(path)
    if not os.path.exists(path) and not is_pattern(path):
        raise PackError(f"{path or 'an empty path'}: there is no such folder or file.")
    parts = split_parts(path)
    if len(parts) > 1:
        kinds = sorted({_kind_of(part) for part in parts})
        if len(kinds) > 1:
            raise PackError(f"{path}: its parts are of several kinds ({', '.join(kinds)}). Pack each kind by itself.")
        return kinds[0]
    for suffix, kind in _SUFFIXES.items():
        if path.lower().endswith(suffix):
            return kind
    msg = f"{path}: this is neither a folder nor a file of a known suffix ({', '.join(_SUFFIXES)})."
    raise PackError(f"{msg}\n  Say what it is with --from; or write it as one of these, or give its rows from Python.")


def _kind_of_folder(path: str) -> str:
    """A folder without an image or a sub-folder may be one of tables or tars; any other is one of images, unless
    `datasets` has written it.
    """
    names = ((STATE_NAME, INFO_NAME), (SPLITS_NAME,))
    if any(all(os.path.exists(os.path.join(path, name)) for name in together) for together in names):
        return "hf"
    suffixes = set()
    for entry in list_folder(path):
        if is_folder(entry) or is_image_field(field_of(entry.name)):
            return "folder"
        suffixes.add(os.path.splitext(entry.name)[1].lower())
    found = [suffix for suffix in _FOLDERS_OF if suffix in suffixes]
    if len(found) > 1:
        raise PackError(f"{path}: there are {' and '.join(found)} in this folder. Say which with --from.")
    return _SUFFIXES[found[0]] if found else "folder"


def _check_options(path: str, what: str, own: tuple[str, ...], how: SourceOptions) -> None:
    """Refuse an option that would be ignored."""
    for option in sorted({option for kind in KINDS.values() for option in kind.options} - {*own}):
        if getattr(how, option) not in _NOT_GIVEN:
            owners = " or ".join(dict.fromkeys(kind.told for kind in KINDS.values() if option in kind.options))
            raise PackError(f"{path}: {option} belongs to {owners}, and {what}.")


def _check_path(path: str, kind: Kind) -> None:
    """Refuse a path that cannot be of its kind, as far as that needs no look inside."""
    if path == STDIN:
        if "stdin" not in kind.takes:
            able = ", ".join(name for name, kind in KINDS.items() if "stdin" in kind.takes)
            raise PackError(f"standard input: {kind.told} cannot be read from there. --from can be {able}.")
        return
    if not os.path.exists(path) and not ("pattern" in kind.takes and is_pattern(path)):
        raise PackError(f"{path or 'an empty path'}: there is no such folder or file.")
    what = "folder" if os.path.isdir(path) else "file" if os.path.exists(path) else "pattern"
    if what not in kind.takes:
        raise PackError(f"{path}: this is a {what}, and {kind.told} cannot be one.")


def is_pattern(path: str) -> bool:
    """Whether a path that does not exist names several."""
    return has_wildcards(path) or "{" in path or "::" in path


def expand_files(path: str, suffix: str) -> list[str]:
    """The files that a path names: itself, those of a folder that end in `suffix`, or those that a pattern matches;
    each pattern's sorted by their bytes.

    Raises:
        PackError: There is none.
    """
    found = []
    for pattern in expand_patterns(path):
        if os.path.isdir(pattern):
            names = [entry.path for entry in list_folder(pattern) if entry.name.lower().endswith(suffix)]
        else:
            names = [pattern] if os.path.exists(pattern) else glob.glob(pattern)
        if not names:
            raise PackError(f"{pattern}: there is no {suffix} file by this name or in this folder.")
        found += sorted(names, key=os.fsencode)
    return found
