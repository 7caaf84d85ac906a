"""What the planned sources can be asked to do. Part of the table in `specs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from wdskit.config.messages import describe, dotted, show, wrong_kind
from wdskit.config.spec import Kind, Stages, StageSpec, read_stage, refuse
from wdskit.config.values import CLASSES, Classes, Count, Natural, Shards
from wdskit.dataset.selection import check_selection_name
from wdskit.errors import SelectionError
from wdskit.order.lanes import DEFAULT_LANES, DEFAULT_WINDOW
from wdskit.order.resampled import DEFAULT_CHUNK

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)%")
_NEEDS_RANGE = 'a first sample and the one behind the last are needed, as in ["0%", "80%"] or [0, 50000]'
_POSITION = re.compile(r"\d{1,18}")


def _check_bounds(value: object) -> tuple[int | str, int | str]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise refuse(wrong_kind(value, _NEEDS_RANGE))
    first, stop = value
    low, high = bound_of(first), bound_of(stop)
    if type(low) is type(high) and not low < high:
        raise refuse(f"{show(value)} holds nothing; the second number must be above the first.")
    return first, stop


def bound_of(value: object) -> int | Fraction:
    """One end of a range: a sample's number, or a share of all.

    Raises:
        PydanticCustomError: It is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise refuse(wrong_kind(value, _NEEDS_RANGE))
    share = Fraction(match[1]) / 100
    if share > 1:
        raise refuse(f"{show(value)} is more than all; a share is 0% to 100%.")
    return share


def _check_weight(value: object) -> float | dict[int, float]:
    if not isinstance(value, Mapping):
        weight = _number(value)
        if not weight:
            raise refuse("a part of weight 0 never comes. Leave it out, or give it a schedule.")
        return weight
    schedule = {_position(key): _number(weight) for key, weight in value.items()}
    if len(schedule) < len(value) or min(schedule, default=-1) != 0:
        raise refuse("a schedule maps samples to weights, each once and from sample 0 on: {0: 1.0, 10000000: 0.2}.")
    return dict(sorted(schedule.items()))


def _position(key: object) -> int:
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        return key
    if isinstance(key, str) and _POSITION.fullmatch(key):
        return int(key)
    raise refuse(f"{show(key)} is no number of samples; a schedule is written {{0: 1.0, 10000000: 0.2}}.")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise refuse(wrong_kind(value, "a weight is a number of 0 or more, or a schedule such as {0: 1.0, 10000: 0.2}"))
    return value


def _check_stages(value: object, info: ValidationInfo) -> tuple[StageSpec, ...]:
    if not isinstance(value, (list, tuple)):
        raise refuse(wrong_kind(value, "a list of stages is needed, as in [{decode: rgb8}, {resize: 256}]"))
    return tuple(_check_stage(at, item, info.context or {}) for at, item in enumerate(value))


def _check_stage(at: int, item: object, stages: Stages) -> StageSpec:
    """A stage of one part: it makes one sample of one."""
    spec: StageSpec | None
    if isinstance(item, StageSpec):
        spec = item
    else:
        name, settings = next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else (item, None)
        if not isinstance(name, str):
            raise refuse(f"[{at}]: {describe(item)}; a stage is needed, as in `- decode: rgb8`.")
        spec, flaws = read_stage(stages, name, settings)
        if spec is None:
            raise refuse(f"{dotted((at, *flaws[0].path))}: {flaws[0].rule}")
    if spec.kind != "each" or spec.name in {"to_tuple", "to_dict", "map_tuple"}:
        msg = f"[{at}]: `{spec.name}` cannot be a stage of one part"
        raise refuse(f"{msg}, which are those that make one sample of one (decode, map, resize, ...).")
    return spec


def _check_split(value: object) -> str:
    if not isinstance(value, str):
        raise refuse(wrong_kind(value, "the name of a split is needed, as in `split: train`"))
    try:
        check_selection_name(value)
    except SelectionError as err:
        raise refuse(str(err)) from None
    return value


_BOUND_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9.]+%$"}]}
_WEIGHT_SCHEMA = {"type": "number", "minimum": 0}
Bounds = Annotated[
    tuple[int | str, int | str],
    PlainValidator(_check_bounds),
    WithJsonSchema({"type": "array", "items": _BOUND_SCHEMA, "minItems": 2, "maxItems": 2}),
]
Split = Annotated[str, PlainValidator(_check_split), WithJsonSchema({"type": "string"})]
Weight = Annotated[
    float | dict[int, float],
    PlainValidator(_check_weight),
    WithJsonSchema({"anyOf": [_WEIGHT_SCHEMA, {"type": "object", "additionalProperties": _WEIGHT_SCHEMA}]}),
]
PartStages = Annotated[
    tuple[StageSpec, ...],
    PlainValidator(_check_stages),
    WithJsonSchema({"type": "array", "items": {"title": "stage"}}),  # the schema of the file knows what that is
]


