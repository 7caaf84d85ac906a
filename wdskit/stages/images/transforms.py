"""The image transforms, each in one place: its settings, its line of YAML, and what it does to a sample.

They act on a sample's one image field, or on those that `fields` names; `masks` share the draw and keep their numbers.
A transform of yours to copy is `CenterCrop`: settings, then `apply`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field, Strict, model_validator

from wdskit.codecs.formats import is_image_field
from wdskit.config.messages import listing
from wdskit.config.spec import refuse
from wdskit.config.values import Channels, FieldChoices, PositiveChannels, Range, ShareRange, Size
from wdskit.errors import PipelineError
from wdskit.stages.base import Context, Origin, PerSampleStage, Run
from wdskit.stages.layouts import Stored, names_image

Sample: TypeAlias = dict[str, Any]

_FIELDS = "The image fields to transform. Without: the sample's one image field."
_MASKS = "Fields transformed with the same draws and nearest neighbour, such as segmentation masks."

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class BoundTransform:
    """An image transform in a pipeline: finds a sample's image fields and mask fields, and draws. It can be pickled.

    Attributes:
        transform: What is done.
        run: Gives the random numbers.
        stage: Name and ordinal of the stage, their key.
        image_fields: Fields that hold images whatever their names say (after a rename).
        stored: Those that hold stored numbers: resized as masks are, and never taken for colours.
    """

    transform: ImageTransform
    run: Run
    stage: str
    image_fields: frozenset[str]
    stored: Stored

    def __call__(self, sample: Any, origin: Origin) -> Sample:
        """A shallow copy of the sample with the fields changed.

        Raises:
            PipelineError: It has no image field, or several, or one that is not decoded.
        """
        return self.transform.apply(self, sample, origin)

    def rng_at(self, origin: Origin) -> np.random.Generator:
        """The Generator of a position, as at its first use."""
        return self.run.rng_of(self.stage)(origin)

    def of_masks(self, sample: Sample) -> list[str]:
        """The mask fields, none unless the transform names some."""
        return [self._named(sample, field) for field in self.transform.mask_names]

    def of_colours(self, sample: Sample) -> list[str]:
        """As `of_images`, of a transform that makes other numbers of pixels."""
        fields = self.of_images(sample)
        if held := [field for field in fields if self.stored.holds(field)]:
            msg = f"{self._name}: `{held[0]}` was decoded by `index`: its numbers name classes or depths, no colours."
            raise PipelineError(f"{msg} Name the images with `fields`")
        return fields

    def of_images(self, sample: Sample) -> list[str]:
        """The fields that the transform names, or else the one image field."""
        from wdskit.stages.images import geometry

        masks = self.of_masks(sample)
        if self.transform.fields:
            named = [self._named(sample, field) for field in self.transform.fields]
            if both := [field for field in named if field in masks]:
                raise PipelineError(f"{self._name}: `fields` and `masks` both come to `{both[0]}` in this sample")
            return named
        found = [field for field in sample if (field in self.image_fields or names_image(field)) and field not in masks]
        decoded = [field for field in found if geometry.is_image(sample[field])]
        if len(decoded) == 1:
            return decoded
        if decoded:
            raise PipelineError(
                f"{self._name}: several image fields in this sample ({', '.join(decoded)}). "
                "Name those that it shall change with `fields`"
            )
        if found:
            raise self._undecoded(found[0], sample[found[0]])
        raise PipelineError(
            f"{self._name}: no image field in this sample (fields: {_names(sample)}). "
            "Put decode before it, or name one with `fields`"
        )

    @property
    def _name(self) -> str:
        return self.transform.name

    def _named(self, sample: Sample, field: str) -> str:
        """The field of the sample that `a;b` names: the first one that is there."""
        from wdskit.stages.images import geometry

        for name in field.split(";"):
            if name in sample:
                if not geometry.is_image(sample[name]):
                    raise self._undecoded(name, sample[name])
                return name
        raise PipelineError(f"{self._name}: no field `{field}` in this sample (fields: {_names(sample)})")

    def _undecoded(self, field: str, value: object) -> PipelineError:
        if isinstance(value, bytes | bytearray | memoryview):
            renamed = "" if is_image_field(field) else ", and before the field gets this name"
            return PipelineError(f"{self._name}: `{field}` is not decoded yet. Put `decode: rgb8` before it{renamed}")
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        return PipelineError(f"{self._name}: `{field}` holds no image but {type(value).__name__}{shape}")


def _names(sample: Mapping[str, Any]) -> str:
    return ", ".join(field for field in sample if not field.startswith("__")) or "none"


class ImageTransform(PerSampleStage):
    """What the image transforms share."""

    fields: FieldChoices | None = Field(None, description=_FIELDS)

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The mask fields that it names, each with its alternatives."""
        return ()

    def bind(self, context: Context, label: str) -> BoundTransform:
        """As `PerSampleStage.bind`."""
        context.layouts = context.layouts.handled((*(self.fields or ()), *self.mask_names))
        return BoundTransform(self, context.run, label, context.images, context.stored)

    def apply(self, bound: BoundTransform, sample: Sample, origin: Origin) -> Sample:
        """A copy of a sample, transformed. Draws come from `bound.rng_at(origin)`, asked for once."""
        raise NotImplementedError

    def masks_before(self, masks: frozenset[str]) -> frozenset[str]:
        """As `PerSampleStage.masks_before`."""
        return masks.union(*(names.split(";") for names in self.mask_names))


