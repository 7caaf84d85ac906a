"""Rows from a folder of images: the class of an image is the sub-folder it stands in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import orjson

from wdskit.codecs.formats import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.packing.class_names import ClassNames
from wdskit.packing.facts import field_with_facts
from wdskit.packing.references import FieldBytes
from wdskit.packing.rows import Row, field_of, file_bytes, make_row, row_error
from wdskit.packing.side_cars import SideCars, Together
from wdskit.packing.walking import is_folder, list_folder, utf8_name, walk_files

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})
"""Folders that hold the classes of a split, as data sets are handed out."""


class _Top(NamedTuple):
    """What stands in the folder itself.

    Attributes:
        folders: Names of its sub-folders, sorted by their bytes.
        image: The first of its images; empty without one.
        num_images: How many they are.
    """

    folders: list[str]
    image: str
    num_images: int


class ImageFolder:
    """A folder of images, walked when its rows are asked for.

    Args:
        root: The folder.
        side_cars: Extensions of the files beside an image that belong to its sample.
        classes: The classes that there may be; None: the sub-folders.

    Attributes:
        classes: Number of each class: its place in `classes`, or among the sorted names of the sub-folders. Empty for a
            flat folder.
        num_other: Files met so far that are neither images nor side-cars of one.

    Raises:
        PackError: It cannot be listed; or the name of a class is no UTF-8, none of `classes`, or that of a split.
    """

    def __init__(self, root: str, *, side_cars: Sequence[str] = (), classes: ClassNames | None = None) -> None:
        self.root = root
        self.num_other = 0
        self._side_cars = SideCars(side_cars)
        self._top = _list_top(root, self._side_cars)
        self.classes = {} if self._top.num_images else _classes(root, self._top.folders, classes)
        if classes is not None and not self.classes:
            raise PackError(f"{root}: classes: there is no class folder here. Leave it out.")

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row an image, in the order of their paths' bytes: its bytes, `cls` and `json` with class, number and path
        (of a flat folder, path only), and its side-cars. A side-car `json` is an object, which keeps what it says.

        Raises:
            PackError: There is no image, or images stand both in sub-folders and beside them.
        """
        num_images = 0
        for found in self._images():
            if self._top.num_images and "/" in found.image:
                msg = f"{os.path.join(self.root, self._top.image)}: it stands beside the class folders, so it has no"
                raise PackError(f"{msg} class.\n  Move it into one. Images that stand so: {self._top.num_images}.")
            num_images += 1
            try:
                yield self._row(found, keys)
            except RowError as err:
                yield err
        if not num_images:
            raise PackError(f"{self.root}: there is no image in this folder.")

    def _images(self) -> Iterator[Together]:
        """The images and their side-cars; all other files are counted."""
        if self._side_cars:
            for paths in walk_files(self.root, together=True):
                images, num_other = self._side_cars.sort_out(paths)
                self.num_other += num_other
                yield from images
            return
        for [path] in walk_files(self.root):
            if is_image_field(field_of(path)):
                yield Together(path, ())
            else:
                self.num_other += 1

    def _row(self, found: Together, keys: str) -> Row:
        path = found.image
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
        for field, beside in found.beside:
            if field in fields:
                raise row_error(where, f"{beside}: it has the field {field!r} already", "Remove or rename one of them.")
            fields[field] = file_bytes(os.path.join(self.root, beside), where)
        fields["json"] = _json(facts, fields.get("json"), where)
        return make_row(os.path.splitext(text)[0], fields, where, keys=keys, path=text)


def _json(facts: dict[str, object], own: FieldBytes | None, where: str) -> bytes:
    """The facts, before what a side-car says."""
    if own is None or isinstance(own, bytes):
        return orjson.dumps(facts)  # texts and numbers: what `to_json` gives, for a fifth of 10 us
    try:
        return field_with_facts(own, facts)
    except (OSError, ValueError) as err:
        problem = (err.strerror or str(err)) if isinstance(err, OSError) else str(err)
        raise row_error(where, f"{own.path}: {problem}", "Mend or rename it, or use --skip-bad.") from err


def _list_top(root: str, side_cars: SideCars) -> _Top:
    folders: list[str] = []
    first, num_images = "", 0
    for entry in list_folder(root):
        if is_folder(entry):
            folders.append(entry.name)
        elif is_image_field(field_of(entry.name)) and not side_cars.has(entry.name):
            first = min(first or entry.name, entry.name, key=os.fsencode)
            num_images += 1
    return _Top(sorted(folders, key=os.fsencode), first, num_images)


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
        told = f"it holds nothing but {' and '.join(names)}, which would be its classes"
        remedy = f"Pack each by itself: `wdskit pack {os.path.join(root, names[0])} DEST`."
        if len(names) > 1:
            remedy = f"{remedy[:-1]}, then the others with `--classes DEST`, so that all number their classes alike."
        raise PackError(f"{root}: {told}.\n  {remedy} If they are the classes, name them: --classes FILE.")
    return {name: number for number, name in enumerate(names)}
