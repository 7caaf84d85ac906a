"""Statistics of a loader: rates, the waits of the consumer, and the time of each stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wdskit.stages.run import Timings
from wdskit.storage.traffic import Traffic
from wdskit.text import format_bytes

WAIT_RATIO = 0.05
"""A consumer that waits for at least this share of its time gets advice."""


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
        stages: The mean seconds per sample of each stage, also of stages that work on batches, in the order of the
            stages. They are measured on some of the samples.
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
    stages: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes by name, as plain dicts and numbers, for wandb or TensorBoard."""
        return asdict(self) | {"traffic": self.traffic._asdict()}

    def line(self) -> str:
        """Return speed and waits in one line, with advice if the consumer waits."""
        found = (
            f"{self.loader}, epoch {self.epoch}: {self.steps} steps, "
            f"{self.samples} samples ({self.replaced} replaced), {self.samples_per_s:,.1f} samples/s, "
            f"{format_bytes(self.bytes_per_s)}/s; "
            f"waited {self.wait_ratio:.1%} of {self.elapsed_s:.3g} s, first wait {self.first_wait_s:.3g} s."
        )
        if self.wait_ratio < WAIT_RATIO:
            return found
        name, mean_s = max(self.stages.items(), key=lambda item: item[1], default=("", 0.0))
        largest = f"`{name}` takes {mean_s / sum(self.stages.values()):.0%} of the stages' time, and " if name else ""
        return f"{found} The consumer waits for the loader: {largest}`wdskit bench` finds the workers and threads."

    def __str__(self) -> str:
        """Return `line()` and a table of the stages."""
        all_s = sum(self.stages.values())
        rows = [f"{mean_s / all_s:6.1%} {mean_s * 1e3:9.3g} ms  {name}" for name, mean_s in self.stages.items()]
        return "\n".join([self.line(), *([" share       mean  stage"] if rows else []), *rows])


class Meter:
    """Counts the items that a consumer receives in an epoch, and measures its waits.

    Args:
        name: Name of the pipeline.
        rank: Rank of the loader.
    """

    def __init__(self, *, name: str, rank: int) -> None:
        self.name = name
        self._rank = rank
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Set all counts to 0 for `epoch`, and start the wait for its first item."""
        self._epoch = epoch
        self._steps = self._samples = self._first_samples = self._replaced = 0
        self._elapsed_s = self._wait_s = self._first_wait_s = 0.0
        self._timings = Timings()
        self._asked_s = self._received_s = time.perf_counter()

    def asked(self) -> None:
        """Start the wait for the next item. Called when the consumer asks for the item."""
        self._asked_s = time.perf_counter()

    def count_replaced(self, number: int) -> None:
        """Count bad samples that were replaced or skipped."""
        self._replaced += number

    def received(self, samples: int, *, replaced: int = 0, timings: Timings | None = None) -> None:
        """Count an item, and end the consumer's wait for it.

        Args:
            samples: Number of samples in the item.
            replaced: Number of bad samples that were replaced by others or skipped.
            timings: The time of each stage for these samples; None if the item has no timings.
        """
        now_s = time.perf_counter()
        if self._steps:
            self._elapsed_s += now_s - self._received_s
            self._wait_s += now_s - self._asked_s
        else:
            self._first_samples = samples
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
        elapsed_s, timings = self._elapsed_s, self._timings
        samples_per_s = (self._samples - self._first_samples) / elapsed_s if elapsed_s else 0.0
        return LoaderStats(
            loader=self.name,
            rank=self._rank,
            epoch=self._epoch,
            steps=self._steps,
            samples=self._samples,
            replaced=self._replaced,
            elapsed_s=elapsed_s,
            wait_s=self._wait_s,
            wait_ratio=self._wait_s / elapsed_s if elapsed_s else 0.0,
            first_wait_s=self._first_wait_s,
            samples_per_s=samples_per_s,
            bytes_read=timings.bytes_read,
            bytes_per_s=timings.bytes_read / self._samples * samples_per_s if self._samples else 0.0,
            traffic=timings.traffic,
            stages={name: total_s / num for name, (num, total_s) in [*timings.stages.items()]},
        )