class GeometricTransform(ImageTransform):
    """What the transforms share that move pixels."""

    masks: FieldChoices | None = Field(None, description=_MASKS)

    @property
    def mask_names(self) -> tuple[str, ...]:
        """As `ImageTransform.mask_names`."""
        return self.masks or ()

    @model_validator(mode="after")
    def _check_masks(self) -> GeometricTransform:
        both = [name for name in self.masks or () if name in (self.fields or ())]
        if both:
            raise refuse(f"{listing(both)} cannot be in `fields` and in `masks`.")
        return self


class Resize(GeometricTransform):
    """Resize images, antialiased."""

    name: ClassVar[str] = "resize"
    shorthand: ClassVar[str | None] = "size"

    size: Size = Field(description="The shorter side in pixels, aspect kept, or [height, width].", examples=[256])

    def apply(self, bound: BoundTransform, sample: Sample, origin: Origin) -> Sample:  # noqa: ARG002 (nothing is drawn)
        """As `ImageTransform.apply`."""
        from wdskit.stages.images import geometry

        def function(image: Any, *, nearest: bool = False) -> Any:
            return geometry.resize(image, resized(self.size, *geometry.image_size(image)), nearest=nearest)

        return _resized(sample, bound, bound.of_images(sample), bound.of_masks(sample), function)


class CenterCrop(GeometricTransform):
    """The middle of images; a smaller image is padded with zeros."""

    name: ClassVar[str] = "center_crop"
    shorthand: ClassVar[str | None] = "size"

    size: Size = Field(description="Both sides in pixels, or [height, width].", examples=[224])

    def apply(self, bound: BoundTransform, sample: Sample, origin: Origin) -> Sample:  # noqa: ARG002 (nothing is drawn)
        """As `ImageTransform.apply`."""
        from wdskit.stages.images import geometry

        size = pair(self.size)
        fields = bound.of_images(sample) + bound.of_masks(sample)
        return _changed(sample, fields, lambda image: geometry.center_crop(image, size))


class RandomResizedCrop(GeometricTransform):
    """A random part of images, resized: the same part of all fields."""

    name: ClassVar[str] = "random_resized_crop"
    shorthand: ClassVar[str | None] = "size"

    size: Size = Field(description="Both sides of the result in pixels, or [height, width].", examples=[224])
    scale: ShareRange = Field((0.08, 1.0), description="Share of the image's area to crop, [low, high].")
    ratio: Range = Field((3 / 4, 4 / 3), description="Width over height of the crop, [low, high].")

    def apply(self, bound: BoundTransform, sample: Sample, origin: Origin) -> Sample:
        """As `ImageTransform.apply`."""
        from wdskit.stages.images import geometry

        size = pair(self.size)
        images, masks = bound.of_images(sample), bound.of_masks(sample)
        height, width = _common_size(sample, images + masks)
        box = geometry.draw_crop(bound.rng_at(origin), height, width, self.scale, self.ratio)

        def function(image: Any, *, nearest: bool = False) -> Any:
            return geometry.resize(geometry.crop(image, *box), size, nearest=nearest)

        return _resized(sample, bound, images, masks, function)


