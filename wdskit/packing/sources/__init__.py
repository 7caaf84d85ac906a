"""Find the kind of a source to pack, such as an image folder or a table, and return its rows as a `Source`.

`KINDS` lists the kinds with their readers. The kind depends on the suffix of a path and on the names in a folder, never
on the content of a file.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.patterns import expand_patterns, has_wildcards, split_parts, split_url
from wdskit.errors import PackError, RowError
from wdskit.files import describe_missing
from wdskit.packing.options import PackOptions
from wdskit.packing.row import Row, field_of, python_rows
from wdskit.packing.sources.archives import Tars, Zips
from wdskit.packing.sources.arrow import INFO_NAME, SPLITS_NAME, STATE_NAME, read_parquet, read_saved_dataset
from wdskit.packing.sources.coco import Coco
from wdskit.packing.sources.folder import FileNames, ImageFolder, list_names
from wdskit.packing.sources.tables import STDIN, SUFFIXES, TextTable
from wdskit.packing.sources.tar_samples import refuse_query
from wdskit.packing.transforms import Transforms
from wdskit.storage.urls import is_local

_SHOWN_REJECTS = 3


class Reader(Protocol):
    """Interface of a source's reader. Optional attributes: `classes`, `num_other` and `sha256`, as in `Source`."""

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Yield each row, or the `RowError` of a row that cannot be packed. `keys` is "given", "clean" or "hashed"."""


class Duplicate(NamedTuple):
    """A row with the same images as an earlier row.

    Attributes:
        number: Number of the row in the source, from 0.
        key: Key of the row.
        where: Place of the row, for messages.
        first_key: Key of the first row with these images.
        first_where: Place of the first row with these images.
        sha256: Digest of the image. A row with several images has the digest of their digests, sorted by field name.
    """

    number: int
    key: str
    where: str
    first_key: str
    first_where: str
    sha256: str

    def to_dict(self) -> dict[str, str]:
        """Return the object for the row's line in `duplicates.jsonl`: all attributes except `number`."""
        return {name: value for name, value in self._asdict().items() if name != "number"}


@dataclass
class Source:
    """The rows of a source, with facts about the source and its rows.

    Attributes:
        name: Name of the source in messages.
        rows: The rows. A row that cannot be packed is replaced by its `RowError`.
        kind: Kind of the source, as text for messages; empty for rows from Python.
        is_stream: True if the rows can be read only once. A stream is read while shards are written.
        is_held: True if the caller keeps the rows in memory, so that the plan does not store them.
        classes: The class number (label) of each class name; empty if the source has no classes.
        reader: Reader of the source; None for rows from Python.
        rejected: Errors of the rows that were left out so far.
        duplicates: The rows with the images of an earlier row, if the options search for duplicates.
        num_cleaned: Number of rows so far whose keys were changed by `--keys clean`.
        sha256: Known SHA-256 digests, in hex, of files that the rows refer to, by path or URL.
        lists: Bytes of the files to write next to the shards, such as `classes.json`, by file name. None: the files are
            made from `classes`, `rejected` and `duplicates`.
    """

    name: str
    rows: Iterable[Row | RowError]
    kind: str = ""
    is_stream: bool = False
    is_held: bool = False
    classes: Mapping[str, int] = field(default_factory=dict)
    reader: Reader | None = None
    rejected: list[RowError] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    num_cleaned: int = 0
    sha256: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, bytes] | None = None

    @property
    def num_other(self) -> int:
        """Number of files of a folder, or members of archives, that were read so far and belong to no row.

        The members of an archive are counted when all its rows are read. 0 for other kinds of source.
        """
        return getattr(self.reader, "num_other", 0)

    def no_rows_error(self) -> PackError:
        """Return the error for a source without a valid row. The message shows the first errors in `rejected`."""
        msg = f"{self.name}: there is nothing to pack"
        if not self.rejected:
            return PackError(f"{msg}.")
        first = "\n".join(f"  {err.where}: {err.problem}" for err in self.rejected[:_SHOWN_REJECTS])
        return PackError(f"{msg}: none of its {len(self.rejected)} rows is valid. The first problems are:\n{first}")


def streamed_rows(source: Source, transforms: Transforms, *, skip_bad: bool) -> Generator[Row, None, None]:
    """Yield the valid rows of a source that can be read only once. At the end or after an error, close `source.rows` if
    it is a generator.

    With `skip_bad`, each row is read and transformed as a check. A row with an error is left out, and the error is
    added to `source.rejected`. Without `skip_bad`, the fields are not read.

    Raises:
        RowError: A row cannot be packed, and `skip_bad` is False.
        PackError: The source cannot be read; or, after the last row, an option of `transforms` is for a field or for
            images that no row has.
    """
    names: set[str] = set()
    try:
        for row in source.rows:
            try:
                if not isinstance(row, Row):
                    raise row
                if skip_bad:
                    row.read(transforms)
            except RowError as err:
                if not skip_bad:
                    raise
                source.rejected.append(err)
            else:
                names.update(field for field, _ in row.fields)
                yield row
        if names:
            transforms.check_used(names)
    finally:
        # After an error, close the generator now: it holds a manifest open until the traceback is freed.
        if isinstance(source.rows, Generator):
            source.rows.close()


