"""Where a stream stands between two values, and how it comes to stand there again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wdskit.engine.board import Standing
from wdskit.engine.sample import Each
from wdskit.engine.splits import Layout
from wdskit.errors import PipelineError
from wdskit.stages.base import NOWHERE, Origin, Run
from wdskit.stages.shard_reader import OpenTars
from wdskit.stages.stream_source import StreamSource
from wdskit.stages.streaming import EpochCut, Keeps, ShuffleBuffer


class Footing:
    """Takes standings of a running pipeline, and puts it where they say.

    Args:
        stages: All of the pipeline.
        run: Of the pipeline.
        layout: Of the pipeline.
    """

    def __init__(self, stages: list[Any], run: Run, layout: Layout) -> None:
        self.stages = stages
        self.run = run
        self.layout = layout

    def standing(self, stages: list[Any], left: int = 0) -> Standing:
        """Where these stages stand, between two values."""
        stages = keepers_of(stages)
        kept = tuple(tuple((origin.major, origin.minor) for origin, _ in stage.kept) for stage in stages)
        counts = tuple(stage.count for stage in stages)
        return Standing(self.run.first_epoch, self.run.next_draw, self.run.next_sample, counts, kept, left)

    def begin(self, epoch: int, standing: Standing | None, stages: list[Any]) -> None:
        """Stand where `standing` says that `stages` stood, or at the first draw of `epoch`."""
        clear(self.stages)
        draws = self.layout.draws
        stop = None if draws is None or self.layout.cut is not None else draws.stop(epoch)
        if standing is None:
            self.run.begin(epoch, draw=0 if draws is None else draws.first(epoch), stop_draw=stop)
            return
        keepers = keepers_of(stages)
        rebuilt = [
            self._rebuild(self.stages.index(stage), pairs) for stage, pairs in zip(keepers, standing.kept, strict=True)
        ]
        for stage, kept, count in zip(keepers, rebuilt, standing.counts, strict=True):
            stage.kept, stage.count = kept, count
        if len(stages) == len(self.stages) and self.layout.cut is not None:
            self.stages[self.layout.cut].resumed = standing.left
        self.run.begin(standing.first_epoch, draw=standing.draw, sample=standing.sample, stop_draw=stop)

    def _rebuild(self, at: int, pairs: tuple[tuple[int, int], ...]) -> list[tuple[Origin, Any]]:
        """The values that reached the stage at position `at`, by their (draw, sample), read again."""
        tars = self.layout.tars or 0
        values: Iterator[Any] = self._reread(pairs)
        for stage in self.stages[tars + 1 : at]:
            if not isinstance(stage, (ShuffleBuffer, EpochCut)):
                values = iter(stage(values))
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
        source, draws = self.stages[0], self.layout.draws
        tars = self.stages[self.layout.tars or 0]
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
    return [stage for stage in stages if isinstance(stage, (ShuffleBuffer, Each))]


def keeping(stages: list[Any]) -> tuple[int, int]:
    """How many stages keep values, and how many all of them can hold."""
    keepers = keepers_of(stages)
    return len(keepers), sum(stage.capacity + 2 for stage in keepers)


def clear(stages: list[Any]) -> None:
    """Let stages begin with nothing."""
    for stage in keepers_of(stages):
        stage.kept = []
        stage.count = 0
