"""Rows from a folder of images or other files. The sub-folder of a file is its class."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import orjson

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASSES_NAME
from wdskit.dataset.keys import check_field
from wdskit.errors import KeyRuleError, PackError, RowError
from wdskit.packing.json_merge import MetadataConflict, field_with_metadata
from wdskit.packing.labels import ClassNames, read_label
from wdskit.packing.references import FieldBytes
from wdskit.packing.row import SAME_FIELD, Row, describe_failure, field_of, file_bytes, make_row, row_error
from wdskit.text import plural

_log = logging.getLogger(__name__)
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})
"""Names of folders that contain the classes of one split in published data sets."""

_METADATA = ("path", "class", "cls")
"""Names of the metadata that a row has in `json`."""

_ROLES = frozenset(
    {"images", "imgs", "jpegimages", "masks", "labels", "annotations", "segmentations", "segmentationclass"}
)
"""Names of folders that contain one part of each sample in published data sets with masks or boxes."""

Samples: TypeAlias = dict[str, Sequence[tuple[str, str]]]
"""Maps the name of each main file, such as an image, to the (field, file name) of each of its sidecars.

A sidecar has the name of the main file except for the extension. Two sidecars with one field are an error of the row.
"""


class FileNames:
    """Finds samples among the names of files. A sample has a main file, such as an image, and may have sidecars: files
    with the same name and another extension.

    Args:
        sidecars: Extensions of sidecars, such as `json`, `txt` or `seg.png`. A file's extension may be in upper case.
        files: Extensions of main files; empty for the extensions of images.

    Attributes:
        sidecars: Extensions of sidecars, as given.
        what: Kind of the main files, for messages.

    Raises:
        PackError: An extension is not a valid field name.
    """

    def __init__(self, sidecars: Sequence[str] = (), files: Sequence[str] = ()) -> None:
        for option, extensions, example in (("sidecars", sidecars, "json,txt,seg.png"), ("files", files, "wav,flac")):
            for extension in extensions:
                try:
                    check_field(extension)
                except KeyRuleError as err:
                    raise PackError(f"{option}: {err}\n  Write extensions: {example}.") from err
        # The shortest stem is matched: with the sidecars png and seg.png, `a.seg.png` has the extension seg.png.
        self._sidecar = re.compile(rf"(?is)(.+?)\.({'|'.join(map(re.escape, sidecars))})") if sidecars else None
        self._files = frozenset(SAME_FIELD.get(extension, extension) for extension in files)
        self.sidecars = tuple(sidecars)
        self.what = " or ".join(f".{extension} file" for extension in files) or "image"

    def is_sample(self, name: str) -> bool:
        """Return True if the file called `name` is the main file of a sample; False for a sidecar or any other file."""
        field = field_of(name)
        wanted = field in self._files if self._files else is_image_field(field)
        return wanted and not (self._sidecar and self._sidecar.fullmatch(name))

    def samples(self, names: Sequence[str]) -> Samples:
        """Return the samples of one folder: the (field, file name) of each sidecar, by the name of the main file.

        `names` are the names of all files in the folder.
        """
        if self._sidecar is None:
            return dict.fromkeys(filter(self.is_sample, names), ())
        sidecars: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            if match := self._sidecar.fullmatch(name):
                sidecars.setdefault(match[1], []).append((match[2].lower(), name))
        return {name: sidecars.get(os.path.splitext(name)[0], ()) for name in names if self.is_sample(name)}


class ImageFolder:
    """A folder of images or other files. The name of a sub-folder is the class of its files. A flat folder has its
    files directly in `root` and no classes.

    Args:
        root: The folder.
        names: Finds samples and sidecars by the names of files.
        classes: The allowed classes; None for the names of the sub-folders.
        omit: Metadata that `json` leaves out: `path`, `class` or `cls`.

    Attributes:
        classes: Number of each class by name. Without given classes, the sub-folders are numbered in the order of their
            names. Empty for a flat folder.
        num_other: Files found so far that are neither samples nor sidecars.

    Raises:
        PackError: The folder cannot be listed, or `omit` has an unknown name. The name of a class is not UTF-8 or not
            in `classes`, or `classes` is given for a flat folder. Without `classes`: all sub-folders have names of
            splits (`train`), or a sub-folder has the name of a part of each sample (`masks`).
    """

    def __init__(
        self, root: str, names: FileNames, classes: ClassNames | None = None, omit: Sequence[str] = ()
    ) -> None:
        unknown = next((name for name in omit if name not in _METADATA), None)
        if unknown is not None:
            known = ", ".join(_METADATA)
            raise PackError(f"omit: {unknown!r} is not among the metadata of an image folder: {known}. Correct it.")
        self._root = root
        self._omit = omit
        self._names = names
        self.num_other = 0
        self._sidecars: set[str] = set()  # extensions of the sidecars found so far
        self._other = ""  # a file with an extension that is neither a sample nor a sidecar
        files, folders = list_names(root)
        at_top = [name for name in files if names.is_sample(name)]
        self._first_at_top, self._num_at_top = min(at_top, key=os.fsencode, default=""), len(at_top)
        self.classes = {} if at_top else _classes(root, sorted(folders, key=os.fsencode), classes)
        if classes is not None and not self.classes:
            raise PackError(f"{root}: classes: there is no class folder here. Leave it out.")

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Yield one row per main file, such as an image, or the `RowError` of a row that cannot be packed. The rows are
        sorted by the bytes of the paths.

        A row has the main file, its sidecars, `cls`, and `json` with the class name, class number and path, except the
        names in `omit`. A row of a flat folder has no class, and `json` has only the path. A sidecar `json` must be an
        object; its members are kept. `keys` is the option `--keys`: "given", "clean" or "hashed".

        Raises:
            PackError: No main file exists, main files are both in `root` and in sub-folders, a sub-folder cannot be
                listed, or an extension for sidecars was given and no sidecar has it.
        """
        num = 0
        for path, sidecars in walk_files(self._root, self._samples):
            if self._num_at_top and "/" in path:
                first = os.path.join(self._root, self._first_at_top)
                others = f"{self._names.what.capitalize()}s like this: {self._num_at_top}."
                msg = f"{first}: it is beside the class folders, so it has no class.\n  Move it into one. {others}"
                raise PackError(msg)
            num += 1
            try:
                yield self._row(path, sidecars, keys)
            except RowError as err:
                yield err
        if not num:
            msg = f"{self._root}: there is no {self._names.what} in this folder"
            if self._other and self._names.what == "image":
                found = f"{plural(self.num_other, 'other file')}, such as {self._other}"
                msg += f"; it has {found}.\n  To pack those, add --files {field_of(self._other)}"
            raise PackError(f"{msg}.")
        for extension in self._names.sidecars:
            if extension not in self._sidecars:
                msg = f"{self._root}: sidecars: no {self._names.what} has a file .{extension} next to it"
                raise PackError(f"{msg}. That of a.jpg is called a.{extension}. Correct --sidecars.")

    def _samples(self, names: Sequence[str]) -> Samples:
        samples = self._names.samples(names)
        used = {name for sidecars in samples.values() for _, name in sidecars}
        self._sidecars.update(extension for sidecars in samples.values() for extension, _ in sidecars)
        self.num_other += len(names) - len(samples) - len(used)
        if not samples:
            self._other = self._other or next(filter(field_of, names), "")
        return samples

    def _row(self, path: str, sidecars: Sequence[tuple[str, str]], keys: str) -> Row:
        where = os.path.join(self._root, path)
        try:
            text = utf8_name(path)
        except UnicodeDecodeError as err:
            raise row_error(where, "its path is not UTF-8", "Rename it.") from err
        metadata: dict[str, object] = {"path": text}
        fields: dict[str, FieldBytes] = {}
        if self.classes:
            name = text.split("/", 1)[0]
            if name not in self.classes:
                raise row_error(where, f"the folder {name!r} did not exist when packing began")
            metadata = {"cls": self.classes[name], "class": name, "path": text}
            fields["cls"] = b"%d" % self.classes[name]
        for name in self._omit:
            metadata.pop(name, None)
        fields[field_of(text)] = file_bytes(where, where)
        for field, sidecar in sidecars:
            place = os.path.join(os.path.dirname(where), sidecar)
            if field in fields:
                raise row_error(where, f"{place}: it already has the field {field!r}", "Remove or rename one of them.")
            fields[field] = file_bytes(place, where)
        own = fields.get("json")
        if own is None or isinstance(own, bytes):
            fields["json"] = orjson.dumps(metadata)  # the bytes of `to_json` in a fifth of the time
        else:
            try:
                fields["json"] = field_with_metadata(own, metadata)
            except (OSError, ValueError) as err:
                remedy = "Repair or rename it, or use --skip-bad."
                if isinstance(err, MetadataConflict):
                    remedy = f"To keep its {err.name!r} and not add another: --omit {err.name}."
                raise row_error(where, describe_failure(own, err), remedy) from err
        try:
            return make_row(os.path.splitext(text)[0], fields, where, keys=keys, path=text)
        except RowError as err:
            extension = text.rpartition("/")[2].partition(".")[2].lower()
            if "." not in extension:
                raise
            remedy = f"If it belongs to another image, like a mask, use --sidecars {extension}. If not, rename it, or"
            raise row_error(where, err.problem, f"{remedy} use --keys clean or --keys hashed.") from err


