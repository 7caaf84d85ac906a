"""Counts what a consumer receives and how long it waits, and reports it while the loader runs."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from wdskit.errors import PipelineError
from wdskit.files import append_lines, make_folders
from wdskit.loader.stats import LoaderStats, StageStats
from wdskit.pipeline.settings import StatsSpec
from wdskit.stages.timing import Timings

logger = logging.getLogger(__name__)

Window = Literal["epoch", "report", "life"]

_COUNTS = ("steps", "samples", "later_samples", "replaced", "work_s", "wait_s", "first_wait_s")


@dataclass
class _Totals:
    """Sums since the loader was made. `later_samples` came with items that are not the first of an epoch: only for
    those is known how long the consumer worked and waited.
    """

    steps: int = 0
    samples: int = 0
    later_samples: int = 0
    replaced: int = 0
    work_s: float = 0.0
    wait_s: float = 0.0
    first_wait_s: float = 0.0
    timings: Timings = field(default_factory=Timings)

    def since(self, before: _Totals) -> _Totals:
        """What has been added since `before`."""
        timings = Timings(
            bytes_read=self.timings.bytes_read - before.timings.bytes_read,
            traffic=self.timings.traffic.minus(before.timings.traffic),
        )
        for stage, (num, total_s) in self.timings.stages.items():
            num_before, before_s = before.timings.stages.get(stage, (0, 0.0))
            if num > num_before:
                timings.stages[stage] = num - num_before, total_s - before_s
        return _Totals(**{name: getattr(self, name) - getattr(before, name) for name in _COUNTS}, timings=timings)


class Meter:
    """Counts what a consumer receives and how long it waits for that; reports every so many steps where that is wanted.

    Another thread may read it while the loader runs.

    Args:
        name: Of the pipeline.
        rank: Of the loader.
        spec: What it reports while it runs; its port is not for this class.
        clock: Seconds.

    Raises:
        PipelineError: The file of the reports cannot be written.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        spec: StatsSpec | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._totals = _Totals()
        self._starts: dict[Window, _Totals] = {"epoch": _Totals(), "report": _Totals(), "life": _Totals()}
        self._epoch = 0
        self._is_first = True
        self._asked_at = self._received_at = 0.0
        self._every = None if spec is None else spec.every
        self._path = None if spec is None or spec.file is None else _report_path(spec.file, rank)

    def begin(self, epoch: int) -> None:
        """The consumer asks for the first item of an iteration."""
        self._epoch = epoch
        self._restart("epoch")
        self._is_first = True
        self._asked_at = self._clock()

    def asked(self) -> None:
        """The consumer asks for one more item."""
        self._asked_at = self._clock()

    def received(self, samples: int, *, replaced: int = 0, timings: Timings | None = None) -> None:
        """The consumer is about to get what it has asked for; a report is made where it is time for one.

        Args:
            samples: In what it gets.
            replaced: Bad samples among them, for which others stand.
            timings: What they took.
        """
        wait_s = self._clock() - self._asked_at
        totals = self._totals
        with self._lock:
            totals.steps += 1
            totals.samples += samples
            totals.replaced += replaced
            if timings is not None:
                totals.timings.merge(timings)
            if self._is_first:
                self._is_first = False
                totals.first_wait_s += wait_s
            else:
                totals.later_samples += samples
                totals.work_s += self._asked_at - self._received_at
                totals.wait_s += wait_s
        if self._every is not None and totals.steps % self._every == 0:
            self._report()
        self._received_at = self._clock()  # what the report took was not the consumer's work

    def _report(self) -> None:
        """Log what was since the last report, and add it to the file."""
        found = self.stats("report")
        self._restart("report")
        logger.info("%s", found.line())
        if self._path is not None:
            try:
                append_lines(self._path, [json.dumps({"time": round(time.time(), 3), **found.to_json()})])
            except OSError as err:  # hours into a training: a report is worth less than that
                logger.warning("stats: %s can no longer be written: %s", self._path, err)
                self._path = None

    def _restart(self, window: Window) -> None:
        """Let a window begin now."""
        with self._lock:
            self._starts[window] = self._totals.since(_Totals())

    def stats(self, window: Window = "epoch") -> LoaderStats:
        """What was counted since the running epoch began, since the last report, or since the loader was made."""
        with self._lock:
            found = self._totals.since(self._starts[window])
        elapsed_s = found.work_s + found.wait_s
        samples_per_s = found.later_samples / elapsed_s if elapsed_s else 0.0
        bytes_read = found.timings.bytes_read
        stages_s = sum(total_s for _, total_s in found.timings.stages.values())
        return LoaderStats(
            loader=self.name,
            rank=self.rank,
            epoch=self._epoch,
            steps=found.steps,
            samples=found.samples,
            replaced=found.replaced,
            elapsed_s=elapsed_s,
            wait_s=found.wait_s,
            wait_ratio=found.wait_s / elapsed_s if elapsed_s else 0.0,
            first_wait_s=found.first_wait_s,
            samples_per_s=samples_per_s,
            bytes_read=bytes_read,
            traffic=found.timings.traffic,
            bytes_per_s=bytes_read / found.samples * samples_per_s if found.samples else 0.0,
            stages={
                name: StageStats(num, total_s / num, total_s, total_s / stages_s if stages_s else 0.0)
                for name, (num, total_s) in found.timings.stages.items()
            },
        )


def _report_path(file: str, rank: int) -> Path:
    """Where a rank reports: `stats.jsonl` with its number is `stats-rank00003.jsonl`. Find out now that it can."""
    path = Path(file)
    path = path.with_name(f"{path.stem}-rank{rank:05d}{path.suffix}")
    try:
        make_folders(path.parent)
        append_lines(path, [])
    except OSError as err:
        msg = f"stats: {path} cannot be written: {err.strerror or err}."
        raise PipelineError(f"{msg}\n  Choose another for loader.stats.file, or leave it out.") from err
    return path
