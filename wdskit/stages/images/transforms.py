"""The image transforms. Each class has the settings, the YAML form and the function of one transform.

A transform changes a sample's only image field, or the fields in `fields`. The fields in `masks` get the same random
values, and their numbers are not blended. `CenterCrop` is a template for a new transform: settings, then `change`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import AfterValidator, Field, Strict, model_validator

from wdskit.config.types import FieldChoices, Natural, Positive, Size, refuse, show
from wdskit.errors import PipelineError, WdskitError
from wdskit.stages.base import Context, PerSampleStage
from wdskit.stages.fields import find, list_fields
from wdskit.stages.images import geometry
from wdskit.stages.run import Live, Origin, Roles, Run

Sample: TypeAlias = dict[str, Any]

_FIELDS = "The image fields to transform. Default: the sample's only image field."
_MASKS = "Fields to transform with the same random values and nearest neighbour, such as segmentation masks."


def _check_ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise refuse(f"{show([*pair])} is not [low, high], with low <= high.")
    return pair


Range = Annotated[tuple[Positive, Positive], AfterValidator(_check_ordered)]
_Share = Annotated[float, Field(strict=True, gt=0, le=1)]
ShareRange = Annotated[tuple[_Share, _Share], AfterValidator(_check_ordered)]
Channels = Annotated[tuple[Annotated[float, Field(strict=True, ge=0, le=1)], ...], Field(min_length=1, max_length=3)]
PositiveChannels = Annotated[tuple[_Share, ...], Field(min_length=1, max_length=3)]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageTransform(PerSampleStage):
    """The base class of all image transforms."""

    colours_only: ClassVar[bool] = False
    """Whether the transform computes new colours. It then refuses masks, whose numbers are classes or depths."""
    draws: ClassVar[bool] = False
    """Whether the transform draws random values, so that `draw` is called for each sample."""
    places_by_size: ClassVar[bool] = False
    """Whether the place of the result in an image depends on the size of this image. A mask must then have the size of
    its image.
    """

    fields: FieldChoices | None = Field(None, description=_FIELDS)

    @abstractmethod
    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:
        """Return a changed image, or the same object if nothing changes.

        Args:
            image: The image of one field: an array, as in the module `geometry`.
            drawn: Result of `draw` for this sample; None if the transform draws nothing.
            nearest: Whether the image is a mask, whose numbers must stay: pixels may move, but not be blended or
                scaled.
        """

    def draw(self, rng: np.random.Generator, images: Mapping[str, Any]) -> Any:  # noqa: ARG002 (most draw nothing)
        """Return the random values of a sample, which `change` gets as `drawn` for each field. Called only if `draws`
        is set. `images` maps all fields to change, masks included, to their images.
        """
        return None

    def bind(self, context: Context, label: str) -> BoundTransform:
        """Return the function that maps a sample and its origin to a changed copy of the sample. `label` is the key of
        the random numbers (see `PerSampleStage.bind`).
        """
        return BoundTransform(self, context.roles, context.run, label)

    def roles_after(self, roles: Roles) -> Roles:
        """Return the roles of the fields after this stage; `roles` are those before it."""
        return roles.named(self.fields or (), self.mask_names)

    def live_before(self, live: Live) -> Live:
        """Return the fields that this stage or later stages use; `live` are those of the later stages."""
        return live.using((*(self.fields or ()), *self.mask_names), images=not self.fields)


class GeometricTransform(ImageTransform):
    """The base class of transforms that move pixels. Such a transform can take fields as masks."""

    masks: FieldChoices | None = Field(None, description=_MASKS)

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The items of `masks`: fields, with `;` between alternatives. Empty without `masks`."""
        return self.masks or ()

    @model_validator(mode="after")
    def _check_masks(self) -> GeometricTransform:
        fields, masks = (set(";".join(names or ()).split(";")) for names in (self.fields, self.masks))
        if self.masks and fields & masks:
            raise refuse("`fields` and `masks` have a field in common.")
        return self


