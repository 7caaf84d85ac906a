"""Stages for streams only: the source `stream`, its splitters, `shuffle`, `select`, `with_epoch` and `with_length`.

A class has the stage's settings and its YAML form. The source and `shuffle` have a method `bind` that returns the
running stage, a callable `iterator -> iterator` as in webdataset. The items of the iterators are pairs of a value and
its origin. All running stages of a stream share a `StreamRun`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import random
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from wdskit.config.types import CLASSES, Bool, Classes, Count, Kind, Natural, Shards, StageSpec, refuse
from wdskit.dataset.classes import check_labels
from wdskit.dataset.index import read_index
from wdskit.dataset.patterns import ShardList, check_found, find_shards
from wdskit.dataset.samples import ShardReader, refuse_divided
from wdskit.dataset.shard import changed_bytes, check_digest
from wdskit.errors import PROCESS_ERRORS, SampleError, ShardError, StorageError
from wdskit.order.base import permutation, philox
from wdskit.stages.base import Context, Function
from wdskit.stages.run import Origin, RankInfo, RejectedSample, Run, Step
from wdskit.storage.urls import ByteStream, LocalFile, open_stream, shown_url

_MOST_EMPTY = 100  # passes over the shards without a sample
_EPOCH_SHIFT = 32  # an epoch of draws with replacement has up to 2**32 draws


class StreamRun(Run):
    """The state of a stream in one process.

    Args:
        rank_info: Rank and world size.
        seed: Seed of the source.
        max_bad: Number of bad samples that a worker may skip in an epoch; with 0, a bad sample is an error.
        forgives_functions: Whether a sample is also skipped if a transform or a user's function fails on it.

    Attributes:
        is_endless: Whether the source starts again after each pass over the shards, as `with_epoch` needs it.
        pass_number: Number of the pass over the shards to which the last draw belongs; 0 if the source is resampled.
        num_samples: Number of samples in the item that the pipeline yielded last.
        bad: The samples that were skipped in the running epoch.
    """

    def __init__(self, rank_info: RankInfo, seed: int, *, max_bad: int = 0, forgives_functions: bool = False) -> None:
        super().__init__(rank_info, seed)
        self.max_bad = max_bad
        self.forgives_functions = forgives_functions
        self.is_endless = False
        self.pass_number = 0
        self.num_samples = 1
        self.bad: list[RejectedSample] = []

    def skips(self, err: SampleError, origin: Origin) -> bool:
        """Return True if a bad sample is skipped. Return False if the caller must raise `err`: `errors` does not cover
        this kind of error, or this worker has more bad samples than `errors.max_bad` allows for the rank.
        """
        if isinstance(err.__cause__, PROCESS_ERRORS) or (err.is_function and not self.forgives_functions):
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

    def bind(self, run: StreamRun) -> StreamSource:
        """Find the shards, and return the source.

        Raises:
            StorageError: The shards cannot be listed, or a `classes.json` cannot be read.
            FolderIndexError: An index is invalid or does not match the files, or is missing with `check: sha256` or for
                a remote folder or glob; a run of `wdskit pack` in a folder without an index is unfinished; a
                `classes.json` is invalid; or the labels of two folders mean different classes.
        """
        found = find_shards(self.shards, read_index if self.check == "sha256" else None, is_absolute=True)
        check_found(found)
        shards = ShardList.of(found)
        if self.classes == "same":
            check_labels(shards.folders, shards.folders.__getitem__)
        return StreamSource(run, self, shards)


class StreamSource:
    """Yields the samples of the shards that belong to this rank and worker, shard by shard.

    Draw d of all draws, which are the same in every process, belongs to rank d mod R of R ranks, and draw e of a rank
    to its worker e mod W of W workers.

    Args:
        run: The running stream.
        settings: The settings of the source. A local shard is compared with its sha256 once, before its first sample,
            another shard after its last sample. Otherwise a local shard is scanned once before its first sample, to
            find samples that are split over non-adjacent members.
        shards: The shards that the settings name.
    """

    def __init__(self, run: StreamRun, settings: Stream, shards: ShardList) -> None:
        self.run = run
        self.settings = settings
        self.urls = shards.urls
        self._entries = dict(zip(shards.urls, shards.entries, strict=True))
        self._checked: set[str] = set()

    def draws(self) -> Iterator[str]:
        """Yield the shards of all ranks and workers from the first draw of the running epoch on: of one pass over the
        shards, or without end if `run.is_endless` is True or the source is resampled.
        """
        run, num, seed, epoch = self.run, len(self.urls), self.settings.seed, self.run.epoch
        for number in itertools.count() if run.is_endless or self.settings.resampled else [0]:
            drawn: Iterable[int] = range(num)
            if self.settings.resampled:
                drawn = (philox("draw", seed, epoch, number).random_raw(num) % num).tolist()
            elif self.settings.shuffle_shards:
                drawn = permutation(num, "shard-order", seed, epoch + number).tolist()
            run.pass_number = 0 if self.settings.resampled else number
            yield from map(self.urls.__getitem__, drawn)

    def __call__(self) -> Iterator[tuple[dict[str, Any], Origin]]:
        """Yield the samples of one epoch, as described for `draws`, each with its origin.

        Raises:
            ShardError: A shard is damaged, has a sample in two places, or differs from its index entry.
            StorageError: A shard cannot be opened or read, or a stream without end has no sample.
        """
        run = self.run
        (rank, world_size, _), epoch = run.rank_info, run.epoch
        first_draw = epoch << _EPOCH_SHIFT if self.settings.resampled else epoch * len(self.urls)
        draws = enumerate(self.draws(), first_draw)
        num_empty = 0  # shards in turn
        for draw, url in itertools.islice(draws, rank + world_size * run.worker, None, world_size * run.num_workers):
            if num_empty > _MOST_EMPTY * len(self.urls):
                raise StorageError(
                    f"{shown_url(url)}: the last {num_empty} shards that were read have no sample.", url=url
                )
            num_empty += 1
            samples = self._read(url)
            close = weakref.finalize(self, samples.close)  # also when Python exits, before the modules are emptied
            try:
                for number, sample in enumerate(samples):
                    num_empty = 0
                    yield sample, Origin(sample["__url__"], sample["__key__"], draw, number, 0, epoch=run.epoch)
            finally:
                close()

    def _read(self, url: str) -> Generator[dict[str, Any]]:
        with contextlib.closing(open_stream(url)) as stream:
            yield from ShardReader(self._checked_read(stream, url), shard=shown_url(url))

    def _checked_read(self, stream: ByteStream, url: str) -> Callable[[int], bytes]:
        """Return the function that reads an open shard, after all checks that come before its first sample."""
        entry = self._entries[url]
        if entry is not None and stream.num_bytes not in (None, entry.num_bytes):
            problem = f"the shard has {stream.num_bytes} bytes, but its folder's index says {entry.num_bytes}"
            remedy = "Fetch it again, or run `wdskit index` if the shard is right."
            raise ShardError(shard=url, offset=entry.num_bytes, problem=problem, remedy=remedy)
        sha256 = entry.sha256 if entry is not None and self.settings.check == "sha256" else ""
        if not isinstance(stream, LocalFile):
            return _hashing(stream, url, sha256) if sha256 else stream.read
        if url not in self._checked:
            if sha256:
                check_digest(stream, sha256)
            elif stream.is_regular:
                refuse_divided(stream, shard=url)
            self._checked.add(url)
        return stream.read


def _hashing(stream: ByteStream, url: str, sha256: str) -> Callable[[int], bytes]:
    """Return a function that reads up to `size` bytes from `stream`. At the end, it raises ShardError if the sha256 of
    all bytes is not `sha256`.
    """
    digest, num_bytes = hashlib.sha256(), 0

    def read(size: int) -> bytes:
        nonlocal num_bytes
        part = stream.read(size)
        digest.update(part)
        num_bytes += len(part)
        if not part and digest.hexdigest() != sha256:
            raise changed_bytes(url, num_bytes, digest.hexdigest(), sha256)
        return part

    return read


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
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "size"

    size: Count = Field(description="Number of values in the buffer.", examples=[2000])
    initial: Count = Field(
        100, description="Number of values in the buffer before the first one comes out; at most `size`."
    )

    def bind(self, run: StreamRun, context: Context) -> Callable[..., Iterator[Any]]:
        """Return `shuffle` with the settings of this stage and its label, the key of its random numbers."""
        return functools.partial(shuffle, run, context.label(self), self.size, self.initial)


def shuffle(run: StreamRun, label: str, size: int, initial: int, source: Iterable[Any]) -> Iterator[Any]:
    """Yield each value of `source` once, in random order, from the buffer of webdataset's `shuffle`.

    At the end of each pass over the shards, the buffer yields all its values, so that an epoch of the size of the data
    has each sample once. The random numbers depend on the label, the seed, the epoch, the rank and the worker.
    """
    import webdataset  # here, because it imports torch

    rng = random.Random(f"{label}/{run.seed}/{run.epoch}/{run.rank_info.rank}/{run.worker}")  # noqa: S311
    for _, values in itertools.groupby(source, lambda _: run.pass_number):
        yield from webdataset.shuffle(size, initial=initial, rng=rng)(values)


class Select(StageSpec):
    """Keep the values for which a function returns true."""

    name: ClassVar[str] = "select"
    calls_user: ClassVar[bool] = True
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(description="A function, or the name of a registered one.", examples=["my_filter"])

    def step(self, context: Context) -> Step:
        """Return the function as a `Step`, whose result says whether a value is kept. PipelineError: The name of the
        function is unknown, or is that of a class that needs settings.
        """
        return Step(self.name, context.call(self.name, self.fn, context.label(self)), context.ordinal(self))


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
