"""Fusion of `decode` with the crop, flip and normalize after it, into one step.

The step gives the results of the single stages: the same draws, types, dtypes, memory layouts and errors. uint8 values
are equal to the bit. Float images differ by up to one level of 255, because they are resized as uint8.

JPEGs that are decoded at a smaller scale give other pixels. PSNR on photographs at q75 to q95, 4:4:4 and 4:2:0: random
crops have 42 to 44 dB in the mean (1.0 to 1.4 levels of 255), at worst 34 dB. `resize` with `center_crop` has 38 to 42
dB, at worst 31 dB (a lawn, 5.4 levels). Single values differ by up to 62 levels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.formats import is_image_field
from wdskit.codecs.images import IMAGE_SPECS
from wdskit.errors import DecodeError, PipelineError
from wdskit.native import native
from wdskit.stages.base import Context, Origin, PerSampleStage, Step, StepFailed, bind_steps, lives
from wdskit.stages.fields import Decode, FieldDecoder, check_dict
from wdskit.stages.images import geometry
from wdskit.stages.images.jpeg_crop import (
    Axis,
    JpegPlan,
    OutputFormat,
    WantedPart,
    as_value,
    decode_part,
    finish,
    plan_jpeg,
    write,
    write_numbers_as,
)
from wdskit.stages.images.transforms import (
    BoundTransform,
    CenterCrop,
    ImageTransform,
    Normalize,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
    pair,
)
from wdskit.stages.progress import Slot
from wdskit.stages.roles import Live, Roles

_Known = tuple[str | None, tuple[str, ...]]  # the image field, and all fields to decode
_MAX_KNOWN = 64  # largest number of cached sets of field names


class FusedStages(PerSampleStage):
    """Stages that run as one step. Only `fuse` makes instances; the class has no name in YAML."""

    name: ClassVar[str] = "decode"

    stages: tuple[PerSampleStage, ...]

    def live_before(self, live: Live) -> Live:
        """Return the fields that these stages or later stages use; `live` are those of the later stages."""
        return lives(self.stages, live)[0]

    def step(self, context: Context) -> tuple[Step, Context]:
        """Return the stages as one `Step`, whose name is the names of the stages joined by `-`, and the context of the
        next stage. PipelineError: A stage cannot run in this pipeline.
        """
        single_steps, after = bind_steps(self.stages, context)
        name = "-".join(step.name for step in single_steps)
        return Step(
            name, FusedStep(self.stages, single_steps, context.roles), single_steps[0].ordinal, context.part
        ), after


def fuse(stages: Sequence[Any]) -> list[Any]:
    """Return the stages of a pipeline, with one FusedStages in place of each run of stages that can be fused.

    A run starts with `decode` of colour images (`rgb8`, `rgb`, `torchrgb8`, ...), followed directly by
    `random_resized_crop`, or by `resize` with or without `center_crop`. `random_flip`, and then `normalize` and
    `to_tensor` in any order, may follow. All transforms of a run have the same setting `fields`: one item, or none. Any
    other stage, such as a user's function, ends the run. Stages with masks or with several fields, a `decode` with
    `fuse: false`, and a `center_crop` with `fill` are not fused.
    """
    fused: list[Any] = []
    at = 0
    while at < len(stages):
        run = _run_at(stages, at)
        fused.append(FusedStages(stages=tuple(run)) if run else stages[at])
        at += len(run) or 1
    return fused


def _run_at(stages: Sequence[Any], at: int) -> list[Any]:
    """Return the run of stages that starts at number `at` and can be fused; empty if no run starts at `at`."""
    decode = stages[at]
    if not isinstance(decode, Decode) or not decode.fuse or decode.images not in IMAGE_SPECS:
        return []
    image = IMAGE_SPECS[decode.images]
    run: list[Any] = [decode]

    def add(*kinds: type[ImageTransform]) -> bool:
        """Append the next stage to `run`, and return True, if it is one of `kinds`, has no masks, has the `fields` of
        the first transform of `run`, and is not a `center_crop` with `fill`.
        """
        stage = stages[at + len(run)] if at + len(run) < len(stages) else None
        if not isinstance(stage, kinds) or stage.mask_names or (len(run) > 1 and stage.fields != run[1].fields):
            return False
        if isinstance(stage, CenterCrop) and stage.fill:  # the fused step pads with 0
            return False
        run.append(stage)
        return True

    if image.kind == "pil" or image.mode != "RGB" or not add(RandomResizedCrop, Resize) or len(run[1].fields or ()) > 1:
        return []
    if isinstance(run[1], Resize):
        add(CenterCrop)
    add(RandomFlip)
    if add(Normalize):
        add(ToTensor)
    elif add(ToTensor):
        add(Normalize)
    return run


class Prepared(NamedTuple):
    """One sample before its pixels are decoded.

    Attributes:
        origin: Origin of the sample.
        values: All fields of the sample: the image as bytes or a memoryview, the other fields decoded. If `field` is
            None, no field is decoded.
        field: The image field; None if the stages must process the sample one after the other.
        plan: The plan to decode the image; None if the image is not a grey or RGB JPEG, or if `field` is None.
        flip: Whether to mirror the image.
        failed: Error of a field after the image, to raise unless decoding the image raises an error. None: no error.
    """

    origin: Origin
    values: dict[str, Any]
    field: str | None = None
    plan: JpegPlan | None = None
    flip: bool = False
    failed: StepFailed | None = None


class FusedStep:
    """The running form of `FusedStages`.

    Attributes:
        output_format: The form of the resulting images.
        batch_format: The form of images that are written into a batch: `output_format`, or uint8 after `write_uint8`.
        out_shape: Shape of the image as a tensor, (3, height, width); None if it depends on the file.

    Args:
        stages: `decode`, the crop, and the other stages of a run that `fuse` has found.
        single_steps: One step for each of `stages`. They process samples with several image fields, and samples whose
            image is decoded already.
        roles: What the stages before say of the fields.
    """

    def __init__(self, stages: Sequence[Any], single_steps: Sequence[Step], roles: Roles) -> None:
        decoder: Any = single_steps[0].function
        self.decode: FieldDecoder = decoder
        self.single_steps = tuple(single_steps)
        self.transforms: dict[str, Any] = {step.name: step.function for step in single_steps[1:]}
        self.crop = stages[1].name
        self.field: str | None = next(iter(stages[1].fields or ()), None)
        by_kind: dict[type, Any] = {type(stage): stage for stage in stages}
        crop, middle = stages[1], by_kind.get(CenterCrop)
        if isinstance(crop, RandomResizedCrop):
            self.choose_part = functools.partial(_draw_part, crop, self.transforms[self.crop])
        else:
            self.choose_part = functools.partial(_middle_part, crop, pair(middle.size) if middle else None)
        flip, normalize = by_kind.get(RandomFlip), by_kind.get(Normalize)
        self.flip: float | None = flip.p if flip else None
        self.roles = roles
        self._known: dict[tuple[str, ...], _Known] = {}
        image = IMAGE_SPECS[stages[0].images]
        self.output_format = OutputFormat(
            is_array=image.kind == "numpy",
            is_float=image.is_float,
            to_tensor=ToTensor in by_kind,
            normalize=normalize.numbers if normalize else None,
        )
        self.batch_format = self.output_format
        self.out_shape: tuple[int, int, int] | None = None
        if middle or isinstance(crop, RandomResizedCrop) or not isinstance(crop.size, int):
            self.out_shape = (3, *pair((middle or crop).size))

    def write_uint8(self) -> None:
        """Make later calls with `out`, and later calls of `carry_out_many`, write images into batches as uint8. The
        caller then converts the batches with `jpeg_crop.finish_batch`.
        """
        self.batch_format = replace(self.output_format, is_float=False, to_tensor=False, normalize=None)

    @property
    def is_native(self) -> bool:
        """Whether `carry_out_many` is to decode the images: True if `out_shape` is known and the C code is there."""
        return self.out_shape is not None and native() is not None

    def value_of(self, written: NDArray[Any]) -> Any:
        """Convert an image that `carry_out` has written to `out` into the image that `carry_out` without `out` puts
        into a sample.

        Args:
            written: The written image, (1, *out_shape), of `batch_format.dtype`.

        Returns:
            An array or a tensor, as `output_format` says. The result may be a view of `written`.
        """
        return as_value(written, self.batch_format, self.output_format)

    def __call__(self, sample: Any, origin: Origin, out: NDArray[Any] | None = None) -> Any:
        """Return the sample after all stages. If `out` is given, the image is written to `out`, which then is the image
        field of the result (see `carry_out`). StepFailed: A stage failed.
        """
        return self.carry_out(self.prepare(sample, origin), out)

    def prepare(self, sample: Any, origin: Origin) -> Prepared:
        """Decode the fields other than the image, read the image's header, and draw the random values. It is fastest to
        prepare several samples before the first image is decoded.

        Args:
            sample: A dict of fields as bytes; in a sample that was just read, images may be memoryviews. The dict is
                not changed.
            origin: Origin of the sample.

        Returns:
            The argument of `carry_out`.

        Raises:
            StepFailed: A stage failed. The error has the name of the stage and the original error.
        """
        try:
            check_dict("decode", sample)
        except PipelineError as err:
            raise StepFailed("decode", err) from err
        field, to_decode = self._fields_of(tuple(sample))
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
                return Prepared(origin, values, field, plan, failed=failed)  # an error of the image has precedence
        flip = self.flip is not None and self.transforms["random_flip"].rng_at(origin).random() < self.flip
        return Prepared(origin, values, field, plan, flip)

    def carry_out(self, prepared: Prepared, out: NDArray[Any] | None = None) -> Any:
        """Return the sample after all stages: its fields decoded and its image cropped.

        Args:
            prepared: Result of `prepare`. Use it only once: `prepared.values` is changed, and is the result if
                `prepared.field` is not None.
            out: Receives the image: (1, *out_shape) of `batch_format.dtype`, channels_last. The image field of the
                result is then `out` itself. None: the image gets new memory. `out` has no effect if `prepared.field` is
                None.

        Raises:
            StepFailed: A stage failed. The error has the name of the stage and the original error.
        """
        origin, values, field, plan, flip, failed = prepared
        if field is None:
            sample: Any = values
            for step in self.single_steps:
                try:
                    sample = step.function(sample, origin)
                except Exception as err:
                    raise StepFailed(step.name, err) from err
            return sample
        try:
            part = decode_part(values[field], plan, self.choose_part, origin, max_pixels=self.decode.max_pixels)
            if out is None:
                values[field] = finish(part, self.output_format, flip=flip)
            else:
                write(part, self.batch_format, flip=flip, out=out)
                values[field] = out
        except DecodeError as err:
            err.field = field
            raise StepFailed("decode", err) from err
        except Exception as err:
            raise StepFailed(self.crop, err) from err
        if failed:
            raise failed from failed.err
        return values

    def carry_out_many(
        self, prepared: Sequence[Prepared], images: NDArray[Any], rows: Sequence[int], slot: Slot
    ) -> list[bool]:
        """Decode, crop and write the images of many samples in C.

        Args:
            prepared: Results of `prepare`.
            images: The batch, (batch, *out_shape), of `batch_format.dtype`, channels_last.
            rows: For each of `prepared`, the number of its image in the batch.
            slot: This thread's slot of the board. It gets the position of each sample before its image is decoded.

        Returns:
            For each of `prepared`, whether its image was written. Call `carry_out` for the other samples: it decodes
            them, or raises their error.
        """
        module = native()
        plans, files, numbers = [], [], []
        for at, (each, row) in enumerate(zip(prepared, rows, strict=True)):
            plan = each.plan
            if (
                plan is None
                or each.field is None
                or each.failed
                or plan.wanted.rows.skip < 0
                or plan.wanted.columns.skip < 0
            ):
                continue
            sides = (side for axis in plan.wanted for side in axis[:4])
            plans.append((each.origin.minor, row, *plan.size, *sides, each.flip))
            files.append(each.values[each.field])
            numbers.append(at)
        done = [False] * len(prepared)
        if not files:
            return done
        out = images.transpose(0, 2, 3, 1)
        values_as = write_numbers_as(self.batch_format)
        verdicts = module.decode_jpegs(files, np.array(plans, np.int64), out, *out.shape[1:3], values_as, slot)
        for at, verdict in zip(numbers, verdicts, strict=True):
            done[at] = verdict == 0
        return done

    def _plan(self, field: str, data: bytes, origin: Origin) -> JpegPlan | None:
        try:
            return plan_jpeg(data, self.choose_part, origin, max_pixels=self.decode.max_pixels)
        except DecodeError as err:
            err.field = field
            raise
        except Exception as err:
            raise StepFailed(self.crop, err) from err

    def _fields_of(self, names: tuple[str, ...]) -> _Known:
        """Return the image field and the fields to decode of a sample with the fields `names`. The image field may be
        None.
        """
        # Most samples have the same fields.
        known = self._known.get(names)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            to_decode = tuple(name for name in names if self.decode.takes(name, b""))
            known = self._known[names] = (self._field_of(names), to_decode)
        return known

    def _field_of(self, names: tuple[str, ...]) -> str | None:
        """Return the image field of a sample with the fields `names`, or None.

        With the setting `fields`, the image field is the first alternative that is in `names`. Without it, the image
        field is the only field that is an image (`Roles.is_image`). Return None if there is no such field, if there are
        several, if the alternative does not have such a name, or if `decode` does not decode the field.
        """
        if self.field is None:
            images = [name for name in names if self.roles.is_image(name)]
            field = images[0] if len(images) == 1 else None
        else:
            field = next((name for name in self.field.split(";") if name in names), None)
        if field is None or not is_image_field(field) or not self.decode.takes(field, b""):
            return None
        return field


def _as_bytes(sample: Mapping[str, Any], *, but: str = "") -> dict[str, Any]:
    """Return a copy of a sample in which bytes replace memoryviews, except in the field `but`."""
    return {
        name: bytes(value) if isinstance(value, memoryview) and name != but else value for name, value in sample.items()
    }


def _draw_part(crop: RandomResizedCrop, bound: BoundTransform, height: int, width: int, origin: Origin) -> WantedPart:
    """Return the part of an image of `height` x `width` that the stage `crop` draws for the position of `origin`.
    `bound` is the running form of `crop`.
    """
    rows, columns = pair(crop.size)
    rng = bound.rng_at(origin)
    top, left, crop_height, crop_width = geometry.draw_crop(rng, height, width, crop.scale, crop.ratio)
    return WantedPart(Axis(top, top + crop_height, rows, 0, rows), Axis(left, left + crop_width, columns, 0, columns))


def _middle_part(resize: Resize, middle: tuple[int, int] | None, height: int, width: int, _: Origin) -> WantedPart:
    """Return the part of an image that is left after `resize` and `center_crop`.

    `height` and `width` are those of the image before `resize`. `middle` is the height and width of `center_crop`; None
    without `center_crop`.
    """
    totals = resize.size_of(height, width)
    rows, columns = (
        Axis(0, side, total, geometry.middle(total, part), part)
        for side, total, part in zip((height, width), totals, middle or totals, strict=True)
    )
    return WantedPart(rows, columns)
