"""What a loader reports: rates, the waits of the consumer, and the time of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wdskit.storage.traffic import Traffic
from wdskit.text import format_bytes

WAIT_RATIO = 0.05
"""Share of its time that a consumer may wait before there is something to say."""

_MUCH_STORAGE = 0.5  # of the stages' time

MIN_WAITS_S = 0.02
"""Time below which shares mean nothing."""


@dataclass(frozen=True)
class StageStats:
    """The time that a stage took. If samples are very small, only some are timed, and the times are scaled to all.

    Attributes:
        num: Number of values: samples, or batches after `batched`.
        mean_s: Time per value.
        total_s: Time for all values, in all threads and workers together.
        share_ratio: Share of the time of all stages.
    """

    num: int
    mean_s: float
    total_s: float
    share_ratio: float


@dataclass(frozen=True)
class LoaderStats:
    """What a loader and its consumer did since the running epoch began, or since the last report.

    The consumer receives an item, works, and waits for the next one. The wait for the first item of an epoch, during
    which processes start, is counted separately.

    Attributes:
        loader: Name of the pipeline.
        rank: Rank of the loader.
        epoch: The epoch that runs, or the last one.
        steps: Number of items that the consumer has received.
        samples: Number of samples in them, without padding.
        replaced: Number of bad samples that were replaced by others.
        elapsed_s: Time from the first item that the consumer received to the last.
        wait_s: Time of `elapsed_s` that it waited.
        wait_ratio: `wait_s` as a share of `elapsed_s`.
        first_wait_s: Time that it waited for the first item.
        samples_per_s: Rate from the first item to the last.
        bytes_read: Bytes read from shards for these samples.
        bytes_per_s: Bytes read at `samples_per_s`.
        traffic: What came from stores, and from the cache of their objects.
        stages: The time of each stage, in the order in which they run.
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

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON, with the same names."""
        return asdict(self) | {"traffic": self.traffic._asdict()}

    def line(self) -> str:
        """Speed and waits in one line, with advice if the consumer waits."""
        return f"{self._summary()} {self._hint()}".rstrip()

    def __str__(self) -> str:
        """Speed and waits, a table of the stages, and whether the loader keeps up."""
        rows: list[tuple[str, ...]] = [("stage", "share", "mean", "total")]
        for name, stage in self.stages.items():
            times = format_duration(stage.mean_s), format_duration(stage.total_s)
            rows.append((name, f"{stage.share_ratio:.1%}", *times))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows]
        keeps_up = self._hint() or "The loader keeps up with its consumer."
        return "\n".join([self._summary(), *(table if self.stages else ()), *([keeps_up] if self.steps else ())])

    def _summary(self) -> str:
        replaced = f" ({self.replaced} replaced)" if self.replaced else ""
        read = f", {format_bytes(self.bytes_per_s)}/s" if self.bytes_read else ""
        read += self._storage()
        first = f", first wait {format_duration(self.first_wait_s)}" if self.first_wait_s else ""
        return (
            f"{self.loader}, epoch {self.epoch}: {self.steps} steps, {self.samples} samples{replaced}, "
            f"{self.samples_per_s:,.1f} samples/s{read}; "
            f"waited {self.wait_ratio:.1%} of {format_duration(self.elapsed_s)}{first}."
        )

    def _storage(self) -> str:
        traffic = self.traffic
        sizes = {"fetched": traffic.fetched, "from the cache": traffic.from_cache}
        found = [f"{format_bytes(size)} {what}" for what, size in sizes.items() if size]
        found += [f"{traffic.retries} requests retried"] if traffic.retries else []
        return "".join(f", {each}" for each in found)

    def _hint(self) -> str:
        if self.wait_ratio < WAIT_RATIO or self.elapsed_s < MIN_WAITS_S:
            return ""
        if self.traffic.wait_s > _MUCH_STORAGE * sum(stage.total_s for stage in self.stages.values()):
            waited = f"its threads waited {format_duration(self.traffic.wait_s)} for the store"
            way = (
                "enlarge the `cache`, raise `prefetch`"
                if self.traffic.from_cache
                else "set a `cache`, raise `prefetch`"
            )
            return f"The consumer waits for the loader: {waited}; {way} or `workers`."
        largest = ""
        if self.stages:
            name, stage = max(self.stages.items(), key=lambda item: item[1].share_ratio)
            largest = f"`{name}` takes {stage.share_ratio:.0%} of the stages' time, and "
        return f"The consumer waits for the loader: {largest}`wdskit bench` finds the workers and threads."


def format_duration(seconds: float) -> str:
    """Three digits, in the unit that fits: `12.3 us`, `1.23 ms`, `1,234 s`."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, scale in (("s", 1), ("ms", 1000)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