class Kind(NamedTuple):
    """A kind of source.

    Attributes:
        what: Name of the kind in messages, with its article.
        read: Takes a path and the options. Returns the reader of the path. Raises the errors of `find_source`.
        options: Names of the options that this kind takes, without the options that every kind takes.
    """

    what: str
    read: Callable[[str, PackOptions], Reader]
    options: tuple[str, ...] = ()


_TABLE_OPTIONS = ("image_column", "key_column", "allow_no_image", "fields", "classes", "omit")
KINDS: dict[str, Kind] = {
    "folder": Kind(
        "an image folder",
        lambda path, how: ImageFolder(path, FileNames(how.sidecars, how.files), how.class_names, how.omit),
        ("sidecars", "files", "classes", "omit"),
    ),
    "table": Kind("a table of text", lambda path, how: TextTable(path, how.records), _TABLE_OPTIONS),
    "list": Kind("a list of paths", lambda path, how: TextTable(path, how.records, is_list=True)),
    "parquet": Kind(
        "a Parquet table",
        lambda path, how: read_parquet(expand_files(path, ".parquet"), how.records, in_order=how.keeps_order),
        _TABLE_OPTIONS,
    ),
    "hf": Kind(
        "a saved data set of Hugging Face", lambda path, how: read_saved_dataset(path, how.records), _TABLE_OPTIONS
    ),
    "coco": Kind(
        "COCO annotations", lambda path, how: Coco(path, how.images, how.records), ("images", "fields", "classes")
    ),
    "tar": Kind("tars", lambda path, how: Tars(path, how.records), ("fields", "classes", "allow_no_image")),
    "zip": Kind(
        "zips", lambda path, how: Zips(expand_files(path, ".zip"), how.records), ("fields", "classes", "allow_no_image")
    ),
}
"""The kinds of source, by the name that `--from` takes."""

_SUFFIXES = {".parquet": "parquet", ".json": "coco", ".tar": "tar", ".zip": "zip", **dict.fromkeys(SUFFIXES, "table")}
_FOLDERS_OF = (".parquet", ".tar", ".zip")  # a folder that has only such files is not an image folder


def find_source(source: Any, how: PackOptions) -> Source:
    """Find the kind of a source and return its rows.

    Args:
        source: A path as text or `os.PathLike` (`-` is standard input), or an iterable of rows as dicts.
        how: The options of `pack`.

    Raises:
        PackError: The source does not exist or cannot be read, its kind is unknown, or an option is for another kind.
        StorageError: A URL or pattern is invalid, or no tar matches.
        FolderIndexError: The tars belong to an unfinished run, or their index or `classes.json` is invalid.
    """
    if isinstance(source, (str, os.PathLike)):
        found = _path_source(os.fsdecode(source), how)
    else:
        if how.from_ is not None:
            raise PackError("the rows: `from` is for a path, but these are rows from Python.")
        _check_options("the rows", "these are rows from Python", ("classes", "allow_no_image"), how)
        if not isinstance(source, Iterable):
            raise PackError(f"{source!r} is not a source. Pass a folder, a manifest, or an iterable of rows.")
        is_stream = not isinstance(source, Sequence)
        found = Source(
            "the rows",
            python_rows(source, keys=how.keys, classes=how.class_names),
            is_stream=is_stream,
            is_held=not is_stream,
            classes={} if how.class_names is None else how.class_names.numbers,
        )
    if how.keys == "clean":
        found.rows = count_cleaned(found, found.rows)
    return found


def _path_source(path: str, how: PackOptions) -> Source:
    is_remote = _is_remote(path)
    name = how.from_ or ("tar" if is_remote else _kind_of(path))
    if name not in KINDS:
        raise PackError(f"from: {name!r} is not a kind of source. The kinds are {', '.join(KINDS)}.")
    if is_remote and name != "tar":
        raise PackError(f"{path}: from: only tars are packed from a store. Copy other files to a local disk first.")
    kind = KINDS[name]
    _check_options(path, f"this is {kind.what}", kind.options, how)
    has_columns = "fields" in kind.options and name not in {"tar", "zip"}
    if how.class_names is not None and has_columns and "cls" not in how.made_fields:
        raise PackError(f"{path}: classes: no column becomes `cls`. Name the column: --field cls=COLUMN.")
    reader = kind.read(path, how)
    shown = "standard input" if path == STDIN else path
    what = kind.what.removeprefix("a ").removeprefix("an ")
    rows, classes = reader.rows(keys=how.keys), getattr(reader, "classes", {})
    sha256 = getattr(reader, "sha256", {})
    return Source(shown, rows, what, is_stream=path == STDIN, classes=classes, reader=reader, sha256=sha256)


