"""What `wdskit.plan` tells, as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Spread(NamedTuple):
    """A number that differs from rank to rank."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class PartPlan:
    """One data set of a source.

    Attributes:
        name: Its shards as the configuration names them, with its split and range.
        num_shards: Shards with a sample that counts, repeats left out.
        num_samples: Samples that count.
        num_bytes: Their bytes, headers and padding included.
        share_ratio: Its share of the epoch's samples.
        repeats: How often each of its samples comes in an epoch, on average.
    """

    name: str
    num_shards: int
    num_samples: int
    num_bytes: int
    share_ratio: float
    repeats: float


@dataclass(frozen=True)
class LanesPlan:
    """The lanes of an order.

    Attributes:
        num_lanes: L.
        per_rank: From how many a rank takes: L / gcd(R, L), for a mixture as sampled.
        fitting: Numbers of lanes nearest to L at which a rank takes from no more than twice L / R.
    """

    num_lanes: int
    per_rank: int
    fitting: tuple[int, ...]


@dataclass(frozen=True)
class QualityPlan:
    """How far batches are from a uniform draw, in the worst case: data sorted by class, with classes of equal size.

    Attributes:
        num_classes: K.
        rank_classes: Different classes in a rank's batch, on average over ranks and over steps all through the epoch;
        rank_classes_least: in the batch with fewest, and
        rank_ideal: in a batch of that size drawn uniformly, as expected.
        global_classes: The same of a global batch, on average, and
        global_ideal: drawn uniformly.
        seen_again: The share of a rank's samples of one pass that the same rank sees in the next. None for sources
            without passes, where each draw is a new one, and for mixtures by weights.
        seen_again_ideal: 1 / R.
        verdict: All this in a sentence.
    """

    num_classes: int
    rank_classes: float
    rank_classes_least: int
    rank_ideal: float
    global_classes: float
    global_ideal: float
    seen_again: Spread | None
    seen_again_ideal: float
    verdict: str


@dataclass(frozen=True)
class EpochPlan:
    """An epoch of a planned source. Shards that stand in a source several times count each time.

    Where a rank shares its lanes with others, and for `resampled`, what it reads is the expectation. Samples are taken
    to be of their shard's mean size.

    Attributes:
        source: "exact", "resampled" or "sequential".
        world_size: R.
        workers: Worker processes of a rank, 0 for none; where nobody says, those of a loader on this machine.
        threads_reason: Why each of them has one thread, where functions of the user's are the reason.
        gpus_per_node: Ranks of a node, which follow each other; at most R.
        epoch: Its number.
        num_samples: Samples of the epoch, over all ranks.
        batch: B, samples of a rank's batch; 1 without `batched`.
        global_batch: R x B.
        steps: Batches of each rank.
        num_dropped: Samples at the end of the epoch that no step holds.
        num_padded: Rows of the last step that hold no sample.
        num_shards: Shards of all parts with a sample that counts.
        num_bytes: Bytes of the samples of all parts.
        lanes: None for `sequential`.
        rank_shards: Shards that a rank reads from in the epoch.
        rank_bytes: Bytes of the samples that a rank reads in the epoch.
        open_shards: What a rank has open at once: the shards into which the windows of its lanes reach (for
            `sequential` a global batch), at the moment with most, on the rank with most.
        node_shards: The same of the ranks of one node together: the shards that must be at hand on it at once.
        node_bytes: Bytes of all samples of these windows.
        parts: One data set, or those of a mixture.
        warnings: What would better be otherwise, each with what to do.
        quality: How far batches are from a uniform draw, where that was asked for.
    """

    source: str
    world_size: int
    workers: int
    threads_reason: str
    gpus_per_node: int
    epoch: int
    num_samples: int
    batch: int
    global_batch: int
    steps: int
    num_dropped: int
    num_padded: int
    num_shards: int
    num_bytes: int
    lanes: LanesPlan | None
    rank_shards: Spread
    rank_bytes: Spread
    open_shards: int
    node_shards: int
    node_bytes: int
    parts: tuple[PartPlan, ...]
    warnings: tuple[str, ...]
    quality: QualityPlan | None = None


@dataclass(frozen=True)
class StreamPlan:
    """An epoch of a stream.

    Attributes:
        source: "stream".
        world_size: R.
        workers: Worker processes of a rank, 0 for none.
        num_shards: Shards of the stream.
        resampled: Whether they are drawn with replacement, so that there is no pass over them.
        rank_shards: Least and most shards that a rank draws in a pass; None where it is resampled.
        worker_shards: The same of one worker.
        batch: Samples of a batch; 1 without `batched`.
        steps: Items of each rank in an epoch; None where only reading tells.
        warnings: What would better be otherwise.
    """

    source: str
    world_size: int
    workers: int
    num_shards: int
    resampled: bool
    rank_shards: tuple[int, int] | None
    worker_shards: tuple[int, int] | None
    batch: int
    steps: int | None
    warnings: tuple[str, ...]
