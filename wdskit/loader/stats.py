"""What happens between a loader and its consumer, counted in the main process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Literal

from wdskit.loader.advice import Setting, advise, is_crowded
from wdskit.loader.stats_types import LoaderStats, StageStats
from wdskit.pipeline.timings import Histogram, Timings

Window = Literal["epoch", "report", "life"]


@dataclass
class Totals:
    """Sums since some moment. `steps` and `samples` are all that was received; `later_samples` came in a time that is
    known, which is that of every item but the first of an epoch.
    """

    steps: int = 0
    samples: int = 0
    later_samples: int = 0
    replaced: int = 0
    work_s: float = 0.0
    first_wait_s: float = 0.0
    asked: int = 0
    empty: int = 0
    ready: int = 0
    waits: Histogram = field(default_factory=Histogram)
    timings: Timings = field(default_factory=Timings)

    def copy(self) -> Totals:
        """One that stays as it is."""
        return replace(self, waits=self.waits.copy(), timings=self.timings.copy())

    def since(self, earlier: Totals) -> Totals:
        """What was counted after a copy of this was taken."""
        sums = (each.name for each in fields(self) if each.name not in {"waits", "timings"})
        left = {name: getattr(self, name) - getattr(earlier, name) for name in sums}
        waits, timings = self.waits.since(earlier.waits), self.timings.since(earlier.timings)
        return Totals(waits=waits, timings=timings, **left)


class Stats:
    """Counts what a consumer receives, and how long it waits for that. `loader._items` tells it.

    It may be read from another thread while the loader runs.

    Args:
        name: Of the pipeline, for reports.
        rank: Of the loader.
        setting: How the loader runs, for the advice.
        clock: Seconds.

    Attributes:
        name: Of the pipeline.
        rank: Of the loader.
        setting: How the loader runs.
    """

    def __init__(self, *, name: str, rank: int, setting: Setting, clock: Callable[[], float] = perf_counter) -> None:
        self.name = name
        self.rank = rank
        self.setting = setting
        self._clock = clock
        self._lock = threading.Lock()
        self._life = Totals()
        self._before: dict[Window, Totals] = {"epoch": Totals(), "report": Totals()}
        self._epoch = 0
        self._is_first = True
        self._asked_at = self._received_at = 0.0

    def begin(self, epoch: int) -> None:
        """The consumer asks for the first item of an iteration."""
        with self._lock:
            self._epoch = epoch
            self._before["epoch"] = self._life.copy()
            self._is_first = True
            self._asked_at = self._clock()

    def asked(self) -> None:
        """The consumer asks for one more item."""
        self._asked_at = self._clock()

    def received(
        self, samples: int, *, steps: int = 1, ready: int = 0, replaced: int = 0, timings: Timings | None = None
    ) -> None:
        """The consumer is about to get what it has asked for.

        Args:
            samples: In what it gets.
            steps: Items that it gets one after the other without waiting.
            ready: Items that were ready when it asked.
            replaced: Bad samples among them, for which others stand.
            timings: What they took.
        """
        wait_s = self._clock() - self._asked_at
        life = self._life
        with self._lock:
            life.steps += steps
            life.samples += samples
            life.replaced += replaced
            if timings is not None:
                life.timings.merge(timings)
            if self._is_first:
                self._is_first = False
                life.first_wait_s += wait_s
            else:
                life.asked += 1
                life.ready += ready
                life.empty += not ready
                life.later_samples += samples
                life.work_s += self._asked_at - self._received_at
                life.waits.add(wait_s)
        self._received_at = self._clock()

    @property
    def steps(self) -> int:
        """Items of all epochs so far."""
        return self._life.steps

    def totals(self, window: Window) -> Totals:
        """The sums since the running epoch began, since the last report, or since the loader was made."""
        with self._lock:
            return self._life.since(self._before[window]) if window != "life" else self._life.copy()

    def begin_report(self) -> None:
        """Begin the next report's window."""
        with self._lock:
            self._before["report"] = self._life.copy()
        self._received_at = self._clock()  # what the report took was not the consumer's work

    def stats(self, window: Window = "epoch") -> LoaderStats:
        """What was counted, as numbers that say something."""
        found = self.totals(window)
        timings, setting = found.timings, self.setting
        wait_s = found.waits.total_s
        elapsed_s = found.work_s + wait_s
        samples_per_s = found.later_samples / elapsed_s if elapsed_s else 0.0
        at_a_time = samples_per_s / found.samples if found.samples else 0.0  # times a second that all this is done
        in_stages_s = sum(each.total_s for each in timings.stages.values())
        told = LoaderStats(
            loader=self.name,
            rank=self.rank,
            epoch=self._epoch,
            steps=found.steps,
            samples=found.samples,
            replaced=found.replaced,
            elapsed_s=elapsed_s,
            wait_s=wait_s,
            wait_ratio=wait_s / elapsed_s if elapsed_s else 0.0,
            wait_p99_s=found.waits.quantile_s(0.99),
            first_wait_s=found.first_wait_s,
            samples_per_s=samples_per_s,
            bytes_read=timings.bytes_read,
            bytes_per_s=timings.bytes_read * at_a_time,
            capacity=setting.capacity,
            ready_mean=found.ready / found.asked if found.asked else 0.0,
            empty_ratio=found.empty / found.asked if found.asked else 0.0,
            busy_ratio=in_stages_s * at_a_time / setting.num_threads if timings.stages else None,
            cpus=sum(each.total_s * each.cpu_ratio for each in timings.stages.values()) * at_a_time,
            stages={name: _stage(each, in_stages_s) for name, each in timings.stages.items()},
            advice=None,
        )
        advice = advise(told, setting, crowded=is_crowded(setting)) if found.waits.num else None
        return replace(told, advice=advice)


def _stage(found: Histogram, in_stages_s: float) -> StageStats:
    return StageStats(
        num=found.num,
        mean_s=found.mean_s,
        p50_s=found.quantile_s(0.5),
        p99_s=found.quantile_s(0.99),
        share_ratio=found.total_s / in_stages_s if in_stages_s else 0.0,
        cpu_ratio=found.cpu_ratio,
    )
