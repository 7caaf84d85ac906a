"""Rows from a folder of images: the class of an image is the sub-folder it stands in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from wdskit.codecs.images import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.packing.rows import FileBytes, Row, field_of, file_bytes, make_row, row_error, to_json


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
        facts: dict[str, object] = {"path": path}
        fields: dict[str, bytes | FileBytes] = {}
        if self.classes:
            name = path.split("/", 1)[0]
            facts = {"cls": self.classes[name], "class": name, "path": path}
            fields["cls"] = b"%d" % self.classes[name]
        try:
            fields["json"] = to_json(facts)
        except UnicodeEncodeError as err:
            raise row_error(where, "its path is no UTF-8", "Rename it.") from err
        fields[field_of(path)] = file_bytes(where, where)
        return make_row(os.path.splitext(path)[0], fields, where, keys=keys, path=path)


def read_folder(root: str) -> ImageFolder:
    """List a folder of images.

    Hidden files and folders are passed over. Links to files are followed, and links to folders as long as they lead
    nowhere that is being walked already.

    Raises:
        PackError: There is no image, or images stand both in sub-folders and beside them.
    """
    paths = sorted(_walk(root, "", ()), key=os.fsencode)
    images = [path for path in paths if is_image_field(field_of(path)) and field_of(path)]
    if not images:
        raise PackError(f"{root}: there is no image in this folder.")
    beside = [path for path in images if "/" not in path]
    if beside and len(beside) < len(images):
        msg = f"{os.path.join(root, beside[0])}: it stands beside the class folders, so it has no class."
        raise PackError(f"{msg}\n  Move it into one. There are {len(beside)} such images.")
    classes: dict[str, int] = {}
    if not beside:
        names = sorted((entry.name for entry in os.scandir(root) if _is_class(entry)), key=os.fsencode)
        classes = {name: number for number, name in enumerate(names)}
    return ImageFolder(root, tuple(images), classes, len(paths) - len(images))


def _is_class(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _walk(folder: str, prefix: str, above: tuple[str, ...]) -> Iterator[str]:
    """Paths of the files below `folder`, in no order."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = list(os.scandir(folder))
    except OSError as err:
        raise PackError(f"{folder}: cannot be listed: {err.strerror}.") from err
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, f"{prefix}{entry.name}/", (*above, real))
        else:
            yield prefix + entry.name