class RandomFlip(GeometricTransform):
    """Mirror images left to right: all fields or none."""

    name: ClassVar[str] = "random_flip"
    shorthand: ClassVar[str | None] = "p"

    p: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(0.5, description="Probability of mirroring.")

    def apply(self, bound: BoundTransform, sample: Sample, origin: Origin) -> Sample:
        """As `ImageTransform.apply`."""
        from wdskit.stages.images import geometry

        fields = bound.of_images(sample) + bound.of_masks(sample)
        return _changed(sample, fields, geometry.flip) if bound.rng_at(origin).random() < self.p else dict(sample)


class Normalize(ImageTransform):
    """(image in 0..1 - mean) / std, as float32."""

    name: ClassVar[str] = "normalize"
    shorthand: ClassVar[str | None] = "preset"

    preset: Literal["imagenet"] | None = Field(None, description="Mean and std of ImageNet's training images.")
    mean: Channels | None = Field(None, description="1 or 3 numbers, for values in 0..1. Needs `std`.")
    std: PositiveChannels | None = Field(None, description="1 or 3 numbers, for values in 0..1. Needs `mean`.")

    @model_validator(mode="after")
    def _check_source(self) -> Normalize:
        if self.preset and (self.mean or self.std):
            raise refuse("`preset` and `mean` with `std` exclude each other; remove one of the two.")
        if not self.preset and not (self.mean and self.std):
            raise refuse("it needs `imagenet`, or both `mean` and `std`. Write `normalize: imagenet`.")
        if self.mean and self.std and len(self.mean) != len(self.std):
            raise refuse(f"`mean` has {len(self.mean)} items and `std` {len(self.std)}; both need 1 or both 3.")
        return self

    @property
    def numbers(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation, for values 0..1."""
        return (IMAGENET_MEAN, IMAGENET_STD) if self.preset == "imagenet" else (self.mean or (), self.std or ())

    def apply(self, bound: BoundTransform, sample: Sample, origin: Origin) -> Sample:  # noqa: ARG002 (nothing is drawn)
        """As `ImageTransform.apply`."""
        from wdskit.stages.images import geometry

        return _changed(sample, bound.of_colours(sample), lambda image: geometry.normalize(image, *self.numbers))


class ToTensor(ImageTransform):
    """Images as torch float32 (C, H, W) in 0..1."""

    name: ClassVar[str] = "to_tensor"
    shorthand: ClassVar[str | None] = "fields"

    def apply(self, bound: BoundTransform, sample: Sample, origin: Origin) -> Sample:  # noqa: ARG002 (nothing is drawn)
        """As `ImageTransform.apply`."""
        from wdskit.stages.images import geometry

        return _changed(sample, bound.of_colours(sample), geometry.to_tensor)


def pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _changed(sample: Sample, fields: list[str], function: Callable[[Any], Any]) -> Sample:
    """A copy of the sample with the function applied to some fields; one that is named twice is changed once."""
    return {**sample, **{field: function(sample[field]) for field in fields}}


def _resized(
    sample: Sample, bound: BoundTransform, images: list[str], masks: list[str], function: Callable[..., Any]
) -> Sample:
    """The sample with images resized smoothly; masks, and images that hold stored numbers, by nearest."""
    smooth = [field for field in images if not bound.stored.holds(field)]
    others = [field for field in (*images, *masks) if field not in smooth]
    return _changed(_changed(sample, smooth, function), others, functools.partial(function, nearest=True))


def resized(size: int | list[int] | tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Height and width that `resize: size` makes of an image's."""
    from wdskit.stages.images import geometry

    return geometry.shorter_side(height, width, size) if isinstance(size, int) else pair(size)


def _common_size(sample: Sample, fields: list[str]) -> tuple[int, int]:
    from wdskit.stages.images import geometry

    sizes = {field: geometry.image_size(sample[field]) for field in fields}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"`{field}` {height} x {width}" for field, (height, width) in sizes.items())
        raise PipelineError(
            f"random_resized_crop: fields that share one draw differ in height x width: {listed}. Resize them first"
        )
    return sizes[fields[0]]
