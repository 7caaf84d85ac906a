"""`bucketed` makes batches of one image shape or of similar text length; `resize_to_bucket` crops to the shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from wdskit.config.types import Count, Few, Text, refuse, show
from wdskit.errors import PipelineError
from wdskit.order.buckets import Buckets
from wdskit.stages.base import Context
from wdskit.stages.batching import BatchStage
from wdskit.stages.images import geometry
from wdskit.stages.images.transforms import BoundTransform, GeometricTransform
from wdskit.stages.run import Origin

MAX_BUCKETS = 256
ASPECT = "aspect"

Shapes = Annotated[tuple[tuple[Few, Few], ...], Field(min_length=1, max_length=MAX_BUCKETS)]
Edges = Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_BUCKETS)]


class Bucketed(BatchStage):
    """Make batches of one shape (`by: aspect`) or of similar length (`by: COLUMN`), in the place of `batched`.

    At each step all ranks have a batch of the same bucket. Each sample comes once in an epoch, or as often as the
    source's `repeat` says. If the last batch of a bucket is not full, the source's `tail` drops or pads this batch.
    """

    name: ClassVar[str] = "bucketed"
    needs_plan: ClassVar[bool] = True
    example: ClassVar[dict[str, Any]] = {"by": "aspect", "shapes": [[512, 512], [384, 640]], "global_size": 256}

    by: Text = Field(
        description="`aspect`, from the columns width and height; or a column with the length of each sample."
    )
    shapes: Shapes | None = Field(
        None,
        description="For `aspect`: [[height, width], ...]. Each sample gets the shape with the nearest aspect ratio.",
        examples=[[[512, 512], [384, 640], [640, 384]]],
    )
    edges: Edges | None = Field(
        None,
        description="For a column: the largest length of each bucket, ascending. A longer sample is an error.",
        examples=[[128, 256, 512]],
    )
    global_size: Count | None = Field(None, description="Samples in the batches of all ranks together.")
    budget: Count | None = Field(
        None,
        description="In place of `global_size`: limit for samples x pixels of the shape, or samples x length of the "
        "bucket, in the batches of all ranks together.",
    )
    divisor: Count = Field(
        8,
        description="With `budget`: the samples in the batches of all ranks together are a multiple of `divisor`. "
        "Choose a multiple of the number of ranks.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Bucketed:
        wanted, other = ("shapes", "edges") if self.by == ASPECT else ("edges", "shapes")
        if not getattr(self, wanted) or getattr(self, other) is not None:
            raise refuse(f"`by: {self.by}` needs `{wanted}`, and no `{other}`.")
        if (self.global_size is None) == (self.budget is None):
            raise refuse("it needs either `global_size` or `budget`. Write `global_size: 256`.")
        if len({*self.labels}) < len(self.labels) or (self.edges and list(self.edges) != sorted(self.edges)):
            raise refuse(f"`{wanted}` has an item twice, or lengths that do not rise, as in [128, 256, 512].")
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
        if self.budget is None:
            return (self.global_size or 0,) * len(self.labels)
        sizes = []
        for label in self.labels:
            most = self.budget // int(np.prod(label))
            size = most // self.divisor * self.divisor
            if not size:
                what = f"the budget is too small for `divisor: {self.divisor}` samples of {show(label)}"
                raise refuse(f"{what}: {most} fit. Write a larger budget, or a smaller `divisor`.")
            sizes.append(size)
        return tuple(sizes)

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
        ratios = np.log([width / height for height, width in self.labels])
        by_ratio = np.argsort(ratios, kind="stable")
        between = (ratios[by_ratio][1:] + ratios[by_ratio][:-1]) / 2
        found = np.searchsorted(between, np.log(numbers[0] / numbers[1]), side="left")
        return by_ratio[found].astype(np.int64)


class ResizeToBucket(GeometricTransform):
    """Resize images so that they cover the shape of their bucket, and crop the middle or a random part."""

    name: ClassVar[str] = "resize_to_bucket"
    needs_plan: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    places_by_size: ClassVar[bool] = True

    crop: Literal["center", "random"] = Field("center", description="Which part is kept.")

    def draw(self, rng: np.random.Generator, images: Mapping[str, Any]) -> tuple[float, float]:  # noqa: ARG002
        """Return two numbers of 0-1: the share of the surplus rows to cut off above, and the share of the surplus
        columns to cut off at the left. Both numbers are 0.5 for the setting `crop: center`, otherwise random from
        `rng`. `images` has no effect.
        """
        return (0.5, 0.5) if self.crop == "center" else (float(rng.random()), float(rng.random()))

    def change(self, image: Any, drawn: Any, *, nearest: bool) -> Any:
        """Return the image of one field, resized and cropped to a shape. `drawn` is (shape, result of `draw`).
        `nearest` is True for a mask.
        """
        shape, shares = drawn
        height, width = geometry.image_size(image)
        scale = max(shape[0] / height, shape[1] / width)
        size = max(shape[0], round(height * scale)), max(shape[1], round(width * scale))
        resized = geometry.resize(image, size, nearest=nearest)
        top, left = (round(share * (full - side)) for share, full, side in zip(shares, size, shape, strict=True))
        return geometry.crop(resized, top, left, *shape)

    def bind(self, context: Context, label: str) -> BoundTransform:
        """Return a callable that resizes each sample to the shape of its bucket. `label` is the key of random numbers.

        Raises:
            PipelineError: The pipeline has no `bucketed: {by: aspect}`.
        """
        if context.buckets is None or not isinstance(context.buckets.labels[0], tuple):
            raise PipelineError(f"{self.name}: it needs `bucketed: {{by: aspect, ...}}` later in the pipeline.")
        return BoundResizeToBucket(self, context.roles, context.run, label, context.buckets)


@dataclass(frozen=True)
class BoundResizeToBucket(BoundTransform):
    """The running form of `resize_to_bucket`. Can be pickled. `buckets` gives a sample's shape from its position."""

    buckets: Buckets

    def draw(self, origin: Origin, images: Mapping[str, Any]) -> Any:
        """Return (shape, random values of the sample)."""
        return self.buckets.labels[self.buckets.plan.bucket_at(origin.minor)], super().draw(origin, images)
