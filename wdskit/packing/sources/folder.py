"""Rows from a folder of images, or of other files: the class of one is the sub-folder it stands in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import orjson

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.keys import check_field
from wdskit.errors import KeyRuleError, PackError, RowError
from wdskit.packing.json_merge import field_with_facts
from wdskit.packing.references import FieldBytes
from wdskit.packing.row import SAME_FIELD, Row, field_of, file_bytes, make_row, row_error
from wdskit.packing.sources.class_names import ClassNames

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})
"""Folders that hold the classes of a split, as data sets are handed out."""


class Together(NamedTuple):
    """A main file, as an image, and the sidecars beside it: files that are called as it is up to the extension.

    Attributes:
        path: The main file's path.
        sidecars: Field and path of each sidecar; two of one field are an error where the sample is made.
    """

    path: str
    sidecars: tuple[tuple[str, str], ...]


class FileNames:
    """Which files of a folder are samples, and which are sidecars of one, by their names.

    Args:
        sidecars: Extensions as `json`, `txt` or `seg.png`; in a file's name in any case.
        files: Extensions of the files that are samples; empty for those of images.

    Raises:
        PackError: One is no name of a field, or stands twice.
    """

    def __init__(self, sidecars: Sequence[str] = (), files: Sequence[str] = ()) -> None:
        _check_extensions("sidecars", sidecars, "json,txt,seg.png")
        _check_extensions("files", files, "wav,flac")
        if dotted := next((extension for extension in files if "." in extension), None):
            raise PackError(f"files: {dotted!r} has a dot. Give the part behind the last one.")
        if both := {*sidecars} & {*files}:
            raise PackError(f"files: {min(both)!r} is in sidecars too. Leave it out of one of them.")
        self._suffixes = sorted((f".{extension}" for extension in sidecars), key=len, reverse=True)
        self._files = frozenset(SAME_FIELD.get(extension, extension) for extension in files)
        self.what = " or ".join(f".{extension} file" for extension in files) or "image"

    @property
    def has_sidecars(self) -> bool:
        """Whether there may be any."""
        return bool(self._suffixes)

    def is_sample(self, path: str) -> bool:
        """Whether a file is a sample's main file by its name."""
        field = field_of(path)
        wanted = field in self._files if self._files else is_image_field(field)
        return wanted and not self._suffix_of(path)

    def _suffix_of(self, path: str) -> str:
        """The longest of the sidecars' suffixes that a path ends with; empty for none."""
        if not self._suffixes:
            return ""
        lower = path.lower()
        return next((suffix for suffix in self._suffixes if lower.endswith(suffix)), "")

    def group(self, paths: Sequence[str]) -> tuple[list[Together], int]:
        """The samples among files whose names are alike, each with its sidecars; and how many files are left over."""
        mains: list[str] = []
        beside: dict[str, list[tuple[str, str]]] = {}
        num_other = 0
        for path in paths:
            if suffix := self._suffix_of(path):
                beside.setdefault(path[: -len(suffix)], []).append((suffix[1:], path))
            elif self.is_sample(path):
                mains.append(path)
            else:
                num_other += 1
        found = [Together(main, tuple(beside.get(os.path.splitext(main)[0], ()))) for main in mains]
        stems = {os.path.splitext(main)[0] for main in mains}
        num_alone = sum(len(files) for stem, files in beside.items() if stem not in stems)
        return found, num_other + num_alone


def _check_extensions(option: str, extensions: Sequence[str], example: str) -> None:
    for extension in extensions:
        try:
            check_field(extension)
        except KeyRuleError as err:
            raise PackError(f"{option}: {err}\n  Write extensions: {example}.") from err
    if len(set(extensions)) < len(extensions):
        raise PackError(f"{option}: {','.join(extensions)} names one twice.")


class _Top(NamedTuple):
    """What stands in the folder itself.

    Attributes:
        folders: Names of its sub-folders, sorted by their bytes.
        first: The first of its samples; empty without one.
        num: How many they are.
    """

    folders: list[str]
    first: str
    num: int


