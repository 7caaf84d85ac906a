"""Stages for streams only: the source `stream`, its splitters, `shuffle`, `select`, `with_epoch` and `with_length`.

A class has the stage's settings and its YAML form. Its `bind(context)` returns the running stage, a callable
`iterator -> iterator` that can be pickled before its first use. All running stages of a stream share a `StreamRun`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from wdskit.config.types import (
    CLASSES,
    Bool,
    Classes,
    Count,
    Kind,
    Natural,
    Shards,
    StageSpec,
    Weights,
    refuse,
    show,
)
from wdskit.dataset.classes import check_labels
from wdskit.dataset.index import ShardEntry, read_index
from wdskit.dataset.patterns import ShardList, check_found, find_shards, split_parts
from wdskit.dataset.samples import ShardReader, refuse_divided
from wdskit.dataset.shard import changed_bytes, check_digest, offsets_path, read_offsets
from wdskit.errors import PROCESS_ERRORS, PipelineError, SampleError, ShardError
from wdskit.order.keys import permutation, philox
from wdskit.stages.base import FOREIGN, NO_ORIGIN, Context, Function, Origin, RankInfo, RejectedSample, Run, Step
from wdskit.storage.urls import ByteStream, LocalFile, is_local, local_path, open_stream, shown_url

_END = object()
_CHUNK = 1024  # random words per call: 0.1 us each, against 5 us in single calls
_EPOCH_SHIFT = 32  # an epoch of draws with replacement has up to 2**32 draws
_MOST_EMPTY = 1000
"""A worker fails after this many empty shards in a row, times the number of all shards: it will never get a sample."""


class StreamRun(Run):
    """The state of a stream in one process.

    Iterators yield values without their origins, so that stages of webdataset and of wdskit can be mixed. A stage
    writes the origin of a value to `origin` before it yields the value. A stage that delays values stores their origins
    with them.

    Args:
        rank_info: Rank and world size.
        seed: Seed of the source.
        max_bad: Number of bad samples that a worker may skip in an epoch; with 0, a bad sample is an error.
        forgives_functions: Whether a sample is also skipped if a transform or a user's function fails on it.

    Attributes:
        is_endless: Whether the source starts again after each pass over the shards, as `with_epoch` needs it.
        num_shards: Number of shards in a pass; None if the source has no passes.
        origin: Origin of the value that a stage yielded last.
        num_bad: Number of samples that were skipped in the running epoch.
        bad: The skipped samples that `take_bad` has not returned yet.
    """

    def __init__(self, rank_info: RankInfo, seed: int, *, max_bad: int = 0, forgives_functions: bool = False) -> None:
        super().__init__(rank_info, seed)
        self.max_bad = max_bad
        self.forgives_functions = forgives_functions
        self.is_endless = False
        self.num_shards: int | None = None
        self.origin = NO_ORIGIN
        self.num_bad = 0
        self.bad: list[RejectedSample] = []

    def skips(self, err: SampleError, origin: Origin) -> bool:
        """Return True if a bad sample is skipped; the sample is then counted and added to `self.bad`. Return False if
        the caller must raise `err`: no bad sample is allowed, `errors` does not cover this kind of error, or the value
        is a batch.

        Raises:
            SampleError: The epoch of this worker has more bad samples than `errors.max_bad` allows.
        """
        is_function = err.is_function and not self.forgives_functions
        if not self.max_bad or is_function or origin.members or isinstance(err.__cause__, PROCESS_ERRORS):
            return False  # raising here would make a cycle: the traceback would refer to this frame
        self.num_bad += 1
        if self.num_bad > self.max_bad:
            msg = f"{err}\n  It is bad sample {self.num_bad} of an epoch of this worker, and errors.max_bad allows"
            raise SampleError(f"{msg} {self.max_bad}.", stage=err.stage, shard=err.shard, key=err.key) from err
        self.bad.append(RejectedSample(origin.minor, err.shard, err.key, str(err)))
        return True

    def take_bad(self) -> tuple[RejectedSample, ...]:
        """Return the samples that were skipped since the last call, in order."""
        bad, self.bad = tuple(self.bad), []
        return bad


class StreamStage(StageSpec):
    """A stage that turns a stream of values into another stream."""

    @abstractmethod
    def bind(self, run: StreamRun, context: Context) -> Callable[..., Iterator[Any]]:
        """Return the running stage: a callable that takes the iterator of the stage before and returns the iterator of
        this stage.

        Raises:
            PipelineError: The stage cannot run in this pipeline.
        """


class Stream(StreamStage):
    """The unplanned source: reads shards one after the other and needs no index."""

    name: ClassVar[str] = "stream"
    kind: ClassVar[Kind] = "source"
    order_version: ClassVar[int] = 3
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
    weights: Weights | None = Field(
        None, description="Relative frequency of each `::`-part or list item of `shards`. Needs `resampled: true`."
    )
    split: Literal["none"] | None = Field(
        None, description="`none`: every rank and worker reads everything. Otherwise a missing splitter is an error."
    )
    check: Literal["none", "size", "sha256"] = Field(
        "size",
        description="What to check in a shard that has an index. `size`: its size, and each sample when it is read. "
        "`sha256`: also its digest. `none`: nothing.",
    )
    classes: Classes = CLASSES

    @model_validator(mode="after")
    def _check_together(self) -> Stream:
        if self.weights is not None and not self.resampled:
            raise refuse("`weights` needs sampling with replacement. Add `resampled: true`.")
        if self.resampled and not self.shuffle_shards:
            raise refuse("`resampled` draws shards at random, so `shuffle_shards: false` has no effect; remove one.")
        parts = [self.shards] if isinstance(self.shards, str) else self.shards
        num_parts = sum(len(split_parts(part)) for part in parts)
        if self.weights is not None and len(self.weights) != num_parts:
            msg = f"{len(self.weights)} `weights` for {num_parts} parts of `shards`. Give one weight for each "
            raise refuse(f"{msg}`::`-part or list item.")
        if self.weights is not None and not math.isfinite(sum(self.weights)):
            raise refuse("the sum of `weights` is too large for a float. Divide all of them by the same number.")
        return self

    def bind(self, run: StreamRun, context: Context) -> StreamSource:  # noqa: ARG002
        """Find the shards, and return the source. Set `run.num_shards`.

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
        run.num_shards = None if self.resampled else len(shards.urls)
        return StreamSource(run, self, shards)

    def fingerprint(self, shards: ShardList) -> dict[str, Any]:
        """Return everything that decides the draws, as plain JSON. Of the shards, only the file names count, and if
        all shards have an index entry also their sha256.
        """
        names = "\n".join(url.rpartition("/")[2] for url in shards.urls)
        digests = [entry.sha256 if entry else "" for entry in shards.entries]
        settings = self.model_dump(exclude={"shards", "check", "classes"})
        return {
            "source": self.name,
            "order_version": self.order_version,
            **{name: value for name, value in settings.items() if value is not None},
            "shards": hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest(),
            "content": hashlib.sha256("".join(digests).encode()).hexdigest() if all(digests) else None,
        }


