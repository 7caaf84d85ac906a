"""A stream pipeline that runs: a `webdataset.DataPipeline` that knows epochs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import webdataset

from wdskit.errors import PipelineError
from wdskit.order.draws import Draws
from wdskit.pipeline.board import Board, Standing
from wdskit.pipeline.buffering import Keeps, Shuffle
from wdskit.pipeline.each import Each
from wdskit.pipeline.foreign import splits_nodes, splits_workers
from wdskit.pipeline.reading import OpenTars, SplitByNode, SplitByWorker, StreamSource
from wdskit.pipeline.run import NOWHERE, Origin, Run

logger = logging.getLogger(__name__)


@dataclass
class _Live:
    """The part of a pipeline up to its with_epoch, running on from epoch to epoch in this process."""

    values: Iterator[Any]
    next_epoch: int | None
    close: Callable[[], object]


@dataclass(frozen=True)
class Layout:
    """What a running pipeline must know of its own list, positions being those of `DataPipeline.pipeline`.

    Attributes:
        draws: The order of the shards; None where the source is not ours.
        cut: Position of with_epoch, None without.
        tars: Position of the stage that opens the shards, None where it is not ours.
        split_none: Whether a missing splitter was asked for.
        count: Number of items that an epoch of a worker yields, as a function of (worker, workers); None where unknown.
        length: What with_length says.
        stateless: Why the part before with_epoch cannot be rebuilt in another process, "" where it can.
    """

    draws: Draws | None
    cut: int | None
    tars: int | None
    split_none: bool
    count: Callable[[int, int], int] | None = field(repr=False)
    length: int | None
    stateless: str


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

    def with_epoch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: webdataset's would repeat the first samples for ever."""
        raise PipelineError("with_epoch comes before build(): Pipeline().stream(...).with_epoch(n).build().")

    repeat = with_epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate one epoch in this process."""
        self._enter()
        epoch = self.board.next_epoch(self._row)
        return self._alone(self._whole(epoch) if self.layout.cut is None else self._part(epoch))

    def _enter(self) -> None:
        """Learn which worker this is, and refuse what would read twice or not at all."""
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        run = self.run
        run.worker, run.num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._row = run.worker
        if run.num_workers > self.board.max_workers:
            msg = f"{run.num_workers} workers: this pipeline was built for {self.board.max_workers}."
            raise PipelineError(f"{msg} Build it with build(max_workers={run.num_workers}).")
        check_splits(self.pipeline, self.layout, run.place.world_size, run.num_workers)

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
        self._begin(epoch, None)
        for value in self._chain(0, len(self.pipeline), None):
            self.run.num_heard += 1
            yield value
        self._finish(epoch)

    def _part(self, epoch: int) -> Iterator[Any]:
        """One epoch of with_epoch: the next part of a stream that goes on."""
        cut = self.layout.cut or 0
        live = self._live
        if live is None or live.next_epoch != epoch:
            standing = self.board.load(self._row, epoch, self._ranks)
            if self.layout.stateless and self.board.last_finished(self._row) == epoch - 1 >= 0:
                raise PipelineError(_cannot_go_on(self.layout.stateless))
            if live is not None:
                live.close()
            self._begin(epoch, standing)
            live = self._live = self._start(cut, epoch)
            if standing is None:
                self._save(epoch)
        self.run.epoch = epoch
        _clear(self.pipeline[cut:])
        live.next_epoch = None
        yield from self._chain(cut, len(self.pipeline), live.values)
        self.pipeline[cut].finish(live.values)
        live.next_epoch = epoch + 1
        self._save(epoch + 1)
        self._finish(epoch)

    def _start(self, cut: int, epoch: int) -> _Live:
        """A new stream. It is closed with its pipeline; when Python exits, before its modules are emptied."""
        values = self._chain(0, cut, None)
        return _Live(values, epoch, weakref.finalize(self, _close, values))

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

    def _keepers(self) -> list[tuple[int, Keeps]]:
        """The stages before with_epoch that keep values, with their positions."""
        upstream = self.pipeline[: self.layout.cut]
        return [(at, stage) for at, stage in enumerate(upstream) if isinstance(stage, (Shuffle, Each))]

    def _save(self, epoch: int) -> None:
        if self.layout.stateless or self.layout.draws is None:
            return
        run, keepers = self.run, [stage for _, stage in self._keepers()]
        kept = tuple(tuple((origin.major, origin.minor) for origin, _ in stage.kept) for stage in keepers)
        counts = tuple(stage.count for stage in keepers)
        standing = Standing(run.first_epoch, run.next_draw, run.next_sample, counts, kept)
        self.board.save(self._row, epoch, self._ranks, standing)

    def _begin(self, epoch: int, standing: Standing | None) -> None:
        """Stand where `standing` says, or at the first draw of `epoch`."""
        _clear(self.pipeline)
        draws = self.layout.draws
        if draws is None:
            self.run.begin(epoch, draw=0)
        elif standing is None:
            stop = draws.stop(epoch) if self.layout.cut is None else None
            self.run.begin(epoch, draw=draws.first(epoch), stop_draw=stop)
        else:
            keepers = self._keepers()
            rebuilt = [self._rebuild(at, pairs) for (at, _), pairs in zip(keepers, standing.kept, strict=True)]
            for (_, stage), kept, count in zip(keepers, rebuilt, standing.counts, strict=True):
                stage.kept, stage.count = kept, count
            self.run.begin(standing.first_epoch, draw=standing.draw, sample=standing.sample)

    def _rebuild(self, at: int, pairs: tuple[tuple[int, int], ...]) -> list[tuple[Origin, Any]]:
        """The values that reached the stage at position `at`, by their (draw, sample), read again."""
        tars = self.layout.tars or 0
        values: Iterator[Any] = self._reread(pairs)
        for stage in self.pipeline[tars + 1 : at]:
            if not isinstance(stage, Shuffle):
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


def _clear(stages: list[Any]) -> None:
    """Let stages begin with nothing."""
    for stage in stages:
        if isinstance(stage, (Shuffle, Each)):
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


def check_splits(stages: list[Any], layout: Layout, world_size: int, num_workers: int) -> None:
    """Refuse a stream that ranks or workers would read twice, or that has too few shards.

    Raises:
        PipelineError: Says which splitter is missing, or the numbers.
    """
    if layout.draws is None:
        return
    by_node = any(isinstance(stage, SplitByNode) or splits_nodes(stage) for stage in stages)
    by_worker = any(isinstance(stage, SplitByWorker) or splits_workers(stage) for stage in stages)
    if not layout.split_none:
        if world_size > 1 and not by_node:
            raise PipelineError(_no_splitter("split_by_node", f"{world_size} ranks"))
        if num_workers > 1 and not by_worker:
            raise PipelineError(_no_splitter("split_by_worker", f"{num_workers} workers"))
    if layout.cut is not None:
        return
    if world_size > 1 and not layout.split_none:
        msg = f"a stream over {world_size} ranks ends at another step on each, and DDP hangs."
        raise PipelineError(
            f"{msg}\n  Add with_epoch: n, which counts per rank and goes on where the last epoch ended."
        )
    num_readers = (world_size if by_node else 1) * (num_workers if by_worker else 1)
    if layout.draws.num_shards < num_readers and not layout.draws.resampled:
        msg = f"{layout.draws.num_shards} shards cannot feed {world_size} ranks x {num_workers} workers one shard each."
        raise PipelineError(f"{msg}\n  Use fewer workers, more shards (`wdskit pack --max-samples`), or with_epoch.")


def _no_splitter(name: str, who: str) -> str:
    msg = f"{who} would each read every shard: {name} is missing."
    return f"{msg}\n  Add it behind stream, or say `split: none` if that is meant."