class ImageFolder:
    """A folder of images, walked when its rows are asked for.

    Args:
        root: The folder.
        sidecars: Extensions of the files beside an image that belong to its sample.
        files: Extensions of the files that are samples instead of images.
        classes: The classes that there may be; None: the sub-folders.

    Attributes:
        classes: Number of each class: its place in `classes`, or among the sorted names of the sub-folders. Empty for a
            flat folder.
        num_other: Files met so far that are neither samples nor sidecars of one.

    Raises:
        PackError: It cannot be listed; or the name of a class is no UTF-8, none of `classes`, or that of a split.
    """

    def __init__(
        self,
        root: str,
        *,
        sidecars: Sequence[str] = (),
        files: Sequence[str] = (),
        classes: ClassNames | None = None,
    ) -> None:
        self.root = root
        self.num_other = 0
        self._names = FileNames(sidecars, files)
        self._top = _list_top(root, self._names)
        self.classes = {} if self._top.num else _classes(root, self._top.folders, classes)
        if classes is not None and not self.classes:
            raise PackError(f"{root}: classes: there is no class folder here. Leave it out.")

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row an image, in the order of their paths' bytes: its bytes, `cls` and `json` with class, number and path
        (of a flat folder, path only), and its sidecars. A sidecar `json` is an object, which keeps what it says.

        Raises:
            PackError: There is no image, or images stand both in sub-folders and beside them.
        """
        num = 0
        for found in self._samples():
            if self._top.num and "/" in found.path:
                msg = f"{os.path.join(self.root, self._top.first)}: it stands beside the class folders, so it has no"
                others = f"{self._names.what.capitalize()}s that stand so: {self._top.num}."
                raise PackError(f"{msg} class.\n  Move it into one. {others}")
            num += 1
            try:
                yield self._row(found, keys)
            except RowError as err:
                yield err
        if not num:
            raise PackError(f"{self.root}: there is no {self._names.what} in this folder.")

    def _samples(self) -> Iterator[Together]:
        """The samples' files; all others are counted."""
        if self._names.has_sidecars:
            for paths in walk_files(self.root, together=True):
                found, num_other = self._names.group(paths)
                self.num_other += num_other
                yield from found
            return
        for [path] in walk_files(self.root):
            if self._names.is_sample(path):
                yield Together(path, ())
            else:
                self.num_other += 1

    def _row(self, found: Together, keys: str) -> Row:
        path = found.path
        where = os.path.join(self.root, path)
        try:
            text = utf8_name(path)
        except UnicodeDecodeError as err:
            raise row_error(where, "its path is no UTF-8", "Rename it.") from err
        facts: dict[str, object] = {"path": text}
        fields: dict[str, FieldBytes] = {}
        if self.classes:
            name = text.split("/", 1)[0]
            if name not in self.classes:
                raise row_error(where, f"the folder {name!r} was not there when packing began")
            facts = {"cls": self.classes[name], "class": name, "path": text}
            fields["cls"] = b"%d" % self.classes[name]
        fields[field_of(text)] = file_bytes(where, where)
        for field, beside in found.sidecars:
            if field in fields:
                raise row_error(where, f"{beside}: it has the field {field!r} already", "Remove or rename one of them.")
            fields[field] = file_bytes(os.path.join(self.root, beside), where)
        fields["json"] = _json(facts, fields.get("json"), where)
        return make_row(os.path.splitext(text)[0], fields, where, keys=keys, path=text)


def _json(facts: dict[str, object], own: FieldBytes | None, where: str) -> bytes:
    """The facts, before what a sidecar says."""
    if own is None or isinstance(own, bytes):
        return orjson.dumps(facts)  # texts and numbers: what `to_json` gives, for a fifth of 10 us
    try:
        return field_with_facts(own, facts)
    except (OSError, ValueError) as err:
        problem = (err.strerror or str(err)) if isinstance(err, OSError) else str(err)
        raise row_error(where, f"{own.path}: {problem}", "Mend or rename it, or use --skip-bad.") from err


def _list_top(root: str, names: FileNames) -> _Top:
    folders: list[str] = []
    first, num = "", 0
    for entry in list_folder(root):
        if is_folder(entry):
            folders.append(entry.name)
        elif names.is_sample(entry.name):
            first = min(first or entry.name, entry.name, key=os.fsencode)
            num += 1
    return _Top(sorted(folders, key=os.fsencode), first, num)


def _classes(root: str, folders: list[str], classes: ClassNames | None) -> dict[str, int]:
    names = []
    for folder in folders:
        try:
            names.append(utf8_name(folder))
        except UnicodeDecodeError as err:
            raise PackError(f"{os.path.join(root, folder)}: the name of this class is no UTF-8. Rename it.") from err
    if classes is not None and names:
        classes.check(names, root)
        return classes.numbers
    if names and all(name.lower() in _SPLITS for name in names):
        problem = f"it holds nothing but {' and '.join(names)}, which would be its classes"
        remedy = f"Pack each by itself: `wdskit pack {os.path.join(root, names[0])} DEST`."
        if len(names) > 1:
            remedy = f"{remedy[:-1]}, then the others with `--classes DEST`, so that all number their classes alike."
        raise PackError(f"{root}: {problem}.\n  {remedy} If they are the classes, name them: --classes FILE.")
    return {name: number for number, name in enumerate(names)}


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

    def enter(prefix: str, above: tuple[str, ...]) -> None:
        folder = os.path.join(root, prefix.rstrip("/")) if prefix else root
        real = os.path.realpath(folder)
        if real in above:
            return
        # A slash behind a folder's name, as it stands in the paths below it, puts it between the others.
        names = sorted(os.fsencode(entry.name) + (b"/" if is_folder(entry) else b"") for entry in list_folder(folder))
        levels.append((prefix, (*above, real), _groups(names) if together else ([name] for name in names)))

    levels: list[tuple[str, tuple[str, ...], Iterator[list[bytes]]]] = []  # path, real paths above, names that are left
    enter("", ())
    while levels:
        prefix, above, groups = levels[-1]
        names = next(groups, None)
        if names is None:
            levels.pop()
        elif names[0].endswith(b"/"):
            enter(prefix + os.fsdecode(names[0]), above)
        else:
            yield [prefix + os.fsdecode(name) for name in names]


def _groups(names: list[bytes]) -> Iterator[list[bytes]]:
    """Names of files that are the same up to their first dot; folders between them come behind them, alone."""
    for _, group in groupby(names, key=lambda name: name.partition(b".")[0]):
        alike = list(group)
        if files := [name for name in alike if not name.endswith(b"/")]:
            yield files
        yield from ([name] for name in alike if name.endswith(b"/"))


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
