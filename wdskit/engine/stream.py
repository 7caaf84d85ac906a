"""The running pipeline of a stream: a `webdataset.DataPipeline` with epochs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
import webdataset
from torch.utils.data import get_worker_info

from wdskit.engine.batch import Batch
from wdskit.engine.outcome import Outcome
from wdskit.errors import PipelineError
from wdskit.order.draws import Draws
from wdskit.stages.base import Run
from wdskit.stages.collate import count_rows
from wdskit.stages.foreign import splits_nodes, splits_workers
from wdskit.stages.progress import IDLE
from wdskit.stages.stream_source import StreamSource
from wdskit.storage.urls import shown_url
from wdskit.text import as_int, plural


@dataclass(frozen=True)
class Layout:
    """Properties of the stages of a running stream.

    Attributes:
        draws: Gives the order of the shards; None for another library's source.
        cut: Index of the stage `with_epoch` in `DataPipeline.pipeline`; None without `with_epoch`.
        split_none: Whether the source has `split: none`, which allows a missing splitter.
        count: Takes a worker's number and the number of workers, and returns how many items an epoch of this worker
            yields. `count` is None if this number is unknown.
        uneven: Start of a message that says what drops values after `with_epoch`, such as "`select` drops values". The
            ranks then end at different steps. Empty if nothing drops values there.
        length: The length that `with_length` sets; None without `with_length`.
        batch: Number of samples in an item; 1 without batches.
        fingerprint: The settings that decide the order of samples, as plain JSON, for the state.
    """

    draws: Draws | None
    cut: int | None
    split_none: bool
    count: Callable[[int, int], int] | None = field(repr=False)
    uneven: str
    length: int | None
    batch: int
    fingerprint: dict[str, Any]


class StreamJob(NamedTuple):
    """A request to a worker for the next item of an epoch.

    Attributes:
        epoch: Number of the epoch.
        is_first: Whether this is the worker's first item of the epoch.
        continues: True: the stream continues where the last epoch ended. False: the epoch starts with new draws,
            because the consumer did not receive all of the last epoch.
    """

    epoch: int
    is_first: bool = False
    continues: bool = False


class _Epochs:
    """The next epoch of each worker, in memory that all processes of a torch DataLoader share.

    So `set_epoch` reaches running workers, and new workers continue the count of earlier workers.
    """

    def __init__(self, max_workers: int) -> None:
        self._set = torch.zeros(2, dtype=torch.int64).share_memory_()  # number of calls of `set`, and the last epoch
        # For each worker: number of calls of `set` that it has followed, and its next epoch.
        self._workers = torch.zeros((max_workers, 2), dtype=torch.int64).share_memory_()

    def set(self, epoch: int) -> None:
        """Make `epoch` the next epoch in every worker."""
        self._set[1] = epoch
        self._set[0] += 1

    def next(self, worker: int) -> int:
        """Return the epoch that worker number `worker` runs next.

        The first epoch is 0. After `set(epoch)`, the next epoch of the worker is `epoch`. Otherwise it is the epoch
        after the last epoch that the worker finished.
        """
        if self._workers[worker, 0] != self._set[0]:
            self._workers[worker] = self._set
        return int(self._workers[worker, 1])

    def finish(self, worker: int, epoch: int) -> None:
        """Make `epoch` + 1 the next epoch of the worker, unless `set` was called during the epoch."""
        self._workers[worker, 1] = epoch + 1


@dataclass
class _OpenStream:
    """The iterator of the stages that precede the `with_epoch` stage. It continues from epoch to epoch in this process.

    Attributes:
        values: Yields the values of these stages.
        next_epoch: The only epoch that may continue with `values`; None while an epoch runs or after a `break`.
        readers: Process id, worker number and number of workers of the process that reads `values`.
        close: Closes `values`.
    """

    values: Iterator[Any]
    next_epoch: int | None
    readers: tuple[int, ...]
    close: Callable[[], object]


def empty_epoch(epoch: int, *, num_bad: int = 0) -> PipelineError:
    """Return the error for an epoch without values, for the caller to raise. `num_bad` samples were bad."""
    if num_bad:
        msg = f"epoch {epoch} is empty: {plural(num_bad, 'sample')} of it {'are' if num_bad > 1 else 'is'} bad."
        return PipelineError(f"{msg}\n  Set `errors: {{max_bad: 0}}` to see the first error.")
    msg = f"epoch {epoch} is empty: the shards hold no samples, or the pipeline dropped all of them."
    return PipelineError(f"{msg}\n  Check its select and slice stages, and run `wdskit info` on the shards.")


class StreamPipeline(webdataset.DataPipeline):  # type: ignore[misc]  # webdataset ships no annotations that mypy can use
    """The running form of a `Pipeline` with a stream source.

    It is an `IterableDataset`, so torch's DataLoader and webdataset's WebLoader take it, with `batch_size=None`.

    Each iteration is one epoch. After a finished epoch, the next iteration has the next epoch number. `set_epoch` sets
    another number. Without `with_epoch`, an epoch reads each shard once, or never ends if the source is resampled. With
    `with_epoch`, the stream continues where the last epoch ended, as long as the process lives. After an unfinished
    epoch, such as after a `break`, the next iteration has the same epoch number, and the stream starts again with the
    first shard of this epoch.

    Args:
        stages: The running stages; the first is a source.
        run: The state that the stages share.
        layout: Properties of the stages.
        max_workers: Largest number of worker processes of a torch DataLoader that iterates the pipeline.
    """

    def __init__(self, stages: list[Any], run: Run, layout: Layout, max_workers: int) -> None:
        super().__init__(*stages)
        self.run = run
        self.layout = layout
        self._max_workers = max(1, max_workers)
        self._epochs = _Epochs(self._max_workers)
        self._open_stream: _OpenStream | None = None
        self._token: object = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_stream": None}

    @property
    def parts(self) -> list[Any]:
        """The stages, which worker processes must be able to unpickle."""
        found: list[Any] = self.pipeline
        return found

    def describe(self, major: int, minor: int) -> str:
        """Return the name of the sample on which a thread works: its shard, and its number in the shard.

        `major` and `minor` are the values of the thread's slot of the `Board`. Return "" if another library made the
        source, or if `major` is negative, as for a value after a stage of another library.
        """
        source = self.pipeline[0]
        if major < 0 or not isinstance(source, StreamSource):
            return ""
        shard = copy.copy(source.draws).shard(major)  # a copy, because `shard` changes it and another thread may use it
        return f"sample {minor} of {shown_url(source.shards.urls[shard])}"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration runs, in every worker of a torch DataLoader.

        Raises:
            PipelineError: `epoch` is not a whole number from 0 to 10**9.
        """
        epoch = as_int(epoch)
        if type(epoch) is not int or not 0 <= epoch <= 10**9:
            raise PipelineError(f"set_epoch({epoch!r}): an epoch is a whole number, 0 to {10**9}.")
        self._epochs.set(epoch)

    def num_items(self, num_workers: int) -> int | None:
        """Return the number of items that an epoch of this rank yields; None if unknown.

        `num_workers` is the number of worker processes, or 0 for the main process.
        """
        if self.layout.count is None:
            return None
        return sum(self.layout.count(worker, max(1, num_workers)) for worker in range(max(1, num_workers)))

    def with_epoch(self, *_: Any, **__: Any) -> NoReturn:
        """Raise PipelineError: webdataset's `with_epoch` would repeat the first samples for ever."""
        raise PipelineError("with_epoch comes before build(): Pipeline().stream(...).with_epoch(n).build().")

    repeat = with_epoch

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over one epoch of this worker.

        Raises:
            PipelineError: The pipeline was built for fewer workers, a splitter is missing, ranks would end at different
                steps, or the shards are too few for all workers.
        """
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if num_workers > self._max_workers:
            msg = f"{num_workers} workers: this pipeline was built for {self._max_workers}."
            raise PipelineError(f"{msg} Build it with build(max_workers={num_workers}).")
        check_splits(self.pipeline, self.layout, self.run.rank_info.world_size, num_workers)
        self.run.worker, self.run.num_workers = worker, num_workers
        epoch = self._epochs.next(worker)
        token = self._token = object()
        return self._iterate(epoch, token)

    def _iterate(self, epoch: int, token: object) -> Iterator[Any]:
        """Yield the values of an epoch. `token` identifies this iteration: a later iteration replaces `_token`.

        Raises:
            PipelineError: Another iteration has started, `close` was called before the end of the epoch, or the rank
                has one worker and the epoch has no values.
        """
        is_empty = self.run.num_workers == 1
        for batch in self.items(StreamJob(epoch, is_first=True, continues=True)):
            if batch.is_end:
                if is_empty:
                    raise empty_epoch(epoch, num_bad=self.run.num_bad)
                self._epochs.finish(self.run.worker, epoch)
                return
            is_empty = False
            yield batch.value
            if self._token is not token:
                msg = "another iterator of this pipeline has started in the meantime."
                raise PipelineError(f"{msg}\n  Finish one before the next, or build() a second pipeline.")

    @property
    def _readers(self) -> tuple[int, ...]:
        """The process id, the number of this worker and the number of workers."""
        return os.getpid(), self.run.worker, self.run.num_workers

    def close(self) -> None:
        """Close the stages that continue from epoch to epoch, unless a parent process opened them before a fork.

        An iteration that is not finished, in this or another thread, raises PipelineError at its next shard.
        """
        self.run.stream += 1  # ends a source that another thread reads, as after a timeout
        stream, self._open_stream = self._open_stream, None
        if stream is not None and stream.readers[0] == os.getpid():
            stream.close()

    def items(self, job: StreamJob) -> Iterator[Batch]:
        """Yield the items of one epoch of this worker, each as a `Batch`. The last batch has `is_end` and no value.

        Raises:
            PipelineError: Before the end of the epoch, `close` was called, or (with `with_epoch`) another iteration
                began.
        """
        cut, stop = self.layout.cut, len(self.pipeline)
        self.run.num_bad = 0
        if cut is None:  # ends after reading each shard once (a resampled source never ends)
            self._begin(job.epoch)
            number = self.run.stream
            values = self._chain(0, stop, None)
            close = weakref.finalize(self, _close, values)  # also when Python exits, before the modules are emptied
            try:
                for value in values:
                    self.run.num_yielded += 1
                    yield self._batch(value)
            finally:
                close()
            self._check_open(number)
            yield Batch(None, 0, self.run.take_bad(), is_end=True)
            return
        stream = self._open_stream
        if stream is None or not job.continues or (stream.next_epoch, stream.readers) != (job.epoch, self._readers):
            self.close()
            self._begin(job.epoch)
            values = self._chain(0, cut, None)
            # Closes the stream with its pipeline; when Python exits, before the modules are emptied.
            close = weakref.finalize(self, _close, values)
            stream = self._open_stream = _OpenStream(values, job.epoch, self._readers, close)
        self.run.epoch = job.epoch
        stream.next_epoch = None
        number = self.run.stream
        for value in self._chain(cut, stop, stream.values):
            yield self._batch(value)
        self._check_open(number)
        self.pipeline[cut].finish(stream.values)
        stream.next_epoch = job.epoch + 1
        yield Batch(None, 0, self.run.take_bad(), is_end=True)

    def _check_open(self, number: int) -> None:
        """Raise PipelineError if `run.stream` differs from `number`: the stream ended early, and values are missing."""
        if self.run.stream != number:
            raise PipelineError("this pipeline was closed, or iterated again, before the epoch ended.")

    def _begin(self, epoch: int) -> None:
        """Reset `run` to the first draw of an epoch."""
        draws = self.layout.draws
        stop = None if draws is None or self.layout.cut is not None else draws.stop(epoch)
        self.run.begin(epoch, first_draw=0 if draws is None else draws.first(epoch), stop_draw=stop)

    def _batch(self, value: Any) -> Batch:
        num_samples = _num_samples(value, self.layout.batch)
        return Batch(value, num_samples, self.run.take_bad(), timings=self.run.take_timings())

    def _chain(self, first: int, stop: int, values: Iterator[Any] | None) -> Iterator[Any]:
        """Return an iterator over the values after the stages `first` to `stop` - 1.

        `values` is the input of the first stage; None if the first stage is a source.
        """
        for stage in self.pipeline[first:stop]:
            values = self.invoke(stage) if values is None else self.invoke(stage, values)
        assert values is not None
        return iter(values)


class StreamBatches:
    """A `BatchFactory` for one worker's stream. Each job makes one item."""

    num_loops = 1

    def __init__(self, pipeline: StreamPipeline) -> None:
        self._pipeline = pipeline
        self._items: Iterator[Batch] = iter(())

    def open(self, job: StreamJob) -> StreamJob:
        """Return the job unchanged."""
        return job

    def __call__(self, job: StreamJob, *_: object) -> Outcome[list[Batch]]:
        """Return an `Outcome` of a list with the next batch of `StreamPipeline.items`, or of the error of a stage.

        The list is empty after the batch with `is_end` and after an error.
        """
        if job.is_first:
            self._items = self._pipeline.items(job)
        try:
            return Outcome.of(lambda: list(itertools.islice(self._items, 1)))
        finally:
            self._pipeline.run.board.main[1] = IDLE

    def close(self, deadline_s: float | None = None) -> None:  # noqa: ARG002 (a stage that hangs is left to its thread)
        """Close the stream, so that its stages close files and end threads. The next job starts a new stream.

        `deadline_s` is not used.
        """
        _close(self._items)
        self._pipeline.close()


