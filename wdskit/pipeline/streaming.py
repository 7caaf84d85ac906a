"""A stream pipeline that runs: a `webdataset.DataPipeline` that knows epochs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import webdataset

from wdskit.errors import PipelineError
from wdskit.pipeline.board import Board, Standing
from wdskit.pipeline.buffering import EpochCut, Keeps, Shuffle
from wdskit.pipeline.each import Each
from wdskit.pipeline.marks import Mark, Marks, Resume
from wdskit.pipeline.reading import OpenTars, StreamSource
from wdskit.pipeline.run import NOWHERE, Origin, Run
from wdskit.pipeline.splits import Layout, check_splits

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

    def set_start(self, worker: int, epoch: int, num_workers: int, standing: Standing) -> None:
        """Let a worker begin `epoch` from there."""
        self.board.save(worker, epoch, (*self.run.place, num_workers), standing)

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
        epoch = self.board.next_epoch(self._row)
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
        resume = self._resume(epoch)
        self._begin(
            epoch, resume.mark.standing if resume is not None and resume.mark is not None else None, self.pipeline
        )
        for value in self._marked(epoch, resume, self._chain(0, len(self.pipeline), None)):
            self.run.num_heard += 1
            yield value
        self._finish(epoch)

    def _part(self, epoch: int) -> Iterator[Any]:
        """One epoch of with_epoch: the next part of a stream that goes on."""
        cut = self.layout.cut or 0
        live = self._live
        resume = self._resume(epoch)
        within = resume is not None and resume.mark is not None
        if resume is not None or live is None or (live.next_epoch, live.worker) != (epoch, self.run.worker):
            standing = self.board.load(self.run.worker, epoch, self._ranks)
            if self.layout.stateless and self.board.last_finished(self._row) == epoch - 1 >= 0:
                raise PipelineError(_cannot_go_on(self.layout.stateless))
            if live is not None:
                live.close()
            if resume is not None and resume.mark is not None:
                self._begin(epoch, resume.mark.standing, self.pipeline)
            else:
                self._begin(epoch, standing, self.pipeline[:cut])
            live = self._live = self._start(cut, epoch)
            if standing is None and not within:
                self._save(epoch)
        self.run.epoch = epoch
        if not within:
            _clear(self.pipeline[cut:])
        live.next_epoch = None
        saved = False
        for value in self._marked(epoch, resume, self._chain(cut, len(self.pipeline), live.values)):
            if not saved and not self.pipeline[cut].left:  # all that this epoch takes is taken
                self._save(epoch + 1)
                saved = True
            yield value
        self.pipeline[cut].finish(live.values)
        live.next_epoch = epoch + 1
        self._save(epoch + 1)
        self._finish(epoch)

    def _resume(self, epoch: int) -> Resume | None:
        """From where this epoch goes on, if it is one that was stopped."""
        return None if self.marks is None else self.marks.take_resume(self.run.worker, epoch)

    def _marked(self, epoch: int, resume: Resume | None, values: Iterator[Any]) -> Iterator[Any]:
        """The values that were not received before; a mark is made now and then."""
        first = resume.mark.num_items if resume is not None and resume.mark is not None else 0
        num_given = 0 if resume is None else resume.num_items
        for number, value in enumerate(values, first + 1):
            if self.marks is not None and number % self.marks.spacing == 0 and not self.layout.unsaved:
                left = 0 if self.layout.cut is None else self.pipeline[self.layout.cut].left
                self.marks.put(self.run.worker, epoch, Mark(number, self._standing(self.pipeline, left)))
            if number > num_given:
                yield value

    def _start(self, cut: int, epoch: int) -> _Live:
        """A new stream. It is closed with its pipeline; when Python exits, before its modules are emptied."""
        values = self._chain(0, cut, None)
        return _Live(values, epoch, self.run.worker, weakref.finalize(self, _close, values))

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
            standing = self._standing(self.pipeline[: self.layout.cut])
            self.board.save(self.run.worker, epoch, self._ranks, standing)

    def _standing(self, stages: list[Any], left: int = 0) -> Standing:
        """Where these stages stand, between two values."""
        stages = keepers_of(stages)
        kept = tuple(tuple((origin.major, origin.minor) for origin, _ in stage.kept) for stage in stages)
        counts = tuple(stage.count for stage in stages)
        return Standing(self.run.first_epoch, self.run.next_draw, self.run.next_sample, counts, kept, left)

    def _begin(self, epoch: int, standing: Standing | None, stages: list[Any]) -> None:
        """Stand where `standing` says that `stages` stood, or at the first draw of `epoch`."""
        _clear(self.pipeline)
        draws = self.layout.draws
        stop = None if draws is None or self.layout.cut is not None else draws.stop(epoch)
        if standing is None:
            self.run.begin(epoch, draw=0 if draws is None else draws.first(epoch), stop_draw=stop)
            return
        keepers = keepers_of(stages)
        rebuilt = [
            self._rebuild(self.pipeline.index(stage), pairs)
            for stage, pairs in zip(keepers, standing.kept, strict=True)
        ]
        for stage, kept, count in zip(keepers, rebuilt, standing.counts, strict=True):
            stage.kept, stage.count = kept, count
        if len(stages) == len(self.pipeline) and self.layout.cut is not None:
            self.pipeline[self.layout.cut].resumed = standing.left
        self.run.begin(standing.first_epoch, draw=standing.draw, sample=standing.sample, stop_draw=stop)

    def _rebuild(self, at: int, pairs: tuple[tuple[int, int], ...]) -> list[tuple[Origin, Any]]:
        """The values that reached the stage at position `at`, by their (draw, sample), read again."""
        tars = self.layout.tars or 0
        values: Iterator[Any] = self._reread(pairs)
        for stage in self.pipeline[tars + 1 : at]:
            if not isinstance(stage, (Shuffle, EpochCut)):
                values = iter(self.invoke(stage, values))
        found = {}
        for value in values:
            origin = self.run.origin
            found[origin.major, origin.minor] = (origin, value)
        missing = [pair for pair in pairs if pair not in found]
        if missing:
            raise PipelineError(
                f"draw {missing[0][0]}: sample {missing[0][1]} is gone. Did the shards change meanwhile?"
            )
        return [found[pair] for pair in pairs]

    def _reread(self, pairs: tuple[tuple[int, int], ...]) -> Iterator[Any]:
        """The samples of these (draw, sample), each shard opened once, in the order of the draws."""
        source, draws = self.pipeline[0], self.layout.draws
        tars = self.pipeline[self.layout.tars or 0]
        assert isinstance(source, StreamSource)
        assert isinstance(tars, OpenTars)
        assert draws is not None
        wanted: dict[int, set[int]] = {}
        for draw, sample in pairs:
            wanted.setdefault(draw, set()).add(sample)
        for draw, samples in sorted(wanted.items()):
            url = source.shards.urls[draws.shard(draw)]
            last = max(samples)
            for index, fields in enumerate(tars.read(url)):
                if index in samples:
                    self.run.origin = Origin(url, fields["__key__"], draw, index, 0)
                    yield fields
                if index == last:
                    break
        self.run.origin = NOWHERE


def keepers_of(stages: list[Any]) -> list[Keeps]:
    """The stages that keep values."""
    return [stage for stage in stages if isinstance(stage, (Shuffle, Each))]


def keeping(stages: list[Any]) -> tuple[int, int]:
    """How many stages keep values, and how many all of them can hold."""
    keepers = keepers_of(stages)
    return len(keepers), sum(stage.capacity + 2 for stage in keepers)


def _clear(stages: list[Any]) -> None:
    """Let stages begin with nothing."""
    for stage in keepers_of(stages):
        stage.kept = []
        stage.count = 0


def _close(values: Iterator[Any]) -> None:
    """Let the stages put away files and threads; another library's iterator may have nothing to close."""
    close = getattr(values, "close", None)
    if close is not None:
        close()


def _cannot_go_on(why: str) -> str:
    msg = f"{why} holds values that cannot be read again, so an epoch cannot be repeated or go on in another process."
    return f"{msg}\n  Finish every epoch, and keep the workers: persistent_workers=True."