@dataclass(frozen=True)
class BoundTransform:
    """The running form of an image transform: finds the fields of each sample, and draws random values. Can be pickled.

    Attributes:
        transform: The transform, with its settings.
        roles: What the stages before say of the fields.
        run: The running pipeline.
        stage: The key of the stage's random numbers; see `Context.label`.
    """

    transform: ImageTransform
    roles: Roles
    run: Run
    stage: str

    def __call__(self, sample: Sample, origin: Origin) -> Sample:
        """Return a shallow copy of the sample with the fields changed.

        Raises:
            PipelineError: A field is not an image (see `_check_image`), the fields differ in size where they may not,
                or `fields` is not set, and the sample has not exactly one image.
            WdskitError: A field is missing; or a mask must be padded, and `mask_fill` is not set or does not fit its
                dtype.
        """
        transform, name = self.transform, self.transform.name
        masks = dict(find(name, sample, names) for names in transform.mask_names)
        fields = transform.fields or (only_image(name, sample, self.roles, masks),)
        images = dict(find(name, sample, names) for names in fields)
        are_masks = {field: field in masks or self.roles.is_mask(field) for field in images | masks}
        for field, value in (images | masks).items():
            self._check_image(field, value, is_mask=are_masks[field])
        if transform.places_by_size:
            self._check_sizes(images, masks)
        drawn = self.draw(origin, images | masks)
        changed = {
            field: transform.change(value, drawn, nearest=are_masks[field]) for field, value in (images | masks).items()
        }
        return {**sample, **changed}

    def draw(self, origin: Origin, images: Mapping[str, Any]) -> Any:
        """Return the random values of a sample: None if the transform draws nothing. `images` are those to change."""
        return self.transform.draw(self.rng_at(origin), images) if self.transform.draws else None

    def _check_sizes(self, images: Mapping[str, Any], masks: Mapping[str, Any]) -> None:
        """Check that each mask has the height and width of at least one image. A difference of one pixel is allowed,
        because `resize` to the shorter side rounds the longer side of each field. The arguments map fields to arrays.
        PipelineError: A mask has another size than all images.
        """
        sizes = {field: image.shape[:2] for field, image in images.items()}
        for field, mask in masks.items():
            if not any(np.abs(np.subtract(size, mask.shape[:2])).max() <= 1 for size in sizes.values()):
                msg = f"{self.transform.name}: the mask `{field}` has the height and width {mask.shape[:2]}, but the "
                msg += f"images have {sizes}. Resize both first, to the same shorter side or the same [height, width]"
                raise PipelineError(msg)

    def rng_at(self, origin: Origin) -> np.random.Generator:
        """Return the random Generator for the position of `origin`, valid until the next call in this thread."""
        return self.run.rng_at(self.stage, origin)

    def _check_image(self, field: str, value: Any, *, is_mask: bool) -> None:
        """Check that the value of a field is an array (height, width[, channels]), of uint8 or float32 if it is not a
        mask. PipelineError: It is not, or it is a mask and the transform computes colours.
        """
        where = f"{self.transform.name}: `{field}`"
        if not isinstance(value, np.ndarray):
            msg = f"{where} is not an array but {type(value).__name__}. Put `decode: rgb8` before this stage; use the"
            raise PipelineError(f"{msg} stage `torchvision` for tensors and images of Pillow")
        if value.ndim not in {2, 3} or self.roles.is_list(field):
            msg = f"{where} has the shape {value.shape}, and an image has (height, width[, channels])"
            raise PipelineError(f"{msg}. For boxes and keypoints, use the stage `torchvision`")
        if is_mask and self.transform.colours_only:
            msg = f"{where} is a mask (of `decode: index`, or of `masks` in an earlier stage): its"
            raise PipelineError(f"{msg} numbers are classes or depths, not colours. Name the images with `fields`")
        if not is_mask and value.dtype not in (np.uint8, np.float32):
            raise PipelineError(f"{where} is {value.dtype}, and an image is uint8 or float32. Name a mask in `masks`")


