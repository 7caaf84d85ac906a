"""Fusion of `decode` with the crop, flip and normalize after it, into one step.

The code in C makes JPEGs in this step. It makes the same draws as the single stages, and uint8 values that are equal to
the bit, but decodes a JPEG that is at least twice as large as its result at 1/2, 1/4 or 1/8 of its size
(docs/pipelines.md). Without that code, and for images that it leaves, the single stages run one after another. Both
decode to uint8 and make floats of the result: a float image of `decode: rgb` differs from that without fusion by up to
one level of 255.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.formats import is_image_field
from wdskit.codecs.structure import colour_jpeg_header
from wdskit.errors import DecodeError
from wdskit.native import native
from wdskit.stages.base import Context, PerSampleStage, bind_steps, lives
from wdskit.stages.fields import Decode, FieldDecoder
from wdskit.stages.images import geometry, transforms
from wdskit.stages.run import Live, Origin, Roles, Slot, Step, stage_error


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
        fused = FusedStep(self.stages, single_steps, context.roles)
        return Step(name, fused, single_steps[0].ordinal, context.part), after


def fuse(stages: Sequence[Any]) -> list[Any]:
    """Return the stages of a pipeline, with one FusedStages in place of each run of stages that can be fused.

    A run starts with `decode` of colour images (`rgb8`, `rgb`), followed directly by
    `random_resized_crop`, or by `resize` with or without `center_crop`. `random_flip`, `normalize` and `to_tensor` may
    follow, in this order. All transforms of a run have the same setting `fields`: one item, or none. Any other stage,
    such as a user's function, ends the run. Stages with masks or with several fields, and a `decode` with
    `fuse: false`, are not fused.
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
    if not isinstance(decode, Decode) or not decode.fuse or decode.images not in {"rgb8", "rgb"}:
        return []
    run: list[Any] = [decode]
    crops = transforms.RandomResizedCrop | transforms.Resize
    for kind in (crops, transforms.CenterCrop, transforms.RandomFlip, transforms.Normalize, transforms.ToTensor):
        stage = next(iter(stages[at + len(run) :]), None)
        if kind is transforms.CenterCrop and not isinstance(run[1], transforms.Resize):
            continue
        if isinstance(stage, kind) and not stage.mask_names and stage.fields == (*run, stage)[1].fields:
            run.append(stage)
        elif len(run) == 1:
            return []
    return run if len(run[1].fields or ()) <= 1 else []


class Axis(NamedTuple):
    """How the rows, or the columns, of a result are made: resize a part of the image, and keep a part of the result.

    Attributes:
        low: First row or column of the image to resize.
        high: Last row or column of the image to resize, + 1.
        total: Number of rows or columns after the resize.
        skip: Number of resized rows or columns to drop before the first wanted row or column.
        size: Number of wanted rows or columns.
    """

    low: int
    high: int
    total: int
    skip: int
    size: int


class JpegPlan(NamedTuple):
    """What the code in C makes of one JPEG: see `Plan` in native/images.h.

    Attributes:
        size: Height and width in the file's header.
        rows: How the rows of the result are made.
        columns: How the columns of the result are made.
        flip: Whether to mirror the result.
    """

    size: tuple[int, int]
    rows: Axis
    columns: Axis
    flip: bool = False

    def numbers(self, position: int, row: int) -> tuple[int, ...]:
        """Return the plan as the code in C reads it. `position` is that of the sample, `row` that in the batch."""
        return (position, row, *self.size, *self.rows[:4], *self.columns[:4], self.flip)


class Prepared(NamedTuple):
    """One sample before its pixels are decoded.

    Attributes:
        origin: Origin of the sample.
        values: All fields of the sample: the image as bytes, the other fields decoded. If `field` is None, the sample
            as it was.
        field: The image field; None if the stages must process the sample one after the other.
        plan: What the code in C makes of the image; None if it cannot make this image.
    """

    origin: Origin
    values: Any
    field: str | None = None
    plan: JpegPlan | None = None


