"""Specs of the built-in image transforms. They act on a sample's one image field, or on those that `fields` names."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Strict, model_validator

from wdskit.config.messages import listing
from wdskit.config.spec import Kind, StageSpec, refuse
from wdskit.config.values import Channels, FieldChoices, PositiveChannels, Range, ShareRange, Size

_FIELDS = "The image fields to transform. Without: the sample's one image field."
_MASKS = "Fields transformed with the same draws and nearest neighbour, such as segmentation masks."


class TransformSpec(StageSpec):
    """What the geometric transforms share."""

    kind: ClassVar[Kind] = "each"

    fields: FieldChoices | None = Field(None, description=_FIELDS)
    masks: FieldChoices | None = Field(None, description=_MASKS)

    @model_validator(mode="after")
    def _check_masks(self) -> TransformSpec:
        both = [name for name in self.masks or () if name in (self.fields or ())]
        if both:
            raise refuse(f"{listing(both)} cannot be in `fields` and in `masks`.")
        return self


class ResizeSpec(TransformSpec):
    """Resize images, antialiased."""

    name: ClassVar[str] = "resize"
    shorthand: ClassVar[str | None] = "size"

    size: Size = Field(description="The shorter side in pixels, aspect kept, or [height, width].", examples=[256])


class CenterCropSpec(TransformSpec):
    """The middle of images; a smaller image is padded with zeros."""

    name: ClassVar[str] = "center_crop"
    shorthand: ClassVar[str | None] = "size"

    size: Size = Field(description="Both sides in pixels, or [height, width].", examples=[224])


class RandomResizedCropSpec(TransformSpec):
    """A random part of images, resized."""

    name: ClassVar[str] = "random_resized_crop"
    shorthand: ClassVar[str | None] = "size"

    size: Size = Field(description="Both sides of the result in pixels, or [height, width].", examples=[224])
    scale: ShareRange = Field((0.08, 1.0), description="Share of the image's area to crop, [low, high].")
    ratio: Range = Field((3 / 4, 4 / 3), description="Width over height of the crop, [low, high].")


class RandomFlipSpec(TransformSpec):
    """Mirror images left to right."""

    name: ClassVar[str] = "random_flip"
    shorthand: ClassVar[str | None] = "p"

    p: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(0.5, description="Probability of mirroring.")


class NormalizeSpec(StageSpec):
    """(image in 0..1 - mean) / std, as float32."""

    name: ClassVar[str] = "normalize"
    kind: ClassVar[Kind] = "each"
    shorthand: ClassVar[str | None] = "preset"

    preset: Literal["imagenet"] | None = Field(None, description="Mean and std of ImageNet's training images.")
    mean: Channels | None = Field(None, description="1 or 3 numbers, for values in 0..1. Needs `std`.")
    std: PositiveChannels | None = Field(None, description="1 or 3 numbers, for values in 0..1. Needs `mean`.")
    fields: FieldChoices | None = Field(None, description=_FIELDS)

    @model_validator(mode="after")
    def _check_source(self) -> NormalizeSpec:
        if self.preset and (self.mean or self.std):
            raise refuse("`preset` and `mean` with `std` exclude each other; remove one of the two.")
        if not self.preset and not (self.mean and self.std):
            raise refuse("it needs `imagenet`, or both `mean` and `std`. Write `normalize: imagenet`.")
        if self.mean and self.std and len(self.mean) != len(self.std):
            raise refuse(f"`mean` has {len(self.mean)} items and `std` {len(self.std)}; both need 1 or both 3.")
        return self


class ToTensorSpec(StageSpec):
    """Images as torch float32 (C, H, W) in 0..1."""

    name: ClassVar[str] = "to_tensor"
    kind: ClassVar[Kind] = "each"
    shorthand: ClassVar[str | None] = "fields"

    fields: FieldChoices | None = Field(None, description=_FIELDS)
