"""The loader of streams: pipelines that run on in worker processes, epoch by epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from wdskit.engine.footing import keeping
from wdskit.engine.marks import How, Marks, Start
from wdskit.engine.splits import check_splits
from wdskit.engine.streaming import StreamPipeline
from wdskit.errors import PipelineError, StateError
from wdskit.loader.failures import Shipped
from wdskit.loader.loader import Loader
from wdskit.loader.passes import beside, unused_state
from wdskit.loader.stream_state import StreamState, read_state
from wdskit.loader.workers import Workers
from wdskit.pipeline.settings import LoaderSpec


class StreamLoader(Loader):
    """Iterate it once an epoch; what a stream yields comes out, from any number of worker processes.

    `len(loader)` is the number of items of an epoch where that follows from the pipeline.

    Args:
        pipeline: Built for this rank, for at least `spec.workers` workers.
        spec: Workers, prefetch and the rest.
        origin: Name of the pipeline, where the rank comes from, and the rest that `Loader` takes.

    Raises:
        PipelineError: The pipeline cannot be run with these workers.
    """

    def __init__(self, pipeline: StreamPipeline, spec: LoaderSpec, **origin: Any) -> None:
        capacity = spec.prefetch * spec.workers
        super().__init__(pipeline.run, spec, prefetch=spec.prefetch, capacity=capacity, **origin)
        self.pipeline = pipeline
        self._epoch = 0
        self._num_rows = max(1, spec.workers)
        self._next_worker = 0
        self._loaded: StreamState | None = None
        self._finished = -1  # the epoch that the consumer has had to its end last
        self._begun: int | None = None  # the one that it has begun last, and
        self._begun_as: tuple[Start, ...] = (Start(How.RESUME),) * self._num_rows  # how, and
        self._received = [0] * self._num_rows  # what it has had of that from each worker
        self._check()
        self._marks = pipeline.marks = Marks(
            self._num_rows, *keeping(pipeline.pipeline), batch=pipeline.layout.batch, ahead=spec.prefetch
        )
        self._workers = Workers(Shipped(pipeline), spec, stages=pipeline.pipeline)

    @property
    def _setting(self) -> dict[str, int]:
        """What must be the same for a state to be taken."""
        rank, world_size = self._place
        workers, threads = self.spec.workers, self.pipeline.run.num_threads
        return {"rank": rank, "world_size": world_size, "workers": workers, "threads": threads}

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration runs, or the one that runs now."""
        return self._epoch

    def _set_epoch(self, epoch: int, *, is_counted_elsewhere: bool) -> None:
        loaded = self._loaded
        if loaded is not None and is_counted_elsewhere:
            match beside(epoch, loaded.epoch, has_begun=any(loaded.received)):
                case "behind":
                    return
                case "ahead":
                    self._loaded = self._left(loaded)
        elif loaded is not None and epoch != self._epoch:
            raise unused_state(epoch, self._epoch)
        if epoch == self._finished and epoch != self._epoch:
            self._received = [0] * self._num_rows  # the same once more
        self._epoch = epoch

    def _left(self, loaded: StreamState) -> StreamState:
        """The beginning of the next epoch, where a loaded one is left."""
        epoch = loaded.epoch + 1
        if self.pipeline.layout.cut is None:
            return StreamState(epoch, 0, (Start(How.ANEW, epoch),) * self._num_rows)
        is_resumed = (How.LEAVE if start.how is How.RESUME else start.how for start in loaded.workers)
        starts = zip(loaded.workers, is_resumed, strict=True)
        return StreamState(epoch, 0, tuple(start._replace(how=how) for start, how in starts))

    def __len__(self) -> int:
        """Items of a whole epoch on this rank.

        Raises:
            TypeError: It does not follow from the pipeline.
        """
        count = self._num_items()
        length = count if self.pipeline.layout.length is None else self.pipeline.layout.length
        if length is None:
            raise TypeError(
                "the length of this pipeline does not follow from its stages. Add with_epoch or with_length."
            )
        return length

    @property
    def remaining(self) -> int:
        """Items between what the consumer has received and the end of the epoch. Raises as `len` does."""
        if self._loaded is not None:
            return len(self) - sum(self._loaded.received)
        return len(self) - (sum(self._received) if self._epoch == self._begun else 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer of this rank stands, as plain JSON: tens of KB, for the values that shuffles hold.

        Raises:
            StateError: A stage holds what cannot be saved.
        """
        if self.pipeline.layout.unsaved:
            msg = f"this stream cannot be resumed: {self.pipeline.layout.unsaved} holds what cannot be read again."
            raise StateError(f"{msg}\n  Use a planned source (exact, resampled), or leave that stage out.")
        return self._state().to_json(self._setting, self.pipeline.layout.fingerprint)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where a state says, with the next iteration.

        Args:
            state: From `state_dict` of this rank, with as many ranks, workers and threads.
            strict: Whether a state of another order of samples is refused, or logged and taken.

        Raises:
            StateError: It is no state, or one of other ranks, workers or data; what differs is named.
        """
        loaded = read_state(state, self._setting, self.pipeline.layout.fingerprint, strict=strict)
        if len(loaded.workers) != self._num_rows:
            raise StateError(f"state: it is damaged: {len(loaded.workers)} of {self._num_rows} workers.")
        self._loaded = loaded
        self._epoch = loaded.epoch
        self._is_inside = False

    def _state(self) -> StreamState:
        """What the marks say now; before the first item of a loaded epoch, what was loaded."""
        if self._loaded is not None:
            return self._loaded
        is_running = self._epoch == self._begun and any(self._received)
        workers = tuple(map(self._state_of, range(self._num_rows)))
        return StreamState(self._epoch, self._next_worker if is_running else 0, workers)

    def _state_of(self, worker: int) -> Start:
        """How one worker goes on in the epoch that is next or running. What it has ready beyond the consumer's place
        depends on timing, so nothing may follow from it.
        """
        epoch, layout, received = self._epoch, self.pipeline.layout, self._received[worker]
        begun = self._begun_as[worker]
        if epoch == self._begun:
            if begun.how is not How.RESUME and not received:
                return begun  # it may not have come to it
            return self._behind(How.RESUME, worker, received)
        if epoch == self._finished + 1:
            return Start(How.RESUME, epoch, begun=self.pipeline.start_of(worker, epoch, self._num_rows))
        if self._begun is None or epoch != self._begun + 1 or layout.cut is None or layout.unsaved:
            return Start(How.ANEW, epoch)
        if begun.how is How.LEAVE and not received:
            return begun  # it was not heard in the epoch that is left now
        return self._behind(How.LEAVE, worker, received)

    def _behind(self, how: How, worker: int, received: int) -> Start:
        """Behind items of the epoch that was begun last."""
        assert self._begun is not None
        begun = self._begun_as[worker]
        start = begun.begun
        if begun.how is not How.RESUME and received:  # where it began was for the worker to find out
            start = self.pipeline.start_of(worker, self._begun, self._num_rows)
        mark = self._marks.last(worker, self._begun, received)
        if mark is None and begun.mark is not None and begun.how is How.RESUME and begun.mark.num_items <= received:
            mark = begun.mark  # it was resumed not long ago
        return Start(how, self._begun, received, mark, start)

    def _items(self) -> Any:
        epoch = self._epoch
        shift = self._tell(epoch)
        wanted = self._num_items()
        num_items = sum(self._received)
        self._meter.begin(epoch)
        ready = 0
        items = iter(self._workers)
        for process, item, timings in items:
            worker = (process + shift) % self._num_rows
            self._received[worker] += 1
            self._next_worker = (worker + 1) % self._num_rows
            num_items += 1
            if num_items == wanted:  # before the last item is out, so that a checkpoint taken with it goes on
                num_items += sum(1 for _ in items)  # none; but each worker has said then where it stands at the end
                self._check_length(epoch, num_items, wanted)
                self._finish(epoch)
            self._meter.received(num_samples(item, self.pipeline.layout.batch), ready=ready, timings=timings)
            yield item
            self._meter.asked()
            ready = self._num_ready(epoch)
        if wanted is None:
            self._end(epoch, num_items)
        else:
            self._check_length(epoch, num_items, wanted)

    def _num_ready(self, epoch: int) -> int:
        """Items that workers have made and nobody has taken yet; 0 without workers."""
        if not self.spec.workers:
            return 0
        return sum(max(0, self._marks.given(at, epoch) - received) for at, received in enumerate(self._received))

    def _tell(self, epoch: int) -> int:
        """Say to the workers how the epoch starts, and return which of them is the first."""
        state, is_loaded = self._state(), self._loaded is not None
        starts = state.workers
        if not is_loaded and epoch == self._begun:  # it starts again
            starts = tuple(
                Start(How.RESUME, epoch, begun=begun.begun) if begun.how is How.RESUME else begun
                for begun in self._begun_as
            )
        goes_on = not is_loaded and epoch != self._begun and epoch == self._finished + 1
        for worker, start in enumerate(starts):
            self._marks.tell(worker, epoch, Start(How.NEXT) if goes_on else start)
        shift = state.next_worker if is_loaded else 0
        self._marks.set_shift(epoch, shift)
        self.pipeline.set_epoch(epoch)
        self._begun, self._begun_as, self._loaded = epoch, starts, None
        self._received = [start.num_items if start.how is How.RESUME else 0 for start in starts]
        return shift

    def _finish(self, epoch: int) -> None:
        if self._is_inside:  # no state was loaded meanwhile
            self._finished = epoch
            self._epoch = epoch + 1
            self._leave()

    def _check_length(self, epoch: int, num_items: int, wanted: int) -> None:
        if num_items != wanted:
            raise PipelineError(f"epoch {epoch} ended after {num_items} of {wanted} items.")

    def _end(self, epoch: int, num_items: int) -> None:
        """The end of an epoch whose length was not known."""
        if num_items == 0:
            msg = f"epoch {epoch} is empty: the shards hold no sample, or the pipeline dropped every one."
            raise PipelineError(f"{msg}\n  Look at its select and slice stages, and at `wdskit info` of the shards.")
        self._finish(epoch)

    def _num_items(self) -> int | None:
        return self.pipeline.num_items(self.spec.workers)

    def _check(self) -> None:
        """Refuse at once what would fail, hang or lie later."""
        layout, workers = self.pipeline.layout, self.spec.workers
        check_splits(self.pipeline.pipeline, layout, self._place.world_size, max(1, workers))
        count = self._num_items()
        if layout.length is not None and count is not None and layout.length != count:
            raise PipelineError(f"with_length says {layout.length}, but an epoch of this rank has {count} items.")
        if workers and layout.cut is not None and layout.stateless and not self.spec.persistent_workers:
            msg = f"workers that do not persist cannot take over what {layout.stateless} holds when an epoch ends."
            raise PipelineError(f"{msg}\n  Use persistent_workers: true.")


def num_samples(item: Any, batch: int) -> int:
    """Samples in what a stream yields, where `batch` are in its batches: the length of the first thing that has one."""
    if batch == 1:
        return 1
    columns = item.values() if isinstance(item, Mapping) else item if isinstance(item, tuple) else (item,)
    for column in columns:
        if not isinstance(column, (str, bytes)):
            with contextlib.suppress(TypeError):  # a tensor without axes
                return len(column)
    return batch
