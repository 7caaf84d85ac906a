"""Statistics of a loader: rates, the waits of the consumer, and the time of each stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wdskit.stages.timing import NodeCounts, Timings
from wdskit.storage.traffic import Traffic
from wdskit.text import format_bytes

WAIT_RATIO = 0.05
"""A consumer that waits for at least this share of its time gets advice."""

MIN_WAITS_S = 0.02
"""Shortest time from the first item to the last item for which the consumer gets advice."""


@dataclass(frozen=True)
class StageStats:
    """The time that a stage takes, measured on some of the samples.

    Attributes:
        mean_s: Mean seconds per sample, also for stages that work on batches.
        share_ratio: Share of the time of all stages, 0 to 1.
    """

    mean_s: float
    share_ratio: float


@dataclass(frozen=True)
class LoaderStats:
    """Statistics of a loader and its consumer since the running epoch began.

    The consumer receives an item, works, and waits for the next one. The wait for the first item of an epoch, during
    which processes start, is counted separately.

    Attributes:
        loader: Name of the pipeline.
        rank: Rank of the loader.
        epoch: Number of the running epoch. Between two epochs: number of the last epoch.
        steps: Number of items that the consumer has received.
        samples: Number of samples in these items, without padding.
        replaced: Number of bad samples. A planned source replaces each by another sample; a stream skips them.
        elapsed_s: Seconds between the first and the last item that the consumer has received.
        wait_s: Seconds of `elapsed_s` in which the consumer waited.
        wait_ratio: `wait_s` as a share of `elapsed_s`, 0 to 1.
        first_wait_s: Seconds that the consumer waited for the first item.
        samples_per_s: Samples per second from the first item to the last item.
        bytes_read: Bytes read from shards for these samples.
        bytes_per_s: Mean bytes of a sample times `samples_per_s`.
        traffic: Bytes that came from stores and from the cache, and the number of repeated requests.
        stages: The time of each stage, in the order of the stages.
        nodes: The batches, bytes and lost jobs of each node of a cluster; empty without a cluster.
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
    first_wait_s: float
    samples_per_s: float
    bytes_read: int
    bytes_per_s: float
    traffic: Traffic
    stages: Mapping[str, StageStats]
    nodes: Mapping[str, NodeCounts] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes by name, as plain dicts and numbers, for wandb or TensorBoard."""
        nodes = {name: counts._asdict() for name, counts in self.nodes.items()}
        return asdict(self) | {"traffic": self.traffic._asdict(), "nodes": nodes}

    def line(self) -> str:
        """Return speed and waits in one line, with advice if the consumer waits."""
        return f"{self._summary()} {self._hint()}".rstrip()

    def __str__(self) -> str:
        """Return speed, waits, tables of the stages and of a cluster's nodes, and advice if the consumer waits."""
        stages = [(name, f"{one.share_ratio:.1%}", format_duration(one.mean_s)) for name, one in self.stages.items()]
        nodes = [
            (name, str(counts.batches), format_bytes(counts.num_bytes), str(counts.repeated))
            for name, counts in sorted(self.nodes.items())
        ]
        lines = [self._summary()]
        lines += _table(("stage", "share", "mean"), stages) if stages else []
        lines += _table(("node", "batches", "size", "jobs repeated"), nodes) if nodes else []
        lines += [self._hint() or "The loader keeps up with its consumer."] if self.steps else []
        return "\n".join(lines)

    def _summary(self) -> str:
        replaced = f" ({self.replaced} replaced)" if self.replaced else ""
        read = f", {format_bytes(self.bytes_per_s)}/s" if self.bytes_read else ""
        sizes = {"fetched": self.traffic.fetched, "from the cache": self.traffic.from_cache}
        read += "".join(f", {format_bytes(size)} {what}" for what, size in sizes.items() if size)
        read += f", {self.traffic.retries} requests retried" if self.traffic.retries else ""
        first = f", first wait {format_duration(self.first_wait_s)}" if self.first_wait_s else ""
        return (
            f"{self.loader}, epoch {self.epoch}: {self.steps} steps, {self.samples} samples{replaced}, "
            f"{self.samples_per_s:,.1f} samples/s{read}; "
            f"waited {self.wait_ratio:.1%} of {format_duration(self.elapsed_s)}{first}."
        )

    def _hint(self) -> str:
        if self.wait_ratio < WAIT_RATIO or self.elapsed_s < MIN_WAITS_S:
            return ""
        largest = ""
        if self.stages:
            name, stage = max(self.stages.items(), key=lambda item: item[1].share_ratio)
            largest = f"`{name}` takes {stage.share_ratio:.0%} of the stages' time, and "
        return f"The consumer waits for the loader: {largest}`wdskit bench` finds the workers and threads."


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with a line of headings, the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in (head, *rows)]