class PartSpec(BaseModel):
    """One data set of a mixture."""

    model_config = StageSpec.model_config

    shards: Shards = Field(description="As of the source.", examples=["photos/photos-*.tar"])
    weight: Weight | None = Field(None, description="Its share relative to the others', or {sample: weight, ...}.")
    repeat: Count | None = Field(None, description="How often each of its samples comes in a finite epoch.")
    split: Split | None = Field(None, description="Only this split of its samples, made by `wdskit split`.")
    range: Bounds | None = Field(None, description='Only a range of its samples: ["0%", "80%"], or their numbers.')
    stages: PartStages = Field((), description="Stages for its samples only, before those of the pipeline.")

    def shorten(self) -> dict[str, Any]:
        """The shortest way to write it."""
        fields = {name: value for name, value in self if value != type(self).model_fields[name].default}
        if self.stages:
            fields["stages"] = [stage.written() for stage in self.stages]
        return fields


class PlannedSpec(StageSpec):
    """What the planned sources have in common."""

    kind: ClassVar[Kind] = "source"
    shorthand: ClassVar[str | None] = "shards"
    is_planned: ClassVar[bool] = True
    items: ClassVar[dict[str, type[BaseModel]]] = {"mixture": PartSpec}

    shards: Shards | None = Field(
        None,
        description="A path, glob, brace pattern or folder, several joined by `::`, or a list of such; indexed.",
        examples=["train-{000000..000127}.tar"],
    )
    mixture: tuple[PartSpec, ...] | None = Field(
        None, min_length=1, description="Instead of `shards`: data sets, each with `weight`, or each with `repeat`."
    )
    schedule: Literal["step", "linear"] = Field("step", description="How weights that are schedules change.")
    split: Split | None = Field(None, description="Only this split of the samples, made by `wdskit split`.")
    range: Bounds | None = Field(None, description='Only a range of the samples: ["0%", "80%"], or their numbers.')
    seed: Natural = Field(0, description="Of the order and of all that is random.")
    classes: Classes = CLASSES

    @model_validator(mode="after")
    def _check_together(self) -> PlannedSpec:
        if (self.shards is None) == (self.mixture is None):
            msg = "exclude each other; remove one" if self.shards else "are both missing; one is needed"
            raise refuse(f"`shards` and `mixture` {msg}. Write for example `{self.name}: train-*.tar`.")
        parts = self.mixture or ()
        for name in ("range", "split"):
            if parts and getattr(self, name) is not None:
                raise refuse(f"`{name}` stands beside `mixture`; put it into the part that it belongs to.")
        if any(part.weight is not None for part in parts) and any(part.repeat is not None for part in parts):
            raise refuse("`weight` and `repeat` stand in one mixture: weights go on without end, `repeat` is finite.")
        for name in ("weight", "repeat"):
            told = [getattr(part, name) is not None for part in parts]
            if any(told) and not all(told):
                raise refuse(f"mixture[{told.index(False)}] has no `{name}`, and others have. Give each part one.")
        schedules = [part.weight for part in parts if isinstance(part.weight, Mapping)]
        if self.schedule == "linear" and not schedules:
            raise refuse(
                "`schedule: linear` without a weight that changes, such as {0: 1.0, 10000000: 0.2}; remove it."
            )
        return self

    @property
    def is_weighted(self) -> bool:
        """Whether it is a mixture that goes on without end, with weights (all 1 where none is told)."""
        return self.mixture is not None and self.mixture[0].repeat is None

    def shorten(self) -> Any:
        """The shortest way to write it."""
        if self.mixture is None:
            return super().shorten()
        fields = {name: value for name, value in self if value != type(self).model_fields[name].default}
        return fields | {"mixture": [part.shorten() for part in self.mixture]}


class ExactSpec(PlannedSpec):
    """A planned source: each sample exactly once an epoch, shuffled anew in each, over all ranks."""

    name: ClassVar[str] = "exact"

    lanes: Count = Field(DEFAULT_LANES, description="Parts of the data that are read side by side.")
    window: Count = Field(DEFAULT_WINDOW, description="Samples of a lane that are shuffled with each other.")
    tail: Literal["drop", "pad"] = Field("drop", description="What becomes of samples that fill no global batch.")


class ResampledSpec(PlannedSpec):
    """A planned source: samples drawn with replacement, a few neighbours at a time."""

    name: ClassVar[str] = "resampled"

    chunk: Count = Field(DEFAULT_CHUNK, description="Neighbouring samples that are drawn together.")
    lanes: Count = Field(DEFAULT_LANES, description="Parts of the sequence that are made side by side.")
    window: Count = Field(DEFAULT_WINDOW, description="Samples of a lane that are shuffled with each other.")
    tail: Literal["drop", "pad"] = Field("drop", description="What becomes of samples that fill no global batch.")


class SequentialSpec(PlannedSpec):
    """A planned source: every sample once, in the order of the index; for evaluation."""

    name: ClassVar[str] = "sequential"

    tail: Literal["drop", "pad"] = Field("pad", description="What becomes of samples that fill no global batch.")