class StreamSource:
    """Yields the draws of a stream, the same in every process. A draw is a dict with the `url` of a shard and the
    number of the draw (`draw`).

    Args:
        run: The running stream.
        settings: The settings of the source.
        shards: The shards that the settings name.
    """

    def __init__(self, run: StreamRun, settings: Stream, shards: ShardList) -> None:
        self.run = run
        self.settings = settings
        self.shards = shards
        sizes = Counter(shards.parts)  # the shards of a part share its weight equally
        weights = settings.weights or [float(sizes[part]) for part in range(max(shards.parts) + 1)]
        self._bounds = np.cumsum([weights[part] / sizes[part] for part in shards.parts])

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the draws from the first draw of the running epoch on: of one pass over the shards, or without end if
        `run.is_endless` is True or the source is resampled.
        """
        epoch, urls = self.run.epoch, self.shards.urls
        first = epoch << _EPOCH_SHIFT if self.settings.resampled else epoch * len(urls)
        for draw, shard in enumerate(self._shards(epoch), first):
            yield {"url": urls[shard], "draw": draw}

    def _shards(self, epoch: int) -> Iterator[int]:
        seed, num_shards = self.settings.seed, len(self.shards.urls)
        if self.settings.resampled:
            bounds = self._bounds
            last = int(np.searchsorted(bounds, bounds[-1]))  # the last shard with a weight above 0
            for chunk in itertools.count():
                places = philox("draw", seed, epoch, chunk).random_raw(_CHUNK) * 2.0**-64 * bounds[-1]
                found = np.searchsorted(bounds, places, side="right")
                yield from np.minimum(found, last).tolist()  # a place may be rounded up
        for number in itertools.count(epoch) if self.run.is_endless else [epoch]:
            shuffled = self.settings.shuffle_shards
            yield from permutation(num_shards, "shard-order", seed, number).tolist() if shuffled else range(num_shards)


class SplitByNode(StreamStage):
    """Keep the shards that belong to this rank."""

    name: ClassVar[str] = "split_by_node"
    kind: ClassVar[Kind] = "splitter"

    def bind(self, run: StreamRun, context: Context) -> Callable[..., Iterator[Any]]:  # noqa: ARG002
        """Return `split_by_node` with `run`."""
        return functools.partial(split_by_node, run)


class SplitByWorker(StreamStage):
    """Keep the shards that belong to this worker process."""

    name: ClassVar[str] = "split_by_worker"
    kind: ClassVar[Kind] = "splitter"

    def bind(self, run: StreamRun, context: Context) -> Callable[..., Iterator[Any]]:  # noqa: ARG002
        """Return `split_by_worker` with `run`."""
        return functools.partial(split_by_worker, run)


def split_by_node(run: StreamRun, source: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over each R-th value of `source`, of R ranks; rank r begins with value r."""
    return itertools.islice(source, run.rank_info.rank, None, run.rank_info.world_size)


