"""The planned sources `exact`, `resampled` and `sequential`: their settings, mixtures, and the order of their samples.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Discriminator, Field, PlainValidator, Strict, Tag, ValidationInfo, model_validator

from wdskit.config.types import (
    CLASSES,
    WHOLE,
    Classes,
    Count,
    CountOrShare,
    Kind,
    Natural,
    Positive,
    Settings,
    Shards,
    StageSpec,
    Text,
    read_stage,
    refuse,
)
from wdskit.dataset.classes import check_labels, folder_has_labels, plain_value
from wdskit.dataset.shard_table import ShardTable
from wdskit.dataset.subset import Subset
from wdskit.dataset.weights import SampleWeights, are_whole
from wdskit.dataset.where import Where
from wdskit.errors import PipelineError, SelectionError
from wdskit.order.base import DEFAULT_LANES, DEFAULT_WINDOW, Order, philox
from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import DEFAULT_CHUNK, ResampledOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.order.subset import PickedOrder
from wdskit.order.weighted import WeightedOrder

MAX_TIMES = 16
"""The largest number of times that `repeat` can put a sample into an epoch."""

_MAX_IN_WINDOWS = 2**28  # lanes x window of `resampled`, which needs up to 8 bytes per sample in a window


def _check_stage(item: Any, info: ValidationInfo) -> StageSpec:
    stage = read_stage(item, info.context or {})
    if stage.kind != "each" or stage.name in {"to_tuple", "to_dict", "map_tuple"}:
        msg = f"`{stage.name}` cannot be a stage of one part"
        raise refuse(f"{msg}; the stages of a part turn one sample into one sample (decode, map, resize, ...).")
    return stage


def _check_where(text: str) -> str:
    try:
        return Where(text).text
    except SelectionError as err:
        raise refuse(str(err)) from None


Condition = Annotated[Text, AfterValidator(_check_where)]
LaneCount = Annotated[int, Strict(), Field(ge=1, le=2**20), WHOLE]
Bounds = tuple[CountOrShare, CountOrShare]
Times = Annotated[dict[Literal["column"], Text], Field(min_length=1)]
_From = Annotated[int, Field(ge=0, lt=10**18)]
_WHOLE = AfterValidator(plain_value)  # states have 3, not 3.0
_Number = Annotated[Positive, _WHOLE, Tag("[number]")]
_Schedule = Annotated[dict[_From, Annotated[float, Strict(), Field(ge=0), _WHOLE]], Tag("[schedule]")]
Weight = Annotated[
    _Number | _Schedule, Discriminator(lambda value: "[schedule]" if isinstance(value, Mapping) else "[number]")
]
PartStages = tuple[Annotated[Any, PlainValidator(_check_stage)], ...]

_SPLIT: Any = Field(None, description="Only this split of the samples, made by `wdskit split`.")
_WHERE: Any = Field(
    None,
    description="Only samples for which this condition on the columns of their folder is true. `wdskit index "
    "FOLDER --columns width,cls` makes columns.",
    examples=["width >= 256 and cls in [1, 2]"],
)
_RANGE: Any = Field(
    None, description='Only the samples from a first one up to, but without, a stop: ["0%", "80%"] or [0, 50000].'
)
_TAIL = (
    "What to do with an incomplete last global batch: `drop` leaves it out, `pad` fills it. With `pad`, each batch has "
    "a mask of the valid rows."
)


class MixturePart(Settings):
    """One data set of a mixture."""

    shards: Shards = Field(
        description="The shards of the part, as in `shards` of the source.", examples=["photos/photos-*.tar"]
    )
    weight: Weight | None = Field(
        None,
        description="Frequency of its samples, relative to the weights of the other parts; or {sample: weight, ...}.",
    )
    repeat: Count | None = Field(None, description="How often each of its samples appears in a finite epoch.")
    split: Text | None = _SPLIT
    where: Condition | None = _WHERE
    range: Bounds | None = _RANGE
    stages: PartStages = Field((), description="Stages for its samples only, before those of the pipeline.")

    def table(self, *, has_columns: bool = False) -> ShardTable:
        """Return the table of the part's shards, with the samples that the part selects. With `has_columns`, the table
        can read columns.

        Raises:
            StorageError: The shards cannot be listed.
            FolderIndexError: A folder has no valid index, or no sample is selected.
            SelectionError: The split or a column is missing, or the condition is invalid.
        """
        bounds = None if self.range is None else (_bound_of(self.range[0]), _bound_of(self.range[1]))
        return ShardTable(self.shards, split=self.split, where=self.where, has_columns=has_columns, bounds=bounds)

    def fingerprint(self, table: ShardTable) -> dict[str, Any]:
        """Return everything in the part that decides the order of the samples, as plain JSON. `table` is the result of
        `self.table`.
        """
        weight: Any = self.weight
        if isinstance(weight, Mapping):
            weight = {str(at): value for at, value in weight.items()}  # JSON has only text keys
        found = {"digest": table.digest(), "content": table.content(), "weight": weight}
        found |= {"repeat": self.repeat, "where": self.where}
        return {name: value for name, value in found.items() if value is not None}


def _bound_of(value: int | str) -> int | Fraction:
    """Return one end of a range: the number of a sample, or a Fraction of 0-1 for a share such as "80%"."""
    return Fraction(value[:-1]) / 100 if isinstance(value, str) else value


@dataclass(frozen=True)
class PlannedData:
    """The shards of a planned source, and the order of their samples.

    Attributes:
        tables: The table of each part, in the order of the parts. A part with `repeat: n` has its table n times.
        parts: For each table of `tables`, the number of its part, from 0.
        order: Maps positions to samples.
        num_samples: Number of samples in one pass over the data; None for a mixture by weights, which is endless.
        fingerprint: Everything that decides the order, as plain JSON.
    """

    tables: tuple[ShardTable, ...]
    parts: tuple[int, ...]
    order: Order
    num_samples: int | None
    fingerprint: dict[str, Any]


class PlannedSource(StageSpec):
    """The base class of the planned sources."""

    kind: ClassVar[Kind] = "source"
    shorthand: ClassVar[str | None] = "shards"
    is_planned: ClassVar[bool] = True
    order_version: ClassVar[int] = 1
    """Stored in each state. It is increased when the same settings give another sequence of samples."""
    selecting: ClassVar[tuple[str, ...]] = ()
    """The settings by which values in columns decide the order."""

    shards: Shards | None = Field(
        None,
        description="A path, glob, brace pattern or folder, several joined by `::`, or a list of these. The shards "
        "need an index.",
        examples=["train-{000000..000127}.tar"],
    )
    mixture: tuple[MixturePart, ...] | None = Field(
        None, min_length=1, description="In place of `shards`: data sets, all with `weight` or all with `repeat`."
    )
    split: Text | None = _SPLIT
    where: Condition | None = _WHERE
    range: Bounds | None = _RANGE
    seed: Natural = Field(0, description="Seed of the order and of everything random.")
    classes: Classes = CLASSES

    @model_validator(mode="after")
    def _check_together(self) -> PlannedSource:
        if (self.shards is None) == (self.mixture is None):
            msg = "exclude each other; remove one" if self.shards else "are both missing; one is needed"
            raise refuse(f"`shards` and `mixture` {msg}. Write for example `{self.name}: train-*.tar`.")
        for name in ("range", "split", "where", *self.selecting):
            if self.mixture and getattr(self, name) is not None:
                raise refuse(f"`{name}` cannot be used with `mixture`, whose parts have their own settings.")
        kinds = {(part.weight is not None, part.repeat is not None) for part in self.mixture or ()}
        if len(kinds) > 1 or (True, True) in kinds:
            raise refuse("all parts of a mixture have `weight` (endless), or all have `repeat` (finite).")
        return self

    @property
    def is_weighted(self) -> bool:
        """Whether the source is a mixture without `repeat`. Such a mixture is endless and draws from its parts by
        weights (default 1). False without a mixture.
        """
        return self.mixture is not None and self.mixture[0].repeat is None

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        """The parts of the mixture; without a mixture, one part that has the settings of the source."""
        return self.mixture or (
            MixturePart(shards=self.shards or "", split=self.split, where=self.where, range=self.range),
        )

    @abstractmethod
    def order_of(self, counts: NDArray[np.int64], seed: int, *, lanes: int | None = None) -> Order:
        """Return the order of the samples of some shards.

        Args:
            counts: Number of samples of each shard, int64 (num_shards,).
            seed: Seed of the order.
            lanes: Number of lanes of the source `exact`; None for the default number. The setting `lanes` overrides
                this argument. Other sources ignore it.
        """

    @property
    def reads_columns(self) -> bool:
        """Whether the order of the samples depends on values in columns."""
        return any(getattr(self, name) is not None for name in self.selecting)

    def order_by_columns(self, table: ShardTable) -> tuple[PickedOrder | WeightedOrder, str]:
        """Return (order, digest): the order of the samples of `table` if a setting in `selecting` is set, and the hex
        sha256 of what decides this order in the columns.

        Raises:
            SelectionError: A column is missing or damaged, or its values do not fit the setting.
        """
        raise NotImplementedError

    def plan(self, *, has_columns: bool = False) -> PlannedData:
        """Return the shards and the order of their samples. With `has_columns`, the tables can read columns.

        Raises:
            PipelineError: The weights of all parts of a mixture are 0 at a position.
            StorageError: The shards cannot be listed, or a `classes.json` cannot be read.
            FolderIndexError: A folder has no valid index, no sample is selected, or the labels of two folders mean
                different classes.
            SelectionError: A split or a column is missing, a condition is invalid, or a column has values that
                `repeat`, `weights` or `balance` cannot use.
        """
        parts = self.parts
        tables = [part.table(has_columns=has_columns or self.reads_columns) for part in parts]
        if self.classes == "same":
            check_labels((folder for table in tables for folder in table.folders), folder_has_labels)
        ignored = {"shards", "mixture", "split", "where", "range", "classes"}
        ignored |= {name for name in self.selecting if getattr(self, name) is None}
        fingerprint = {
            "source": self.name,
            "order_version": self.order_version,
            **self.model_dump(exclude=ignored),
            "parts": [part.fingerprint(table) for part, table in zip(parts, tables, strict=True)],
        }
        if self.is_weighted:
            fingerprint["schedule"] = "step"  # states that older versions saved have it
            return PlannedData(tuple(tables), tuple(range(len(parts))), self._mix(tables), None, fingerprint)
        if self.reads_columns:
            order, fingerprint["columns"] = self.order_by_columns(tables[0])
            return PlannedData((tables[0],), (0,), order, order.num_samples, fingerprint)
        numbers = tuple(number for number, part in enumerate(parts) for _ in range(part.repeat or 1))
        repeated = tuple(tables[number] for number in numbers)
        counts = np.concatenate([table.counts for table in repeated])
        return PlannedData(repeated, numbers, self.order_of(counts, self.seed), int(counts.sum()), fingerprint)

    def _mix(self, tables: list[ShardTable]) -> MixtureOrder:
        seeds = [self.seed]
        if len(tables) > 1:  # with one seed, parts with the same shards would have the same order
            seeds = [int(philox("mixture-part", self.seed, number).random_raw()) for number in range(len(tables))]
        orders = [self.order_of(table.counts, seed) for table, seed in zip(tables, seeds, strict=True)]
        weights = [1.0 if part.weight is None else part.weight for part in self.parts]
        try:
            return MixtureOrder(orders, [len(table) for table in tables], weights)
        except ValueError as err:
            raise PipelineError(f"{self.name}: mixture: {err}.") from err


class Exact(PlannedSource):
    """A planned source: each sample at most once per epoch over all ranks, in a new random order each epoch. With
    `tail: pad`, exactly once; `tail: drop` leaves out the samples that do not fill a batch on all ranks. With
    `repeat`, each repetition counts as a sample.
    """

    name: ClassVar[str] = "exact"
    selecting: ClassVar[tuple[str, ...]] = ("repeat",)
    order_version: ClassVar[int] = 2  # in version 1, the cuts were assigned to lanes at random

    lanes: LaneCount | None = Field(
        None,
        description="Number of parts of the data that are read side by side. Default: 240, or one per 64 samples of a "
        "smaller data set.",
    )
    window: Count = Field(DEFAULT_WINDOW, description="Number of samples of a lane that are shuffled together.")
    homes: Count = Field(
        1,
        description="Number of groups of shards. A group keeps its place in every epoch, so that a node reads mostly "
        "the same shards in each epoch. For shards in a store with a `cache`: a few times the number of nodes.",
    )
    repeat: Times | None = Field(
        None,
        description=f"How often an epoch has a sample: as {{column: NAME}} says, 0 to {MAX_TIMES} times.",
    )
    tail: Literal["drop", "pad"] = Field("drop", description=_TAIL)

    def times(self, table: ShardTable) -> NDArray[Any]:
        """Return how often each selected sample of `table` is in an epoch: uint8 (num_selected,), in the order of the
        index. The setting `repeat` must not be None.

        Raises:
            SelectionError: The column is missing or damaged, or has values that `repeat` cannot use.
        """
        assert self.repeat is not None
        view, [column, *_] = table.column(self.repeat["column"])
        values = view.all()[table.used()]
        if column.values is not None or not are_whole(values):
            raise column.unfit("`repeat` needs whole numbers")
        if values.min() < 0 or not 0 < values.max() <= MAX_TIMES:
            raise column.unfit(f"`repeat` needs numbers from 0 to {MAX_TIMES}, one of them above 0")
        return values.astype(np.uint8)

    def order_by_columns(self, table: ShardTable) -> tuple[PickedOrder | WeightedOrder, str]:
        """Return the order in which each sample is repeated as `times` says, and a digest. The errors are those of
        `times`.
        """
        times = self.times(table)
        layers = [Subset(table.counts, times > layer) for layer in range(int(times.max(initial=0)))]
        counts = np.concatenate([layer.counts for layer in layers])
        digest = hashlib.sha256(b"".join(layer.digest() for layer in layers)).hexdigest()
        return PickedOrder(self.order_of(counts, self.seed), layers), digest

    def order_of(self, counts: NDArray[np.int64], seed: int, *, lanes: int | None = None) -> Order:
        """Return the order of the samples of some shards: the shards are shuffled and divided into lanes, and each lane
        is shuffled in windows. The arguments are those of `PlannedSource.order_of`.
        """
        return ExactOrder(counts, seed=seed, lanes=self.lanes or lanes, window=self.window, homes=self.homes)


class Resampled(PlannedSource):
    """A planned source: samples drawn with replacement, in chunks of consecutive samples, or one by one by weights.

    Without `with_epoch`, an epoch has as many samples as the data. A mixture by weights needs `with_epoch`.
    """

    name: ClassVar[str] = "resampled"
    selecting: ClassVar[tuple[str, ...]] = ("weights", "balance")

    weights: Text | None = Field(
        None, description="A column with the weight of each sample: samples are drawn one by one, in proportion to it."
    )
    balance: Text | None = Field(
        None, description="A column of classes or texts: samples are drawn one by one, each value equally often."
    )
    chunk: Count = Field(DEFAULT_CHUNK, description="Number of consecutive samples that are drawn together.")
    lanes: LaneCount = Field(DEFAULT_LANES, description="Number of parts of the sequence that are read side by side.")
    window: Count = Field(DEFAULT_WINDOW, description="Number of samples of a lane that are shuffled together.")
    tail: Literal["drop", "pad"] = Field("drop", description=_TAIL)

    @model_validator(mode="after")
    def _check_draws(self) -> Resampled:
        if self.lanes * self.window > _MAX_IN_WINDOWS:
            raise refuse(f"`lanes` x `window` is {self.lanes * self.window:,}, more than {_MAX_IN_WINDOWS:,}.")
        if self.weights is not None and self.balance is not None:
            raise refuse("`weights` and `balance` exclude each other; remove one.")
        sizes = (self.chunk, self.lanes, self.window)
        if self.reads_columns and sizes != (DEFAULT_CHUNK, DEFAULT_LANES, DEFAULT_WINDOW):
            own = "weights" if self.weights is not None else "balance"
            raise refuse(f"`{own}` draws samples one by one, without `chunk`, `lanes` and `window`; remove these.")
        return self

    def order_by_columns(self, table: ShardTable) -> tuple[PickedOrder | WeightedOrder, str]:
        """Return the order of the samples that are drawn by `weights` or `balance`, and a digest."""
        name = self.weights or self.balance or ""
        weights = SampleWeights(table, name, balance=self.balance is not None)
        num_samples = int(table.counts.sum())
        return WeightedOrder(table.file_counts, weights, num_samples=num_samples, seed=self.seed), weights.digest

    def order_of(self, counts: NDArray[np.int64], seed: int, *, lanes: int | None = None) -> Order:  # noqa: ARG002
        """Return the order of the samples of some shards: chunks of consecutive samples are drawn uniformly. `lanes`
        has no effect; the setting `lanes` counts.
        """
        return ResampledOrder(counts, seed=seed, chunk=self.chunk, lanes=self.lanes, window=self.window)


class Sequential(PlannedSource):
    """A planned source for evaluation: every sample once, in the order of the index.

    The parts of a mixture with `repeat` come one after the other, each as often as its `repeat`.
    """

    name: ClassVar[str] = "sequential"

    tail: Literal["drop", "pad"] = Field("pad", description=_TAIL)

    def order_of(self, counts: NDArray[np.int64], seed: int, *, lanes: int | None = None) -> Order:  # noqa: ARG002
        """Return the order of the index: sample after sample. Only `counts` has an effect."""
        return SequentialOrder(counts)
