"""A stream pipeline that runs: a `webdataset.DataPipeline` that knows epochs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import webdataset
from torch.utils.data import get_worker_info

from wdskit.engine.batch import Batch
from wdskit.engine.outcome import Outcome
from wdskit.engine.stream_epochs import SharedEpochs
from wdskit.engine.stream_position import EpochPosition, How, Position, Positions, Start, clear, max_numbers, spacing
from wdskit.errors import PipelineError
from wdskit.order.draws import Draws
from wdskit.stages.base import Run
from wdskit.stages.foreign import splits_nodes, splits_workers
from wdskit.stages.progress import IDLE
from wdskit.stages.stream_source import StreamSource
from wdskit.storage.urls import shown_url
from wdskit.text import as_int, plural


@dataclass(frozen=True)
class Layout:
    """What a running stream must know of its own list, places being those of `DataPipeline.pipeline`.

    Attributes:
        draws: The order of the shards; None where the source is not ours.
        cut: Place of with_epoch, None without.
        tars: Place of the stage that opens the shards, None where it is not ours.
        split_none: Whether a missing splitter was asked for.
        count: Number of items that an epoch of a worker yields, as a function of (worker, workers); None where unknown.
        length: What with_length says.
        stateless: Why the part before with_epoch cannot be rebuilt in another process, "" where it can.
        unsaved: The same of the whole pipeline, in the middle of an epoch.
        batch: Samples of an item.
        fingerprint: What the order of samples follows from, as plain JSON, for the state.
    """

    draws: Draws | None
    cut: int | None
    tars: int | None
    split_none: bool
    count: Callable[[int, int], int] | None = field(repr=False)
    length: int | None
    stateless: str
    unsaved: str
    batch: int
    fingerprint: dict[str, Any]


class Progress(NamedTuple):
    """What is known of a stream with one of its items.

    Attributes:
        begun: Where the epoch began, with its first item; None where that began a stream.
        mark: Where it stands behind this item, now and then.
        following: Where the next epoch begins, once nothing more is taken for this one.
        is_end: Whether the epoch is over, and this no item.
    """

    begun: Position | None = None
    mark: EpochPosition | None = None
    following: Position | None = None
    is_end: bool = False


class StreamJob(NamedTuple):
    """Ask a worker for the next item of an epoch.

    Attributes:
        epoch: Which.
        start: With the first item: how it starts.
        last_finished: The epoch that the consumer has had to its end last, -1 before.
    """

    epoch: int
    start: Start | None = None
    last_finished: int = -1


@dataclass
class _Live:
    """The part of a pipeline up to its with_epoch, running on from epoch to epoch in this process."""

    values: Iterator[Any]
    next_epoch: int | None
    readers: tuple[int, ...]
    close: Callable[[], object]


def empty_epoch(epoch: int) -> PipelineError:
    """The error of an epoch without values."""
    msg = f"epoch {epoch} is empty: the shards hold no samples, or the pipeline dropped all of them."
    return PipelineError(f"{msg}\n  Check its select and slice stages, and run `wdskit info` on the shards.")


class StreamPipeline(webdataset.DataPipeline):  # type: ignore[misc]  # webdataset ships no annotations that mypy can use
    """The running form of a `Pipeline` with a stream source.

    It is an `IterableDataset`, so torch's DataLoader and webdataset's WebLoader take it, with `batch_size=None`.

    One iteration is one epoch. Without `with_epoch` that is each shard once; with it, the stream goes on where the last
    epoch ended, in workers that persist and in workers that do not. The epoch counts itself on; `set_epoch` sets it. An
    epoch that is iterated again, after a break for instance, gives the same values again.

    Args:
        stages: What runs, a source first.
        run: What they share.
        layout: Of the stages.
        max_workers: Most worker processes of a torch DataLoader that it will be used with.
    """

    def __init__(self, stages: list[Any], run: Run, layout: Layout, max_workers: int) -> None:
        super().__init__(*stages)
        self.run = run
        self.layout = layout
        self._positions = Positions(self.pipeline, run, layout.draws, layout.cut, layout.tars)
        self._spacing = spacing(self.pipeline, layout.batch)
        before_cut = [] if layout.cut is None else self.pipeline[: layout.cut]
        self._epochs = SharedEpochs(max(1, max_workers), max_numbers(before_cut))
        self._live: _Live | None = None
        self._turn: object = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}

    @property
    def num_threads(self) -> int:
        """Threads of each process that make its items, one after the other: its stages have threads of their own."""
        return 1

    def describe(self, major: int, minor: int) -> str:
        """Name the sample that a slot of the `Board` says: its shard, and its number there; "" where only a stage that
        is not wdskit's knows it.
        """
        source = self.pipeline[0]
        if major < 0 or not isinstance(source, StreamSource):
            return ""
        shard = copy.copy(source.draws).shard(major)  # which keeps an order, and may be at work in another thread
        return f"sample {minor} of {shown_url(source.shards.urls[shard])}"

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` >= 0 the one that the next iteration runs, in every worker of a torch DataLoader."""
        epoch = as_int(epoch)
        if type(epoch) is not int or epoch < 0:
            raise PipelineError(f"set_epoch({epoch!r}): an epoch is a whole number, 0 or more.")
        self._epochs.set(epoch)

    def num_items(self, num_workers: int) -> int | None:
        """Items that an epoch of this rank yields with so many workers (0: in the main process); None where unknown."""
        if self.layout.count is None:
            return None
        return sum(self.layout.count(worker, max(1, num_workers)) for worker in range(max(1, num_workers)))

    def with_epoch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: webdataset's would repeat the first samples for ever."""
        raise PipelineError("with_epoch comes before build(): Pipeline().stream(...).with_epoch(n).build().")

    repeat = with_epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate one epoch in this process."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if num_workers > self._epochs.max_workers:
            msg = f"{num_workers} workers: this pipeline was built for {self._epochs.max_workers}."
            raise PipelineError(f"{msg} Build it with build(max_workers={num_workers}).")
        check_splits(self.pipeline, self.layout, self.run.place.world_size, num_workers)
        self.run.worker, self.run.num_workers = worker, num_workers
        epoch = self._epochs.next(worker)
        turn = self._turn = object()
        return self._alone(epoch, turn)

    def _alone(self, epoch: int, turn: object) -> Iterator[Any]:
        """The values, as long as no other iteration of this pipeline starts: they would share one place in the stream.

        Raises:
            PipelineError: One has; or this is the only worker, and the epoch has no values.
        """
        run, epochs = self.run, self._epochs
        ranks = (*run.place[:2], run.num_workers)
        begun = epochs.load(run.worker, epoch, ranks)
        last = epochs.last_finished(run.worker)
        is_empty = run.num_workers == 1
        for batch in self.items(StreamJob(epoch, Start(How.NEXT, epoch, begun=begun), last)):
            for at, position in ((epoch, batch.position.begun), (epoch + 1, batch.position.following)):
                if position is not None:
                    epochs.save(run.worker, at, ranks, position)
            if batch.position.is_end:
                if is_empty:
                    raise empty_epoch(epoch)
                epochs.finish(run.worker, epoch)
                return
            is_empty = False
            yield batch.value
            if self._turn is not turn:
                msg = "another iterator of this pipeline has started in the meantime."
                raise PipelineError(f"{msg}\n  Finish one before the next, or build() a second pipeline.")

    def start(self, worker: int, num_workers: int) -> StreamItems:
        """What gives the items of one worker: called with a StreamJob, it gives the next item of its epoch."""
        self.run.worker, self.run.num_workers = worker, num_workers
        return StreamItems(self)

    @property
    def _readers(self) -> tuple[int, ...]:
        """Who reads: this process, and which of how many workers it is."""
        return os.getpid(), self.run.worker, self.run.num_workers

    def close(self) -> None:
        """End the stream that goes on from epoch to epoch, unless it is that of a process that this was forked from."""
        live, self._live = self._live, None
        if live is not None and live.readers[0] == os.getpid():
            live.close()

    def items(self, job: StreamJob) -> Iterator[Batch]:
        """One epoch of this worker; the `position` of each batch is a Progress, and the last one is its end."""
        start = job.start or Start(How.NEXT)
        return self._whole(job.epoch, start) if self.layout.cut is None else self._part(job, start)

    def _whole(self, epoch: int, start: Start) -> Iterator[Batch]:
        """One epoch that ends by itself: each shard once (or no end at all, resampled without with_epoch)."""
        self._positions.begin(epoch, start.position, self.pipeline)
        for value, mark in self._marked(start, self._chain(0, len(self.pipeline), None)):
            self.run.num_heard += 1
            yield self._batch(value, Progress(mark=mark))
        yield Batch(None, 0, position=Progress(is_end=True))

    def _part(self, job: StreamJob, start: Start) -> Iterator[Batch]:
        """One epoch of with_epoch: the next part of a stream that goes on."""
        epoch, cut = job.epoch, self.layout.cut or 0
        live, begun = self._live, None
        if start.how is not How.NEXT or live is None or (live.next_epoch, live.readers) != (epoch, self._readers):
            live, begun = self._restart(job, start)
        self.run.epoch = epoch
        if start.how is not How.RESUME or start.mark is None:
            clear(self.pipeline[cut:])
        live.next_epoch = None
        following = None
        for value, mark in self._marked(start, self._chain(cut, len(self.pipeline), live.values)):
            now = None
            if following is None and not self.pipeline[cut].left:  # all that this epoch takes is taken
                now = following = self._between_epochs()
            yield self._batch(value, Progress(begun, mark, now))
            begun = None
        self.pipeline[cut].finish(live.values)
        live.next_epoch = epoch + 1
        following = following or self._between_epochs()
        yield Batch(None, 0, position=Progress(begun, None, following, is_end=True))

    def _restart(self, job: StreamJob, start: Start) -> tuple[_Live, Position | None]:
        """A new stream that stands where the epoch starts, and that position where it was not known before."""
        epoch, stateless = job.epoch, self.layout.stateless
        if stateless and start.how is not How.ANEW and job.last_finished == epoch - 1 >= 0:
            raise PipelineError(_cannot_go_on(stateless))
        self.close()
        first = start.epoch if start.how is How.LEAVE else epoch
        cut = self.layout.cut or 0
        self._positions.begin(first, start.position, self.pipeline if start.mark else self.pipeline[:cut])
        values = self._chain(0, cut, None)
        # It is closed with its pipeline; when Python exits, before its modules are emptied.
        live = self._live = _Live(values, epoch, self._readers, weakref.finalize(self, _close, values))
        if start.how is How.LEAVE:
            self.run.epoch = first
            rest = self._chain(cut, len(self.pipeline), values)
            for _ in itertools.islice(rest, start.num_skipped):
                self.run.num_heard += 1
        is_new = start.how in (How.LEAVE, How.ANEW) or start.position is None
        return live, self._between_epochs() if is_new else None

    def _marked(self, start: Start, values: Iterator[Any]) -> Iterator[tuple[Any, EpochPosition | None]]:
        """The values behind those that were received before, some with a mark."""
        is_resumed = start.how is How.RESUME
        first = start.mark.num_items if is_resumed and start.mark is not None else 0
        for number, value in enumerate(values, first + 1):
            mark = None
            if number % self._spacing == 0 and not self.layout.unsaved:
                left = 0 if self.layout.cut is None else self.pipeline[self.layout.cut].left
                mark = EpochPosition(number, self._positions.take(self.pipeline, left))
            if not is_resumed or number > start.num_items:
                yield value, mark

    def _batch(self, value: Any, progress: Progress) -> Batch:
        return Batch(value, _num_samples(value, self.layout.batch), (), None, self.run.take_timings(), progress)

    def _between_epochs(self) -> Position | None:
        """Where the stream stands, for the epoch that begins there; None where that cannot be said."""
        if self.layout.stateless or self.layout.draws is None:
            return None
        return self._positions.take(self.pipeline[: self.layout.cut])

    def _chain(self, first: int, stop: int, values: Iterator[Any] | None) -> Iterator[Any]:
        """The stages of a part of the list, each fed by the one before."""
        for stage in self.pipeline[first:stop]:
            values = self.invoke(stage) if values is None else self.invoke(stage, values)
        assert values is not None
        return iter(values)


