"""What a loader reports of itself: rates, the consumer's waits, each stage's time, and which setting would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

WAIT_RATIO = 0.05
"""Share of its time that a consumer may wait before there is something to say."""

MIN_WAITS_S = 0.02
"""Time below which shares mean nothing."""

_BUSY = 0.7  # share of their time from which on threads are what limits
_SELDOM = 0.05  # share of the steps at which nothing is ready, up to which it is not that that the consumer waits for
_WAITING = 0.5  # share of its time on a CPU, up to which a stage waits more than it works
_LARGE = 0.4  # share of all stages' time that makes one of them the reason
_RUNNING = 0.6  # share of their time on a CPU below which threads are kept from running
_IDLE_CPUS = 0.7  # CPUs of a process below which its threads do not wait for the GIL
_ONE_CPU = 1.35  # CPUs of a process whose threads wait for the GIL: one, and what is done without it


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
        line = f"{self.loader}: epoch {self.epoch}, {self.steps} steps: {self._speed()}, {self._waited()}."
        return f"{line} {self.advice}" if self.advice else line

    def __str__(self) -> str:
        """A report of some lines, the last of which says what to do."""
        replaced = f", {self.replaced} replaced" if self.replaced else ""
        lines = [
            f"{self.loader}, epoch {self.epoch}: {self.steps} steps, {self.samples} samples{replaced}; {self._speed()}",
            f"{self._waited()}; the first {duration(self.first_wait_s)}, 99 of 100 within {duration(self.wait_p99_s)}",
        ]
        if self.busy_ratio is not None:
            lines.append(f"threads busy {percent(self.busy_ratio)} of the time, on {self.cpus:.1f} CPUs")
            rows: list[tuple[str, ...]] = [("stage", "share", "mean", "p50", "p99", "on a CPU")]
            for name, stage in self.stages.items():
                times = (duration(seconds) for seconds in (stage.mean_s, stage.p50_s, stage.p99_s))
                rows.append((name, percent(stage.share_ratio), *times, percent(stage.cpu_ratio)))
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows]
        if self.steps:
            lines.append(self.advice or "The loader keeps up with its consumer: there is nothing to change.")
        return "\n".join(lines)

    def _speed(self) -> str:
        read = f", {self.bytes_per_s / 1e6:.3g} MB/s" if self.bytes_read else ""
        return f"{number(self.samples_per_s)} samples/s{read}"

    def _waited(self) -> str:
        ready = f", {self.ready_mean:.1f} of {self.capacity} ready" if self.capacity else ", none made ahead"
        return f"waited {percent(self.wait_ratio)} of {duration(self.elapsed_s)}{ready}"


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


class Setting(NamedTuple):
    """How a loader runs: worker processes (0: none), threads of each process, items that each has ready ahead and all
    have (0: none is made ahead), CPUs of this rank, and whether processes have one thread for functions of the user's.
    """

    workers: int
    threads: int
    prefetch: int
    capacity: int
    num_cpus: int
    one_thread: bool = False

    @property
    def num_processes(self) -> int:
        """Those that make items."""
        return max(1, self.workers)

    @property
    def num_threads(self) -> int:
        """Threads that make items, in all processes."""
        return self.num_processes * self.threads


def advise(stats: LoaderStats, setting: Setting, *, crowded: bool = False) -> str | None:
    """What to change, and the numbers it follows from; None where the consumer hardly waits, and so nothing would help.

    Args:
        stats: Of some steps.
        setting: How they were made.
        crowded: Whether other programs want the CPUs: then threads that do not run do not wait for the GIL.
    """
    if stats.wait_ratio < WAIT_RATIO or stats.elapsed_s < MIN_WAITS_S:
        return None
    ready = f"{stats.ready_mean:.1f} of {setting.capacity} items were ready"
    if not setting.capacity:
        reason = "each item is made only when it is asked for. Use workers: 1, which makes them ahead."
    elif stats.busy_ratio is None:
        reason = f"{ready} when it asked. Use more workers than {setting.workers}."
    elif stats.busy_ratio < _BUSY:
        busy = f"though the threads were busy {percent(stats.busy_ratio)} of theirs"
        reason = f"{busy} and {ready} on average when it asked{_why_idle(stats, setting)}"
    else:
        busy = f"the threads were busy {percent(stats.busy_ratio)} of theirs"
        reason = _why_waiting(stats, setting, crowded=crowded) or _why_busy(stats, setting, busy, crowded=crowded)
    return f"The consumer waited {percent(stats.wait_ratio)} of the time: {reason}"


def _why_idle(stats: LoaderStats, setting: Setting) -> str:
    """Threads that have nothing to do while the consumer waits."""
    if stats.empty_ratio <= _SELDOM:
        takes = duration(stats.wait_s / max(1, stats.steps))
        way = "Use larger batches" if setting.workers else "Use workers: 1, and larger batches"
        return f", so to hand one over takes {takes}. {way}."
    if stats.ready_mean >= setting.capacity / 4:
        empty = f"none at {percent(stats.empty_ratio)} of the steps"
        return f", {empty}: it asks in bursts. Use prefetch: {2 * setting.prefetch}."
    if setting.workers:
        return ": what is between stages takes the rest. Use larger batches."
    return ": the consumer's own Python code keeps them from running. Use workers: 1."


def _why_waiting(stats: LoaderStats, setting: Setting, *, crowded: bool) -> str | None:
    """A stage that waits for something outside: the others run when they want to, or else the CPUs are idle. Where
    threads wait for each other instead, all stages do, and one CPU is busy.
    """
    name, stage = max(stats.stages.items(), key=lambda item: item[1].share_ratio * (1 - item[1].cpu_ratio))
    if stage.share_ratio < _LARGE or stage.cpu_ratio > _WAITING:
        return None
    rest = 1 - stage.share_ratio
    others_run = rest > 0.02 and (_run_ratio(stats) - stage.share_ratio * stage.cpu_ratio) / rest > _WAITING
    if not others_run and (crowded or stats.cpus / setting.num_processes >= _IDLE_CPUS):
        return None
    took = f"`{name}` takes {percent(stage.share_ratio)} of the threads' time ({_durations(stage)}), "
    took += f"and waits in {percent(1 - stage.cpu_ratio)} of that"
    more = f"workers: {2 * setting.workers}" if setting.one_thread else f"threads: {2 * setting.threads}"
    if name.startswith("read"):
        return f"{took}: the storage is slow. Use {more}, which wait for more at once, or bring the shards nearer."
    return f"{took}: for something outside. Use {more}, which wait for more at once."


def _why_busy(stats: LoaderStats, setting: Setting, busy: str, *, crowded: bool) -> str:
    """Threads that do all they can."""
    threads, num_cpus, num_processes = setting.threads, setting.num_cpus, setting.num_processes
    name, stage = max(stats.stages.items(), key=lambda item: item[1].share_ratio)
    largest = f"`{name}` takes {percent(stage.share_ratio)} of their time ({_durations(stage)})"
    run_ratio, a_process = _run_ratio(stats), stats.cpus / num_processes
    if crowded and run_ratio < _RUNNING:
        return f"{busy}, but ran in {percent(run_ratio)} of that, since other programs hold the CPUs; {largest}."
    if stats.cpus < 0.8 * num_cpus:
        if threads > 1 and run_ratio < _RUNNING and a_process < _ONE_CPU:
            held = f"the {threads} threads of a process kept only {a_process:.1f} CPUs busy, because Python code holds"
            return f"{held} the GIL; {largest}. Use workers: {setting.workers + 1}; more threads would not help."
        if setting.num_threads < num_cpus:
            more = max(threads + 1, num_cpus // num_processes)
            way = f"workers: {num_cpus}" if setting.one_thread else f"threads: {more}"
            return f"{busy}, and {stats.cpus:.1f} of {num_cpus} CPUs were. Use {way}."
        if run_ratio < _RUNNING:
            return f"{busy}, but ran in {percent(run_ratio)} of that, as {num_cpus} CPUs let them; {largest}."
    return f"all CPUs are in use ({stats.cpus:.1f} of {num_cpus}); {largest}. Make that stage cheaper."


def _run_ratio(stats: LoaderStats) -> float:
    """The share of their time in stages in which threads ran."""
    return sum(each.share_ratio * each.cpu_ratio for each in stats.stages.values())


def _durations(stage: StageStats) -> str:
    return f"{duration(stage.mean_s)} on average, p99 {duration(stage.p99_s)}"
