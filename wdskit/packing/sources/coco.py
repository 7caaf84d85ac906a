"""Rows from COCO annotations (cocodataset.org/#format-data): each row has an image and its annotations."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import PackError, RowError
from wdskit.files import describe_missing
from wdskit.limits import MAX_COCO_BYTES
from wdskit.packing.row import Label, Row, file_field, make_row
from wdskit.packing.sources.base import Reading, Source, attempt
from wdskit.packing.sources.records import Records, add_field, key_of_path, read_json, to_json
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
        self._records = Records(os.path.dirname(path) if how.images is None else how.images, how, self.name)
        document = read_json(file_field(path, path), path, limit=MAX_COCO_BYTES)
        found = document if isinstance(document, dict) else {}
        self._images, annotations, categories = (found.get(n, []) for n in ("images", "annotations", "categories"))
        if "images" not in found or not all(isinstance(each, list) for each in (self._images, annotations, categories)):
            raise PackError(f"{path}: these are not COCO annotations, which have a list 'images': {[*found][:10]}.")
        self._annotations: defaultdict[Hashable, list[dict[str, Any]]] = defaultdict(list)
        for annotation in annotations:
            self._annotations[_id(annotation, "image_id")].append(annotation)
        orphans = self._annotations.keys() - {_id(image, "id") for image in self._images}
        if orphans:
            num = sum(len(self._annotations[number]) for number in orphans)
            self.notes.append(f"{plural(num, 'annotation')} of no image in `images` left out.")
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
            yield attempt(self._row, f"{self.path}, image {place}", image, seen)

    def _row(self, where: str, image: dict[str, Any], seen: set[Hashable]) -> Row:
        number = _id(image, "id")
        if number in seen:
            raise ValueError(f"its id {number!r} is missing, or appears twice")
        seen.add(number)
        own = self._annotations.get(number, [])
        name = image.get("file_name", str(image.get("coco_url", "")).rpartition("/")[2])
        fields = self._records.image(name)
        parts = [*own, *(segment for one in own for segment in one.get("segments_info", ()))]  # of panoptic COCO
        used = dict.fromkeys(part["category_id"] for part in parts if "category_id" in part)
        if self._names and used.keys() - self._names.keys():
            raise ValueError(f"one of its categories, {[*used]}, is not in `categories`")
        names = {str(number): self._names[number] for number in used if self._names}
        captions = [one["caption"].strip() for one in own if isinstance(one.get("caption"), str)]
        known = {**image, _CAPTION: "\n".join(captions), _CATEGORY: None}
        if _CATEGORY in self.how.fields.values() and names:
            known[_CATEGORY] = category = next(iter(names.values()))
            if not isinstance(category, str) or len({*names.values()}) > 1:
                raise ValueError(f"its annotations have several categories, or one without a name: {names}")
        for field, made in self._records.fields(known, self.how.fields).items():
            add_field(fields, field, made)
        if self.classes is not None and known[_CATEGORY] is not None:
            fields[CLASS_FIELD] = Label(known[_CATEGORY])  # also if a category is called "7"
        fields["json"] = to_json({"image": image, "annotations": own, "categories": names})
        return make_row(key_of_path(name), fields, where, keys=self.how.keys, source=self.name)


def _id(item: Any, name: str) -> Hashable:
    """Return the id or the name of an object, a number or a text; None without one."""
    value = item.get(name) if isinstance(item, dict) else None
    return value if isinstance(value, str | int | float) else None