def _classes(root: str, folders: list[str], classes: ClassNames | None) -> dict[str, int]:
    names = []
    for folder in folders:
        try:
            names.append(utf8_name(folder))
        except UnicodeDecodeError as err:
            raise PackError(f"{os.path.join(root, folder)}: the name of this class is not UTF-8. Rename it.") from err
    if classes is not None:
        unknown = [name for name in names if name not in classes.numbers]
        if unknown:
            more = f", and {len(unknown) - 1} more are not" if len(unknown) > 1 else ""
            msg = f"{os.path.join(root, unknown[0])}: {classes.refusal(unknown[0], more)}"
            raise PackError(f"{msg}\n  Add it there, or move this folder away.")
        return classes.numbers if names else {}
    if names and all(name.lower() in _SPLITS for name in names):
        problem = f"it holds only {' and '.join(names)}, which would become its classes"
        first = next((name for name in names if name.lower() in {"train", "training"}), names[0])
        remedy = f"Pack each separately: `wdskit pack {os.path.join(root, first)} DEST`, the others then with"
        remedy = f"{remedy} `--classes DEST`, so that each class has the same number in all of them."
        raise PackError(f"{root}: {problem}.\n  {remedy} If they are the classes, name them: --classes FILE.")
    role = next((name for name in names if name.lower() in _ROLES), None)
    if role is not None:
        problem = f"the folder {role!r} would become a class, but its name says that it holds a part of each sample"
        remedy = "Pack the folder of the images alone. Masks next to the images (a.seg.png for a.jpg) are added with"
        remedy = f"{remedy} --sidecars seg.png, masks elsewhere by a table: --field seg.png=COLUMN."
        raise PackError(f"{root}: {problem}.\n  {remedy} If these are the classes, name them: --classes FILE.")
    numbers = {name: number for number, name in enumerate(names)}
    other = next((name for name, number in numbers.items() if read_label(name) != number), None)
    if other is not None and all(isinstance(read_label(name), int) for name in names):
        msg = (
            "%s: the folder %r is class %d, because class folders are numbered in sorted order, as torchvision does.\n"
        )
        remedy = "  For other numbers name the classes in their order: --classes FILE. %s lists them."
        _log.warning(msg + remedy, root, other, numbers[other], CLASSES_NAME)
    return numbers


