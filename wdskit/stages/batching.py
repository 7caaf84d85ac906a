"""The settings of `batched`, which makes batches of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field, model_validator

from wdskit.config.types import Bool, Count, FieldNames, Kind, StageSpec, refuse
from wdskit.errors import PipelineError
from wdskit.stages.base import Context, Function
from wdskit.stages.collate import Batcher, Collate

COLLATE: Any = Field(None, description="Function from a list of samples to a batch.")
RAGGED: Any = Field(None, description="Fields with arrays of different lengths, which become values and offsets.")


class Batched(StageSpec):
    """Make batches of consecutive values. By default, arrays and numbers are stacked; other values become lists."""

    name: ClassVar[str] = "batched"
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "batch"
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
    collate: Function | None = COLLATE
    ragged: FieldNames | None = RAGGED

    @model_validator(mode="after")
    def _check_one(self) -> Batched:
        if (self.size is None) == (self.global_size is None):
            what = "a size is missing" if self.size is None else "`size` and `global_size` exclude each other"
            raise refuse(f"{what}. Write `batched: 64`, or `batched: {{global_size: 4096}}`.")
        if self.ragged is not None and self.collate is not None:
            raise refuse("`ragged` has no effect with your own `collate`; remove one.")
        return self

    def size_on(self, world_size: int) -> int:
        """Return the number of samples in a batch of one of `world_size` ranks.

        Raises:
            PipelineError: `global_size` is not a multiple of `world_size`.
        """
        if self.size is not None:
            return self.size
        assert self.global_size is not None
        size, rest = divmod(self.global_size, world_size)
        if rest:
            msg = f"batched: global_size {self.global_size} is not a multiple of {world_size} ranks."
            raise PipelineError(f"{msg}\n  Choose a multiple of the ranks that you will ever use.")
        return size

    def make_batcher(self, context: Context) -> Batcher:
        """Return the object that collates the batches.

        Raises:
            PipelineError: `global_size` is not a multiple of the number of ranks, or the name of a function or of a
                ragged field is unknown.
        """
        return make_batcher(self, context, partial=self.partial)


def make_batcher(stage: Any, context: Context, *, partial: bool) -> Batcher:
    """Return the `Batcher` of `stage`, a `Batched` or `Bucketed`. `partial` is the argument of `Batcher`.

    Raises:
        PipelineError: A global batch is not a multiple of the number of ranks, or the name of a function or of a ragged
            field is unknown.
    """
    collate: Callable[..., Any] = Collate(context.roles, frozenset(stage.ragged or ()))
    if stage.collate is not None:
        collate = context.resolve(stage.name, stage.collate)
    return Batcher(context.run, collate, stage.size_on(context.run.rank_info.world_size), partial=partial)
