"""Rows from COCO annotations (cocodataset.org/#format-data): each row has an image and its annotations."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import PackError, RowError
from wdskit.packing.row import Field, Label, Reading, Row
from wdskit.packing.sources.records import Records, Source, add_field, key_of_path, to_json

_CATEGORY, _CAPTION = "category", "caption"


class Coco(Source):
    """A file of COCO annotations, with the JSON `document`. It may lack `annotations` and `categories`; ids are numbers
    or texts.

    `how.fields` makes fields of the members of an image's object, of `category` (the name of the category of all its
    annotations) and of `caption` (its captions, one per line).

    Attributes:
        classes: All category names in sorted order if `cls` is made from `category`; None otherwise.

    Raises:
        PackError: The document has no list `images`, or a category's id appears twice.
    """

    reads = frozenset({"fields", "images"})

    def __init__(self, path: str, how: Reading, document: object) -> None:
        super().__init__(path, how)
        self._records = Records(os.path.dirname(path) if how.images is None else how.images, how)
        found = document if isinstance(document, dict) else {}
        self._images, annotations, categories = (found.get(n, []) for n in ("images", "annotations", "categories"))
        if "images" not in found or not all(isinstance(each, list) for each in (self._images, annotations, categories)):
            raise PackError(f"{path}: these are not COCO annotations, which have a list 'images'.")
        self._annotations: defaultdict[Hashable, list[dict[str, Any]]] = defaultdict(list)
        for annotation in annotations:
            self._annotations[_id(annotation, "image_id")].append(annotation)
        self._names = {_id(category, "id"): _id(category, "name") for category in categories}
        if len(self._names) < len(categories):
            raise PackError(f"{path}: two categories have the same id.")
        if how.fields.get(CLASS_FIELD) == _CATEGORY:
            self.classes = sorted({name for name in self._names.values() if isinstance(name, str) and name.strip()})

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per image, in the order of the file: the image, further fields, and `json`, which has `image`
        (its object), `annotations` (all of the image) and `categories` (names of the used categories, by id).
        """
        seen: set[Hashable] = {None}
        for place, image in enumerate(self._images):
            yield self.row(f"{self.path}, image {place}", self._fields, image, seen)

    def _fields(self, image: dict[str, Any], seen: set[Hashable]) -> tuple[str, dict[str, Field]]:
        number = _id(image, "id")
        if number in seen:
            raise ValueError(f"its id {number!r} is missing, or appears twice")
        seen.add(number)
        own = self._annotations.get(number, [])
        name = image.get("file_name", str(image.get("coco_url", "")).rpartition("/")[2])
        fields = self._records.image(name)
        parts = [*own, *(segment for one in own for segment in one.get("segments_info", ()))]  # of panoptic COCO
        used = dict.fromkeys(part["category_id"] for part in parts if "category_id" in part)
        names = {str(number): self._names[number] for number in used if self._names}
        captions = [one["caption"].strip() for one in own if isinstance(one.get("caption"), str)]
        known = {**image, _CAPTION: "\n".join(captions), _CATEGORY: None}
        if _CATEGORY in self.how.fields.values() and names:
            known[_CATEGORY] = category = next(iter(names.values()))
            if not isinstance(category, str) or len({*names.values()}) > 1:
                raise ValueError(f"its annotations have several categories, or one without a name: {names}")
        self._records.add_fields(fields, known, self.how.fields)
        if self.classes is not None and known[_CATEGORY] is not None:
            fields[CLASS_FIELD] = Label(known[_CATEGORY])  # also if a category is called "7"
        add_field(fields, "json", to_json({"image": image, "annotations": own, "categories": names}))
        return key_of_path(name), fields


def _id(item: Any, name: str) -> Hashable:
    """Return the id or the name of an object, a number or a text; None without one."""
    value = item.get(name) if isinstance(item, dict) else None
    return value if isinstance(value, str | int | float) else None