def walk_files(
    root: str, samples_of: Callable[[Sequence[str]], Samples]
) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
    """Yield the samples of a folder and its sub-folders, sorted by the bytes of their paths.

    Hidden files and folders are skipped. Links are followed, except a link to a folder that contains the link.

    Args:
        root: The folder.
        samples_of: Takes the names of the files in one folder, and returns the folder's samples.

    Yields:
        (path, sidecars) for each sample. `path` is the main file, relative to `root` and with `/`. `sidecars` has the
        (field, file name) of each sidecar.

    Raises:
        PackError: A folder cannot be listed.
    """

    def enter(prefix: str, above: tuple[str, ...]) -> None:
        folder = os.path.join(root, prefix.rstrip("/")) if prefix else root
        real = os.path.realpath(folder)
        if real in above:
            return
        files, folders = list_names(folder)
        samples = samples_of(files)
        # A slash after the name of a folder gives the sort order of the paths in the folder.
        names = sorted([*samples, *(f"{name}/" for name in folders)], key=os.fsencode)
        levels.append((prefix, (*above, real), samples, iter(names)))

    levels: list[tuple[str, tuple[str, ...], Samples, Iterator[str]]] = []
    enter("", ())
    while levels:
        prefix, above, samples, names = levels[-1]
        name = next(names, None)
        if name is None:
            levels.pop()
        elif name.endswith("/"):
            enter(prefix + name, above)
        else:
            yield prefix + name, samples[name]


def list_names(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the files and the names of the sub-folders of a folder, unsorted and without hidden names.

    Raises:
        PackError: The folder cannot be listed.
    """
    files: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if _is_folder(entry) else files).append(entry.name)
    except OSError as err:
        raise PackError(f"{folder}: cannot be listed: {err.strerror}.") from err
    return files, folders


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself or to a folder without permission: reading it as a file gives the error
        return False


def utf8_name(name: str) -> str:
    """Return the name of a file, decoded as UTF-8 in any locale. UnicodeDecodeError: The name is not UTF-8."""
    return name if name.isascii() else os.fsencode(name).decode()