def _is_remote(path: str) -> bool:
    """Return True if a path names tars in a store: one of its parts, joined by `::`, is the URL of a store. Return
    False if a local file or folder has the name `path`.

    Raises:
        PackError: A URL names a file that is not a tar, or has a query.
        StorageError: A part is not a valid URL.
    """
    if os.path.lexists(path):
        return False
    urls = [part for part in split_parts(path) if "://" in part and not is_local(part)]
    for url in urls:
        refuse_query(url)
        name = split_url(url)[1]  # empty for a folder
        suffix = os.path.splitext(url.rpartition("/")[2])[1].lower()
        if suffix != ".tar" and (suffix[1:].isalpha() or (name and not has_wildcards(name))):
            msg = f"{url}: only tars are packed from a store: by name, by pattern, or a folder of them."
            raise PackError(f"{msg}\n  Copy other files to a local disk first. A folder ends with a slash.")
    return bool(urls)


def count_cleaned(source: Source, rows: Iterable[Row | RowError]) -> Iterator[Row | RowError]:
    """Yield `rows` unchanged, and count in `source.num_cleaned` the rows whose keys were cleaned."""
    for row in rows:
        source.num_cleaned += isinstance(row, Row) and row.is_cleaned
        yield row


def _kind_of(path: str) -> str:
    """Return the kind of a path: a name in `KINDS`. If several parts are joined by `::`, the first part decides.

    Raises:
        PackError: The path does not exist, its suffix is unknown, or a folder has files of two kinds or cannot be
            listed.
    """
    if path == STDIN:
        return "list"
    if os.path.isdir(path):
        return _kind_of_folder(path)
    is_pattern = has_wildcards(path) or "{" in path or "::" in path
    if not os.path.exists(path) and not is_pattern:
        raise PackError(f"{path or 'an empty path'}: {describe_missing(path, 'folder or file')}")
    parts = split_parts(path)
    if len(parts) > 1:
        return _kind_of(parts[0])
    for suffix, kind in _SUFFIXES.items():
        if path.lower().endswith(suffix):
            return kind
    msg = f"{path}: this is neither a folder nor a file with a known suffix ({', '.join(_SUFFIXES)})."
    raise PackError(f"{msg}\n  Set its kind with --from, write it as one of these, or pass its rows from Python.")


def _kind_of_folder(path: str) -> str:
    """Return the kind of a folder: a name in `KINDS`.

    A folder that `datasets` saved is "hf". A folder with an image or a sub-folder is "folder". Any other folder has the
    kind of its Parquet files, tars or zips. A folder without such files is "folder".

    Raises:
        PackError: The folder has files of two of these kinds, or cannot be listed.
    """
    for names in ({STATE_NAME, INFO_NAME}, {SPLITS_NAME}):
        if all(os.path.exists(os.path.join(path, name)) for name in names):
            return "hf"
    files, folders = list_names(path)
    if folders or any(is_image_field(field_of(name)) for name in files):
        return "folder"
    found = [suffix for suffix in _FOLDERS_OF if any(name.lower().endswith(suffix) for name in files)]
    if len(found) > 1:
        raise PackError(f"{path}: there are {' and '.join(found)} in this folder. Choose one with --from.")
    return _SUFFIXES[found[0]] if found else "folder"


def _check_options(path: str, what: str, own: tuple[str, ...], how: PackOptions) -> None:
    """Raise `PackError` if `how` sets an option that only other kinds of source have.

    `own` names the options of this kind. `what` describes the source in the message: "this is a list of paths".
    """
    for option in sorted({option for kind in KINDS.values() for option in kind.options} - {*own}):
        if getattr(how, option) not in (None, False, (), [], {}):
            owners = " or ".join(dict.fromkeys(kind.what for kind in KINDS.values() if option in kind.options))
            raise PackError(f"{path}: {option} is for {owners}, but {what}. Leave it out.")


def expand_files(path: str, suffix: str) -> list[str]:
    """Return the files that a path names. A path has one or several parts, joined by `::`.

    A part is a file, a pattern or a folder. A folder gives its files that end in `suffix`. The files of each part are
    sorted by the bytes of their paths.

    Raises:
        PackError: A folder has no file that ends in `suffix` or cannot be listed, or no file matches a pattern.
        StorageError: A pattern is invalid.
    """
    found = []
    for pattern in expand_patterns(path):
        if os.path.isdir(pattern):
            names = [os.path.join(pattern, name) for name in list_names(pattern)[0] if name.lower().endswith(suffix)]
        else:
            names = [pattern] if os.path.exists(pattern) else glob.glob(pattern)
        if not names:
            raise PackError(f"{pattern}: there is no {suffix} file with this name or in this folder.")
        found += sorted(names, key=os.fsencode)
    return found
