"""Rows from a folder of images: the class of an image is the sub-folder it stands in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from wdskit.codecs.images import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.packing.references import FieldBytes
from wdskit.packing.rows import Row, field_of, file_bytes, make_row, row_error, to_json


@dataclass(frozen=True)
class ImageFolder:
    """What stands in a folder of images.

    Attributes:
        root: The folder.
        images: Paths below it, `/` between their parts, sorted by their bytes.
        classes: Number of each class: its place among the sorted names of the sub-folders. Empty for a flat folder.
        num_other: Files that are no images.
    """

    root: str
    images: tuple[str, ...]
    classes: dict[str, int]
    num_other: int

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row an image: its bytes, `cls` and `json` with class, number and path; of a flat folder, path only."""
        for path in self.images:
            try:
                yield self._row(path, keys)
            except RowError as err:
                yield err

    def _row(self, path: str, keys: str) -> Row:
        where = os.path.join(self.root, path)
        try:
            text = utf8_name(path)
        except UnicodeDecodeError as err:
            raise row_error(where, "its path is no UTF-8", "Rename it.") from err
        facts: dict[str, object] = {"path": text}
        fields: dict[str, FieldBytes] = {}
        if self.classes:
            name = text.split("/", 1)[0]
            facts = {"cls": self.classes[name], "class": name, "path": text}
            fields["cls"] = b"%d" % self.classes[name]
        fields["json"] = to_json(facts)
        fields[field_of(path)] = file_bytes(where, where)
        return make_row(os.path.splitext(text)[0], fields, where, keys=keys, path=text)


def read_folder(root: str) -> ImageFolder:
    """List a folder of images.

    Hidden files and folders are passed over. Links to files are followed, and links to folders as long as they lead
    nowhere that is being walked already.

    Raises:
        PackError: There is no image, images stand both in sub-folders and beside them, or the name of a class is no
            UTF-8.
    """
    paths = sorted(_walk(root), key=os.fsencode)
    images = [path for path in paths if is_image_field(field_of(path))]
    if not images:
        raise PackError(f"{root}: there is no image in this folder.")
    beside = [path for path in images if "/" not in path]
    if beside and len(beside) < len(images):
        msg = f"{os.path.join(root, beside[0])}: it stands beside the class folders, so it has no class."
        raise PackError(f"{msg}\n  Move it into one. There are {len(beside)} such images.")
    classes = {} if beside else {name: number for number, name in enumerate(_class_names(root))}
    return ImageFolder(root, tuple(images), classes, len(paths) - len(images))


def utf8_name(name: str) -> str:
    """The name of a file as its bytes read in UTF-8, whatever the locale makes of them.

    Raises:
        UnicodeDecodeError: They are no UTF-8.
    """
    return os.fsencode(name).decode()


def _class_names(root: str) -> list[str]:
    """Names of the sub-folders, sorted by their bytes."""
    names = sorted((entry.name for entry in _list(root) if _is_folder(entry)), key=os.fsencode)
    for name in names:
        try:
            utf8_name(name)
        except UnicodeDecodeError as err:
            raise PackError(f"{os.path.join(root, name)}: the name of this class is no UTF-8. Rename it.") from err
    return [utf8_name(name) for name in names]


def _walk(root: str) -> Iterator[str]:
    """Paths of the files below `root`, in no order."""
    todo: list[tuple[str, str, tuple[str, ...]]] = [(root, "", ())]
    while todo:
        folder, prefix, above = todo.pop()
        real = os.path.realpath(folder)
        if real in above:
            continue
        for entry in _list(folder):
            if _is_folder(entry):
                todo.append((entry.path, f"{prefix}{entry.name}/", (*above, real)))
            else:
                yield prefix + entry.name


def _list(folder: str) -> list[os.DirEntry[str]]:
    """What stands in a folder, hidden entries left out."""
    try:
        return [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as err:
        raise PackError(f"{folder}: cannot be listed: {err.strerror}.") from err


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, or where this user may not look: a file that cannot be read
        return False
