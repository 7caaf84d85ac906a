"""Stages for streams only: the source `stream`, its splitters, `shuffle`, `select`, `with_epoch` and `with_length`.

A class has the stage's settings and its YAML form. The running stages map iterators to iterators, as in webdataset; the
items are pairs of a value and its origin. All running stages of a stream share a `StreamRun`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from wdskit.config.types import CLASSES, Bool, Classes, Count, Kind, Natural, Shards, StageSpec, refuse
from wdskit.dataset.classes import check_labels
from wdskit.dataset.index import read_index
from wdskit.dataset.patterns import list_shards
from wdskit.dataset.samples import ShardReader, refuse_divided
from wdskit.dataset.shard import DigestedFile, changed_bytes, changed_size, check_digest
from wdskit.errors import PROCESS_ERRORS, SampleError, StorageError
from wdskit.order.base import permutation, philox
from wdskit.stages.base import Context, Function
from wdskit.stages.run import Origin, RankInfo, RejectedSample, Run, Step
from wdskit.storage.urls import LocalFile, open_stream, shown_url


class StreamRun(Run):
    """The state of a stream in one process.

    Args:
        rank_info: Rank and world size.
        seed: Seed of the source.
        max_bad: Number of bad samples that a worker may skip in an epoch; with 0, a bad sample is an error.
        forgives_functions: Whether a sample is also skipped if a transform or a user's function fails on it.

    Attributes:
        num_items: Number of items of an epoch of this rank, which `with_epoch` sets. The source then starts again after
            each pass over the shards. None without `with_epoch`.
        pass_number: Number of the pass over the shards to which the value belongs that a stage passes on; 0 if the
            source is resampled.
        num_samples: Number of samples in the item that the pipeline yielded last.
        bad: The samples that were skipped in the running epoch, or since the loader took the last ones.
    """

    def __init__(self, rank_info: RankInfo, seed: int, *, max_bad: int = 0, forgives_functions: bool = False) -> None:
        super().__init__(rank_info, seed)
        self.max_bad = max_bad
        self.forgives_functions = forgives_functions
        self.num_items: int | None = None
        self.pass_number = 0
        self.num_samples = 1
        self.bad: list[RejectedSample] = []

    def skips(self, err: SampleError, origin: Origin) -> bool:
        """Return True if a bad sample is skipped. Return False if the caller must raise `err`: `errors` does not cover
        this kind of error, a whole batch failed, or this worker has more bad samples than `errors.max_bad` allows.
        """
        is_other = isinstance(err.__cause__, PROCESS_ERRORS) or bool(origin.members)
        if is_other or (err.is_function and not self.forgives_functions):
            return False  # raising here would make a cycle: the traceback would refer to this frame
        if self.max_bad:
            self.bad.append(RejectedSample(origin.minor, err.shard, err.key, str(err)))
        return 0 < len(self.bad) <= self.max_bad


class Stream(StageSpec):
    """The unplanned source: reads shards one after the other and needs no index."""

    name: ClassVar[str] = "stream"
    kind: ClassVar[Kind] = "source"
    shorthand: ClassVar[str | None] = "shards"

    shards: Shards = Field(
        description="A path, URL, glob, brace pattern or folder, several joined by `::`, or a list of these. A shard "
        "that is named twice is read twice.",
        examples=["train-{000000..000127}.tar"],
    )
    seed: Natural = Field(0, description="Seed of the shards' order and of everything random.")
    shuffle_shards: Bool = Field(
        True, description="Whether to shuffle the shards in each epoch; otherwise they keep the listed order."
    )
    resampled: Bool = Field(False, description="Whether to draw shards with replacement, without end.")
    check: Literal["size", "sha256"] = Field(
        "size",
        description="What to compare with the index, if the shards have one: only the `size` of each shard, or also "
        "its `sha256`.",
    )
    classes: Classes = CLASSES

    @model_validator(mode="after")
    def _check_together(self) -> Stream:
        if self.resampled and not self.shuffle_shards:
            raise refuse("`resampled` draws shards at random, so `shuffle_shards: false` has no effect; remove one.")
        return self


class StreamSource:
    """Yields the samples of the shards that belong to this rank and worker, shard by shard.

    Draw d of all draws, which are the same in every process, belongs to rank d mod R of R ranks, and draw e of a rank
    to its worker e mod W of W workers.

    Args:
        run: The running stream.
        settings: The settings of the source. A shard is compared with its sha256 after its last sample, and a local
            shard also once before its first sample. Without the sha256, a local shard is scanned once before its first
            sample, to find samples that are split over non-adjacent members.

    Attributes:
        shards: The shards that the settings name.

    Raises:
        StorageError: The shards cannot be listed, or a `classes.json` cannot be read.
        FolderIndexError: An index is invalid or does not match the files, or is missing with `check: sha256` or for a
            remote folder or glob; a run of `wdskit pack` in a folder without an index is unfinished; a `classes.json`
            is invalid; or the labels of two folders mean different classes.
    """

    def __init__(self, run: StreamRun, settings: Stream) -> None:
        self.run, self.settings = run, settings
        self.shards = list_shards(settings.shards, read_index if settings.check == "sha256" else None, is_absolute=True)
        self._checked: set[int] = set()
        if settings.classes == "same":
            check_labels(self.shards.folders, self.shards.folders.__getitem__)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the order of the shards, as plain JSON. Of the shards, it has a digest of the names
        without their folders.
        """
        names = [shown_url(url).rpartition("/")[2] for url in self.shards.urls]
        digest = hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()
        order = self.settings.model_dump(include={"seed", "shuffle_shards", "resampled"})
        return {"source": "stream", **order, "shards": digest}

    def draws(self) -> Iterator[int]:
        """Yield the numbers of the shards of all ranks and workers from the first draw of the running epoch on: of one
        pass over the shards, or without end if `run.num_items` is set or the source is resampled.
        """
        run, num, seed, epoch = self.run, len(self.shards.urls), self.settings.seed, self.run.epoch
        for number in itertools.count() if run.num_items or self.settings.resampled else [0]:
            drawn: Iterable[int] = range(num)
            if self.settings.resampled:
                drawn = (philox("draw", seed, epoch, number).random_raw(num) % num).tolist()
            elif self.settings.shuffle_shards:
                drawn = permutation(num, "shard-order", seed, epoch + number).tolist()
            run.pass_number = 0 if self.settings.resampled else number
            yield from drawn

    def __call__(self) -> Iterator[tuple[dict[str, Any], Origin]]:
        """Yield the samples of one epoch, as described for `draws`, each with its origin.

        Raises:
            ShardError: A shard is damaged, has a sample in two places, or differs from its index entry.
            StorageError: A shard cannot be opened or read, or a stream without end has no sample.
        """
        run, num = self.run, len(self.shards.urls)
        (rank, world_size, _), epoch = run.rank_info, run.epoch
        # An epoch of draws with replacement has up to 2**32 draws.
        draws = enumerate(self.draws(), epoch << 32 if self.settings.resampled else epoch * num)
        num_empty = 0  # shards in turn
        for draw, at in itertools.islice(draws, rank + world_size * run.worker, None, world_size * run.num_workers):
            samples = self._read(at)
            close = weakref.finalize(self, samples.close)  # also when Python exits, before the modules are emptied
            try:
                for number, sample in enumerate(samples):
                    num_empty = -1
                    yield sample, Origin(sample["__url__"], sample["__key__"], draw, number, 0, epoch=run.epoch)
            finally:
                close()
            num_empty += 1
            if num_empty > 100 * num:
                url = shown_url(self.shards.urls[at])
                raise StorageError(f"{url}: the last {num_empty} shards that were read have no sample.", url=url)

    def _read(self, at: int) -> Generator[dict[str, Any]]:
        """Yield the samples of shard `at`."""
        url, entry = self.shards.urls[at], self.shards.entries[at]
        sha256 = entry.sha256 if entry is not None and self.settings.check == "sha256" else ""
        with contextlib.closing(open_stream(url)) as stream:
            if entry is not None and stream.num_bytes not in (None, entry.num_bytes):
                raise changed_size(url, stream.num_bytes, entry.num_bytes)
            if isinstance(stream, LocalFile) and at not in self._checked:
                if sha256:
                    check_digest(stream, sha256)
                elif stream.is_regular:
                    refuse_divided(stream, shard=url)
                self._checked.add(at)
            digested = DigestedFile(stream)
            yield from ShardReader(digested.read if sha256 else stream.read, shard=shown_url(url))
            if sha256 and digested.sha256.hexdigest() != sha256:
                raise changed_bytes(url, digested.num_bytes, digested.sha256.hexdigest(), sha256)


