"""Rows from COCO annotations (cocodataset.org/#format-data): each row has an image and its annotations."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import PackError, RowError
from wdskit.files import describe_missing
from wdskit.limits import MAX_COCO_BYTES
from wdskit.packing.json_merge import refuse_constant, to_json, unique_members
from wdskit.packing.labels import checked_classes, is_utf8
from wdskit.packing.row import Row, make_row, row_error
from wdskit.packing.sources.records import Records, image_path, key_of_path

_CATEGORY, _CAPTION = "category", "caption"


class Coco:
    """A file of COCO annotations. The whole file is in memory.

    Args:
        path: The JSON file.
        images: The folder that `file_name` is relative to; None for the folder of the JSON file.
        records: Names the column of each field to make. A column is a member of the image's object in the file, or
            `category` or `caption`. `category` is the category name of the image's annotations; annotations of several
            categories are an error of the row. `caption` is the captions of the annotations, one per line.

    Attributes:
        classes: Number of each class by name: the classes of `records`. If `records` has no classes and `cls` is made
            from `category`: all category names, sorted by bytes. Otherwise empty.

    Raises:
        PackError: The file cannot be read or does not have COCO's format, or `images` is not a folder. Or the classes
            are the category names, and a category has no valid name or no category exists.
    """

    def __init__(self, path: str, images: str | os.PathLike[str] | None, records: Records) -> None:
        if images is not None and not os.path.isdir(images):
            raise PackError(f"images: {images}: {describe_missing(os.fspath(images), 'folder')}")
        self._path = path
        self._folder_hint = ""
        found = _read(path)
        self._images = self._list(found, "images")
        self._categories = self._by_id(self._list({"categories": [], **found}, "categories"))
        self._annotations: dict[int | None, list[Any]] = {number: [] for number in self._by_id(self._images)}
        for annotation in self._list(found, "annotations"):
            number = _id(annotation.get("image_id"))
            if number not in self._annotations:
                msg = f"{path}: an annotation (id {annotation.get('id')!r}) is of the image {number!r}"
                raise PackError(f"{msg}, which is not in `images`.\n  Remove the annotation, or add the image.")
            self._annotations[number].append(annotation)
        classes = records.classes
        if classes is None and records.fields.get(CLASS_FIELD) == _CATEGORY:
            names = {self._category_name(number) for number in self._categories}
            if not names:
                raise PackError(f"{path}: it has no categories, so no `cls`.\n  Leave --field cls={_CATEGORY} out.")
            classes = checked_classes(sorted(names, key=str.encode), f"the categories of {path}")
        self.classes = classes.numbers if classes is not None else {}
        folder = os.path.dirname(path) if images is None else os.fspath(images)
        self._records = dataclasses.replace(records, folder=folder, classes=classes)

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Yield one row per image, in the order of the file, or the `RowError` of a row that cannot be packed.

        A row has the image, the fields of `records`, and `json`. `json` contains the values of the file: `image` (the
        object of the image), `annotations` (all annotations of the image) and `categories` (names of the used
        categories, by id). `keys` is the option `--keys`: "given", "clean" or "hashed".

        Raises:
            PackError: A field uses `category`, and a used category has no valid name.
        """
        for number, image in enumerate(self._images):
            try:
                yield self._row(image, f"{self._path}, image {number}", keys)
            except RowError as err:
                yield err

    def _row(self, image: dict[str, Any], where: str, keys: str) -> Row:
        name = image_path(image.get("file_name"), "file_name", where)
        own = self._annotations[_id(image.get("id"))]
        used = dict.fromkeys(_id(annotation["category_id"]) for annotation in own if "category_id" in annotation)
        unknown = next((number for number in used if number not in self._categories), None)
        if unknown is not None and self._categories:
            raise row_error(where, f"one of its annotations has the category {unknown}, which is not in `categories`")
        has_category = _CATEGORY in self._records.fields.values()
        names = {
            str(number): self._category_name(number) if has_category else self._categories[number].get("name")
            for number in used
            if number in self._categories
        }
        try:
            fields = self._records.image_file(name, where)
        except RowError as err:
            if os.path.exists(os.path.join(self._records.folder, name)):
                raise
            self._folder_hint = self._folder_hint or _find_folder(self._path, name) or "DIR"
            remedy = f"Name the folder of the images with --images {self._folder_hint}, or use --skip-bad."
            raise row_error(where, err.problem, remedy) from err
        category = {*map(str, names.values())}
        if len(category) > 1 and has_category:
            raise row_error(where, f"its annotations have several categories: {', '.join(sorted(category))}")
        captions = [annotation["caption"].strip() for annotation in own if isinstance(annotation.get("caption"), str)]
        known = {**image, _CATEGORY: min(category, default=None), _CAPTION: "\n".join(captions)}
        fields.update(self._records.column_fields(known, {*fields}, where))
        try:
            fields["json"] = to_json({"image": image, "annotations": own, "categories": names})
        except ValueError as err:
            raise row_error(where, f"it cannot be written as JSON: {err}") from err
        return make_row(key_of_path(name), fields, where, keys=keys, path=name)

    def _category_name(self, number: int | None) -> str:
        """Return the name of the category with the id `number`, to be used as a class name. The category must exist.

        Raises:
            PackError: The category has no name, or its name is blank or not text.
        """
        name = self._categories[number].get("name")
        if not isinstance(name, str) or not name.strip() or not is_utf8(name):
            msg = f"{self._path}: the category with the id {number} has the name {name!r}"
            raise PackError(f"{msg}, which is not the name of a class.\n  Give each category a name.")
        return name

    def _list(self, found: dict[str, Any], name: str) -> list[dict[str, Any]]:
        items = found.get(name)
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            there = ", ".join(map(repr, list(found)[:10])) or "nothing"
            msg = f"{self._path}: it has no list of objects {name!r}, which COCO annotations have; it has {there}."
            raise PackError(f"{msg}\n  A JSON table has one object per line, in a file that ends in .jsonl.")
        return items

    def _by_id(self, items: list[dict[str, Any]]) -> dict[int | None, dict[str, Any]]:
        found: dict[int | None, dict[str, Any]] = {}
        for item in items:
            number = _id(item.get("id"))
            if number is None or number in found:
                raise PackError(f"{self._path}: the id {item.get('id')!r} is not a number, or appears twice.")
            found[number] = item
        return found


