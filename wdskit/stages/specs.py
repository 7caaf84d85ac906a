"""The stages `batched` and `unbatched`: settings."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from wdskit.config.spec import Kind, refuse
from wdskit.config.values import Bool, Count, FieldNames
from wdskit.errors import PipelineError
from wdskit.stages.names import Function
from wdskit.stages.streaming import StreamContext, StreamStage


class BatchedSpec(StreamStage):
    """Values into batches."""

    name: ClassVar[str] = "batched"
    kind: ClassVar[Kind] = "batch"
    shorthand: ClassVar[str | None] = "size"
    is_counted: ClassVar[bool] = True

    size: Count | None = Field(None, description="Samples in a batch of one rank.", examples=[64])
    global_size: Count | None = Field(None, description="Instead: samples in the batches of all ranks together.")
    partial: Bool = Field(True, description="Of a stream: whether the last batch may be smaller; else it is dropped.")
    collate: Function | None = Field(None, description="Name of a registered function: list of samples to batch.")
    ragged: FieldNames | None = Field(
        None, description="Fields with arrays of different lengths, which become values and offsets."
    )

    @model_validator(mode="after")
    def _check_one(self) -> BatchedSpec:
        if (self.size is None) == (self.global_size is None):
            what = "a size is missing" if self.size is None else "`size` and `global_size` exclude each other"
            raise refuse(f"{what}. Write `batched: 64`, or `batched: {{global_size: 4096}}`.")
        if self.ragged is not None and self.collate is not None:
            raise refuse("`ragged` does nothing where a `collate` of your own makes the batch; remove one.")
        return self

    def bind(self, context: StreamContext) -> Any:
        """Lists of values, collated."""
        from wdskit.stages.buffering import Batched  # imports torch, which settings do not need

        size = self.size_on(context.run.place.world_size)
        return Batched(context.run, context.collate(self), size, partial=self.partial)

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """Full batches, and where `partial` allows it what is left."""
        size = self.size_on(world_size)
        return -(-num_values // size) if self.partial else num_values // size

    def num_held(self) -> int:
        """A batch."""
        return self.size or self.global_size or 0

    def samples_each(self, samples: int) -> int:
        """Those of a batch."""
        return samples * self.num_held()

    def size_on(self, world_size: int) -> int:
        """Samples in a batch of one of so many ranks.

        Raises:
            PipelineError: The global batch does not divide.
        """
        if self.size is not None:
            return self.size
        assert self.global_size is not None
        size, rest = divmod(self.global_size, world_size)
        if rest:
            near = [each * world_size for each in (size, size + 1) if each]
            msg = f"batched: global_size {self.global_size} does not divide into {world_size} ranks."
            raise PipelineError(f"{msg}\n  {' and '.join(map(str, near))} would.")
        return size


class UnbatchedSpec(StreamStage):
    """Batches into samples again."""

    name: ClassVar[str] = "unbatched"
    kind: ClassVar[Kind] = "stream"
    is_rebuilt: ClassVar[bool] = False

    def bind(self, context: StreamContext) -> Any:
        """Batches into samples."""
        from wdskit.stages.buffering import Unbatched  # imports torch, which settings do not need

        return Unbatched(context.run)

    def samples_each(self, samples: int) -> int:  # noqa: ARG002 (whatever came in)
        """One."""
        return 1
