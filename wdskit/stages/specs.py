"""What each stage can be asked to do: one frozen model a stage, and the table `STAGES` of all of them."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from wdskit.config.messages import show
from wdskit.config.spec import Kind, StageSpec, checked, read_stage, refuse
from wdskit.config.values import (
    CLASSES,
    Bool,
    Classes,
    Count,
    Natural,
    Shards,
    Text,
    Weights,
)
from wdskit.dataset.braces import parse_factors
from wdskit.errors import PipelineError
from wdskit.stages import batching, fields, source_specs
from wdskit.stages.base import Function
from wdskit.stages.images import transforms

__all__ = [
    "STAGES",
    "SelectSpec",
    "ShuffleSpec",
    "SliceSpec",
    "SplitByNodeSpec",
    "SplitByWorkerSpec",
    "StageSpec",
    "StreamSpec",
    "TarfileToSamplesSpec",
    "WithEpochSpec",
    "WithLengthSpec",
    "parse_stage",
]

_JOINT = re.compile(r"::(?![^\[\]/]*\])")  # between parts of `shards`; not the one inside http://[::1]/


class StreamSpec(StageSpec):
    """The unplanned source: shards one after the other, no index needed."""

    name: ClassVar[str] = "stream"
    kind: ClassVar[Kind] = "source"
    shorthand: ClassVar[str | None] = "shards"

    shards: Shards = Field(
        description="A path, URL, glob, brace pattern or folder, several joined by `::`, or a list of such.",
        examples=["train-{000000..000127}.tar"],
    )
    seed: Natural = Field(0, description="Of the shards' order and all that is random.")
    shuffle_shards: Bool = Field(True, description="Whether each epoch has its own order of shards, or the listed one.")
    resampled: Bool = Field(False, description="Whether shards are drawn with replacement, without end.")
    weights: Weights | None = Field(
        None, description="How often each `::`-part or list item of `shards` is drawn. Needs `resampled: true`."
    )
    upsampling: Text | None = Field(
        None, description="Instead of weights, as open_clip writes it: how often each shard of a part is drawn, `1::2`."
    )
    split: Literal["none"] | None = Field(
        None, description="`none`: every rank and worker reads everything, on purpose, where a splitter is missing."
    )
    check: Literal["none", "size", "sha256"] = Field(
        "size",
        description="What an indexed shard is compared with: its size and its samples as they are read, or its sha256.",
    )
    classes: Classes = CLASSES

    @model_validator(mode="after")
    def _check_together(self) -> StreamSpec:
        for name in ("weights", "upsampling"):
            if getattr(self, name) is not None and not self.resampled:
                raise refuse(f"`{name}` need draws with replacement. Add `resampled: true`.")
        if self.weights is not None and self.upsampling is not None:
            raise refuse(
                "`weights` (of parts) and `upsampling` (of each shard of a part) exclude each other; remove one."
            )
        if self.resampled and not self.shuffle_shards:
            raise refuse("`resampled` draws shards at random, so `shuffle_shards: false` would do nothing; remove one.")
        parts = [self.shards] if isinstance(self.shards, str) else self.shards
        num_parts = sum(len(_JOINT.split(part)) for part in parts)
        if self.weights is not None and len(self.weights) != num_parts:
            msg = f"{len(self.weights)} `weights` for {num_parts} parts of `shards`. Give one weight for each "
            raise refuse(f"{msg}`::`-part or list item.")
        if self.upsampling is not None:
            try:
                parse_factors(self.upsampling, num_parts)
            except PipelineError as err:
                raise refuse(f"`upsampling` {err}") from None
        return self


class SplitByNodeSpec(StageSpec):
    """Keep the draws of this rank."""

    name: ClassVar[str] = "split_by_node"
    kind: ClassVar[Kind] = "splitter"


class SplitByWorkerSpec(StageSpec):
    """Keep the draws of this worker process."""

    name: ClassVar[str] = "split_by_worker"
    kind: ClassVar[Kind] = "splitter"


class TarfileToSamplesSpec(StageSpec):
    """Open the shards here. Without it they are opened at the first stage that is no splitter."""

    name: ClassVar[str] = "tarfile_to_samples"
    kind: ClassVar[Kind] = "open"


class ShuffleSpec(StageSpec):
    """Shuffle in a buffer."""

    name: ClassVar[str] = "shuffle"
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "size"

    size: Count = Field(description="How many values the buffer holds.", examples=[2000])
    initial: Count | None = Field(None, description="How many are there before the first is given.")

    @field_validator("initial")
    @classmethod
    def _check_initial(cls, initial: int | None, info: Any) -> int | None:
        size = info.data.get("size")
        if initial is not None and size is not None and initial > size:
            raise refuse(f"{show(initial)} is more than the buffer holds (`size` is {show(size)}).")
        return initial


class SelectSpec(StageSpec):
    """Keep the values for which a function holds."""

    name: ClassVar[str] = "select"
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(description="A function, or the name of a registered one.", examples=["my_filter"])


class SliceSpec(StageSpec):
    """Some of the values, as Python's slice."""

    name: ClassVar[str] = "slice"
    kind: ClassVar[Kind] = "stream"
    is_starred: ClassVar[str] = "bounds"
    shorthand: ClassVar[str | None] = "stop"

    start: Natural = Field(0, description="Number of the first value.")
    stop: Natural | None = Field(
        description="Number behind the last, or start, stop and step. null: no end.", examples=[1000]
    )
    step: Count = Field(1, description="Every how many.")

    @classmethod
    def expand(cls, value: object) -> dict[str, Any]:
        """`stop`, `[start, stop]` or `[start, stop, step]`, as a mapping."""
        if not isinstance(value, (list, tuple)):
            return super().expand(value)
        if not 2 <= len(value) <= 3:
            raise ValueError(f"{show(value)} has {len(value)} items; write stop, [start, stop] or [start, stop, step].")
        return dict(zip(("start", "stop", "step"), value, strict=False))

    def shorten(self) -> Any:
        """The shortest way to write it."""
        if self.step != 1:
            return [self.start, self.stop, self.step]
        return [self.start, self.stop] if self.start or self.stop is None else self.stop

    @model_validator(mode="after")
    def _check_range(self) -> SliceSpec:
        if self.stop is not None and self.stop <= self.start:
            raise refuse(f"it keeps nothing: `stop` {show(self.stop)} is not behind `start` {show(self.start)}.")
        return self