class SplitByNode(StageSpec):
    """Keep the shards that belong to this rank."""

    name: ClassVar[str] = "split_by_node"
    kind: ClassVar[Kind] = "splitter"


class SplitByWorker(StageSpec):
    """Keep the shards that belong to this worker process."""

    name: ClassVar[str] = "split_by_worker"
    kind: ClassVar[Kind] = "splitter"


class Shuffle(StageSpec):
    """Shuffle the values in a buffer."""

    name: ClassVar[str] = "shuffle"
    kind: ClassVar[Kind] = "streamed"
    shorthand: ClassVar[str | None] = "size"

    size: Count = Field(description="Number of values in the buffer.", examples=[2000])
    initial: Count = Field(
        100, description="Number of values in the buffer before the first one comes out; at most `size`."
    )

    def shuffled(self, run: StreamRun, label: str, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value of `source` once, in random order, from the buffer of webdataset's `shuffle`.

        At the end of each pass over the shards, the buffer yields all its values, so that an epoch of the size of the
        data has each sample once. The random numbers depend on the label, the seed, the epoch, the rank and the worker.
        """
        import webdataset  # here, because it imports torch

        rng = random.Random(f"{label}/{run.seed}/{run.epoch}/{run.rank_info.rank}/{run.worker}")  # noqa: S311
        for number, values in itertools.groupby(source, lambda _: run.pass_number):
            for value in webdataset.shuffle(self.size, initial=self.initial, rng=rng)(values):
                ahead, run.pass_number = run.pass_number, number  # the source may have begun the next pass
                yield value
                run.pass_number = ahead


class Select(StageSpec):
    """Keep the values for which a function returns true."""

    name: ClassVar[str] = "select"
    calls_user: ClassVar[bool] = True
    kind: ClassVar[Kind] = "streamed"
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(description="A function, or the name of a registered one.", examples=["my_filter"])

    def step(self, context: Context) -> tuple[Step, Context]:
        """Return the function as a `Step`, whose result says whether a value is kept, and the context of the next
        stage. PipelineError: The name of the function is unknown, or is that of a class that needs settings.
        """
        function = context.call(self.name, self.fn, context.label(self))
        return Step(self.name, function, context.ordinal(self)), context.after(self)


class WithEpoch(StageSpec):
    """End an epoch after `n` values on each rank. The next epoch continues with the next value."""

    name: ClassVar[str] = "with_epoch"
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"

    n: Count = Field(description="Number per rank: of samples before `batched`, of batches after it.", examples=[1000])


class WithLength(StageSpec):
    """Set the length that `len(loader)` returns. The values of an epoch do not change."""

    name: ClassVar[str] = "with_length"
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"

    n: Count = Field(description="The length.", examples=[1000])
