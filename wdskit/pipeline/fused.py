"""`decode` of an image and the crop behind it, with flip and normalize, as one step.

It gives what the stages give one after the other: the same draws, kinds, dtypes, memory layouts and errors. uint8
values are the same to the bit, float images differ by up to one level of 255, since they are resized as uint8.

JPEGs that are decoded at a smaller scale give other pixels. Measured on photographs at q75 to q95, 4:4:4 and 4:2:0:
random crops 42 to 44 dB in the mean (1.0 to 1.4 levels of 255), the worst 34; a resize with the middle cut out, whose
factor may be exactly 2 or 4, 38 to 42 dB, the worst 31 (a lawn, 5.4 levels); single values up to 62 levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from numpy.random import Generator

from wdskit.codecs.images import IMAGE_SPECS, is_image_field
from wdskit.errors import DecodeError
from wdskit.pipeline import geometry
from wdskit.pipeline.each import Step, StepFailed
from wdskit.pipeline.framing import Ending, decode_frame, finish, write
from wdskit.pipeline.functions import Decode, check_dict
from wdskit.pipeline.run import Origin
from wdskit.pipeline.scaling import Axis, Frame
from wdskit.pipeline.spec_types import StageSpec
from wdskit.pipeline.transforms import mean_and_std, pair, resized

Rng: TypeAlias = Callable[[], Generator]


def fused_step(specs: Sequence[StageSpec], apart: Sequence[Step], image_fields: frozenset[str]) -> Step:
    """The step that does what some stages do, named as they are. The arguments are those of FusedStep."""
    return Step("-".join(step.name for step in apart), FusedStep(specs, apart, image_fields))


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
        self.decode = Decode(first.images, first.only, first.max_pixels)
        self.specs: dict[str, Any] = {spec.name: spec for spec in specs[1:]}
        self.apart = tuple(apart)
        self.transforms: dict[str, Any] = {step.name: step.function for step in apart[1:]}
        self.image_fields = image_fields
        self.crop = specs[1].name
        self.field: str | None = next(iter(getattr(specs[1], "fields", None) or ()), None)
        image, normalize = IMAGE_SPECS[first.images], self.specs.get("normalize")
        self.ending = Ending(
            is_array=image.kind == "numpy",
            is_float=image.is_float,
            to_tensor="to_tensor" in self.specs,
            normalize=mean_and_std(normalize) if normalize else None,
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
        self.out_ending = self.ending._replace(is_float=False, to_tensor=False, normalize=None)

    def __call__(self, sample: Any, origin: Origin, out: torch.Tensor | None = None) -> Any:
        """The sample with its fields decoded and its image cropped.

        Args:
            sample: Fields as bytes.
            origin: Its position.
            out: Where to write the image, as `framing.write` takes it: `out_shape` and `out_ending.dtype` say what
                fits.
                The field of the result is then `out` itself, or, of a sample that is not the common case, what it
                would be without.

        Raises:
            StepFailed: From the error of the stage that failed.
        """
        check_dict("decode", sample)
        field = self._field_of(sample)
        if field is None:
            return self._run_apart(sample, origin)
        try:
            done = {
                name: self._image(name, value, origin, out) if name == field else self.decode.decode_one(name, value)
                for name, value in sample.items()
            }
        except StepFailed:
            raise
        except Exception as err:
            raise StepFailed("decode", err) from err
        return done

    def _field_of(self, sample: Mapping[str, Any]) -> str | None:
        """The one image field, if it is there and still encoded."""
        if self.field is None:
            found = [name for name in sample if name in self.image_fields or _names_image(name)]
            field = found[0] if len(found) == 1 else None
        else:
            field = next((name for name in self.field.split(";") if name in sample), None)
        if field is None or not is_image_field(field) or not self.decode.takes(field, sample[field]):
            return None
        return field

    def _image(self, field: str, data: bytes, origin: Origin, out: torch.Tensor | None) -> Any:
        def frame_of(height: int, width: int) -> Frame:
            return _FRAMES[self.crop](self.specs, height, width, lambda: self.transforms[self.crop].rng_at(origin))

        try:
            pixels = decode_frame(data, frame_of, max_pixels=self.decode.max_pixels)
        except DecodeError as err:
            err.field = field
            raise
        except Exception as err:
            raise StepFailed(self.crop, err) from err
        flip = False
        if "random_flip" in self.specs:
            flip = self.transforms["random_flip"].rng_at(origin).random() < self.specs["random_flip"].p
        if out is None:
            return finish(pixels, self.ending, flip=flip)
        write(pixels, self.out_ending, flip=flip, out=out)
        return out

    def _run_apart(self, sample: Any, origin: Origin) -> Any:
        for step in self.apart:
            try:
                sample = step.function(sample, origin)
            except Exception as err:
                raise StepFailed(step.name, err) from err
        return sample


def _names_image(field: str) -> bool:
    return not field.startswith("__") and is_image_field(field)


def _frame_random_resized_crop(specs: Mapping[str, Any], height: int, width: int, rng: Rng) -> Frame:
    spec = specs["random_resized_crop"]
    top, left, crop_height, crop_width = geometry.draw_crop(rng(), height, width, spec.scale, spec.ratio)
    rows, columns = pair(spec.size)
    return Frame(Axis(top, top + crop_height, rows, 0, rows), Axis(left, left + crop_width, columns, 0, columns))


def _frame_resize(specs: Mapping[str, Any], height: int, width: int, _: Rng) -> Frame:
    """With center_crop behind it, if there is one."""
    totals = resized(specs["resize"].size, height, width)
    sizes = pair(specs["center_crop"].size) if "center_crop" in specs else totals
    rows, columns = (
        Axis(0, side, total, geometry.middle(total, size), size)
        for side, total, size in zip((height, width), totals, sizes, strict=True)
    )
    return Frame(rows, columns)


_FRAMES: dict[str, Callable[[Mapping[str, Any], int, int, Rng], Frame]] = {
    "random_resized_crop": _frame_random_resized_crop,
    "resize": _frame_resize,
}