class StreamItems:
    """The items of one worker, one a call, as an `engine.batch.Maker`."""

    def __init__(self, pipeline: StreamPipeline) -> None:
        self._pipeline = pipeline
        self._items: Iterator[Batch] = iter(())

    def begin(self, job: StreamJob) -> StreamJob:
        """Nothing: a stream reads ahead by itself."""
        return job

    def __call__(self, work: StreamJob, *_: object) -> Outcome[list[Batch]]:
        """The next item of an epoch; none behind its end."""
        if work.start is not None:
            self._items = self._pipeline.items(work)
        try:
            return Outcome.of(lambda: list(itertools.islice(self._items, 1)))
        finally:
            self._pipeline.run.board.main[1] = IDLE

    def close(self) -> None:
        """Let the stages put away files and threads; the next job begins a new stream where its epoch starts."""
        _close(self._items)
        self._pipeline.close()


def check_splits(stages: list[Any], layout: Layout, world_size: int, num_workers: int) -> None:
    """Refuse a stream that ranks or workers would read twice, or that has too few shards.

    Raises:
        PipelineError: Says which splitter is missing, or the numbers.
    """
    if layout.draws is None:
        return
    by_node, by_worker = splitters_of(stages)
    if not layout.split_none:
        if world_size > 1 and not by_node:
            raise PipelineError(_no_splitter("split_by_node", f"{world_size} ranks"))
        if num_workers > 1 and not by_worker:
            raise PipelineError(_no_splitter("split_by_worker", f"{num_workers} workers"))
    if layout.cut is not None:
        return
    if world_size > 1 and not layout.split_none:
        msg = f"a stream over {world_size} ranks ends at a different step on each rank, and DDP hangs."
        raise PipelineError(
            f"{msg}\n  Add with_epoch: n, which counts per rank and continues where the last epoch ended."
        )
    num_readers = (world_size if by_node else 1) * (num_workers if by_worker else 1)
    if layout.draws.num_shards < num_readers and not layout.draws.resampled:
        msg = f"{layout.draws.num_shards} shards cannot feed {world_size} ranks x {num_workers} workers one shard each."
        if world_size == 1:
            msg = f"{plural(layout.draws.num_shards, 'shard')} cannot feed {num_workers} workers one shard each."
        raise PipelineError(f"{msg}\n  Use fewer workers, more shards (`wdskit pack --max-samples`), or with_epoch.")


