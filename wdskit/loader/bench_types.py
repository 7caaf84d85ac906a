"""What `wdskit.bench` measures, as numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Measured(NamedTuple):
    """The median of repeats, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


class Setting(NamedTuple):
    """How a loader is run: worker processes (0: none), and threads in each process."""

    workers: int
    threads: int


@dataclass(frozen=True)
class PartBench:
    """Reading alone, or decoding alone, without a loader.

    Attributes:
        what: "read": the fields' bytes through the index, in the pipeline's order. "decode": the pipeline's stages,
            batches included, on samples that are in memory.
        processes: That work at the same time, and
        threads: in each.
        samples_per_s: All of them together.
        bytes_per_s: The encoded bytes of these samples.
        cpu_ms: CPU time of a sample.
    """

    what: Literal["read", "decode"]
    processes: int
    threads: int
    samples_per_s: Measured
    bytes_per_s: float
    cpu_ms: Measured


@dataclass(frozen=True)
class LoaderBench:
    """The whole loader with one setting; rates are samples/s.

    Attributes:
        setting: Workers and threads.
        alone: While the process that takes the batches does nothing else.
        limit_ratio: `alone` as a share of the fastest decoding of the same repeat.
        cpu_ms: CPU time of a sample, of the process and its workers; None where only Linux could tell.
        first_batch_s: From the first `next` to the first batch, the start of the workers included.
        beside_python: While a thread of the process that takes the batches runs Python code without a pause; None where
            that was left out.
        beside_training: While it trains between two batches; None where that was left out.
        headspace: The same loader with batches that cost nothing to make: what its own work allows.
    """

    setting: Setting
    alone: Measured
    limit_ratio: Measured
    cpu_ms: Measured | None
    first_batch_s: Measured
    beside_python: Measured | None
    beside_training: Measured | None
    headspace: Measured


@dataclass(frozen=True)
class Refused:
    """A setting with which the pipeline cannot run, and why."""

    setting: Setting
    reason: str


@dataclass(frozen=True)
class Advice:
    """The setting to take.

    Attributes:
        setting: Workers and threads.
        yaml: It, and what else the configuration says of the loader, to paste.
        reason: Why, in a sentence.
        limit_ratio: The share of the fastest decoding that it reaches, and
        cpu_ratio: how many times its CPU time a sample it needs; None where only Linux could tell.
        warnings: What makes the figures doubtful, or is in the way of better ones.
    """

    setting: Setting
    yaml: str
    reason: str
    limit_ratio: float
    cpu_ratio: float | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class BenchResult:
    """All that was measured. Rates are samples/s.

    Attributes:
        source: "exact", "resampled" or "sequential".
        num_shards: Shards that the source names.
        sample_bytes: Mean bytes of the fields of a sample.
        batch: Samples of a batch of a rank; 1 without `batched`.
        world_size: Ranks of the run of which one is measured.
        num_cpus: CPUs that this process may use.
        device: Where the training step ran: "cpu", or the GPU's name.
        python: Its version, and
        torch: that of torch.
        seconds: Length of each measurement.
        repeats: How often each was made, in turns.
        training_step_s: What a step took of the training beside which was measured; None where that was left out.
        configured: The setting of the configuration; None of a `Pipeline`.
        parts: Reading and decoding alone.
        limit: The fastest decoding.
        loaders: One a setting.
        refused: Settings with which the pipeline cannot run.
        advice: What follows.
    """

    source: str
    num_shards: int
    sample_bytes: float
    batch: int
    world_size: int
    num_cpus: int
    device: str
    python: str
    torch: str
    seconds: float
    repeats: int
    training_step_s: float | None
    configured: Setting | None
    parts: tuple[PartBench, ...]
    limit: Measured
    loaders: tuple[LoaderBench, ...]
    refused: tuple[Refused, ...]
    advice: Advice
