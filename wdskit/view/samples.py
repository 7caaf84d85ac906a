"""The samples of a data set in a fixed order. Opening reads only indexes; a sample is read on request."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from wdskit.codecs.fields import decode_field
from wdskit.config.types import parse_settings
from wdskit.dataset.classes import read_classes
from wdskit.engine.reader import SampleReader
from wdskit.errors import PipelineError, StorageError, WdskitError
from wdskit.files import Buffer
from wdskit.order.base import Ints, Order
from wdskit.order.buckets import BucketSteps
from wdskit.order.steps import AnySteps, rank_positions
from wdskit.pipeline.builder import open_pipeline
from wdskit.shards.filters import Expression, ExpressionError
from wdskit.stages.epoch import plan_epoch
from wdskit.stages.sources import PlannedData, PlannedSource, Sequential
from wdskit.tune.plan import choose_ranks_per_node

_ROWS_AT_ONCE = 256  # most rows that are read together
_BYTES_AT_ONCE = 32 << 20  # samples with more bytes are read one at a time
_STEPS_KEPT = 64  # steps whose positions are cached


class ViewedSample(NamedTuple):
    """A sample of the page.

    Attributes:
        row: Number of the sample among the shown samples, from 0.
        shard: Path or URL of the shard.
        key: Key of the sample.
        fields: The bytes of each field, by field name; they may be views of one buffer.
        classes: Class names of the shard's folder, in the order of their numbers; empty without `classes.json`.
    """

    row: int
    shard: str
    key: str
    fields: dict[str, Buffer]
    classes: tuple[str, ...]


class SearchResult(NamedTuple):
    """The result of one part of a search.

    Attributes:
        rows: Rows that match, ascending.
        stop: The row where the search continues; None if all rows were checked.
        num_unanswered: Number of rows that could not be checked: the row cannot be read, or the filter has no answer.
        problem: Why the first of these rows could not be checked; empty without such a row.
    """

    rows: list[int]
    stop: int | None
    num_unanswered: int
    problem: str


class _RankPositions(Sequence[int]):
    """The positions of the samples that a rank reads in an epoch, without padding. Item i is the position of row i.

    A position counts the samples of all ranks from the start of epoch 0, as `Order.take` expects.
    """

    def __init__(self, order: Order, start: int, steps: AnySteps, rank: int, ranks_per_node: int) -> None:
        positions_at = functools.partial(rank_positions, order, start, steps, rank=rank, ranks_per_node=ranks_per_node)
        self._positions_at = functools.lru_cache(_STEPS_KEPT)(positions_at)
        self._start = start
        if isinstance(steps, BucketSteps):  # the batches differ in size, and each can be padded
            counts = [int(np.count_nonzero(self._positions_at(step) < steps.num_samples)) for step in range(len(steps))]
        else:
            in_last = np.count_nonzero(self._positions_at(len(steps) - 1) < steps.num_samples) if len(steps) else 0
            counts = [*[steps.batch] * (len(steps) - 1), int(in_last)]
        self._stops = np.cumsum(counts)
        self._num = sum(counts)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, row: Any) -> Any:
        number = range(self._num)[row]
        step = int(np.searchsorted(self._stops, number, side="right"))
        at = number - (int(self._stops[step - 1]) if step else 0)
        return self._start + int(self._positions_at(step)[at])


class SampleView:
    """Reads the samples of a planned source by row. Several threads may share an object.

    Args:
        data: The shards and their order.
        positions: The position in the order for each row.
        title: Title of the samples, for the page.

    Raises:
        FolderIndexError, StorageError: A `classes.json` is invalid or cannot be read.
    """

    def __init__(self, data: PlannedData, positions: Sequence[int], title: str) -> None:
        self.title = title
        self._order = data.order
        self._positions = positions
        self._shards = SampleReader(data.tables, data.parts)
        self._classes = {folder: read_classes(folder) or () for table in data.tables for folder in table.folders}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._positions)

    def read(self, row: int) -> ViewedSample:
        """Read the sample of a row.

        Raises:
            ShardError: The shard is damaged, or does not match its offsets.
            StorageError: The shard cannot be read.
            FolderIndexError: The shard does not match the index of its folder.
        """
        sample = next(self.read_each([row]))
        if isinstance(sample, WdskitError):
            raise sample
        return sample

    def read_each(self, rows: Sequence[int]) -> Iterator[ViewedSample | WdskitError]:
        """Yield the sample of each row, or the error of a sample that cannot be read, in the order of `rows`."""
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[first : first + _ROWS_AT_ONCE]
            shards, numbers = self._order.take(np.array([self._positions[row] for row in part], dtype=np.int64))
            yield from self._read_together(part, shards, numbers) or self._read_singly(part, shards, numbers)

    def _read_together(self, rows: Sequence[int], shards: Ints, numbers: Ints) -> Iterator[ViewedSample] | None:
        """Read several samples with one call, and return an iterator over them in the order of `rows`.

        `shards` has the number of each sample's shard, and `numbers` the number of each sample in its shard. Return
        None if there is only one sample, the samples are large or have different fields, or a sample cannot be read:
        `_read_singly` must then read the samples.
        """
        # Ten times as fast as one sample at a time.
        if len(rows) < 2 or self._shards.mean_bytes(shards) > _BYTES_AT_ONCE:
            return None
        try:
            columns = self._shards.read_columns(shards, numbers)
        except WdskitError:
            return None
        if columns is None:
            return None
        values = zip(*columns.fields.values(), strict=True)
        return (
            self._sample(row, columns.paths[at], columns.keys[at], dict(zip(columns.fields, each, strict=True)))
            for at, (row, each) in enumerate(zip(rows, values, strict=True))
        )

    def _read_singly(self, rows: Sequence[int], shards: Ints, numbers: Ints) -> Iterator[ViewedSample | WdskitError]:
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
        """Search for rows that match `text` and `expression`, in order, for a limited time.

        Rows that cannot be read, or for which `expression` has no answer, do not match and are counted in the result.

        Args:
            start: The first row to check.
            text: Text that the key must contain; "" for any key.
            expression: Condition that must be true for the sample; None for no condition.
            limit: Stop after this number of matching rows.
            seconds: Approximate time limit. At least one row is checked.
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
        split: Name of the split to show; None shows all samples.

    Raises:
        ConfigError: `split` is not a name.
        StorageError: `shards` or `split` is empty, the shards cannot be listed, or a `classes.json` cannot be read.
        FolderIndexError: A folder has no valid index or has an invalid `classes.json`, or no sample is selected.
        SelectionError: A folder has no split with this name.
    """
    if not shards.strip() or split == "":
        raise StorageError("an empty path or split: name the shards, or write . for this folder.", url=shards)
    data = parse_settings(Sequential, {"shards": shards, "split": split, "classes": "any"}, where="view").plan()
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
        pipeline: Name of the pipeline; None if the file has only one.
        overrides: Settings to change first, each as `a.b.c=VALUE`.
        rank: Number of the rank, 0 <= rank < world_size.
        world_size: Number of ranks.
        gpus_per_node: Limit for the ranks per node if the configuration has no `ranks_per_node`. The largest divisor of
            `world_size` up to this number is used.
        epoch: Number of the epoch, from 0.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: The pipeline has no planned source or cannot run on `world_size` ranks, or `rank` is too large.
        StorageError: The shards cannot be listed.
        FolderIndexError: A folder has no index, or the index is invalid.
        SelectionError: A folder has no such split or selection.
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
    node_size = opened.loader.ranks_per_node or choose_ranks_per_node(gpus_per_node, world_size)
    own = _RankPositions(data.order, start, steps, rank, node_size)
    title = f"{PurePath(config).name}, pipeline {opened.name}: epoch {epoch}, rank {rank} of {world_size}"
    return SampleView(data, own, title)
