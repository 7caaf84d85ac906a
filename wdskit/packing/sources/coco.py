"""Rows from COCO annotations (cocodataset.org/#format-data): each row has an image and its annotations."""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import PackError, RowError
from wdskit.files import describe_missing
from wdskit.packing.row import Label, Row, bad_row, make_row
from wdskit.packing.sources.base import Reading, Source
from wdskit.packing.sources.records import Records, is_utf8, key_of_path, read_document, to_json
from wdskit.text import plural

_CATEGORY, _CAPTION = "category", "caption"


class Coco(Source):
    """A file of COCO annotations, held in memory. It may lack `annotations` and `categories`; ids are numbers or texts.

    `how.fields` makes fields of the members of an image's object, of `category` (the name of the category of all its
    annotations) and of `caption` (its captions, one per line).

    Attributes:
        classes: All category names in sorted order if `cls` is made from `category`; None otherwise.

    Raises:
        PackError: The file cannot be read or has no list `images`, a category's id appears twice, or `how.images` is
            not a folder.
    """

    kind: ClassVar[str] = "COCO annotations"

    def __init__(self, path: str, how: Reading) -> None:
        super().__init__(path, how)
        if how.images is not None and not os.path.isdir(how.images):
            raise PackError(f"images: {how.images}: {describe_missing(how.images, 'folder')}")
        folder = os.path.dirname(path) if how.images is None else how.images
        self._records = Records(folder, how, self.name)
        document = read_document(path)
        found = document if isinstance(document, dict) else {}
        lists = {name: found.get(name, []) for name in ("images", "annotations", "categories")}
        if "images" not in found or not all(isinstance(items, list) for items in lists.values()):
            has = ", ".join(map(repr, list(found)[:10])) or "nothing"
            raise PackError(f"{path}: it has no list of objects 'images', which COCO annotations have; it has {has}.")
        self._images = lists["images"]
        self._annotations: dict[Hashable, list[dict[str, Any]]] = {_id(image, "id"): [] for image in self._images}
        orphans = []
        for annotation in lists["annotations"]:
            number = _id(annotation, "image_id")
            if number is None or number not in self._annotations:
                orphans.append(annotation)
            else:
                self._annotations[number].append(annotation)
        if orphans:
            shown = str(orphans[0])[:60]
            self.notes.append(f"{plural(len(orphans), 'annotation')} of no image in `images` left out, first {shown}.")
        self._names: dict[Hashable, Any] = {}
        for category in lists["categories"]:
            number = _id(category, "id")
            if number is not None and number in self._names:
                raise PackError(f"{path}: the category id {number!r} appears twice.")
            if number is not None:
                self._names[number] = category.get("name")
        names = sorted({name for name in self._names.values() if _is_name(name)}, key=str.encode)
        self.classes = tuple(names) if how.fields.get(CLASS_FIELD) == _CATEGORY else None

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per image, in the order of the file: the image, further fields, and `json`, which has `image`
        (its object), `annotations` (all of the image) and `categories` (names of the used categories, by id).
        """
        seen: set[Hashable] = set()
        for place, image in enumerate(self._images):
            where = f"{self.path}, image {place}"
            try:
                number = _id(image, "id")
                if number is None or number in seen:
                    raise bad_row(where, "it has no id" if number is None else f"its id {number!r} appears twice")
                seen.add(number)
                yield self._row(image, self._annotations[number], where)
            except RowError as err:
                yield err

    def _row(self, image: dict[str, Any], own: list[dict[str, Any]], where: str) -> Row:
        url = image.get("coco_url")
        name = image.get("file_name", url.rpartition("/")[2] if isinstance(url, str) else None)
        if not isinstance(name, str) or not name or "\0" in name or not is_utf8(name):
            raise bad_row(where, f"its file_name is {name!r}, not a path")
        inside = [one["segments_info"] for one in own if isinstance(one.get("segments_info"), list)]  # panoptic
        parts = [part for part in itertools.chain(own, *inside) if isinstance(part, dict) and "category_id" in part]
        used = dict.fromkeys(_id(part, "category_id") for part in parts)
        unknown = next((number for number in used if number not in self._names), None)
        if unknown is not None and self._names:
            raise bad_row(where, f"one of its annotations has the category {unknown!r}, which is not in `categories`")
        names = {str(number): self._names[number] for number in used if number in self._names}
        fields = self._records.image(name, where)
        captions = [one["caption"].strip() for one in own if isinstance(one.get("caption"), str)]
        known = {**image, _CAPTION: "\n".join(captions), _CATEGORY: None}
        if _CATEGORY in self.how.fields.values() and names:
            category = {*map(str, names.values())}
            if len(category) > 1 or not _is_name(*category):
                raise bad_row(
                    where, f"its annotations have no name or several categories: {', '.join(sorted(category))}"
                )
            [known[_CATEGORY]] = category
        fields.update(self._records.fields(known, where))
        if self.classes is not None and known[_CATEGORY] is not None:
            fields[CLASS_FIELD] = Label(known[_CATEGORY])  # also if a category is called "7"
        try:
            fields["json"] = to_json({"image": image, "annotations": own, "categories": names})
        except ValueError as err:
            raise bad_row(where, f"it cannot be written as JSON: {err}") from err
        return make_row(key_of_path(name), fields, where, keys=self.how.keys, source=self.name)


def _id(item: Any, name: str) -> Hashable:
    """Return the id of an object, a number or a text; None without one."""
    value = item.get(name) if isinstance(item, dict) else None
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip()) and is_utf8(name)
