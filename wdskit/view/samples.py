"""The samples of a data set in an order. Only indexes are read first; each sample is read on request."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from wdskit.codecs.fields import decode_field
from wdskit.dataset.classes import read_classes
from wdskit.engine.reader import SampleReader
from wdskit.errors import PipelineError, WdskitError
from wdskit.files import Buffer
from wdskit.order.base import Ints, Order
from wdskit.order.buckets import BucketSteps
from wdskit.order.steps import AnySteps, dealt
from wdskit.pipeline.builder import open_pipeline
from wdskit.shards.filters import Expression, ExpressionError
from wdskit.stages.epoch import plan_epoch
from wdskit.stages.sources import PlannedData, PlannedSource, Sequential
from wdskit.tune.plan import fitting_node

_ROWS_AT_ONCE = 256  # samples that are looked up together, and read together
_BYTES_AT_ONCE = 32 << 20  # where they have no more than this
_STEPS_KEPT = 64  # whose positions need not be found again


class ViewedSample(NamedTuple):
    """One sample.

    Attributes:
        row: Its number among the shown samples.
        shard: Path or URL of its shard.
        key: Its key.
        fields: The bytes of its fields; they may be views of one buffer.
        classes: Names by class number of its folder, empty without classes.json.
    """

    row: int
    shard: str
    key: str
    fields: dict[str, Buffer]
    classes: tuple[str, ...]


class SearchResult(NamedTuple):
    """What a search has found so far.

    Attributes:
        rows: Rows that match, rising.
        stop: The row where the search continues, None at the end.
        num_unanswered: Rows for which the filter has no answer, or that cannot be read.
        problem: The reason for the first of these rows.
    """

    rows: list[int]
    stop: int | None
    num_unanswered: int
    problem: str


class _RankPositions(Sequence[int]):
    """The positions that a rank takes in an epoch, without padding. They are computed on request."""

    def __init__(self, order: Order, start: int, steps: AnySteps, rank: int, ranks_per_node: int) -> None:
        dealt_to = functools.partial(dealt, order, start, steps, rank=rank, ranks_per_node=ranks_per_node)
        self._dealt = functools.lru_cache(_STEPS_KEPT)(dealt_to)
        self._start = start
        if isinstance(steps, BucketSteps):  # whose batches differ in size, and may all be padded
            counts = [int(np.count_nonzero(self._dealt(step) < steps.num_samples)) for step in range(len(steps))]
        else:
            in_last = np.count_nonzero(self._dealt(len(steps) - 1) < steps.num_samples) if len(steps) else 0
            counts = [*[steps.batch] * (len(steps) - 1), int(in_last)]
        self._stops = np.cumsum(counts)
        self._num = sum(counts)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, row: Any) -> Any:
        number = range(self._num)[row]
        step = int(np.searchsorted(self._stops, number, side="right"))
        at = number - (int(self._stops[step - 1]) if step else 0)
        return self._start + int(self._dealt(step)[at])


class SampleView:
    """The samples of a planned source by row. Safe to share between threads.

    Args:
        data: The shards and their order.
        positions: Position in the order of each row.
        title: What they are, for people.
    """

    def __init__(self, data: PlannedData, positions: Sequence[int], title: str) -> None:
        self.title = title
        self._order = data.order
        self._positions = positions
        self._shards = SampleReader(data.tables, data.parts)
        self._classes = {folder: read_classes(folder) or () for table in data.tables for folder in table.folders}

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._positions)

    def read(self, row: int) -> ViewedSample:
        """One sample, compared with its shard's offsets.

        Raises:
            ShardError, StorageError, FolderIndexError: It cannot be read.
        """
        sample = next(self.read_each([row]))
        if isinstance(sample, WdskitError):
            raise sample
        return sample

    def read_each(self, rows: Sequence[int]) -> Iterator[ViewedSample | WdskitError]:
        """Yield samples in turn; for a sample that cannot be read, its error."""
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[first : first + _ROWS_AT_ONCE]
            shards, numbers = self._order.take(np.array([self._positions[row] for row in part], dtype=np.int64))
            yield from self._read_together(part, shards, numbers) or self._read_apart(part, shards, numbers)

    def _read_together(self, rows: Sequence[int], shards: Ints, numbers: Ints) -> Iterator[ViewedSample] | None:
        """Read samples together, ten times as fast; None if they are large, differ in fields, or one is invalid."""
        if len(rows) < 2 or self._shards.mean_bytes(shards) > _BYTES_AT_ONCE:
            return None
        try:
            many = self._shards.read_many(shards, numbers, viewed=lambda _: True)
        except WdskitError:
            return None
        if many is None:
            return None
        places = zip(*(of.places() for of in many.fields.values()), strict=True)  # of the fields of each sample
        return (
            self._sample(
                row,
                many.paths[at],
                many.keys[at],
                {
                    name: memoryview(data)[start:stop]
                    for name, (data, start, stop) in zip(many.fields, each, strict=True)
                },
            )
            for at, (row, each) in enumerate(zip(rows, places, strict=True))
        )

    def _read_apart(self, rows: Sequence[int], shards: Ints, numbers: Ints) -> Iterator[ViewedSample | WdskitError]:
        for row, shard, number in zip(rows, shards.tolist(), numbers.tolist(), strict=True):
            try:
                path, key, _, fields = self._shards.read(shard, number, viewed=lambda _: True)
            except WdskitError as err:
                yield err
            else:
                yield self._sample(row, path, key, fields)

    def _sample(self, row: int, path: str, key: str, fields: dict[str, Any]) -> ViewedSample:
        return ViewedSample(row, path, key, fields, self._classes.get(path.rpartition("/")[0], ()))

    def find(
        self, start: int, *, text: str = "", expression: Expression | None = None, limit: int, seconds: float
    ) -> SearchResult:
        """Search rows until `limit` rows are found or the time is over.

        Args:
            start: The first row to check.
            text: Text that the key must contain.
            expression: Condition that must be true for the sample.
            limit: Most rows to find.
            seconds: Approximate time; at least one row is checked.
        """
        end = time.monotonic() + seconds
        rows: list[int] = []
        num_unanswered, problem = 0, ""
        for row, sample in enumerate(self.read_each(range(start, len(self))), start):
            try:
                if _matches(sample, text, expression):
                    rows.append(row)
            except (ExpressionError, WdskitError) as err:
                num_unanswered += 1
                problem = problem or (str(err) if isinstance(sample, WdskitError) else f"{sample.key}: {err}")
            if len(rows) == limit or time.monotonic() > end:
                return SearchResult(rows, row + 1 if row + 1 < len(self) else None, num_unanswered, problem)
        return SearchResult(rows, None, num_unanswered, problem)


def _matches(sample: ViewedSample | WdskitError, text: str, expression: Expression | None) -> bool:
    if isinstance(sample, WdskitError):
        raise sample
    if text not in sample.key:
        return False
    return expression is None or expression.holds(
        sample.key, sample.fields, lambda name: decode_field(name, sample.fields[name])
    )


def open_folder(shards: str, *, split: str | None = None) -> SampleView:
    """Open the samples of indexed shards in the order of the index.

    Args:
        shards: A folder, glob or brace pattern, several joined by `::`.
        split: Only this selection of each folder.

    Raises:
        StorageError, FolderIndexError, SelectionError: They cannot be listed, or have no index or no such selection.
    """
    data = Sequential(shards=shards, split=split, classes="any").plan()
    assert data.num_samples is not None
    title = shards if split is None else f"{shards}, split {split}"
    return SampleView(data, range(data.num_samples), title)


def open_order(
    config: str | os.PathLike[str],
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    rank: int = 0,
    world_size: int = 1,
    gpus_per_node: int = 8,
    epoch: int = 0,
) -> SampleView:
    """Open the samples of a pipeline in the order in which a rank gets them in an epoch.

    Args:
        config: A YAML file.
        pipeline: Which of its pipelines; may be left out where there is one.
        overrides: `a.b.c=VALUE` each.
        rank: 0 <= rank < world_size.
        world_size: Number of ranks.
        gpus_per_node: Ranks of a node, as `plan` takes them, where the configuration has no `ranks_per_node`.
        epoch: Which epoch, from 0.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: The pipeline has no planned source, or cannot run on `world_size` ranks.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or have no index.
    """
    if not 0 <= rank < world_size:
        raise PipelineError(f"view: rank {rank} is not one of {world_size}. The ranks are 0 to {world_size - 1}.")
    opened = open_pipeline(config, pipeline, overrides, caller="view")
    source = opened.pipe.stages[0]
    if not isinstance(source, PlannedSource):
        msg = f"{config}: only a run shows the order of a stream."
        raise PipelineError(f"{msg}\n  View its folder, or use `exact`, `sequential` or `resampled`.")
    data, layout = plan_epoch(opened.pipe.stages, world_size)
    start = epoch * layout.num_samples
    steps = layout.steps(world_size, start=start)
    node_size = opened.loader.ranks_per_node or fitting_node(gpus_per_node, world_size)
    own = _RankPositions(data.order, start, steps, rank, node_size)
    title = f"{PurePath(config).name}, pipeline {opened.name}: epoch {epoch}, rank {rank} of {world_size}"
    return SampleView(data, own, title)
