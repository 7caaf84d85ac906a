"""A stream pipeline that runs: a `webdataset.DataPipeline` that knows epochs."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import webdataset

from wdskit.engine.board import Board, Standing
from wdskit.engine.footing import Footing, clear
from wdskit.engine.marks import How, Mark, Marks, Start
from wdskit.engine.splits import Layout, check_splits
from wdskit.errors import PipelineError
from wdskit.stages.base import Run

logger = logging.getLogger(__name__)


@dataclass
class _Live:
    """The part of a pipeline up to its with_epoch, running on from epoch to epoch in this process."""

    values: Iterator[Any]
    next_epoch: int | None
    worker: int
    close: Callable[[], object]


class StreamPipeline(webdataset.DataPipeline):  # type: ignore[misc]  # webdataset ships no annotations that mypy can use
    """The running form of a `Pipeline` with a stream source.

    It is an `IterableDataset`, so torch's DataLoader and webdataset's WebLoader take it, with `batch_size=None`.

    One iteration is one epoch. Without `with_epoch` that is each shard once; with it, the stream goes on where the last
    epoch ended, in workers that persist and in workers that do not. The epoch counts itself on; `set_epoch` sets it. An
    epoch that is iterated again, after a break for instance, gives the same values again.
    """

    def __init__(self, stages: list[Any], run: Run, layout: Layout, board: Board) -> None:
        super().__init__(*stages)
        self.run = run
        self.layout = layout
        self.board = board
        self.footing = Footing(self.pipeline, run, layout)
        self.marks: Marks | None = None
        self._live: _Live | None = None
        self._turn: object = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` >= 0 the one that the next iteration runs, in every worker."""
        if type(epoch) is not int or epoch < 0:
            raise PipelineError(f"set_epoch({epoch!r}): an epoch is a whole number, 0 or more.")
        self.board.set_epoch(epoch)

    def num_items(self, num_workers: int) -> int | None:
        """Items that an epoch of this rank yields with so many workers (0: in the main process); None where unknown."""
        if self.layout.count is None:
            return None
        return sum(self.layout.count(worker, max(1, num_workers)) for worker in range(max(1, num_workers)))

    def start_of(self, worker: int, epoch: int, num_workers: int) -> Standing | None:
        """Where a worker stood, or will stand, when `epoch` begins; None where it begins a stream."""
        return None if self.layout.cut is None else self.board.load(worker, epoch, (*self.run.place, num_workers))

    def with_epoch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: webdataset's would repeat the first samples for ever."""
        raise PipelineError("with_epoch comes before build(): Pipeline().stream(...).with_epoch(n).build().")

    repeat = with_epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate one epoch in this process."""
        epoch = self._enter()
        return self._alone(self._whole(epoch) if self.layout.cut is None else self._part(epoch))

    def _enter(self) -> int:
        """Learn which worker this is and which epoch it is to run, and refuse what would read twice or not at all."""
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        run = self.run
        self._row, run.num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if run.num_workers > self.board.max_workers:
            msg = f"{run.num_workers} workers: this pipeline was built for {self.board.max_workers}."
            raise PipelineError(f"{msg} Build it with build(max_workers={run.num_workers}).")
        check_splits(self.pipeline, self.layout, run.place.world_size, run.num_workers)
        # A loader sets each epoch that it begins; alone, they count themselves on.
        epoch = self.board.next_epoch(self._row) if self.marks is None else self.board.set_one()
        shift = 0 if self.marks is None else self.marks.shift(self._row, epoch)
        run.worker = (self._row + shift) % run.num_workers
        return epoch

    def _alone(self, values: Iterator[Any]) -> Iterator[Any]:
        """The values, as long as no other iteration of this pipeline starts: they would share one place in the stream.

        Raises:
            PipelineError: One has.
        """
        turn = self._turn = object()
        for value in values:
            yield value
            if self._turn is not turn:
                msg = "this pipeline is being iterated by another iterator that was started meanwhile."
                raise PipelineError(f"{msg}\n  Finish one before the next, or build() a second pipeline.")

    def _whole(self, epoch: int) -> Iterator[Any]:
        """One epoch that ends by itself: each shard once (or no end at all, resampled without with_epoch)."""
        start = self._told(epoch)
        self.footing.begin(epoch, start.standing, self.pipeline)
        for value in self._marked(epoch, start, self._chain(0, len(self.pipeline), None)):
            self.run.num_heard += 1
            yield value
        self._finish(epoch)

    def _part(self, epoch: int) -> Iterator[Any]:
        """One epoch of with_epoch: the next part of a stream that goes on."""
        cut = self.layout.cut or 0
        start = self._told(epoch)
        live = self._live
        if start.how is not How.NEXT or live is None or (live.next_epoch, live.worker) != (epoch, self.run.worker):
            live = self._restart(epoch, start)
        self.run.epoch = epoch
        if start.how is not How.RESUME or start.mark is None:
            clear(self.pipeline[cut:])
        live.next_epoch = None
        saved = False
        for value in self._marked(epoch, start, self._chain(cut, len(self.pipeline), live.values)):
            if not saved and not self.pipeline[cut].left:  # all that this epoch takes is taken
                self._save(epoch + 1)
                saved = True
            yield value
        self.pipeline[cut].finish(live.values)
        live.next_epoch = epoch + 1
        if not saved:  # else it could be read just now
            self._save(epoch + 1)
        self._finish(epoch)

    def _told(self, epoch: int) -> Start:
        """How this epoch starts."""
        return Start(How.NEXT) if self.marks is None else self.marks.told(self.run.worker, epoch)

    def _restart(self, epoch: int, start: Start) -> _Live:
        """A new stream that stands where `epoch` starts."""
        stateless, last = self.layout.stateless, self.board.last_finished(self._row)
        if stateless and start.how is not How.ANEW and last == epoch - 1 >= 0:
            raise PipelineError(_cannot_go_on(stateless))
        if self._live is not None:
            self._live.close()
        first = start.epoch if start.how is How.LEAVE else epoch
        standing = start.standing
        if start.how is How.NEXT:
            standing = self.board.load(self.run.worker, epoch, self._ranks)
        self.footing.begin(
            first, standing, self.pipeline if start.mark is not None else self.pipeline[: self.layout.cut]
        )
        cut = self.layout.cut or 0
        values = self._chain(0, cut, None)
        # It is closed with its pipeline; when Python exits, before its modules are emptied.
        live = self._live = _Live(values, epoch, self.run.worker, weakref.finalize(self, _close, values))
        if start.how is How.LEAVE:
            self.run.epoch = first
            rest = self._chain(cut, len(self.pipeline), values)
            for _ in itertools.islice(rest, start.num_skipped):
                self.run.num_heard += 1
        if start.how in (How.LEAVE, How.ANEW) or standing is None:
            self._save(epoch)
        return live

    def _marked(self, epoch: int, start: Start, values: Iterator[Any]) -> Iterator[Any]:
        """The values behind those that were received before; a mark is made now and then."""
        is_resumed = start.how is How.RESUME
        first = start.mark.num_items if is_resumed and start.mark is not None else 0
        for number, value in enumerate(values, first + 1):
            if self.marks is not None and number % self.marks.spacing == 0 and not self.layout.unsaved:
                left = 0 if self.layout.cut is None else self.pipeline[self.layout.cut].left
                self.marks.put(self.run.worker, epoch, Mark(number, self.footing.standing(self.pipeline, left)))
            if not is_resumed or number > start.num_items:
                if self.marks is not None:
                    self.marks.give(self.run.worker, epoch, number)
                yield value

    def _finish(self, epoch: int) -> None:
        self.board.finish(self._row, epoch)

    def _chain(self, first: int, stop: int, values: Iterator[Any] | None) -> Iterator[Any]:
        """The stages of a part of the list, each fed by the one before."""
        for stage in self.pipeline[first:stop]:
            values = self.invoke(stage) if values is None else self.invoke(stage, values)
        assert values is not None
        return iter(values)

    # Standing still between two epochs, and going on from there.

    @property
    def _ranks(self) -> tuple[int, int, int]:
        return (*self.run.place, self.run.num_workers)

    def _save(self, epoch: int) -> None:
        if not self.layout.stateless and self.layout.draws is not None:
            standing = self.footing.standing(self.pipeline[: self.layout.cut])
            self.board.save(self.run.worker, epoch, self._ranks, standing)


def _close(values: Iterator[Any]) -> None:
    """Let the stages put away files and threads; another library's iterator may have nothing to close."""
    close = getattr(values, "close", None)
    if close is not None:
        close()


def _cannot_go_on(why: str) -> str:
    msg = f"{why} holds values that cannot be read again, so an epoch cannot be repeated or go on in another process."
    return f"{msg}\n  Finish every epoch, and keep the workers: persistent_workers=True."