def split_by_worker(run: StreamRun, source: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over each W-th value of `source`, of W workers; worker w begins with value w."""
    return itertools.islice(source, run.worker, None, run.num_workers)


class ShardOpener:
    """Opens the shard of each draw and yields its samples.

    Args:
        run: The running stream.
        shards: All shards of the source.
        check: What is compared with the index entry of a shard. `none`: nothing. `size`: the size of the shard, and the
            number and the fields of its samples. If a local shard has an `.idx` file, the offsets of its samples are
            compared too. `sha256`: as `size`, and the sha256 of each shard is compared; of a local shard once, before
            its first sample, of another shard after its last sample. With `size` and `sha256`, a local shard without an
            entry is scanned once before its first sample, to find samples that are split over non-adjacent members.
    """

    def __init__(self, run: StreamRun, shards: ShardList, check: str) -> None:
        self.run = run
        pairs = zip(shards.urls, shards.entries, strict=True) if check != "none" else ()
        self._entries = {url: entry for url, entry in pairs if entry is not None}
        self._num_shards = len(shards.urls)
        self._check = check
        self._checked: set[str] = set()

    def __call__(self, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the samples of the shard of each draw in `source`, in order. Set `run.origin` before each sample.

        Raises:
            PipelineError: The stream is endless, and all shards of this worker are empty.
            ShardError: A shard is damaged, has a sample in two places, or differs from its index entry.
            FolderIndexError: The `.idx` file next to a shard belongs to another shard.
            StorageError: A shard cannot be opened or read.
        """
        num_empty = 0
        for item in source:
            num_empty += 1
            shown = shown_url(item["url"])
            samples = self._read(item["url"])
            close = weakref.finalize(self, samples.close)  # also when Python exits, before the modules are emptied
            try:
                for index, sample in enumerate(samples):
                    num_empty = 0
                    self.run.origin = Origin(shown, sample["__key__"], item["draw"], index, 0, epoch=self.run.epoch)
                    yield sample
            finally:
                close()
            if num_empty >= _MOST_EMPTY * self._num_shards:
                raise PipelineError(f"{shown}: this worker gets only shards that hold no samples. Pack them again.")

    def _read(self, url: str) -> Generator[dict[str, Any]]:
        """Yield the samples of a shard. The shard is closed at its end, after an error, and with the iterator."""
        entry, stream = self._entries.get(url), open_stream(url)
        try:
            comparison = None if entry is None else IndexComparison(url, entry, stream)
            read: Callable[[int], bytes] = stream.read
            if not isinstance(stream, LocalFile):
                if entry is not None and self._check == "sha256":
                    read = _hashing(stream, url, entry.sha256)
            elif url not in self._checked:
                if entry is not None and self._check == "sha256":
                    check_digest(stream, entry.sha256)
                elif entry is None and self._check != "none" and stream.is_regular:
                    refuse_divided(stream, shard=url)
                self._checked.add(url)
            yield from ShardReader(read, shard=shown_url(url), on_sample=comparison)
            if comparison is not None:
                comparison.end()
        finally:
            stream.close()


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


class IndexComparison:
    """Compares the samples of a shard with the folder's index while the samples are read.

    The size of the shard is compared, unless its server does not send it. The number of samples and their fields are
    compared, and for a local shard with an `.idx` file the offsets of its samples.

    Args:
        url: URL of the shard.
        entry: The index entry of the shard.
        stream: The open shard.

    Raises:
        ShardError: The size of the shard differs from the index.
        FolderIndexError: The `.idx` file next to the shard belongs to another shard.
    """

    def __init__(self, url: str, entry: ShardEntry, stream: ByteStream) -> None:
        self._url = url
        self._entry = entry
        self._offsets: list[int] | None = None
        self._fields = frozenset((*entry.fields, "__key__", "__url__"))
        self._unseen = set(entry.fields)
        self._num_samples = 0
        num_bytes = stream.num_bytes
        if num_bytes not in (None, entry.num_bytes):
            problem = f"the shard has {num_bytes} bytes, but its folder's index says {entry.num_bytes}"
            raise self._error(min(num_bytes, entry.num_bytes), problem)
        path = local_path(url) if is_local(url) else ""
        if path and offsets_path(path).is_file():
            self._offsets = read_offsets(path, num_bytes=entry.num_bytes, sha256=entry.idx_sha256).tolist()

    def __call__(self, number: int, start: int, stop: int, sample: Mapping[str, Any]) -> None:
        """Compare a sample with the index before it is yielded.

        Args:
            number: Number of the sample in the shard, from 0.
            start: Byte offset of the sample's first header.
            stop: Byte offset of the sample's end.
            sample: The fields of the sample.

        Raises:
            ShardError: The index has fewer samples, or other offsets for this sample; or the sample has a field that
                the index of the shard does not list. A field that is listed may be missing.
        """
        if number >= self._entry.num_samples:
            raise self._error(start, f"it holds more samples than the {self._entry.num_samples} in the index")
        if self._offsets is not None and self._offsets[number : number + 2] != [start, stop]:
            raise self._error(start, f"sample {number} is at bytes {start} to {stop}, but its .idx says otherwise")
        fields = sample.keys()
        if not fields <= self._fields:
            others = ", ".join(sorted(fields - self._fields))
            raise self._error(start, f"sample {number} has fields that are not in the index: {others}")
        self._unseen -= fields
        self._num_samples = number + 1

    def end(self) -> None:
        """Compare the number of samples and the fields of all samples with the index. Call it after the last sample.

        Raises:
            ShardError: Samples are missing, or no sample has a field that the index lists.
        """
        if self._num_samples != self._entry.num_samples:
            problem = f"it holds {self._num_samples} samples, but the index says {self._entry.num_samples}"
        elif self._unseen:
            problem = f"no sample has {', '.join(sorted(self._unseen))}, which the index lists"
        else:
            return
        raise self._error(self._entry.num_bytes, problem)

    def _error(self, offset: int, problem: str) -> ShardError:
        remedy = "It was damaged or replaced. Fetch it again, or run `wdskit index` if the shard is right."
        error = ShardError(shard=self._url, offset=offset, problem=problem, remedy=remedy)
        return error.after(self._num_samples)


class Shuffle(StreamStage):
    """Shuffle the values in a buffer."""

    name: ClassVar[str] = "shuffle"
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "size"

    size: Count = Field(description="Number of values in the buffer.", examples=[2000])
    initial: Count | None = Field(
        None, description="Number of values in the buffer before the first one comes out. Default: 100, at most `size`."
    )

    @field_validator("initial")
    @classmethod
    def _check_initial(cls, initial: int | None, info: Any) -> int | None:
        size = info.data.get("size")
        if initial is not None and size is not None and initial > size:
            raise refuse(f"{show(initial)} is more than the buffer holds (`size` is {show(size)}).")
        return initial

    def bind(self, run: StreamRun, context: Context) -> Callable[..., Iterator[Any]]:
        """Return `shuffle` with the settings of this stage and its label, the key of its random numbers."""
        initial = min(100 if self.initial is None else self.initial, self.size)
        return functools.partial(shuffle, run, context.label(self), self.size, initial)


def shuffle(run: StreamRun, label: str, size: int, initial: int, source: Iterable[Any]) -> Iterator[Any]:
    """Yield each value of `source` once, in random order. Before each value, set `run.origin` to its origin.

    As in webdataset, values enter a buffer of `size` values, and leave it in random order once it has `initial` values.
    Until the buffer is full, it takes two values for each value that it yields. At the end of each pass over the
    shards, the buffer yields all its values, so that an epoch of the size of the data has each sample once. The random
    numbers depend on the label, the seed, the epoch, the rank and the worker.
    """
    epoch = run.epoch

    def words() -> Iterator[int]:
        for chunk in itertools.count():
            bits = philox(f"shuffle:{label}", run.seed, epoch, run.rank_info.rank, run.worker, chunk)
            yield from bits.random_raw(_CHUNK).tolist()

    def number_of_pass(pair: tuple[Origin, Any]) -> int:
        origin = pair[0]
        return 0 if run.num_shards is None or origin.part & FOREIGN else origin.major // run.num_shards

    random_words, buffer = words(), list[tuple[Origin, Any]]()

    def pick() -> Any:
        at = next(random_words) * len(buffer) >> 64
        buffer[at], buffer[-1] = buffer[-1], buffer[at]
        run.origin, value = buffer.pop()
        return value

    for _, pairs in itertools.groupby(((run.origin, value) for value in source), number_of_pass):
        for pair in pairs:
            buffer.append(pair)
            if len(buffer) < size:
                buffer += itertools.islice(pairs, 1)  # noqa: B031 (takes one pair)
            if len(buffer) >= initial:
                yield pick()
        while buffer:
            yield pick()


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


class WithEpoch(StreamStage):
    """End an epoch after `n` values on each rank. The next epoch continues with the next value."""

    name: ClassVar[str] = "with_epoch"
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"

    n: Count = Field(description="Number per rank: of samples before `batched`, of batches after it.", examples=[1000])

    def bind(self, run: StreamRun, context: Context) -> EpochCut:  # noqa: ARG002
        """Return the `EpochCut`."""
        return EpochCut(run, self.n)


class EpochCut:
    """Cuts a stream into epochs of `n` values of a rank, which its workers share."""

    def __init__(self, run: StreamRun, n: int) -> None:
        self.run = run
        self.n = n

    def __call__(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield this worker's values of one epoch. For the next epoch, call this method again with the same iterator.

        Raises:
            PipelineError: The stream ended before the epoch was complete.
        """
        num_values = share(self.n, self.run.worker, self.run.num_workers)
        for number in range(num_values):
            value = next(source, _END)
            if value is _END:
                msg = f"with_epoch: the stream ended after {number} of the {num_values} values of this worker's epoch."
                raise PipelineError(f"{msg}\n  No stage before with_epoch can end the stream.")
            yield value


def share(total: int, part: int, num_parts: int) -> int:
    """Return how many of `total` items belong to `part`, if item i belongs to part i mod `num_parts`."""
    return (total - part + num_parts - 1) // num_parts


class WithLength(StageSpec):
    """Set the length that `len(loader)` returns. The values of an epoch do not change."""

    name: ClassVar[str] = "with_length"
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"

    n: Count = Field(description="The length.", examples=[1000])