def check_splits(stages: list[Any], layout: Layout, world_size: int, num_workers: int) -> None:
    """Check that a stream can be divided among ranks and workers. A source of another library is not checked.

    Raises:
        PipelineError: Without `split: none`, a splitter is missing, or ranks would end at different steps. Or an epoch
            without `with_epoch` has fewer shards than readers.
    """
    if layout.draws is None:
        return
    by_node, by_worker = any(map(splits_nodes, stages)), any(map(splits_workers, stages))
    if not layout.split_none:
        if world_size > 1 and not by_node:
            raise PipelineError(_no_splitter("split_by_node", f"{world_size} ranks"))
        if num_workers > 1 and not by_worker:
            raise PipelineError(_no_splitter("split_by_worker", f"{num_workers} workers"))
    if layout.cut is not None:
        if world_size > 1 and layout.uneven and not layout.split_none:
            msg = f"{layout.uneven} after with_epoch, so that ranks end at different steps, and DDP hangs."
            raise PipelineError(f"{msg}\n  Put with_epoch last; after `batched`, its n is a number of batches.")
        return
    if world_size > 1 and not layout.split_none and not layout.draws.resampled:  # a resampled stream has no end
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


def _no_splitter(name: str, who: str) -> str:
    msg = f"{who} would each read every shard: {name} is missing."
    return f"{msg}\n  Add it after the source, or set `split: none` if this is intended."


def _num_samples(value: Any, batch: int) -> int:
    """Return the number of samples in an item, for a pipeline with `batch` samples in each full batch.

    This is 1 if `batch` is 1. Otherwise it is the length of the first column that has a length and is not text or
    bytes; without such a column, it is `batch`. An item that is not a mapping or tuple is one column.
    """
    if batch == 1:
        return 1
    columns = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
    for column in columns:
        if not isinstance(column, (str, bytes)):
            with contextlib.suppress(TypeError):  # a tensor without axes
                return count_rows(column)
    return batch


def _close(values: Iterator[Any]) -> None:
    """Close an iterator, so that its stages close files and end threads.

    Do nothing if the iterator has no `close`, or if a thread still runs in the iterator.
    """
    close = getattr(values, "close", None)
    if close is not None and not getattr(values, "gi_running", False):
        close()
