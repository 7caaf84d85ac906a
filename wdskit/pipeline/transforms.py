"""The built-in transforms: which fields of a sample they touch, and the draw that these fields share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from wdskit.codecs.formats import is_image_field
from wdskit.codecs.images import INDEX_SPEC
from wdskit.errors import PipelineError
from wdskit.pipeline import geometry

Sample: TypeAlias = dict[str, Any]
Rng: TypeAlias = Callable[[], np.random.Generator]
Transform: TypeAlias = Callable[[Sample, Rng], Sample]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Stored:
    """Which image fields hold the numbers that their files store, one a pixel: no transform may blend or scale them.

    Attributes:
        numbers: By name, those that `decode: index` took.
        others: By name, those that another `decode` took.
        rest: What the image fields are that no `decode` named: decoded by `index`, otherwise, or None for not yet.
    """

    numbers: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    rest: bool | None = None

    def holds(self, field: str) -> bool:
        """Whether it is such a field."""
        if field in self.numbers or field in self.others:
            return field in self.numbers
        return self.rest is True and is_image_field(field)

    def decoded(self, images: str | None, only: Sequence[str] | None) -> Stored:
        """Behind a `decode`, which leaves what is decoded already."""
        if images is None or self.rest is not None:
            return self
        is_index = images == INDEX_SPEC
        if not only:
            return replace(self, rest=is_index)
        names = frozenset(only) - self.numbers - self.others
        return replace(self, numbers=self.numbers | names) if is_index else replace(self, others=self.others | names)

    def renamed(self, names: Mapping[str, str]) -> Stored:
        """Behind a `rename`."""
        held = {new for new, olds in names.items() if any(self.holds(old) for old in olds.split(";"))}
        return replace(self, numbers=(self.numbers - {*names}) | held, others=self.others | ({*names} - held))


def make_transform(spec: Any, image_fields: frozenset[str], stored: Stored | None = None) -> Transform:
    """The function `(sample, rng) -> sample` of a transform spec.

    Args:
        spec: By `spec.name` one of resize, center_crop, random_resized_crop, random_flip, normalize, to_tensor.
        image_fields: Fields that hold images whatever their names say (after a rename).
        stored: Those that hold stored numbers: resized as masks are, and never taken for colours.

    Returns:
        Gives a shallow copy of the sample with the fields changed. `rng`, called only by transforms that draw and then
        once, gives the Generator of the sample's position. It raises PipelineError where the sample has no image
        field or several, or an undecoded one. It can be pickled, for workers that are not forked.
    """
    return functools.partial(_TRANSFORMS[spec.name], spec, _Fields.of(spec, image_fields, stored or Stored()))


@dataclass(frozen=True)
class _Fields:
    """Finds the image fields and mask fields of a sample, for the transform `name`."""

    name: str
    image_fields: frozenset[str]
    fields: tuple[str, ...]
    masks: tuple[str, ...]
    stored: Stored

    @classmethod
    def of(cls, spec: Any, image_fields: frozenset[str], stored: Stored) -> _Fields:
        masks = tuple(getattr(spec, "masks", None) or ())
        return cls(spec.name, image_fields, tuple(spec.fields or ()), masks, stored)

    def of_masks(self, sample: Sample) -> list[str]:
        """The mask fields, none unless the spec names some."""
        return [self._named(sample, field) for field in self.masks]

    def of_colours(self, sample: Sample) -> list[str]:
        """As `of_images`, of a transform that makes other numbers of pixels."""
        fields = self.of_images(sample)
        if held := [field for field in fields if self.stored.holds(field)]:
            msg = f"{self.name}: `{held[0]}` was decoded by `index`: its numbers name classes or depths, no colours."
            raise PipelineError(f"{msg} Name the images with `fields`")
        return fields

    def of_images(self, sample: Sample) -> list[str]:
        """The fields that the spec names, or else the one image field."""
        masks = self.of_masks(sample)
        if self.fields:
            named = [self._named(sample, field) for field in self.fields]
            if both := [field for field in named if field in masks]:
                raise PipelineError(f"{self.name}: `fields` and `masks` both come to `{both[0]}` in this sample")
            return named
        found = [field for field in sample if self._is_image(field) and field not in masks]
        decoded = [field for field in found if geometry.is_image(sample[field])]
        if len(decoded) == 1:
            return decoded
        if decoded:
            raise PipelineError(
                f"{self.name}: several image fields in this sample ({', '.join(decoded)}). "
                "Name those that it shall change with `fields`"
            )
        if found:
            raise self._undecoded(found[0], sample[found[0]])
        raise PipelineError(
            f"{self.name}: no image field in this sample (fields: {_names(sample)}). "
            "Put decode before it, or name one with `fields`"
        )

    def _is_image(self, field: str) -> bool:
        return field in self.image_fields or (not field.startswith("__") and is_image_field(field))

    def _named(self, sample: Sample, field: str) -> str:
        """The field of the sample that `a;b` names: the first one that is there."""
        for name in field.split(";"):
            if name in sample:
                if not geometry.is_image(sample[name]):
                    raise self._undecoded(name, sample[name])
                return name
        raise PipelineError(f"{self.name}: no field `{field}` in this sample (fields: {_names(sample)})")

    def _undecoded(self, field: str, value: object) -> PipelineError:
        if isinstance(value, bytes | bytearray | memoryview):
            renamed = "" if is_image_field(field) else ", and before the field gets this name"
            return PipelineError(f"{self.name}: `{field}` is not decoded yet. Put `decode: rgb8` before it{renamed}")
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        return PipelineError(f"{self.name}: `{field}` holds no image but {type(value).__name__}{shape}")


def _names(sample: Mapping[str, Any]) -> str:
    return ", ".join(field for field in sample if not field.startswith("__")) or "none"


def pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _changed(sample: Sample, fields: list[str], function: Callable[[Any], Any]) -> Sample:
    """A copy of the sample with the function applied to some fields; one that is named twice is changed once."""
    return {**sample, **{field: function(sample[field]) for field in fields}}


def _resized(
    sample: Sample, find: _Fields, images: list[str], masks: list[str], function: Callable[..., Any]
) -> Sample:
    """The sample with images resized smoothly; masks, and images that hold stored numbers, by nearest."""
    smooth = [field for field in images if not find.stored.holds(field)]
    others = [field for field in (*images, *masks) if field not in smooth]
    return _changed(_changed(sample, smooth, function), others, functools.partial(function, nearest=True))


def _resize(spec: Any, find: _Fields, sample: Sample, _: Rng) -> Sample:
    """A number is the length of the shorter side."""

    def function(image: Any, *, nearest: bool = False) -> Any:
        return geometry.resize(image, resized(spec.size, *geometry.image_size(image)), nearest=nearest)

    return _resized(sample, find, find.of_images(sample), find.of_masks(sample), function)


def resized(size: int | list[int] | tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Height and width that `resize: size` makes of an image's."""
    return geometry.shorter_side(height, width, size) if isinstance(size, int) else pair(size)


