"""`decode` of an image and the crop behind it, with flip and normalize, as one step.

It gives what the stages give one after the other: the same draws, kinds, dtypes, memory layouts and errors. uint8
values are the same to the bit, float images differ by up to one level of 255, since they are resized as uint8.

JPEGs that are decoded at a smaller scale give other pixels. Measured on photographs at q75 to q95, 4:4:4 and 4:2:0:
random crops 42 to 44 dB in the mean (1.0 to 1.4 levels of 255), the worst 34; a resize with the middle cut out, whose
factor may be exactly 2 or 4, 38 to 42 dB, the worst 31 (a lawn, 5.4 levels); single values up to 62 levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from wdskit.codecs.formats import is_image_field
from wdskit.codecs.images import IMAGE_SPECS
from wdskit.config.spec import StageSpec
from wdskit.errors import DecodeError
from wdskit.stages.base import Origin, Step, StepFailed
from wdskit.stages.functions import Decode, check_dict
from wdskit.stages.images import geometry
from wdskit.stages.images.framing import Ending, Plan, as_value, decode_part, finish, plan_jpeg, write
from wdskit.stages.images.scaling import Axis, Frame
from wdskit.stages.transforms import pair, resized

_Roles = tuple[str | None, tuple[str, ...]]  # the image field, and all fields to decode
_MAX_ROLES = 64  # samples of so many make-ups are known at a time


class Prepared(NamedTuple):
    """One sample before its pixels are decoded; without `field` it is not the common case, and nothing is done yet.

    `values` are decoded, but for the image; `failed` is the error of a field behind it.
    """

    origin: Origin
    values: dict[str, Any]
    field: str | None = None
    plan: Plan | None = None
    flip: bool = False
    failed: StepFailed | None = None


def fused_step(specs: Sequence[StageSpec], apart: Sequence[Step], image_fields: frozenset[str]) -> Step:
    """The step that does what some stages do, named as they are. The arguments are those of FusedStep."""
    return Step("-".join(step.name for step in apart), FusedStep(specs, apart, image_fields), apart[0].ordinal)


class FusedStep:
    """The step of a run of stages, as `fuse_plan.fuse` finds them.

    Attributes:
        out_ending: What is written where the caller says; `ending` unless `write_uint8` was called.

    Args:
        specs: Of the stages: decode, the crop, and what follows.
        apart: The same stages as steps of their own, for samples that are not the common case: several image fields, or
            one that is decoded already.
        image_fields: Fields that hold images under names that do not say so.
    """

    def __init__(self, specs: Sequence[StageSpec], apart: Sequence[Step], image_fields: frozenset[str]) -> None:
        first: Any = specs[0]
        decode: Any = apart[0].function
        self.decode: Decode = decode.function
        self.specs: dict[str, Any] = {spec.name: spec for spec in specs[1:]}
        self.apart = tuple(apart)
        self.transforms: dict[str, Any] = {step.name: step.function for step in apart[1:]}
        self.image_fields = image_fields
        self.crop = specs[1].name
        self.field: str | None = next(iter(getattr(specs[1], "fields", None) or ()), None)
        image, normalize = IMAGE_SPECS[first.images], self.specs.get("normalize")
        self.frame_of = _FRAMES[self.crop](self.specs, self.transforms)
        self.flip: float | None = self.specs["random_flip"].p if "random_flip" in self.specs else None
        self._roles: dict[tuple[str, ...], _Roles] = {}
        self.ending = Ending(
            is_array=image.kind == "numpy",
            is_float=image.is_float,
            to_tensor="to_tensor" in self.specs,
            normalize=normalize.numbers if normalize else None,
        )
        self.out_ending = self.ending

    @property
    def out_shape(self) -> tuple[int, int, int] | None:
        """Of the image as a tensor, (3, height, width); None where it depends on the file."""
        sizes = [spec.size for name, spec in self.specs.items() if name in {self.crop, "center_crop"}]
        if self.crop == "resize" and len(sizes) == 1 and isinstance(sizes[0], int):
            return None
        return (3, *pair(sizes[-1]))

    def write_uint8(self) -> None:
        """Leave what follows the pixels of images that are written into batches to somebody else."""
        self.out_ending = replace(self.ending, is_float=False, to_tensor=False, normalize=None)

    def value_of(self, written: torch.Tensor) -> Any:
        """What an image that was written is by itself: a view of that memory, unless its numbers are left to do."""
        return as_value(written, self.out_ending, self.ending)

    def __call__(self, sample: Any, origin: Origin, out: torch.Tensor | None = None) -> Any:
        """`prepare` and `carry_out`, with their errors."""
        return self.carry_out(self.prepare(sample, origin), out)

    def prepare(self, sample: Any, origin: Origin) -> Prepared:
        """All but the pixels: other fields, the image's header, the draws.

        A decoder fills the caches, and what runs behind it takes three times as long. So of several samples all are
        best prepared first: that saves 30 us each.

        Args:
            sample: Fields as bytes; the images may be memoryviews, if it is a sample as it was read.
            origin: Its position.

        Raises:
            StepFailed: From the error of the stage that failed.
        """
        check_dict("decode", sample)
        field, to_decode = self._roles_of(tuple(sample))
        if field is None or not isinstance(sample[field], (bytes, memoryview)):
            return Prepared(origin, _as_bytes(sample))
        values = _as_bytes(sample, but=field)
        plan = None
        for at, name in enumerate(to_decode):
            try:
                if name == field:
                    plan = self._plan(field, sample[field], origin)
                else:
                    values[name] = self.decode.decode_one(name, values[name])
            except StepFailed:
                raise
            except Exception as err:
                failed = StepFailed("decode", err)
                if field not in to_decode[:at]:
                    raise failed from err
                return Prepared(origin, values, field, plan, failed=failed)  # if the image is bad, that comes first
        flip = self.flip is not None and self.transforms["random_flip"].rng_at(origin).random() < self.flip
        return Prepared(origin, values, field, plan, flip)

    def carry_out(self, prepared: Prepared, out: torch.Tensor | None = None) -> Any:
        """The sample with its fields decoded and its image cropped.

        Args:
            prepared: By `prepare`, once.
            out: Where to write the image, as `framing.write` takes it: (1, *out_shape), of `out_ending.dtype`. The
                field of the result is then `out` itself, or, of a sample that is not the common case, what it would be
                without.

        Raises:
            StepFailed: From the error of the stage that failed.
        """
        origin, values, field, plan, flip, failed = prepared
        if field is None:
            return self._run_apart(values, origin)
        try:
            part = decode_part(values[field], plan, self.frame_of, origin, max_pixels=self.decode.max_pixels)
            if out is None:
                values[field] = finish(part, self.ending, flip=flip)
            else:
                write(part, self.out_ending, flip=flip, out=out)
                values[field] = out
        except DecodeError as err:
            err.field = field
            raise StepFailed("decode", err) from err
        except Exception as err:
            raise StepFailed(self.crop, err) from err
        if failed:
            raise failed from failed.err
        return values

    def _plan(self, field: str, data: bytes, origin: Origin) -> Plan | None:
        try:
            return plan_jpeg(data, self.frame_of, origin, max_pixels=self.decode.max_pixels)
        except DecodeError as err:
            err.field = field
            raise
        except Exception as err:
            raise StepFailed(self.crop, err) from err

    def _roles_of(self, names: tuple[str, ...]) -> _Roles:
        """Of the fields of a sample, as most samples have the same ones."""
        roles = self._roles.get(names)
        if roles is None:
            if len(self._roles) >= _MAX_ROLES:
                self._roles.clear()
            to_decode = tuple(name for name in names if self.decode.takes(name, b""))
            roles = self._roles[names] = (self._field_of(names), to_decode)
        return roles

    def _field_of(self, names: tuple[str, ...]) -> str | None:
        """The one image field, if it is one to decode."""
        if self.field is None:
            found = [name for name in names if name in self.image_fields or names_image(name)]
            field = found[0] if len(found) == 1 else None
        else:
            field = next((name for name in self.field.split(";") if name in names), None)
        if field is None or not is_image_field(field) or not self.decode.takes(field, b""):
            return None
        if field in self.decode.masks:
            return None  # which `decode` has to look at
        return field

    def _run_apart(self, sample: Any, origin: Origin) -> Any:
        for step in self.apart:
            try:
                sample = step.function(sample, origin)
            except Exception as err:
                raise StepFailed(step.name, err) from err
        return sample


def _as_bytes(sample: Mapping[str, Any], *, but: str = "") -> dict[str, Any]:
    """A copy with bytes for views of what was read, but for one field."""
    return {
        name: bytes(value) if isinstance(value, memoryview) and name != but else value for name, value in sample.items()
    }


def names_image(field: str) -> bool:
    """Whether a field of a sample holds an image by its name."""
    return not field.startswith("__") and is_image_field(field)


class _RandomResizedCrop:
    """The frame of a position: a draw of random_resized_crop."""

    def __init__(self, specs: Mapping[str, Any], transforms: Mapping[str, Any]) -> None:
        self.spec = specs["random_resized_crop"]
        self.rng_at = transforms["random_resized_crop"].rng_at
        self.size = pair(self.spec.size)

    def __call__(self, height: int, width: int, origin: Origin) -> Frame:
        spec, (rows, columns) = self.spec, self.size
        top, left, crop_height, crop_width = geometry.draw_crop(
            self.rng_at(origin), height, width, spec.scale, spec.ratio
        )
        return Frame(Axis(top, top + crop_height, rows, 0, rows), Axis(left, left + crop_width, columns, 0, columns))


class _Resize:
    """The frame of every position: resize, with center_crop behind it if there is one."""

    def __init__(self, specs: Mapping[str, Any], _: Mapping[str, Any]) -> None:
        self.size = specs["resize"].size
        self.middle = pair(specs["center_crop"].size) if "center_crop" in specs else None

    def __call__(self, height: int, width: int, _: Origin) -> Frame:
        totals = resized(self.size, height, width)
        rows, columns = (
            Axis(0, side, total, geometry.middle(total, size), size)
            for side, total, size in zip((height, width), totals, self.middle or totals, strict=True)
        )
        return Frame(rows, columns)


_FRAMES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Callable[[int, int, Origin], Frame]]] = {
    "random_resized_crop": _RandomResizedCrop,
    "resize": _Resize,
}
