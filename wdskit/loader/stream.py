"""The loader of streams: pipelines that run on in worker processes, epoch by epoch."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from wdskit.engine.batch import Batch
from wdskit.engine.stream import Progress, StreamJob, StreamPipeline, check_splits, empty_epoch
from wdskit.engine.stream_position import STATE_VERSION, How, Start, StreamState
from wdskit.errors import PipelineError, StateError
from wdskit.loader.base import Loader
from wdskit.loader.device import hand_over, pin_mover
from wdskit.loader.prefetch import make_pool
from wdskit.loader.starting import start_fork_server, start_method_of
from wdskit.loader.states import beside, compare_fingerprints, unused_state
from wdskit.pipeline.settings import DEFAULT_PREFETCH, LoaderSpec

logger = logging.getLogger(__name__)


class StreamLoader(Loader):
    """Iterate it once an epoch; what a stream yields comes out, from any number of worker processes.

    `len(loader)` is the number of items of an epoch where that follows from the pipeline.

    Args:
        pipeline: Built for this rank.
        spec: Workers, prefetch and the rest.
        origin: Name of the pipeline, where the rank comes from, and the rest that `Loader` takes.

    Raises:
        PipelineError: The pipeline cannot be run with these workers.
    """

    def __init__(self, pipeline: StreamPipeline, spec: LoaderSpec, **origin: Any) -> None:
        super().__init__(pipeline.run, spec, **origin)
        self.pipeline = pipeline
        self._epoch = 0
        self._num_workers = max(1, spec.workers)
        self._loaded: StreamState | None = None
        self._finished = -1  # the epoch that the consumer has had to its end last
        self._begun: int | None = None  # the one that it has begun last, and
        self._begun_as: tuple[Start, ...] = (Start(How.RESUME),) * self._num_workers  # how, and
        self._received = [0] * self._num_workers  # what it has had of that from each worker, and
        self._next_worker = 0  # whose turn it is
        self._progress = [Progress()] * self._num_workers  # what each has said in it last
        self._waiting: deque[tuple[int, Any]] = deque()  # workers and the tickets of their jobs, in turns
        self._check()
        if pipeline.layout.unsaved:
            msg = "this stream cannot be resumed, and `state_dict` is an error: %s holds what cannot be read again"
            logger.warning(msg, pipeline.layout.unsaved)
        start_method = functools.partial(start_method_of, pipeline.pipeline, spec.start_method)
        if spec.workers:
            start_fork_server(start_method())
        self._pool = make_pool(pipeline, spec.workers, start_method, spec.timeout)
        self._mover = pin_mover(spec)

    @property
    def _setting(self) -> dict[str, int]:
        """What must be the same for a state to be taken."""
        rank, world_size, _ = self._place
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
            self._received = [0] * self._num_workers  # the same once more
        self._epoch = epoch

    def _left(self, loaded: StreamState) -> StreamState:
        """The beginning of the next epoch, where a loaded one is left."""
        epoch = loaded.epoch + 1
        if self.pipeline.layout.cut is None:
            return StreamState(epoch, 0, (Start(How.ANEW, epoch),) * self._num_workers)
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
            raise TypeError("the stages of this pipeline do not define its length. Add with_epoch or with_length.")
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
        layout = self.pipeline.layout
        if layout.unsaved:
            msg = f"this stream cannot be resumed: {layout.unsaved} holds what cannot be read again."
            raise StateError(f"{msg}\n  Use a planned source (exact, resampled), or leave that stage out.")
        return {**self._state().to_json(), "setting": self._setting, "fingerprint": dict(layout.fingerprint)}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from a state with the next iteration.

        Args:
            state: From `state_dict` of this rank, with as many ranks, workers and threads.
            strict: Whether a state of another order of samples is refused; otherwise it is logged and accepted.

        Raises:
            StateError: It is not a state, or one of other ranks, workers or data; what differs is named.
        """
        given: Any = state
        if not isinstance(given, Mapping) or given.get("version") != STATE_VERSION or "workers" not in given:
            raise StateError(f"this is not the state of a stream of version {STATE_VERSION}.")
        there, here = state.get("setting"), self._setting
        if there != here:
            msg = f"a stream resumes only with the same ranks, workers and threads: {there} in the state"
            raise StateError(f"{msg}, {here} here.\n  Use the same, or a planned source, which resumes on any.")
        if not isinstance(state.get("fingerprint"), Mapping):
            raise StateError("state: fingerprint is missing.")
        compare_fingerprints(self.pipeline.layout.fingerprint, state["fingerprint"], strict=strict)
        loaded = StreamState.of_json(state)
        if len(loaded.workers) != self._num_workers:
            raise StateError(f"state: it is damaged: {len(loaded.workers)} of {self._num_workers} workers.")
        self._loaded = loaded
        self._epoch = loaded.epoch
        self._is_inside = False

    def _state(self) -> StreamState:
        """Where the workers stand behind what was received; before the first item of a loaded epoch, as loaded."""
        if self._loaded is not None:
            return self._loaded
        is_running = self._epoch == self._begun and any(self._received)
        workers = tuple(map(self._state_of, range(self._num_workers)))
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
            return Start(How.RESUME, epoch, begun=self._progress[worker].following)
        if self._begun is None or epoch != self._begun + 1 or layout.cut is None or layout.unsaved:
            return Start(How.ANEW, epoch)
        if begun.how is How.LEAVE and not received:
            return begun  # it was not heard in the epoch that is left now
        return self._behind(How.LEAVE, worker, received)

    def _behind(self, how: How, worker: int, received: int) -> Start:
        """Behind items of the epoch that was begun last."""
        assert self._begun is not None
        begun, progress = self._begun_as[worker], self._progress[worker]
        start = begun.begun
        if begun.how is not How.RESUME and received:  # where it began was for the worker to find out
            start = progress.begun
        mark = progress.mark
        if mark is None and begun.how is How.RESUME and begun.mark is not None and begun.mark.num_items <= received:
            mark = begun.mark  # it was resumed not long ago
        return Start(how, self._begun, received, mark, start)

    def _items(self) -> Any:
        epoch = self._epoch
        jobs, first = self._begin(epoch)
        wanted = self._num_items()
        num_items = sum(self._received)
        self._meter.begin(epoch)
        taken = self._take(jobs, first)
        moved = taken if self._mover is None else hand_over(taken, self._mover, self._is_ready)
        for worker, batch in moved:
            self._keep(worker, batch.position)
            if batch.position.is_end:
                continue
            self._received[worker] += 1
            self._next_worker = (worker + 1) % self._num_workers
            num_items += 1
            if num_items == wanted:  # before the last item is out, so that a checkpoint taken with it goes on
                for other, end in moved:  # each worker says where it stands at the end
                    self._keep(other, end.position)
                    num_items += not end.position.is_end
                self._check_length(epoch, num_items, wanted)
                self._finish(epoch)
            self._meter.received(batch.num_samples, timings=batch.timings)
            value = batch.value
            del batch
            yield value
            del value
            self._meter.asked()
        if wanted is None:
            self._end(epoch, num_items)
        else:
            self._check_length(epoch, num_items, wanted)

    def _take(self, jobs: list[StreamJob], first: int) -> Iterator[tuple[int, Batch]]:
        """What the workers give in turns, from `first` on: the items of an epoch, and the end of each worker."""
        pool = self._pool
        turns = [(first + turn) % self._num_workers for turn in range(self._num_workers)]
        waiting = self._waiting = deque()
        following = StreamJob(jobs[0].epoch)
        try:
            waiting += [(worker, pool.submit(jobs[worker], worker)) for worker in turns]
            for _ in range(1, (self.spec.prefetch or DEFAULT_PREFETCH) if self.spec.workers else 1):
                waiting += [(worker, pool.submit(following, worker)) for worker in turns]
            while waiting:
                worker, ticket = waiting[0]
                outcome = pool.take(ticket)
                waiting.popleft()
                batches = outcome.result()
                if not batches:  # behind the end
                    continue
                if not batches[0].position.is_end:
                    waiting.append((worker, pool.submit(following, worker)))
                yield worker, batches.pop()  # not held here while it is used
        finally:
            pool.forget([ticket for _, ticket in waiting])
            waiting.clear()
            if not self.spec.persistent_workers:
                pool.close()
            pool.rest()

    def _is_ready(self) -> bool:
        return bool(self._waiting) and self._pool.is_ready(self._waiting[0][1])

    def _close_pool(self) -> None:
        self._pool.close()

    def _keep(self, worker: int, said: Progress) -> None:
        """Note what a worker says of its stream with an item that the consumer is about to get."""
        known: Progress = self._progress[worker]
        self._progress[worker] = Progress(
            said.begun or known.begun, said.mark or known.mark, said.following or known.following
        )

    def _begin(self, epoch: int) -> tuple[list[StreamJob], int]:
        """How each worker starts the epoch, and which of them is the first."""
        state, is_loaded = self._state(), self._loaded is not None
        starts = state.workers
        if not is_loaded and epoch == self._begun:  # it starts again
            starts = tuple(
                Start(How.RESUME, epoch, begun=begun.begun) if begun.how is How.RESUME else begun
                for begun in self._begun_as
            )
        goes_on = not is_loaded and epoch != self._begun and epoch == self._finished + 1
        said = [start._replace(how=How.NEXT) if goes_on else start for start in starts]
        self._begun, self._begun_as, self._loaded = epoch, starts, None
        self._received = [start.num_items if start.how is How.RESUME else 0 for start in starts]
        self._progress = [Progress()] * self._num_workers
        last = self._finished
        return [StreamJob(epoch, start, last) for start in said], state.next_worker if is_loaded else 0

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
            raise empty_epoch(epoch)
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