def _center_crop(spec: Any, find: _Fields, sample: Sample, _: Rng) -> Sample:
    size = pair(spec.size)
    fields = find.of_images(sample) + find.of_masks(sample)
    return _changed(sample, fields, lambda image: geometry.center_crop(image, size))


def _random_resized_crop(spec: Any, find: _Fields, sample: Sample, rng: Rng) -> Sample:
    """One part for all fields, cut out and resized."""
    size = pair(spec.size)
    images, masks = find.of_images(sample), find.of_masks(sample)
    height, width = _common_size(sample, images + masks)
    box = geometry.draw_crop(rng(), height, width, spec.scale, spec.ratio)

    def function(image: Any, *, nearest: bool = False) -> Any:
        return geometry.resize(geometry.crop(image, *box), size, nearest=nearest)

    return _resized(sample, find, images, masks, function)


def _common_size(sample: Sample, fields: list[str]) -> tuple[int, int]:
    sizes = {field: geometry.image_size(sample[field]) for field in fields}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"`{field}` {height} x {width}" for field, (height, width) in sizes.items())
        raise PipelineError(
            f"random_resized_crop: fields that share one draw differ in height x width: {listed}. Resize them first"
        )
    return sizes[fields[0]]


def _random_flip(spec: Any, find: _Fields, sample: Sample, rng: Rng) -> Sample:
    """All fields or none."""
    fields = find.of_images(sample) + find.of_masks(sample)
    return _changed(sample, fields, geometry.flip) if rng().random() < spec.p else dict(sample)


def _normalize(spec: Any, find: _Fields, sample: Sample, _: Rng) -> Sample:
    return _changed(sample, find.of_colours(sample), lambda image: geometry.normalize(image, *mean_and_std(spec)))


def mean_and_std(spec: Any) -> tuple[Sequence[float], Sequence[float]]:
    """Those of a normalize spec, for values 0..1."""
    return (IMAGENET_MEAN, IMAGENET_STD) if spec.preset == "imagenet" else (spec.mean, spec.std)


def _to_tensor(_: Any, find: _Fields, sample: Sample, __: Rng) -> Sample:
    return _changed(sample, find.of_colours(sample), geometry.to_tensor)


_TRANSFORMS: dict[str, Callable[[Any, _Fields, Sample, Rng], Sample]] = {
    "resize": _resize,
    "center_crop": _center_crop,
    "random_resized_crop": _random_resized_crop,
    "random_flip": _random_flip,
    "normalize": _normalize,
    "to_tensor": _to_tensor,
}
