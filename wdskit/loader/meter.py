"""Counts what a consumer receives and how long it waits, and reports it while the loader runs."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from wdskit.errors import PipelineError
from wdskit.files import append_lines, make_folders
from wdskit.loader.stats import LoaderStats, Setting, StageStats, advise
from wdskit.pipeline.settings import StatsSpec
from wdskit.stages.timing import Histogram, Timings

logger = logging.getLogger(__name__)

Window = Literal["epoch", "report", "life"]

_AT_A_TIME = 32  # items that are summed up together: 1 us each, against 10 one by one between batches (cold caches)


@dataclass
class Totals:
    """Sums of a part of a run. `later_samples` came with items that are not the first of an epoch: only for those is
    known how long the consumer worked and waited.
    """

    steps: int = 0
    samples: int = 0
    later_samples: int = 0
    replaced: int = 0
    work_s: float = 0.0
    first_wait_s: float = 0.0
    empty: int = 0
    ready: int = 0
    waits: Histogram = field(default_factory=Histogram)
    timings: Timings = field(default_factory=Timings)

    def merge(self, other: Totals) -> None:
        """Add what another has counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waits.merge(other.waits)
        self.timings.merge(other.timings)


_SUMS = [each.name for each in fields(Totals) if each.name not in {"waits", "timings"}]


class Meter:
    """Counts what a consumer receives and how long it waits for that; reports every so many steps where that is wanted.

    Another thread may read it while the loader runs.

    Args:
        name: Of the pipeline.
        rank: Of the loader.
        setting: How the loader runs.
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
        setting: Setting,
        spec: StatsSpec | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.rank = rank
        self._setting = setting
        self._clock = clock
        self._lock = threading.Lock()
        self._received: deque[tuple[int, int, int, int, Timings | None, float | None, float]] = deque()
        self._current = Totals()  # since the last of `_before` began
        self._before: dict[Window, Totals] = {"epoch": Totals(), "report": Totals(), "life": Totals()}
        self._epoch = 0
        self._is_first = True
        self._asked_at = self._received_at = 0.0
        self._num_steps = 0
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

    def received(
        self, samples: int, *, steps: int = 1, ready: int = 0, replaced: int = 0, timings: Timings | None = None
    ) -> None:
        """The consumer is about to get what it has asked for; a report is made where it is time for one.

        Args:
            samples: In what it gets.
            steps: Items that it gets one after the other without waiting.
            ready: Items that were ready when it asked.
            replaced: Bad samples among them, for which others stand.
            timings: What they took.
        """
        wait_s = self._clock() - self._asked_at
        work_s = None if self._is_first else self._asked_at - self._received_at
        self._is_first = False
        self._received.append((samples, steps, ready, replaced, timings, work_s, wait_s))
        if len(self._received) >= _AT_A_TIME:
            with self._lock:
                self._sum_up()
        self._num_steps += steps
        if self._every is not None and self._num_steps % self._every < steps:
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
                logger.warning("stats: %s cannot be written any more: %s", self._path, err)
                self._path = None

    def _sum_up(self) -> None:
        """Add what was received to `_current`. The lock is held."""
        now = self._current
        for _ in range(len(self._received)):
            samples, steps, ready, replaced, timings, work_s, wait_s = self._received.popleft()
            now.steps += steps
            now.samples += samples
            now.replaced += replaced
            if timings is not None:
                now.timings.merge(timings)
            if work_s is None:
                now.first_wait_s += wait_s
            else:
                now.ready += ready
                now.empty += not ready
                now.later_samples += samples
                now.work_s += work_s
                now.waits.add(wait_s)

    def _restart(self, window: Window) -> None:
        """Let a window begin now."""
        with self._lock:
            self._sum_up()
            for totals in self._before.values():
                totals.merge(self._current)
            self._before[window], self._current = Totals(), Totals()

    def totals(self, window: Window) -> Totals:
        """The sums since the running epoch began, since the last report, or since the loader was made."""
        found = Totals()
        with self._lock:
            self._sum_up()
            found.merge(self._before[window])
            found.merge(self._current)
        return found

    def stats(self, window: Window = "epoch") -> LoaderStats:
        """What was counted since the running epoch began, since the last report, or since the loader was made."""
        found, known = self.totals(window), self.totals("life").timings.stages
        timings, setting, waits = found.timings, self._setting, found.waits
        elapsed_s = found.work_s + waits.total_s
        samples_per_s = found.later_samples / elapsed_s if elapsed_s else 0.0
        at_a_time = samples_per_s / found.samples if found.samples else 0.0  # times a second that all this is done
        in_stages_s = sum(each.total_s for each in timings.stages.values())
        stages = {
            name: StageStats(
                num=each.num,
                mean_s=each.mean_s,
                p50_s=each.quantile_s(0.5),
                p99_s=each.quantile_s(0.99),
                share_ratio=each.total_s / in_stages_s if in_stages_s else 0.0,
                cpu_ratio=(each if each.clocked_s else known[name]).cpu_ratio,  # a short epoch may have none of its own
            )
            for name, each in ((name, timings.stages[name]) for name in known if name in timings.stages)
        }
        stats = LoaderStats(
            loader=self.name,
            rank=self.rank,
            epoch=self._epoch,
            steps=found.steps,
            samples=found.samples,
            replaced=found.replaced,
            elapsed_s=elapsed_s,
            wait_s=waits.total_s,
            wait_ratio=waits.total_s / elapsed_s if elapsed_s else 0.0,
            wait_p99_s=waits.quantile_s(0.99),
            first_wait_s=found.first_wait_s,
            samples_per_s=samples_per_s,
            bytes_read=timings.bytes_read,
            bytes_per_s=timings.bytes_read * at_a_time,
            capacity=setting.capacity,
            ready_mean=found.ready / waits.num if waits.num else 0.0,
            empty_ratio=found.empty / waits.num if waits.num else 0.0,
            busy_ratio=in_stages_s * at_a_time / setting.num_threads if stages else None,
            cpus=sum(timings.stages[name].total_s * each.cpu_ratio for name, each in stages.items()) * at_a_time,
            stages=stages,
            advice=None,
        )
        others_load = os.getloadavg()[0] - setting.num_threads  # threads that want a CPU, in the last minute
        return replace(stats, advice=advise(stats, setting, crowded=others_load >= (os.cpu_count() or 1)))


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
