"""`bucketed` makes batches of one image shape or of similar text length; `resize_to_bucket` crops to the shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from wdskit.config.types import Count, FieldNames, Kind, StageSpec, refuse, show, wrong_kind
from wdskit.errors import PipelineError
from wdskit.order.buckets import BucketPlan
from wdskit.stages.base import Context, Function, Origin
from wdskit.stages.batching import Batcher, make_batcher
from wdskit.stages.images.transforms import BoundTransform, GeometricTransform, Sample
from wdskit.stages.sources import ColumnName
from wdskit.text import as_int

MAX_BUCKETS = 256
ASPECT = "aspect"
_NEEDS_SHAPES = "a list of [height, width] is needed, or {area: 512, divisible_by: 64, ratio: [0.5, 2.0]}"
_NEEDS_SIZE = "a number of samples is needed, or {pixels: N} for a budget in pixels"

Shape = tuple[int, int]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 31


def _check_shapes(value: object) -> tuple[Shape, ...]:
    if isinstance(value, Mapping):
        return _make_shapes(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise refuse(wrong_kind(value, _NEEDS_SHAPES))
    shapes = []
    for each in value:
        pair = tuple(map(as_int, each)) if isinstance(each, (list, tuple)) else ()
        if len(pair) != 2 or not all(map(_is_count, pair)):
            raise refuse(f"{show(each)} is not [height, width] in pixels.")
        shapes.append(pair)
    if len(set(shapes)) < len(shapes):
        raise refuse("a shape comes twice.")
    if len(shapes) > MAX_BUCKETS:
        raise refuse(f"{len(shapes)} shapes are more than {MAX_BUCKETS}.")
    return tuple(shapes)


def _make_shapes(value: Mapping[Any, Any]) -> tuple[Shape, ...]:
    """Return the shapes (height, width) for the setting {area, divisible_by, ratio}, sorted by width / height. All
    sides are multiples of `divisible_by`. Each width has the largest height for which height x width is at most area x
    area. Shapes with a width / height outside of `ratio` are left out.

    Raises:
        PydanticCustomError: A setting is invalid, or the number of shapes is 0 or more than `MAX_BUCKETS`.
    """
    area, step = as_int(value.get("area")), as_int(value.get("divisible_by", 64))
    ratio = value.get("ratio", [0.5, 2.0])
    if set(value) - {"area", "divisible_by", "ratio"} or not _is_count(area) or not _is_count(step):
        raise refuse(wrong_kind(dict(value), _NEEDS_SHAPES))
    is_pair = isinstance(ratio, (list, tuple)) and len(ratio) == 2
    if not is_pair or any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in ratio):
        raise refuse(f"ratio: {show(ratio)} is not [lowest, highest] width over height.")
    if not 0 < ratio[0] <= ratio[1] < math.inf:
        raise refuse(f"ratio: {show(ratio)} is empty; write the lowest width over height first.")
    shapes = set()
    for width in range(step, area * area // step + 1, step):
        height = area * area // width // step * step
        if height and ratio[0] <= width / height <= ratio[1]:
            shapes.add((height, width))
        if len(shapes) > MAX_BUCKETS:
            raise refuse(f"these are more than {MAX_BUCKETS} shapes. Write a larger `divisible_by`.")
    if not shapes:
        raise refuse(f"no shape of {area} x {area} pixels has sides that are multiples of {step} and such a ratio.")
    return tuple(sorted(shapes, key=lambda shape: (shape[1] / shape[0], shape)))


def _check_size(value: object) -> int | dict[str, int]:
    value = as_int(value)
    if isinstance(value, Mapping) and set(value) == {"pixels"} and _is_count(as_int(value["pixels"])):
        return {"pixels": as_int(value["pixels"])}
    if not _is_count(value):
        raise refuse(wrong_kind(value, _NEEDS_SIZE))
    return value  # type: ignore[return-value]


def _check_edges(value: object) -> tuple[int, ...]:
    edges = tuple(map(as_int, value)) if isinstance(value, (list, tuple)) else ()
    if not edges or not all(map(_is_count, edges)) or list(edges) != sorted(set(edges)):
        raise refuse(wrong_kind(value, "a list of rising lengths is needed, as in [128, 256, 512]"))
    if len(edges) > MAX_BUCKETS:
        raise refuse(f"{len(edges)} edges are more than {MAX_BUCKETS}.")
    return edges


_LIST = {"type": "array", "items": {"type": "integer"}}
Shapes = Annotated[
    tuple[Shape, ...],
    PlainValidator(_check_shapes),
    WithJsonSchema({"anyOf": [{"type": "array", "items": _LIST}, {"type": "object"}]}),
]
GlobalSize = Annotated[
    int | dict[str, int],
    PlainValidator(_check_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "object"}]}),
]
Edges = Annotated[tuple[int, ...], PlainValidator(_check_edges), WithJsonSchema(_LIST)]


class Bucketed(StageSpec):
    """Make batches of one shape (`by: aspect`) or of similar length (`by: COLUMN`), in the place of `batched`.

    At each step all ranks have a batch of the same bucket. Each sample comes once in an epoch, or as often as the
    source's `repeat` says. If the last batch of a bucket is not full, the source's `tail` drops or pads this batch.
    """

    name: ClassVar[str] = "bucketed"
    needs_plan: ClassVar[bool] = True
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "batch"
    example: ClassVar[dict[str, Any]] = {"by": "aspect", "shapes": [[512, 512], [384, 640]], "global_size": 256}

    by: ColumnName = Field(
        description="`aspect`, from the columns width and height; or a column with the length of each sample."
    )
    shapes: Shapes | None = Field(
        None,
        description="For `aspect`: [[height, width], ...]. Each sample gets the shape with the nearest aspect ratio. "
        "Or {area: 512, divisible_by: 64, ratio: [0.5, 2.0]} for all such shapes of at most 512 x 512 pixels.",
        examples=[[[512, 512], [384, 640], [640, 384]]],
    )
    edges: Edges | None = Field(
        None,
        description="For a column: the largest length of each bucket, ascending. A longer sample is an error.",
        examples=[[128, 256, 512]],
    )
    global_size: GlobalSize | None = Field(
        None,
        description="Samples in the batches of all ranks together. For `aspect` also {pixels: N}: these batches have "
        "at most N pixels together.",
    )
    budget: Count | None = Field(
        None,
        description="For a column, in place of `global_size`: limit for length x samples in the batches of all ranks "
        "together.",
    )
    divisor: Count = Field(
        8,
        description="With `budget` or {pixels: N}: the samples in the batches of all ranks together are a multiple of "
        "`divisor`. Choose a multiple of the number of ranks.",
    )
    collate: Function | None = Field(None, description="Function from a list of samples to a batch.")
    ragged: FieldNames | None = Field(
        None, description="Fields with arrays of different lengths, which become values and offsets."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Bucketed:
        if self.by == ASPECT:
            wanted, other = "shapes", next((name for name in ("edges", "budget") if getattr(self, name)), None)
        else:
            wanted, other = "edges", "shapes" if self.shapes else None
        if getattr(self, wanted) is None:
            raise refuse(f"`{wanted}` is missing, which `by: {self.by}` needs.")
        if other is not None:
            raise refuse(f"`{other}` has no effect with `by: {self.by}`; remove it.")
        if (self.global_size is None) == (self.budget is None):
            way = "global_size: 256" if self.by == ASPECT else "budget: 65536"
            what = "a size is missing" if self.budget is None else "`global_size` and `budget` exclude each other"
            raise refuse(f"{what}. Write `{way}`.")
        if self.by != ASPECT and isinstance(self.global_size, Mapping):
            raise refuse("a budget in pixels is for `by: aspect`; write `budget`.")
        if self.ragged is not None and self.collate is not None:
            raise refuse("`ragged` has no effect with your own `collate`; remove one.")
        self.sizes  # noqa: B018 (a budget may be too small)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that `assign` needs, in order."""
        return ("width", "height") if self.by == ASPECT else (self.by,)

    @property
    def labels(self) -> tuple[Any, ...]:
        """The label of each bucket: the shape (height, width) of its images, or the largest length of its samples."""
        return self.shapes or self.edges or ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each bucket, the number of samples in a global batch: the batches of all ranks. PydanticCustomError: The
        budget is too small for `divisor` samples of a bucket.
        """
        if isinstance(self.global_size, int):
            return (self.global_size,) * len(self.labels)
        pixels = self.global_size["pixels"] if self.global_size else 0
        sizes = []
        for label in self.labels:
            most = pixels // (label[0] * label[1]) if self.by == ASPECT else (self.budget or 0) // label
            size = most // self.divisor * self.divisor
            if not size:
                what = f"the budget is too small for `divisor: {self.divisor}` samples of {show(label)}"
                raise refuse(f"{what}: {most} fit. Write a larger budget, or a smaller `divisor`.")
            sizes.append(size)
        return tuple(sizes)

    def size_on(self, world_size: int) -> int:
        """Return the number of samples in the largest batch of one of `world_size` ranks.

        Raises:
            PipelineError: The global batch of a bucket is not a multiple of `world_size`.
        """
        for size in self.sizes:
            if size % world_size:
                way = "Choose `global_size`" if isinstance(self.global_size, int) else "Choose `divisor`"
                msg = f"bucketed: a global batch of {size} is not a multiple of {world_size} ranks."
                raise PipelineError(f"{msg}\n  {way} as a multiple of the ranks that you will ever use.")
        return max(self.sizes) // world_size

    def assign(self, values: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        """Return the bucket of each sample: its number in `labels`, int64 (n,).

        Args:
            values: For each of `columns`, the values of all samples, (n,).

        Raises:
            ValueError: A value is negative or not finite, or is 0 with `by: aspect`; or a sample is longer than the
                last edge. `args` of the error is (message, number of the sample in `values`).
        """
        numbers = [np.asarray(each, dtype=np.float64) for each in values]
        for name, each in zip(self.columns, numbers, strict=True):
            bad = ((each <= 0) if self.by == ASPECT else (each < 0)) | ~np.isfinite(each)
            if bad.any():
                at = int(np.argmax(bad))
                msg = f"column {name} is {each[at]}"
                raise ValueError(msg, at)
        if self.by != ASPECT:
            edges = np.array(self.edges)
            buckets = np.searchsorted(edges, numbers[0], side="left")
            if (buckets == len(edges)).any():
                at = int(np.argmax(buckets == len(edges)))
                msg = f"{self.by} is {numbers[0][at]:g}, more than the last of `edges`. Add an edge, or leave such "
                msg += f"samples out with `where: {self.by} <= {edges[-1]}`"
                raise ValueError(msg, at)
            return buckets.astype(np.int64)
        ratios = np.log([width / height for height, width in self.shapes or ()])
        by_ratio = np.argsort(ratios, kind="stable")
        between = (ratios[by_ratio][1:] + ratios[by_ratio][:-1]) / 2
        found = np.searchsorted(between, np.log(numbers[0] / numbers[1]), side="left")
        return by_ratio[found].astype(np.int64)

    def make_batcher(self, context: Context) -> Batcher:
        """Return the callable that makes the batches.

        Raises:
            PipelineError: A global batch is not a multiple of the number of ranks, or the name of a function or of a
                ragged field is unknown.
        """
        return make_batcher(self, context, partial=True)


class ResizeToBucket(GeometricTransform):
    """Resize images so that they cover the shape of their bucket, and crop the middle or a random part."""

    name: ClassVar[str] = "resize_to_bucket"
    needs_plan: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    blends: ClassVar[bool] = True
    places_by_size: ClassVar[bool] = True

    crop: Literal["center", "random"] = Field("center", description="Which part is kept.")

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:  # noqa: ARG002
        """Raise AssertionError: this method is not used, because `bind` makes one `ResizeToShape` for each shape."""
        raise AssertionError

    def bind(self, context: Context, label: str) -> Any:
        """Return a callable that resizes each sample to the shape of its bucket. `label` is the key of random numbers.

        Raises:
            PipelineError: The pipeline has no `bucketed: {by: aspect}`.
        """
        if context.buckets is None or not isinstance(context.buckets.labels[0], tuple):
            raise PipelineError(f"{self.name}: it needs `bucketed: {{by: aspect, ...}}` later in the pipeline.")
        own = {"fields": self.fields, "masks": self.masks, "crop": self.crop}
        stages = [ResizeToShape(shape=shape, **own) for shape in context.buckets.labels]
        transforms = tuple(BoundTransform(stage, context.roles, context.run, label) for stage in stages)
        return BoundResizeToBucket(context.buckets.plan, transforms)


class ResizeToShape(ResizeToBucket):
    """Resize images so that they cover one shape, and crop to it."""

    shape: Shape

    def draw(self, rng: np.random.Generator, images: Mapping[str, Any]) -> tuple[float, float]:  # noqa: ARG002
        """Return two numbers of 0-1: the share of the surplus rows to cut off above, and the share of the surplus
        columns to cut off at the left. Both numbers are 0.5 for the setting `crop: center`, otherwise random from
        `rng`. `images` has no effect.
        """
        return (0.5, 0.5) if self.crop == "center" else (float(rng.random()), float(rng.random()))

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:
        """Return the image of one field, resized and cropped to `shape`. `drawn` is the result of `draw`. `nearest` is
        True for a mask.
        """
        from wdskit.stages.images import geometry

        height, width = geometry.image_size(image)
        scale = max(self.shape[0] / height, self.shape[1] / width)
        size = max(self.shape[0], round(height * scale)), max(self.shape[1], round(width * scale))
        resized = geometry.resize(image, size, nearest=nearest)
        top, left = (round(share * (full - side)) for share, full, side in zip(drawn, size, self.shape, strict=True))
        return geometry.crop(resized, top, left, *self.shape)


@dataclass(frozen=True)
class BoundResizeToBucket:
    """The running form of `resize_to_bucket`. Can be pickled.

    Attributes:
        plan: Gives the bucket of a sample from the sample's position.
        transforms: The transform of each bucket.
    """

    plan: BucketPlan
    transforms: tuple[BoundTransform, ...]

    def __call__(self, sample: Sample, origin: Origin) -> Sample:
        """Return a copy of the sample with its images resized.

        Raises:
            PipelineError: A field is missing, is not a decoded image, or is in `fields` and in `masks`. A mask does not
                have the size of an image. An image, other than a mask, is neither uint8 nor float. Or the stage has no
                setting `fields`, and the sample has no image field or several image fields.
        """
        return self.transforms[self.plan.bucket_at(origin.minor)](sample, origin)
