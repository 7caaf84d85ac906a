"""The settings of `batched`, which makes batches of values, and what it has in common with `bucketed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field, model_validator

from wdskit.config.types import Bool, Count, FieldNames, Kind, StageSpec, refuse
from wdskit.errors import PipelineError
from wdskit.stages.base import Context, Function
from wdskit.stages.collate import Batcher, Collate


class BatchStage(StageSpec):
    """The base class of `batched` and `bucketed`."""

    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "batch"

    collate: Function | None = Field(None, description="Function from a list of samples to a batch.")
    ragged: FieldNames | None = Field(
        None, description="Fields with arrays of different lengths, which become values and offsets."
    )

    @model_validator(mode="after")
    def _check_collate(self) -> BatchStage:
        if self.ragged is not None and self.collate is not None:
            raise refuse("`ragged` has no effect with your own `collate`; remove one.")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of samples of global batches: the batches of all ranks."""
        raise NotImplementedError

    def size_on(self, world_size: int) -> int:
        """Return the number of samples in the largest batch of one of `world_size` ranks.

        Raises:
            PipelineError: A global batch is not a multiple of `world_size`.
        """
        for size in self.sizes:
            if size % world_size:
                msg = f"{self.name}: a global batch of {size} is not a multiple of {world_size} ranks."
                raise PipelineError(f"{msg}\n  Choose a multiple of the ranks that you will ever use.")
        return max(self.sizes) // world_size

    def make_batcher(self, context: Context) -> Batcher:
        """Return the object that collates the batches.

        Raises:
            PipelineError: A global batch is not a multiple of the number of ranks, or the name of a function or of a
                ragged field is unknown.
        """
        collate: Callable[..., Any] = Collate(context.roles, frozenset(self.ragged or ()))
        if self.collate is not None:
            collate = context.resolve(self.name, self.collate)
        return Batcher(context.run, collate, self.size_on(context.run.rank_info.world_size))


class Batched(BatchStage):
    """Make batches of consecutive values. By default, arrays and numbers are stacked; other values become lists."""

    name: ClassVar[str] = "batched"
    shorthand: ClassVar[str | None] = "size"

    size: Count | None = Field(None, description="Samples per batch of one rank.", examples=[64])
    global_size: Count | None = Field(
        None, description="In place of `size`: samples in the batches of all ranks together."
    )
    partial: Bool = Field(
        True,
        description="For a stream: whether to keep a last, smaller batch; otherwise it is dropped. With a planned "
        "source, whose `tail` decides, false is an error.",
    )

    @model_validator(mode="after")
    def _check_one(self) -> Batched:
        if (self.size is None) == (self.global_size is None):
            what = "a size is missing" if self.size is None else "`size` and `global_size` exclude each other"
            raise refuse(f"{what}. Write `batched: 64`, or `batched: {{global_size: 4096}}`.")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """The setting `global_size`."""
        return (self.global_size or 0,)

    def size_on(self, world_size: int) -> int:
        """Return the number of samples in a batch of one of `world_size` ranks. PipelineError: `global_size` is not a
        multiple of `world_size`.
        """
        return self.size or super().size_on(world_size)