def splitters_of(stages: list[Any]) -> tuple[bool, bool]:
    """Whether the stages split the shards by node, and by worker."""
    return any(map(splits_nodes, stages)), any(map(splits_workers, stages))


def _no_splitter(name: str, who: str) -> str:
    msg = f"{who} would each read every shard: {name} is missing."
    return f"{msg}\n  Add it after the source, or set `split: none` if this is intended."


def _num_samples(value: Any, batch: int) -> int:
    """Samples of an item, where `batch` are in a batch: the length of the first thing in it that has one."""
    if batch == 1:
        return 1
    columns = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
    for column in columns:
        if not isinstance(column, (str, bytes)):
            with contextlib.suppress(TypeError):  # a tensor without axes
                return len(column)
    return batch


def _close(values: Iterator[Any]) -> None:
    """Let the stages put away files and threads; another library's iterator may have nothing to close. One in which a
    thread hangs is left to that thread.
    """
    close = getattr(values, "close", None)
    if close is not None and not getattr(values, "gi_running", False):
        close()


def _cannot_go_on(why: str) -> str:
    msg = (
        f"{why} holds values that cannot be read again, so an epoch cannot be repeated, or continue in another process."
    )
    return f"{msg}\n  Finish every epoch, and keep the workers: persistent_workers=True."
