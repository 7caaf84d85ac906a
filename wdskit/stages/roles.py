"""What a pipeline knows of its fields before it runs, by their names: which are images, masks or lists of JSON.

Each stage says what it makes of the fields (`PerSampleStage.roles_after`). No value is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from wdskit.codecs.fields import is_path
from wdskit.codecs.formats import is_image_field

Numbers: TypeAlias = Literal["mask", "colours", ""]
"""What the numbers of a field mean: classes or depths, which no stage may blend; colours; unknown."""


def names_image(name: str) -> bool:
    """Return whether a field has the name of an image field, such as `jpg`."""
    return not name.startswith("__") and is_image_field(name)


@dataclass(frozen=True)
class Roles:
    """The roles of fields at one place of a pipeline. A method that takes `names` also takes alternatives: `jpg;png`.

    Attributes:
        images: The images whose name is not that of an image: `rename` moved them, or an image stage named them.
        lists: The fields that `rename` or a stage made of lists in JSON, besides paths such as `json.boxes`.
        numbers: What the numbers of a field mean.
        others: What the numbers of all fields with the name of an image mean that are not in `numbers`.
        places: The fields of each item of the tuples that `to_tuple` made; None without `to_tuple`.
    """

    images: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    others: Numbers = ""
    places: tuple[str, ...] | None = None

    def is_image(self, names: str) -> bool:
        """Return whether a field is an image: it has the name of one, was renamed from one, or an image stage named
        it.
        """
        return any(name in self.images or names_image(name) for name in names.split(";"))

    def is_list(self, names: str) -> bool:
        """Return whether a field is a value in JSON. If it is a list of numbers, it became an array."""
        return any(name in self.lists or is_path(name) for name in names.split(";"))

    def numbers_of(self, names: str) -> Numbers:
        """Return what the numbers of a field mean."""
        found = (self.numbers.get(name, self.others if names_image(name) else "") for name in names.split(";"))
        return next(filter(None, found), "")

    def is_mask(self, names: str) -> bool:
        """Return whether the numbers of a field are classes or depths."""
        return self.numbers_of(names) == "mask"

    def at_run(self) -> Roles:
        """Return only what the running stages ask for: of the numbers, those of masks."""
        masks = {name: found for name, found in self.numbers.items() if found == "mask"}
        return replace(self, numbers=masks, others="mask" if self.others == "mask" else "")

    def names_at(self, slot: object) -> str:
        """Return the field of a slot of a batch: of a key, or of a place in tuples; "" if no stage named it."""
        if isinstance(slot, str):
            return slot
        places = self.places or ()
        return places[slot] if isinstance(slot, int) and slot < len(places) else ""

    def decoded(self, only: Iterable[str], numbers: Numbers) -> Roles:
        """Return the roles after a `decode` of the images in `only`, of all if it is empty. What is decoded stays."""
        taken = {name: numbers for name in only if names_image(name) and not self.numbers_of(name)}
        return replace(self, numbers={**self.numbers, **taken}, others=self.others if only else self.others or numbers)

    def named(self, images: Iterable[str], masks: Iterable[str] = (), lists: Iterable[str] = ()) -> Roles:
        """Return the roles after an image stage that names images, masks, and fields that are lists in JSON."""
        found, as_masks = ({name for each in names for name in each.split(";")} for names in (images, masks))
        new: dict[str, Numbers] = dict.fromkeys(as_masks, "mask")
        numbers = {**self.numbers, **new}
        return replace(self, images=self.images | found | as_masks, lists=self.lists | {*lists}, numbers=numbers)

    def renamed(self, names: Mapping[str, str]) -> Roles:
        """Return the roles after fields got new names. `names` maps each new name to the old one or to alternatives."""
        kept = {name: numbers for name, numbers in self.numbers.items() if name not in names}
        moved = {new: numbers for new, olds in names.items() if (numbers := self.numbers_of(olds)) or self.others}
        return replace(
            self,
            images=(self.images - names.keys()) | {new for new, olds in names.items() if self.is_image(olds)},
            lists=(self.lists - names.keys()) | {new for new, olds in names.items() if self.is_list(olds)},
            numbers={**kept, **moved},
        )

    def after_function(self, names: Iterable[str] | None = None) -> Roles:
        """Return the roles after a user's function for the fields `names`; for whole samples if None. A field keeps its
        layout, and a mask stays a mask: its name says so.
        """
        if names is None:
            return self.at_run()
        own: dict[str, Numbers] = {name: "" for name in names if not self.is_mask(name)}
        return replace(self, numbers={**self.numbers, **own})


@dataclass(frozen=True)
class Live:
    """The fields that later stages or the output use; a `decode` leaves all others as bytes.

    Attributes:
        names: The fields, with the JSON fields of paths. None: all fields.
        images: Whether a stage looks for the only image of a sample, so that all images are used.
    """

    names: frozenset[str] | None = None
    images: bool = False

    def has(self, field: str) -> bool:
        """Return whether a field is used."""
        return self.names is None or field in self.names or (self.images and names_image(field))

    def using(self, names: Iterable[str], *, images: bool = False, without: Iterable[str] = ()) -> Live:
        """Return the fields that are used before a stage that uses `names` and makes the fields `without` new. `names`
        are fields, paths in JSON or alternatives.
        """
        if self.names is None:
            return self
        used = {name for each in names for name in each.split(";")}
        used |= {".".join(name.split(".")[:stop]) for name in used for stop in range(1, name.count(".") + 1)}
        return Live(self.names.difference(without) | used, self.images or images)


EVERYTHING = Live()
NOTHING = Live(frozenset())
NO_ROLES = Roles()
"""What is known before the first stage."""


def merged(found: Sequence[Roles]) -> Roles:
    """Return the roles of samples from several parts of a mixture: a field is an image, or a list, if it is one in any
    part. What the numbers mean is unknown.
    """
    images = frozenset[str]().union(*(roles.images for roles in found))
    return Roles(images, frozenset[str]().union(*(roles.lists for roles in found)), places=found[0].places)
