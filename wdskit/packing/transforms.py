"""Check and change samples before they are packed: rotate, resize and encode images.

The sizes, boxes and run lengths in the JSON of a sample are updated with its image.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, get_args

from wdskit.codecs.checks import IMAGE_LEVELS, ImageLevel, check_image, check_image_field, read_header
from wdskit.codecs.edit.encode import DEFAULT_QUALITY, FORMATS, ImageFormat, encoder_versions, parse_colour
from wdskit.codecs.edit.geometry import Geometry, resize_move
from wdskit.codecs.edit.masks import move_mask
from wdskit.codecs.edit.recode import Recoding
from wdskit.codecs.edit.resize import RESIZE_MODES, ResizeMode, ResizePlan, Size, resizer_versions
from wdskit.codecs.fields import decode_field, is_json_field
from wdskit.codecs.formats import check_magic, image_format, is_image_field, promised_format
from wdskit.codecs.images import may_be_mask
from wdskit.codecs.structure import check_pixels
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import DecodeError, PackError
from wdskit.files import Buffer
from wdskit.limits import MAX_PIXELS
from wdskit.packing.described_fields import ImageChange, update_field
from wdskit.packing.json_merge import add_metadata

Field = tuple[str, bytes]

DERIVED = ("width", "height", "bytes", "sha256")
JSON_FIELD = "json"


@dataclass(frozen=True)
class Transforms:
    """The options of `pack` that check and change samples. By default images are checked and no byte is changed.

    `resize`, `format` and `orient` change the images of a row: its only image, or the images of `image_fields`. An
    image that already has the wanted size, format and orientation keeps its bytes; `quality` does not apply to it. A
    newly encoded image keeps the colour profile and the EXIF block, and loses XMP, IPTC, comments and texts.

    Attributes:
        validate: Check of each image before the transforms. "none" checks nothing, not even JSON and `cls`. "magic"
            compares the first bytes with the field's name. "structure" also checks that the file is complete: JPEG
            markers, PNG checksums, WebP sizes. "decode" also decodes the pixels. Default: "structure", but the first
            bytes of an image that `resize`, `format` or `orient` changes are not compared with the field's name.
        resize: Length in pixels, 1 to 65536, of the side that `resize_mode` names. Larger images are made smaller.
        resize_mode: "shorter" or "longer" is the side of the image with the length `resize`. "crop" makes a square from
            the middle, and "pad" adds pixels to make a square; `resize` is then the side of the square. Default:
            "shorter".
        upscale: True also makes smaller images larger.
        format: "jpg", "webp" or "png"; the field is renamed. Default: the format of each image.
        quality: 1 to 100, for jpg and webp. Default: 90.
        orient: True applies the EXIF orientation to the pixels and removes it from the EXIF block. False keeps it.
        background: Colour (`white`, `#rrggbb`) that replaces transparency in jpg and fills padding. Without a colour, a
            transparent image cannot become jpg, and padding is black or transparent.
        image_fields: The image fields to change or describe, as a text with commas or as a list of names. Default: the
            only image of a row that is not in `mask_fields`.
        mask_fields: PNG images that are resized and rotated like the image of their row, by nearest neighbour. Their
            numbers, bits and palette stay.
        mask_fill: The number of the mask pixels that padding adds, 0 to 65535. Without it, padding a mask is an error.
        derive: Metadata of the packed image to add to `json`: "width", "height", "bytes", "sha256".
        require: Fields that each sample must have: `jpg;png,json` means jpg or png, and json.
        missing: What to do with a row that lacks a required field: "error", "warn", "skip". Default: "error".
        duplicates: What to do with a row whose images have the same bytes as the images of an earlier row: "keep",
            "report" lists the row in `duplicates.jsonl`, "drop" also leaves the row out.
        max_pixels: The largest number of pixels of an image, width x height, before and after the change.
        checks_labels: Whether `cls` must be a whole number, unless `validate` is "none".

    Raises:
        PackError: An option is invalid, or has no effect.
    """

    validate: str | None = None
    resize: int | None = None
    resize_mode: str | None = None
    upscale: bool = False
    format: str | None = None
    quality: int | None = None
    orient: bool = False
    background: str | None = None
    image_fields: str | Sequence[str] = ()
    mask_fields: str | Sequence[str] = ()
    mask_fill: int | None = None
    derive: str | Sequence[str] = ()
    require: str | Sequence[str] = ()
    missing: str | None = None
    duplicates: str = "keep"
    max_pixels: int = MAX_PIXELS
    checks_labels: bool = True

    def __post_init__(self) -> None:
        for name in ("image_fields", "mask_fields", "derive", "require"):
            object.__setattr__(self, name, _parse_names(name, getattr(self, name)))
        _check_choice("validate", self.validate, (None, *IMAGE_LEVELS))
        _check_choice("resize_mode", self.resize_mode, (None, *RESIZE_MODES))
        _check_choice("format", self.format, (None, *get_args(ImageFormat)))
        _check_choice("missing", self.missing, (None, "error", "warn", "skip"))
        _check_choice("duplicates", self.duplicates, ("keep", "report", "drop"))
        for name in self.derive:
            _check_choice("derive", name, DERIVED)
        for name, most in (("resize", 1 << 16), ("quality", 100), ("max_pixels", 1 << 62)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise PackError(f"{name}: {value!r} is not a whole number of 1 to {most}.")
        if self.mask_fill is not None and (type(self.mask_fill) is not int or not 0 <= self.mask_fill < 1 << 16):
            raise PackError(f"mask_fill: {self.mask_fill!r} is not a whole number of 0 to 65535.")
        both = set(self.image_fields) & set(self.mask_fields)
        if both:
            raise PackError(f"mask_fields: {min(both)} is in image_fields, too. Name it once.")
        try:
            if self.background is not None:
                parse_colour(self.background)
        except (ValueError, AttributeError, TypeError) as err:
            raise PackError(f"background: {self.background!r} is not a colour. Write white or #ffffff.") from err
        concerns_images = self.changes_bytes or self.duplicates != "keep"
        has_quality = self.changes_images and self.format != "png"
        has_background = self.format == "jpg" or self.resize_mode == "pad"
        pads_masks = self.mask_fields and self.resize_mode == "pad"
        for name, is_given, has_effect, why in (
            ("resize_mode", self.resize_mode is not None, self.resize is not None, "without resize"),
            ("upscale", self.upscale, self.resize is not None, "without resize"),
            ("quality", self.quality is not None, has_quality, "without resize, format or orient, or for png"),
            ("background", self.background is not None, has_background, "without format jpg or resize_mode pad"),
            ("image_fields", self.image_fields, concerns_images, "without an option that changes images"),
            ("mask_fields", self.mask_fields, self.moves_images, "without resize or orient"),
            ("mask_fill", self.mask_fill is not None, pads_masks, "without mask_fields and resize_mode pad"),
            ("missing", self.missing is not None, self.require, "without require"),
        ):
            if is_given and not has_effect:
                raise PackError(f"{name}: it has no effect {why}. Leave it out.")

    @property
    def changes_images(self) -> bool:
        """True if an option can change images: `resize`, `format` or `orient`. A changed image may get another field
        name.
        """
        return self.resize is not None or self.format is not None or self.orient

    @property
    def moves_images(self) -> bool:
        """True if an option can change the size or the orientation of an image: `resize` or `orient`."""
        return self.resize is not None or self.orient

    @property
    def changes_bytes(self) -> bool:
        """True if the transforms can change the size of a row. Shards can then be limited only by the number of
        samples.
        """
        return self.changes_images or bool(self.derive)

    @property
    def checks_structure(self) -> bool:
        """True if the whole file of each image is checked: `validate` is "structure", "decode" or the default."""
        return self.validate not in {"none", "magic"}

    def apply(self, fields: Sequence[Field]) -> list[Field]:
        """Check and transform `fields`, which are sorted by name. Return the fields to pack, sorted by name.

        Raises:
            DecodeError: A field is invalid or cannot be transformed.
        """
        for field, data in fields:
            self.check(field, data)
        if not self.changes_bytes:
            return list(fields)
        images = self._images([field for field, _ in fields])
        transformed = dict(fields)
        if self.changes_images:
            transformed, images = self._change(fields, images)
        if self.derive and images:
            transformed[JSON_FIELD] = self._add_derived(transformed, images)
        return sorted(transformed.items())

    def field_names(self, fields: Iterable[str]) -> tuple[str, ...]:
        """Return the sorted names of the fields after `apply`, for a row whose fields have the names `fields`.

        The result is exact if the bytes of each image fit its name. Otherwise `apply` may rename the image after its
        format.

        Raises:
            DecodeError: An option changes or describes images, and it is not clear which: the row has several images
                and `image_fields` is empty, or the row has images and `image_fields` has only other names.
        """
        names = list(fields)
        images = self._images(names) if self.changes_bytes else []
        if self.format is not None:
            names = [self._renamed(name, self.format) if name in images else name for name in names]
        return tuple(sorted({*names, *([JSON_FIELD] if self.derive and images else [])}))

    def lacks(self, fields: Iterable[str]) -> str | None:
        """Return the first item of `require`, such as `jpg;png`, that `fields` lack; None if no item is missing."""
        names = {name.lower() for name in fields}
        return next((wanted for wanted in self.require if not names & set(wanted.split(";"))), None)

    def lacks_image(self, before: Iterable[str], after: Iterable[str]) -> str | None:
        """Return the first item of `require` that the fields `before` have and the packed fields `after` lack, because
        an image got the name of its format. Return None if there is no such item, or if `missing` is "warn".
        """
        if not self.require or self.missing == "warn":
            return None
        had, has = ({name.lower() for name in fields} for fields in (before, after))
        lacking = (wanted for wanted in self.require if had & {*wanted.split(";")} and not has & {*wanted.split(";")})
        return next(lacking, None)

    def prepare_thread(self) -> None:
        """Limit torch to one thread for calls from this thread. Without `resize`, do nothing."""
        if self.resize is not None:
            import torch

            torch.set_num_threads(1)  # of this thread: threads work on different images, not on parts of one image

    def check(self, field: str, data: Buffer) -> None:
        """Check one field. DecodeError: The field is an image that fails the check of `validate`, invalid JSON, or with
        `checks_labels` a `cls` that is not a whole number. Fields of other kinds are accepted. With `validate` "none",
        nothing is checked.
        """
        if self.validate != "none" and (is_json_field(field) or (field == CLASS_FIELD and self.checks_labels)):
            decode_field(field, data)
        if not is_image_field(field):
            return
        try:
            if self.validate is not None:
                check_image_field(field, data, cast(ImageLevel, self.validate), max_pixels=self.max_pixels)
                return
            check_image(data, max_pixels=self.max_pixels)
            is_changed = field in self.image_fields if self.image_fields else field not in self.mask_fields
            if not self.changes_images or not is_changed:
                check_magic(field, data)  # a newly encoded image gets the name of its format
        except DecodeError as err:
            problem = str(err) if self.validate is None else f"{field}: validate: {err}"
            raise type(err)(problem, field=field) from err

    def check_used(self, fields: Iterable[str]) -> None:
        """Check that the samples have the images that the options are for.

        Args:
            fields: Names of the fields of all samples, before they are transformed.

        Raises:
            PackError: A name of `image_fields` or `mask_fields` is not in `fields`; or an option is for images, and no
                sample has an image.
        """
        names = set(fields)
        has = f"The fields are {', '.join(sorted(names))}."
        for option in ("image_fields", "mask_fields"):
            unknown = next((name for name in getattr(self, option) if name not in names), None)
            if unknown is not None:
                raise PackError(f"{option}: no sample has the field {unknown}. {has} Correct the name.")
        if any(map(is_image_field, names)):
            return
        for option in ("resize", "format", "orient", "derive"):
            if getattr(self, option):
                raise PackError(f"{option}: no sample has an image. {has} Leave the option out.")
        if self.duplicates != "keep":
            raise PackError(f"duplicates: no sample has an image to compare. {has} Leave the option out.")

    def _images(self, names: Sequence[str]) -> list[str]:
        """Return the image fields to change or describe; empty for a row without images. `names` are all fields of the
        row. DecodeError: The row has several images and `image_fields` is empty; or the row has images, and
        `image_fields` has only other names.
        """
        images = [name for name in names if is_image_field(name) and name not in self.mask_fields]
        if self.image_fields:
            chosen = [name for name in images if name in self.image_fields]
            if images and not chosen:
                msg = f"none of its images ({', '.join(images)}) is in --image-fields {','.join(self.image_fields)}"
                raise DecodeError(msg, field=images[0])
            return chosen
        if len(images) > 1:
            msg = f"it has {len(images)} images ({', '.join(images)}). Choose with --image-fields {images[0]}"
            if self.moves_images:
                msg += f", and name masks: --mask-fields {images[-1]}"
            raise DecodeError(msg, field=images[0])
        return images

    def _change(self, fields: Sequence[Field], images: list[str]) -> tuple[dict[str, bytes], list[str]]:
        """Change the images in the fields `images`. Return the bytes of all fields by new name, and the new names of
        `images`.

        DecodeError: An image cannot be changed or seems to be a mask, two fields get one name, or a field that
        describes a changed image cannot be updated.
        """
        self._refuse_masks(dict(fields), images)
        transformed: dict[str, bytes] = {}
        names, changes = [], {}
        for field, data in fields:
            name = field
            if field in images:
                before = data
                try:
                    data, fmt, geometry = self._recoding.apply(data)
                except DecodeError as err:
                    problem = str(err).removeprefix(f"{field}: ")
                    raise type(err)(f"{field}: {problem}", field=field) from err
                changes[field] = ImageChange(before, data, geometry)
                name = self._renamed(field, FORMATS[fmt]) if fmt in FORMATS else field
                names.append(name)
                if self.validate != "none":
                    check_magic(name, data)
            if name in transformed:
                raise DecodeError(
                    f"{field}: encode: it would become {name!r}, which the sample already has", field=field
                )
            transformed[name] = data
        if any(change.after is not change.before for change in changes.values()):
            self._update_described(transformed, dict(fields), changes)
        return transformed, names

    def _refuse_masks(self, fields: dict[str, bytes], images: list[str]) -> None:
        """Raise `DecodeError` if one of `images` seems to be a mask: a lossless grey or palette image next to an image
        of another kind. `fields` has the bytes of all fields by name.
        """
        others = [name for name in fields if is_image_field(name) and name not in self.mask_fields]
        if len(others) < 2:
            return
        masks = [name for name in others if may_be_mask(fields[name], max_pixels=self.max_pixels)]
        mask = next((name for name in masks if name in images), None)
        if mask is not None and len(masks) < len(others):
            msg = f"{mask}: it stores one number per pixel, as masks do, which would be blended or made JPEG or WebP"
            raise DecodeError(f"{msg}. Name it in --mask-fields {mask} instead of --image-fields", field=mask)

    def _update_described(
        self, transformed: dict[str, bytes], fields: dict[str, bytes], changes: dict[str, ImageChange]
    ) -> None:
        """Update the masks, and the fields that describe the changed images, in `transformed`.

        `transformed` has the new fields by name, `fields` the old fields, `changes` the changed images by old name.
        DecodeError: A field cannot be updated. Or an image may be a mask that no option names: it is lossless, is not
        changed, and has the old size of an image that is resized or rotated.
        """
        moved = [change.geometry for change in changes.values() if not change.geometry.is_same]
        known = [*changes.values()]
        for field, data in fields.items():
            if field in changes or field in self.mask_fields or not is_image_field(field):
                continue
            try:
                header = read_header(lambda size, data=data: data[:size])  # type: ignore[misc]
            except DecodeError as err:
                raise type(err)(f"{field}: {err}", field=field) from err
            size = Size(header.width, header.height)
            is_exact = image_format(data) not in {"JPEG", "WebP"}
            if is_exact and any(size in {other.move.before, other.upright.before} for other in moved):
                msg = f"{field}: it has the size of the image, which --resize or --orient changes"
                raise DecodeError(
                    f"{msg}. Name a mask in --mask-fields {field}, an image in --image-fields", field=field
                )
            known.append(ImageChange(data, data, Geometry(resize_move(size, ResizePlan(0, 0, size, size, size)))))
        for field, data in fields.items():
            if field in self.mask_fields and moved:
                try:
                    geometries = [change.geometry for change in known]
                    transformed[field] = move_mask(data, geometries, fill=self.mask_fill, max_pixels=self.max_pixels)
                except DecodeError as err:
                    raise type(err)(f"{field}: mask: {err}", field=field) from err
            elif not is_image_field(field):
                transformed[field] = update_field(field, data, known)

    def _add_derived(self, transformed: dict[str, bytes], images: list[str]) -> bytes:
        """Return the bytes of the field `json` with the metadata of `derive`. Width and height come from the header of
        the packed image. The EXIF orientation is ignored.

        DecodeError: There are several images; the image is invalid or has more than `max_pixels`; `json` is not an
        object; or `json` already has a member of `derive` with a different value.
        """
        if len(images) > 1:
            raise DecodeError(
                f"derive: it has {len(images)} images ({', '.join(images)}), but derive describes only one"
            )
        image = transformed[images[0]]
        known: dict[str, int | str] = {"bytes": len(image)}
        try:
            if "width" in self.derive or "height" in self.derive:
                header = read_header(lambda size: image[:size])
                check_pixels(header.width, header.height, max_pixels=self.max_pixels)
                known |= {"width": header.width, "height": header.height}
            if "sha256" in self.derive:
                known["sha256"] = hashlib.sha256(image).hexdigest()
            wanted = {name: known[name] for name in DERIVED if name in self.derive}
            return add_metadata(transformed.get(JSON_FIELD, b"{}"), wanted, at_end=True)
        except (DecodeError, ValueError) as err:
            kind = type(err) if isinstance(err, DecodeError) else DecodeError
            raise kind(f"{JSON_FIELD}: derive: {err}", field=JSON_FIELD) from err

    def _renamed(self, field: str, extension: str) -> str:
        """Return the name of an image field with `extension` as its last part. Without the option `format`, a name of
        the same format is kept, such as `jpe` for `jpg`.
        """
        if self.format is None and FORMATS.get(promised_format(field).upper()) == extension:
            return field
        stem, dot, _ = field.rpartition(".")
        return f"{stem}{dot}{extension}"

    @cached_property
    def _recoding(self) -> Recoding:
        return Recoding(
            size=self.resize,
            mode=cast(ResizeMode, self.resize_mode or "shorter"),
            upscale=self.upscale,
            format=cast("ImageFormat | None", self.format),
            quality=self.quality or DEFAULT_QUALITY,
            orient=self.orient,
            background=None if self.background is None else parse_colour(self.background),
            max_pixels=self.max_pixels,
        )


def transform_versions(transforms: Transforms) -> dict[str, str]:
    """Return the version of each library that decides the packed bytes, by name; empty if no image is encoded."""
    if not transforms.changes_images:
        return {}
    versions = encoder_versions() | (resizer_versions() if transforms.resize is not None else {})
    return versions | ({"zlib of masks": zlib.ZLIB_RUNTIME_VERSION} if transforms.mask_fields else {})


def _parse_names(option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return names in lower case. `value` is a list of names, or a text with commas between names. PackError: A name is
    empty, repeated or not a text. The message starts with `option`.
    """
    parts: Sequence[Any] = value.split(",") if isinstance(value, str) else value
    if not all(isinstance(part, str) and part.strip(" ;") for part in parts):
        raise PackError(f"{option}: {value!r} is not a list of names. Write jpg,json.")
    names = tuple(";".join(each.strip().lower() for each in part.split(";")) for part in parts)
    if len(set(names)) < len(names):
        raise PackError(f"{option}: {value!r} repeats a name.")
    return names


def _check_choice(option: str, value: object, known: Sequence[object]) -> None:
    """Raise `PackError` if `value` is not in `known`. The message starts with `option`."""
    if value not in known:
        names = ", ".join(str(each) for each in known if each is not None)
        raise PackError(f"{option}: {value!r} is not one of {names}.")


UNTOUCHED = Transforms()
"""The default: images and JSON are checked, and no byte is changed."""
