"""What `loader.stats()` tells, as numbers and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StageStats:
    """What a stage took, for each value: a sample, or behind `batched` a batch.

    Where samples are so small that clocks would slow them down, some were timed and stand for all.

    Attributes:
        num: Values.
        mean_s: Of a value.
        p50_s: What half of the values did not exceed, within 5 %, and
        p99_s: 99 of 100.
        share_ratio: Its share of the time of all stages.
        cpu_ratio: The part of its time in which it was running; in the rest it waited, for a disk, a lock, the GIL or a
            free CPU.
    """

    num: int
    mean_s: float
    p50_s: float
    p99_s: float
    share_ratio: float
    cpu_ratio: float


@dataclass(frozen=True)
class LoaderStats:
    """What a loader and its consumer did since the running epoch began, or since the last report.

    Times are those of the consumer, from one item that it received to the next: first it works, then it waits. The wait
    for the first item of an epoch, in which processes start, stands by itself.

    Attributes:
        loader: Name of the pipeline.
        rank: Of the loader.
        epoch: The one that runs, or the last.
        steps: Items that the consumer has received.
        samples: In them, padding left out.
        replaced: Bad samples for which others stand.
        elapsed_s: From the first item that the consumer received to the last.
        wait_s: What it waited of that, and
        wait_ratio: as a share of `elapsed_s`.
        wait_p99_s: What 99 of 100 waits did not exceed.
        first_wait_s: How long it waited for the first item.
        samples_per_s: From the first item to the last.
        bytes_read: From shards, for these samples.
        bytes_per_s: At `samples_per_s`.
        capacity: Items that can be ready ahead of the consumer; 0 where none is made before it is asked for.
        ready_mean: How many were ready when the consumer asked.
        empty_ratio: Share of the steps at which none was.
        busy_ratio: Share of their time that all threads of all workers spent in stages. None where no stage was timed.
        cpus: CPUs that the stages kept busy.
        stages: What each stage took, in the order in which they run.
        advice: Which setting would make the consumer wait less, and why; None where it hardly waits.
    """

    loader: str
    rank: int
    epoch: int
    steps: int
    samples: int
    replaced: int
    elapsed_s: float
    wait_s: float
    wait_ratio: float
    wait_p99_s: float
    first_wait_s: float
    samples_per_s: float
    bytes_read: int
    bytes_per_s: float
    capacity: int
    ready_mean: float
    empty_ratio: float
    busy_ratio: float | None
    cpus: float
    stages: Mapping[str, StageStats]
    advice: str | None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, under the same names."""
        return asdict(self)

    def line(self) -> str:
        """All that matters in one line."""
        told = f"{self.loader}: epoch {self.epoch}, {self.steps} steps: {self._speed()}, {self._waited()}"
        return f"{told}. {self.advice}" if self.advice else f"{told}."

    def __str__(self) -> str:
        """A report of some lines, the last of which says what to do."""
        replaced = f", {self.replaced} replaced" if self.replaced else ""
        lines = [
            f"{self.loader}, epoch {self.epoch}: {self.steps} steps, {self.samples} samples{replaced}; {self._speed()}",
            f"{self._waited()}; the first {duration(self.first_wait_s)}, 99 of 100 within {duration(self.wait_p99_s)}",
        ]
        if self.busy_ratio is not None:
            lines.append(f"threads busy {percent(self.busy_ratio)} of the time, on {self.cpus:.1f} CPUs")
            lines += _table(self.stages)
        if self.steps:
            lines.append(self.advice or "The loader keeps up with its consumer: there is nothing to change.")
        return "\n".join(lines)

    def _speed(self) -> str:
        read = f", {self.bytes_per_s / 1e6:.3g} MB/s" if self.bytes_read else ""
        return f"{number(self.samples_per_s)} samples/s{read}"

    def _waited(self) -> str:
        ready = f", {self.ready_mean:.1f} of {self.capacity} ready" if self.capacity else ", none made ahead"
        return f"waited {percent(self.wait_ratio)} of {duration(self.elapsed_s)}{ready}"


def _table(stages: Mapping[str, StageStats]) -> list[str]:
    rows: list[tuple[str, ...]] = [("stage", "share", "mean", "p50", "p99", "on a CPU")]
    for name, stage in stages.items():
        times = (duration(seconds) for seconds in (stage.mean_s, stage.p50_s, stage.p99_s))
        rows.append((name, percent(stage.share_ratio), *times, percent(stage.cpu_ratio)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows]


def number(value: float) -> str:
    """Three digits, and no fewer than stand before the point: 2,310, 23.1."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Two digits: 0.43 %, 7.4 %, 74 %."""
    return f"{share * 100:.2g} %" if share < 0.995 else f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """Three digits, in the unit that fits: 12.3 us, 1.23 ms, 123 s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale * 0.9995:
            return f"{number(seconds / scale)} {unit}"
    return f"{seconds * 1e6:.3g} us"