def format_duration(seconds: float) -> str:
    """Return a time with its unit: `12.3 us`, `1.23 ms`, `1,234 s`. It has at most three significant digits, but a time
    from 1000 s on is rounded to whole seconds.
    """
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1), ("ms", 1000)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


class Meter:
    """Counts the items that a consumer receives in an epoch, and measures its waits. Another thread may call `stats`.

    Args:
        name: Name of the pipeline.
        rank: Rank of the loader.
        clock: Returns the current time in seconds.
    """

    def __init__(self, *, name: str, rank: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Set all counts to 0 for `epoch`, and start the wait for its first item."""
        with self._lock:
            self._epoch = epoch
            self._steps = self._samples = self._later_samples = self._replaced = 0
            self._elapsed_s = self._wait_s = self._first_wait_s = 0.0
            self._timings = Timings()
            self._asked_s = self._received_s = self._clock()

    def asked(self) -> None:
        """Start the wait for the next item. Called when the consumer asks for the item."""
        self._asked_s = self._clock()

    def count_replaced(self, number: int) -> None:
        """Count bad samples that were replaced or skipped."""
        with self._lock:
            self._replaced += number

    def received(self, samples: int, *, replaced: int = 0, timings: Timings | None = None) -> None:
        """Count an item, and end the consumer's wait for it.

        Args:
            samples: Number of samples in the item.
            replaced: Number of bad samples that were replaced by others or skipped.
            timings: The time of each stage for these samples; None if the item has no timings.
        """
        now_s = self._clock()
        with self._lock:
            if self._steps:
                self._later_samples += samples
                self._elapsed_s += now_s - self._received_s
                self._wait_s += now_s - self._asked_s
            else:
                self._first_wait_s = now_s - self._asked_s
            self._steps += 1
            self._samples += samples
            self._replaced += replaced
            if timings is not None:
                self._timings.merge(timings)
        self._received_s = now_s

    def stats(self) -> LoaderStats:
        """Return the statistics since the running epoch began; between two epochs, of the last epoch. Before the first
        epoch, all counts are 0.
        """
        with self._lock:
            elapsed_s, wait_s, timings = self._elapsed_s, self._wait_s, self._timings
            samples_per_s = self._later_samples / elapsed_s if elapsed_s else 0.0
            means = {name: total_s / num for name, (num, total_s) in timings.stages.items()}
            all_s = sum(means.values()) or 1.0
            return LoaderStats(
                loader=self.name,
                rank=self._rank,
                epoch=self._epoch,
                steps=self._steps,
                samples=self._samples,
                replaced=self._replaced,
                elapsed_s=elapsed_s,
                wait_s=wait_s,
                wait_ratio=wait_s / elapsed_s if elapsed_s else 0.0,
                first_wait_s=self._first_wait_s,
                samples_per_s=samples_per_s,
                bytes_read=timings.bytes_read,
                bytes_per_s=timings.bytes_read / self._samples * samples_per_s if self._samples else 0.0,
                traffic=timings.traffic,
                stages={name: StageStats(mean_s, mean_s / all_s) for name, mean_s in means.items()},
                nodes=dict(timings.nodes),
            )