def _find_folder(path: str, name: str) -> str | None:
    """Return the first folder that has the image `name`; None if no folder has it. The search looks at the folders next
    to the JSON file `path`, then at the folders next to the folder of `path`, each time sorted by name.
    """
    folder = os.path.dirname(path) or "."
    for parent in (folder, os.path.join(folder, os.pardir)):
        with contextlib.suppress(OSError):
            for folder_name in sorted(os.listdir(parent)):
                if os.path.isfile(os.path.join(parent, folder_name, name)):
                    return os.path.normpath(os.path.join(parent, folder_name))
    return None


def _id(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read(path: str) -> dict[str, Any]:
    try:
        if os.stat(path).st_size > MAX_COCO_BYTES:
            raise PackError(f"{path}: it has more than the {MAX_COCO_BYTES} bytes that wdskit reads at once.")
        with open(path, encoding="utf-8-sig") as file:
            found = json.load(file, object_pairs_hook=unique_members, parse_constant=refuse_constant)
    except OSError as err:
        raise PackError(f"{path}: cannot be read: {err.strerror}.") from err
    except (ValueError, RecursionError) as err:
        raise PackError(f"{path}: it is not JSON: {err}.") from err
    if not isinstance(found, dict):
        raise PackError(f"{path}: it holds a {type(found).__name__}, but COCO annotations are an object.")
    return found