class FusedStep:
    """The running form of `FusedStages`.

    Attributes:
        dtype: Dtype of the resulting images: float32 of 0..1 or normalized, or uint8.
        out_shape: Shape of the image as a tensor, (3, height, width); None if it depends on the file.

    Args:
        stages: `decode`, the crop, and the other stages of a run that `fuse` has found.
        single_steps: One step for each of `stages`.
        roles: What the stages before say of the fields.
    """

    def __init__(self, stages: Sequence[Any], single_steps: Sequence[Step], roles: Roles) -> None:
        decoder: Any = single_steps[0].function
        self.decode: FieldDecoder = decoder
        self.single_steps = tuple(single_steps)
        by_kind = {type(stage): stage for stage in stages}
        bound: list[Any] = [step.function for step in single_steps[1:]]
        self.moves = [each for each in bound if isinstance(each.transform, transforms.GeometricTransform)]
        self._field = next(iter(stages[1].fields or ()), None)
        self._roles = roles
        is_float = stages[0].images == "rgb" or len(self.moves) < len(bound)
        self.dtype = np.dtype(np.float32 if is_float else np.uint8)
        self._factors = factors_of(by_kind.get(transforms.Normalize)) if is_float else None
        self._is_tensor = transforms.ToTensor in by_kind
        last = by_kind.get(transforms.CenterCrop, stages[1])
        has_size = not (isinstance(last, transforms.Resize) and isinstance(last.size, int))
        self.out_shape = (3, *transforms.pair(last.size)) if has_size else None

    @property
    def is_native(self) -> bool:
        """Whether `carry_out_many` is to decode the images: True if `out_shape` is known and the C code is there."""
        return self.out_shape is not None and native() is not None

    def value_of(self, written: NDArray[Any]) -> Any:
        """Return an image that `carry_out` has written to `out`, (1, *out_shape), in the form in which `carry_out`
        without `out` puts it into a sample: as an array or a tensor, which is a view of `written`.
        """
        image = written[0].transpose(1, 2, 0)
        return geometry.to_tensor(image) if self._is_tensor else image

    def __call__(self, sample: Any, origin: Origin, out: NDArray[Any] | None = None) -> Any:
        """Return the sample after all stages. If `out` is given, the image is written to `out`, which then is the image
        field of the result (see `carry_out`). SampleError: A stage failed.
        """
        return self.carry_out(self.prepare(sample, origin), out)

    def prepare(self, sample: Any, origin: Origin) -> Prepared:
        """Decode the fields other than the image, read the image's header, and draw the random values. It is fastest to
        prepare several samples before the first image is decoded.

        Args:
            sample: A dict of fields as bytes. The dict is not changed.
            origin: Origin of the sample.

        Returns:
            The argument of `carry_out`. If a field cannot be decoded, `carry_out` raises the error.
        """
        if not isinstance(sample, dict):
            return Prepared(origin, sample)
        field = self._field_of(sample)
        if field is not None:
            with contextlib.suppress(Exception):  # the single stages raise it again, in the order of the fields
                one = self.decode.decode_one
                values = {name: value if name == field else one(name, value) for name, value in sample.items()}
                return Prepared(origin, values, field, self._plan(sample[field], origin))
        return Prepared(origin, sample)

    def carry_out(self, prepared: Prepared, out: NDArray[Any] | None = None) -> Any:
        """Return the sample after all stages: its fields decoded and its image cropped.

        Args:
            prepared: Result of `prepare`. Use it only once: `prepared.values` is changed, and is the result if
                `prepared.field` is not None.
            out: Receives the image: (1, *out_shape) of `dtype`, channels_last. The image field of the
                result is then `out` itself. None: the image gets new memory. `out` has no effect if `prepared.field` is
                None.

        Raises:
            SampleError: A stage failed. The error names stage, shard and key.
        """
        origin, sample, field, plan = prepared
        if plan is not None:
            shape = (1, plan.rows.size, plan.columns.size, 3)
            written = np.empty(shape, self.dtype).transpose(0, 3, 1, 2) if out is None else out
            if self.carry_out_many([prepared], written, [0], memoryview(bytearray(16)).cast("q"))[0]:
                sample[field] = self.value_of(written) if out is None else out
                return sample
        steps = self.single_steps
        if field is not None:  # the other fields are decoded
            pixels = replace(self.decode, images="rgb8", only=frozenset({field}))
            steps = (Step("decode", pixels), *steps[1:])
        for step in steps:
            try:
                sample = step.function(sample, origin)
            except Exception as err:
                raise stage_error(step.name, origin, err) from err
        if field is None:
            return sample
        image = sample[field]
        if self.dtype == np.float32 and image.dtype == np.uint8:
            image = np.divide(image, np.float32(255), dtype=np.float32)
        if out is not None:
            out[0] = image if self._is_tensor else image.transpose(2, 0, 1)
            image = out
        return {**sample, field: image}

    def carry_out_many(
        self, prepared: Sequence[Prepared], images: NDArray[Any], rows: Sequence[int], slot: Slot
    ) -> list[bool]:
        """Decode, crop and write the images of many samples in C.

        Args:
            prepared: Results of `prepare`.
            images: The batch, (batch, *out_shape), of `dtype`, channels_last.
            rows: For each of `prepared`, the number of its image in the batch.
            slot: This thread's slot of the board. It gets the position of each sample before its image is decoded.

        Returns:
            For each of `prepared`, whether its image was written. Call `carry_out` for the other samples: it decodes
            them, or raises their error.
        """
        done = [False] * len(prepared)
        planned = [(at, each, each.plan) for at, each in enumerate(prepared) if each.plan is not None]
        if not planned:
            return done
        files = [each.values[each.field] for _, each, _ in planned]
        plans = [plan.numbers(each.origin.minor, rows[at]) for at, each, plan in planned]
        out = images.transpose(0, 2, 3, 1)
        numbers = np.array(plans, np.int64)
        verdicts = native().decode_jpegs(files, numbers, out, *out.shape[1:3], self._factors, slot)
        for (at, _, _), verdict in zip(planned, verdicts, strict=True):
            done[at] = verdict == 0
        return done

    def _plan(self, data: Any, origin: Origin) -> JpegPlan | None:
        """Return the plan of an image for the code in C. Return None without that code, for a file that is not a grey
        or RGB JPEG or has a damaged header, and for an image that must be padded.
        """
        header = None
        if native() is not None:
            with contextlib.suppress(DecodeError):  # decoding the image raises it again
                header = colour_jpeg_header(data, max_pixels=self.decode.max_pixels)
        if header is None or header.mode == "CMYK":
            return None
        size = header.height, header.width
        crop, *others = self.moves
        rows, columns = self._axes(crop, size, origin)
        if min(rows.skip, columns.skip) < 0:
            return None
        last: Any = others[-1] if others else None
        is_flip = last is not None and isinstance(last.transform, transforms.RandomFlip)
        flip = is_flip and last.transform.draw(last.rng_at(origin), {})
        return JpegPlan(size, rows, columns, flip)

    def _axes(self, crop: Any, size: tuple[int, int], origin: Origin) -> list[Axis]:
        """Return how rows and columns of the result are made of an image of `size` = (height, width). `crop` is the
        running form of the first transform.
        """
        if isinstance(crop.transform, transforms.RandomResizedCrop):
            draws = transforms.draw_crop(crop.rng_at(origin), *size, crop.transform.scale, crop.transform.ratio)
            sizes = transforms.pair(crop.transform.size)
            return [
                Axis(low, low + side, total, 0, total)
                for low, side, total in zip(draws[:2], draws[2:], sizes, strict=True)
            ]
        totals = crop.transform.size_of(*size)
        wanted = totals if self.out_shape is None else self.out_shape[1:]
        return [
            Axis(0, side, total, geometry.middle(total, part), part)
            for side, total, part in zip(size, totals, wanted, strict=True)
        ]

    def _field_of(self, sample: Mapping[str, Any]) -> str | None:
        """Return the image field of a sample, or None if the stages must process the sample one after the other.

        With the setting `fields`, the image field is the first alternative that the sample has. Without it, the image
        field is the only field that is an image. Return None if there is no such field, if there are several, or if
        `decode` does not decode the field.
        """
        if self._field is None:
            images = [name for name in sample if self._roles.is_image(name)]
            field = images[0] if len(images) == 1 else None
        else:
            field = next((name for name in self._field.split(";") if name in sample), None)
        if field is None or not is_image_field(field) or not self.decode.takes(field, b""):
            return None
        return field if isinstance(sample[field], bytes) else None


def factors_of(normalize: transforms.Normalize | None) -> bytes:
    """Return the argument with which the code in C writes float32: empty for value / 255, otherwise three scales and
    three shifts as bytes of float32, for value * scale + shift. For uint8 values, the argument is None.
    """
    if normalize is None:
        return b""
    numbers = np.concatenate(geometry.affine_numbers(*normalize.numbers, 255.0))
    return np.repeat(numbers, 6 // len(numbers)).tobytes()
