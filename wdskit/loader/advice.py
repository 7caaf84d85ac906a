"""Which knob to turn where a consumer waits for its loader, as a sentence with the numbers that say so."""

from __future__ import annotations

import os
from typing import NamedTuple

from wdskit.loader.stats_types import LoaderStats, StageStats, duration, percent

WAIT_RATIO = 0.05
"""Share of its time that a consumer may wait before there is something to say."""

MIN_WAITS_S = 0.02
"""Time below which shares mean nothing."""

_BUSY = 0.7  # share of their time from which on threads are what limits
_SELDOM = 0.05  # share of the steps at which nothing is ready, up to which it is not that that the consumer waits for
_WAITING = 0.5  # share of its time on a CPU, up to which a stage waits more than it works
_LARGE = 0.4  # share of all stages' time that makes one of them the reason
_IDLE_CPUS = 0.7  # CPUs of a process below which its threads do not wait for the GIL
_ONE_CPU = 1.35  # CPUs of a process whose threads wait for the GIL: one, and what is done without it


class Setting(NamedTuple):
    """How a loader runs.

    Attributes:
        workers: Processes; 0: the main one.
        threads: Of each of them.
        prefetch: Items that each process has ready ahead.
        capacity: Items that can be ready in all; 0 where each is made when the consumer asks for it.
        num_cpus: That the processes of this rank may use.
        one_thread: Whether each process has one thread because functions of the user's are called.
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


def is_crowded(setting: Setting) -> bool:
    """Whether other programs have had work for all CPUs of this machine, in the last minute."""
    return os.getloadavg()[0] - setting.num_threads >= (os.cpu_count() or 1)


def advise(stats: LoaderStats, setting: Setting, *, crowded: bool = False) -> str | None:
    """What to change, and the numbers it follows from; None where the consumer hardly waits, and so nothing would help.

    Args:
        stats: Of some steps.
        setting: How they were made.
        crowded: Whether other programs want the CPUs: then threads that do not run do not wait for the GIL.
    """
    if stats.wait_ratio < WAIT_RATIO or stats.elapsed_s < MIN_WAITS_S:
        return None
    waited = f"The consumer waited {percent(stats.wait_ratio)} of the time"
    return f"{waited}: {_reason(stats, setting, crowded=crowded)}"


def _reason(stats: LoaderStats, setting: Setting, *, crowded: bool) -> str:
    if not setting.capacity:
        return "each item is made only when it is asked for. Use workers: 1, which makes them ahead."
    if stats.busy_ratio is None:
        return _without_stages(stats, setting)
    if stats.busy_ratio < _BUSY:
        return _idle(stats, setting, stats.busy_ratio)
    waiting = _waits_most(stats, setting, crowded=crowded)
    if waiting is not None:
        return _outside(waiting, stats.stages[waiting], setting)
    return _saturated(stats, setting, stats.busy_ratio, crowded=crowded)


def _without_stages(stats: LoaderStats, setting: Setting) -> str:
    ready = f"{stats.ready_mean:.1f} of {setting.capacity} items were ready when it asked"
    return f"{ready}. Use more workers than {setting.workers}."


def _idle(stats: LoaderStats, setting: Setting, busy_ratio: float) -> str:
    """Threads that have nothing to do while the consumer waits."""
    busy = f"though the threads were busy {percent(busy_ratio)} of theirs"
    ready = f"{stats.ready_mean:.1f} of {setting.capacity} items were ready on average when it asked"
    if stats.empty_ratio <= _SELDOM:
        takes = f"to hand one over takes {duration(stats.wait_s / max(1, stats.steps))}"
        way = "Use larger batches" if setting.workers else "Use workers: 1, and larger batches"
        return f"{busy} and {ready}, so {takes}. {way}."
    times = f"none at {percent(stats.empty_ratio)} of the steps"
    if stats.ready_mean >= setting.capacity / 4:
        return f"{busy} and {ready}, {times}: it asks in bursts. Use prefetch: {2 * setting.prefetch}."
    if setting.workers:
        return f"{busy} and {ready}: what is between stages takes the rest. Use larger batches."
    return f"{busy} and {ready}: the consumer's own Python code keeps them from running. Use workers: 1."


def _waits_most(stats: LoaderStats, setting: Setting, *, crowded: bool) -> str | None:
    """The stage that waits for something outside: the others run when they want to, or else the CPUs are idle. Where
    threads wait for each other instead, all stages do, and one CPU is busy.
    """
    name = max(stats.stages, key=lambda each: _idle_ratio(stats.stages[each]))
    stage = stats.stages[name]
    if stage.share_ratio < _LARGE or stage.cpu_ratio > _WAITING:
        return None
    rest = 1 - stage.share_ratio
    others = [each for other, each in stats.stages.items() if other != name]
    others_run = rest > 0.02 and sum(each.share_ratio * each.cpu_ratio for each in others) / rest > _WAITING
    is_idle = not crowded and stats.cpus / setting.num_processes < _IDLE_CPUS
    return name if others_run or is_idle else None


def _idle_ratio(stage: StageStats) -> float:
    return stage.share_ratio * (1 - stage.cpu_ratio)


def _outside(name: str, stage: StageStats, setting: Setting) -> str:
    took = f"`{name}` takes {percent(stage.share_ratio)} of the threads' time ({duration(stage.mean_s)} on average, "
    took += f"p99 {duration(stage.p99_s)}), and waits in {percent(1 - stage.cpu_ratio)} of that"
    what = "the storage is slow" if name.startswith("read") else "for something outside"
    way = "" if not name.startswith("read") else ", or bring the shards nearer"
    more = f"workers: {2 * setting.workers}" if setting.one_thread else f"threads: {2 * setting.threads}"
    return f"{took}: {what}. Use {more}, which wait for more at once{way}."


def _saturated(stats: LoaderStats, setting: Setting, busy_ratio: float, *, crowded: bool) -> str:
    """Threads that do all they can."""
    workers, threads, num_cpus = setting.workers, setting.threads, setting.num_cpus
    name, stage = max(stats.stages.items(), key=lambda item: item[1].share_ratio)
    largest = f"`{name}` takes {percent(stage.share_ratio)} of their time ({duration(stage.mean_s)} on average, "
    largest += f"p99 {duration(stage.p99_s)})"
    busy = f"the threads were busy {percent(busy_ratio)} of theirs"
    each_cpus = stats.cpus / setting.num_processes
    all_busy = stats.cpus >= 0.8 * num_cpus
    runs = sum(each.share_ratio * each.cpu_ratio for each in stats.stages.values())
    if crowded and runs < 0.6:
        return f"{busy}, but ran in {percent(runs)} of that, since other programs hold the CPUs; {largest}."
    if threads > 1 and runs < 0.6 and each_cpus < _ONE_CPU and not all_busy:
        held = (
            f"the {threads} threads of a process kept only {each_cpus:.1f} CPUs busy, because Python code holds the GIL"
        )
        return f"{held}; {largest}. Use workers: {workers + 1}; more threads would not help."
    if not all_busy and setting.num_threads < num_cpus and setting.one_thread:
        return f"{busy}, and {stats.cpus:.1f} of {num_cpus} CPUs were. Use workers: {num_cpus}."
    if not all_busy and setting.num_threads < num_cpus:
        wanted = max(threads + 1, num_cpus // setting.num_processes)
        return f"{busy}, and {stats.cpus:.1f} of {num_cpus} CPUs were. Use threads: {wanted}."
    if runs < 0.6 and not all_busy:
        return f"{busy}, but ran in {percent(runs)} of that, as {num_cpus} CPUs let them; {largest}."
    return f"all CPUs are in use ({stats.cpus:.1f} of {num_cpus}); {largest}. Make that stage cheaper."