class Resize(GeometricTransform):
    """Resize images, bilinear with antialiasing; masks by nearest neighbour. Boxes in JSON do not change."""

    name: ClassVar[str] = "resize"
    shorthand: ClassVar[str | None] = "size"

    size: Size = Field(
        description="The shorter side in pixels, which keeps the aspect ratio, or [height, width].", examples=[256]
    )

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:  # noqa: ARG002 (nothing is drawn)
        """Return `image` in the size of `size_of`; by nearest neighbour if `nearest`. `drawn` has no effect."""
        return geometry.resize(image, self.size_of(*geometry.image_size(image)), nearest=nearest)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the result for an image of `height` x `width`."""
        return geometry.shorter_side(height, width, self.size) if isinstance(self.size, int) else pair(self.size)


class CenterCrop(GeometricTransform):
    """Crop the middle of images; smaller images are padded with 0, smaller masks with `mask_fill`."""

    name: ClassVar[str] = "center_crop"
    places_by_size: ClassVar[bool] = True
    shorthand: ClassVar[str | None] = "size"

    size: Size = Field(description="Both sides in pixels, or [height, width].", examples=[224])
    mask_fill: Natural | None = Field(
        None, description="The number around a mask that is smaller, such as 255. Without it such a mask is an error."
    )

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:  # noqa: ARG002 (nothing is drawn)
        """Return the middle of `image` in the size of the setting `size`. A smaller image is padded with 0, a smaller
        mask (`nearest`) with `mask_fill`. `drawn` has no effect.

        Raises:
            WdskitError: A mask must be padded, and `mask_fill` is not set or is too large for its dtype.
        """
        (height, width), (rows, columns) = image.shape[:2], pair(self.size)
        fill = self.mask_fill if nearest else 0
        is_smaller = height < rows or width < columns
        if is_smaller and (fill is None or np.array(fill).astype(image.dtype) != fill):
            msg = f"a mask of height x width {height} x {width} is smaller than {rows} x {columns}. Resize it first, "
            raise WdskitError(f"{msg}or set `mask_fill`, the class number around it, which {image.dtype} can store")
        return geometry.center_crop(image, (rows, columns), fill=fill or 0)


class RandomResizedCrop(GeometricTransform):
    """Crop a random part of images and resize it. All fields of a sample get the same part."""

    name: ClassVar[str] = "random_resized_crop"
    shorthand: ClassVar[str | None] = "size"
    draws: ClassVar[bool] = True

    size: Size = Field(description="Both sides of the result in pixels, or [height, width].", examples=[224])
    scale: ShareRange = Field((0.08, 1.0), description="Share of the image's area to crop, [low, high].")
    ratio: Range = Field((3 / 4, 4 / 3), description="Width over height of the crop, [low, high].")

    def draw(self, rng: np.random.Generator, images: Mapping[str, Any]) -> tuple[int, int, int, int]:
        """Return top, left, height and width of the crop in pixels, drawn from `rng`. PipelineError: The images differ
        in height or width.
        """
        sizes = {field: geometry.image_size(image) for field, image in images.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"`{field}` {height} x {width}" for field, (height, width) in sizes.items())
            msg = f"random_resized_crop: fields with the same crop differ in height x width: {listed}."
            raise PipelineError(f"{msg} Resize them first")
        return draw_crop(rng, *next(iter(sizes.values())), self.scale, self.ratio)

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:
        """Return the part `drawn` of `image`, resized to the setting `size`; by nearest neighbour if `nearest`. `drawn`
        is the result of `draw`.
        """
        return geometry.resize(geometry.crop(image, *drawn), pair(self.size), nearest=nearest)


class RandomFlip(GeometricTransform):
    """Mirror images left to right at random: all images and masks of a sample, or none. Boxes in JSON do not move."""

    name: ClassVar[str] = "random_flip"
    shorthand: ClassVar[str | None] = "p"
    draws: ClassVar[bool] = True

    p: Annotated[float, Strict(), Field(ge=0, le=1)] = Field(0.5, description="Probability of mirroring.")

    def draw(self, rng: np.random.Generator, images: Mapping[str, Any]) -> bool:  # noqa: ARG002 (one for all images)
        """Return whether to mirror all fields of the sample: True with the probability `p`."""
        return rng.random() < self.p

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:  # noqa: ARG002 (no number changes)
        """Return `image` mirrored left to right if `drawn` is True, else `image` itself. `nearest` has no effect."""
        return geometry.flip(image) if drawn else image


class Normalize(ImageTransform):
    """Compute (image - mean) / std as float32. The values of uint8 images are first divided by 255."""

    name: ClassVar[str] = "normalize"
    shorthand: ClassVar[str | None] = "preset"
    colours_only: ClassVar[bool] = True

    preset: Literal["imagenet"] | None = Field(
        None, description="Mean and std of ImageNet's training images.", examples=["imagenet"]
    )
    mean: Channels | None = Field(None, description="1 or 3 numbers, for values in 0..1. Needs `std`.")
    std: PositiveChannels | None = Field(None, description="1 or 3 numbers, for values in 0..1. Needs `mean`.")

    @model_validator(mode="after")
    def _check_source(self) -> Normalize:
        given = tuple(value is not None for value in (self.preset, self.mean, self.std))
        if given not in {(True, False, False), (False, True, True)}:
            raise refuse("it needs either `imagenet`, or both `mean` and `std`. Write `normalize: imagenet`.")
        if 2 in {len(self.mean or ()), len(self.std or ())}:
            raise refuse("`mean` and `std` have 1 number (grey) or 3 (red, green, blue).")
        return self

    @property
    def numbers(self) -> tuple[Sequence[float], Sequence[float]]:
        """(mean, standard deviation) of the preset or the settings, each with 1 or 3 numbers, for images in 0..1."""
        return (IMAGENET_MEAN, IMAGENET_STD) if self.preset == "imagenet" else (self.mean or (), self.std or ())

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:  # noqa: ARG002 (nothing is drawn)
        """Return (image - mean) / std of `image` as float32. `drawn` and `nearest` have no effect. PipelineError: The
        numbers of the settings do not fit.
        """
        return geometry.normalize(image, *self.numbers)


class ToTensor(ImageTransform):
    """Convert images to torch float32 (C, H, W), uint8 values to 0..1. No other transform can follow."""

    name: ClassVar[str] = "to_tensor"
    shorthand: ClassVar[str | None] = "fields"
    colours_only: ClassVar[bool] = True

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:  # noqa: ARG002 (nothing is drawn)
        """Return `image` as a float32 tensor (see `geometry.to_tensor`). `drawn` and `nearest` have no effect."""
        return geometry.to_tensor(image)


def draw_crop(
    rng: np.random.Generator, height: int, width: int, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[int, int, int, int]:
    """Draw a random part of an image, as torchvision's RandomResizedCrop does.

    Args:
        rng: Each try takes four numbers from `rng.random`.
        height: Height of the image.
        width: Width of the image.
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest width / height. The logarithm of the ratio is drawn uniformly.

    Returns:
        top, left, height and width of the part in pixels. If ten tries give no part that fits into the image: the
        largest part in the middle of the image with an allowed ratio.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):  # the number in torchvision
        # `random` is the method of numpy that is least likely to change.
        for_area, for_shape, for_top, for_left = rng.random(4).tolist()
        area = height * width * (scale[0] + for_area * (scale[1] - scale[0]))
        shape = math.exp(low + for_shape * (high - low))
        crop_height, crop_width = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            top, left = int(for_top * (height - crop_height + 1)), int(for_left * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    crop_height, crop_width = height, width
    if width / height < ratio[0]:
        crop_height = max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        crop_width = max(1, round(height * ratio[1]))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) for a setting `size`. An int is the length of both sides."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def only_image(stage: str, sample: Sample, roles: Roles, masks: Collection[str] = ()) -> str:
    """Return the only image of a sample: the only array, or, without arrays, the only field with the role of an image.
    Fields in `masks` do not count. PipelineError: There is none, or several. The message starts with `stage`.
    """
    named = [field for field in sample if roles.is_image(field) and field not in masks]
    images = [field for field in named if isinstance(sample[field], np.ndarray)] or named
    if len(images) == 1:
        return images[0]
    if images:
        msg = f"{stage}: several image fields in this sample ({', '.join(images)})."
        raise PipelineError(f"{msg} Name those to change with `fields`")
    what = "no image field besides `masks`" if masks else "no image field"
    msg = f"{stage}: {what} in this sample (fields: {list_fields(sample)})."
    raise PipelineError(f"{msg} Put decode before it, or name one with `fields`")