class WithEpochSpec(StageSpec):
    """End an epoch after so many values of each rank; the stream goes on where it ended."""

    name: ClassVar[str] = "with_epoch"
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"

    n: Count = Field(description="Samples before `batched`, batches behind it; of each rank.", examples=[1000])


class WithLengthSpec(StageSpec):
    """What `len()` says; nothing else changes."""

    name: ClassVar[str] = "with_length"
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"

    n: Count = Field(description="The length.", examples=[1000])


STAGES: dict[str, type[StageSpec]] = {
    spec.name: spec
    for spec in (
        source_specs.ExactSpec,
        source_specs.ResampledSpec,
        source_specs.SequentialSpec,
        StreamSpec,
        SplitByNodeSpec,
        SplitByWorkerSpec,
        TarfileToSamplesSpec,
        ShuffleSpec,
        SelectSpec,
        SliceSpec,
        fields.Decode,
        fields.Map,
        fields.MapDict,
        fields.MapTuple,
        fields.Rename,
        transforms.Resize,
        transforms.CenterCrop,
        transforms.RandomResizedCrop,
        transforms.RandomFlip,
        transforms.Normalize,
        transforms.ToTensor,
        fields.ToTuple,
        fields.ToDict,
        batching.Batched,
        batching.Unbatched,
        WithEpochSpec,
        WithLengthSpec,
    )
}
"""Every stage by its name."""


def parse_stage(name: str, value: object = None, *, where: str = "pipeline") -> StageSpec:
    """The spec of a stage with what stands behind its name: None, a bare value, or a mapping of settings.

    Args:
        name: One of `STAGES`.
        value: As in YAML: `parse_stage("shuffle", 200)` or `parse_stage("shuffle", {"size": 200})`.
        where: Said first in messages.

    Raises:
        ConfigError: There is no such stage, or settings are wrong; all of them are listed.
    """
    return checked(*read_stage(STAGES, name, value), where=where)
