"""How well an order mixes the batches of an epoch, by taking some of them: in numbers and as a picture.

The worst case is taken for the data: sorted by class, as a folder of folders is. What shuffles then is the order and
nothing else.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.classes import read_classes
from wdskit.errors import PipelineError, StorageError
from wdskit.files import publish_bytes
from wdskit.order.base import Ints
from wdskit.order.deal import dealt
from wdskit.order.sequential import SequentialOrder
from wdskit.order.steps import Steps
from wdskit.stages.sources import PlannedData
from wdskit.text import install_extra

DEFAULT_CLASSES = 1000

_MAX_STEPS = 24  # that are taken whole,
_MAX_POSITIONS = 1 << 18  # and their samples, the first step always
_MAX_RANKS = 16
_AS_GOOD = 0.95  # of the classes of a uniform draw
_USABLE = 0.8
_COLOURS = ("#0072B2", "#E69F00", "#009E73")  # colour-blind eyes see the difference too (Okabe and Ito)
_DEPTHS = 10_000  # of a picture
_DRAWN_STEPS = 120
_DRAWN_ROWS = 16  # of a rank's batch


@dataclass(frozen=True)
class QualityPlan:
    """How far batches are from a uniform draw, in the worst case: data sorted by class, with classes of equal size.

    Attributes:
        num_classes: K.
        num_steps: Steps all through the epoch that were sampled.
        rank_classes: Different classes in a rank's batch, on average over ranks and these steps;
        rank_classes_least: in the batch with fewest, and
        rank_ideal: in a batch of that size drawn uniformly, as expected.
        global_classes: The same of a global batch, on average, and
        global_ideal: drawn uniformly.
        verdict: All this in a sentence.
    """

    num_classes: int
    num_steps: int
    rank_classes: float
    rank_classes_least: int
    rank_ideal: float
    global_classes: float
    global_ideal: float
    verdict: str


def depths(data: PlannedData, taken: tuple[Ints, Ints], num: int) -> Ints:
    """Where samples, which `Order.take` gave, stand in their data set, 0..num-1: their classes where it is sorted."""
    counts = [table.counts for table in data.tables]
    firsts = np.concatenate([np.cumsum(each) - each for each in counts])
    totals = np.concatenate([np.full(len(each), each.sum()) for each in counts])
    shards, samples = taken
    found: Ints = (firsts[shards] + samples) * num // totals[shards]
    return found


def _evenly(num: int, size: int) -> Ints:
    """At most `num` of the numbers below `size`, from the first to the last."""
    return np.unique(np.linspace(0, size - 1, min(num, size)).round().astype(np.int64))


def _num_different(rows: Ints) -> Ints:
    """How many different numbers stand in each row."""
    num: Ints = 1 + (np.diff(np.sort(rows, axis=1), axis=1) != 0).sum(axis=1)
    return num


def expected_classes(num_classes: int, num_samples: int, batch: int) -> float:
    """Different classes in a batch drawn uniformly without replacement from K classes of equal size."""
    batch = min(batch, num_samples)
    others = num_samples - num_samples / num_classes
    if batch > others:
        return float(num_classes)
    with_others, in_all = (
        math.lgamma(size + 1) - math.lgamma(size - batch + 1) for size in (others, float(num_samples))
    )
    return -num_classes * math.expm1(with_others - in_all)


def measure_quality(
    data: PlannedData, steps: Steps, start: int, classes: int | None = None, *, node_size: int = 1
) -> QualityPlan:
    """Compare batches of steps all over an epoch, the first and the last full one among them, with a uniform draw.

    Args:
        data: The shards and their order.
        steps: Of the epoch.
        start: Position of its first sample in the endless sequence.
        classes: K; None for those of classes.json, or 1000. Where a data set has fewer samples, as many as it has.
        node_size: Ranks of a node.

    Raises:
        PipelineError: The epoch has no full global batch.
        FolderIndexError: `classes.json` is invalid.
    """
    size = steps.global_batch
    num_full = steps.num_samples // size
    if not num_full:
        raise PipelineError(f"an epoch of {steps.num_samples} samples does not fill one global batch.")
    least_samples = min(int(table.counts.sum()) for table in data.tables)
    if classes is None:
        classes = len(read_classes(data.tables[0].folders[0]) or ()) or DEFAULT_CLASSES
    classes = min(classes, least_samples)
    numbers = _evenly(max(1, min(_MAX_STEPS, _MAX_POSITIONS // size)), num_full)
    ranks = _evenly(_MAX_RANKS, steps.world_size).tolist()
    of_ranks, of_all = [], []
    for number in numbers.tolist():
        places = [dealt(data.order, start, steps, number, rank=rank, ranks_per_node=node_size) for rank in ranks]
        found = depths(data, data.order.take(start + np.concatenate(places)), classes)
        of_ranks.append(_num_different(found.reshape(len(ranks), steps.batch)))
        whole = depths(data, data.order.take(start + steps.first(number) + np.arange(size)), classes)
        of_all.append(_num_different(whole[None]))
    mean, rank_ideal = float(np.mean(of_ranks)), expected_classes(classes, least_samples, steps.batch)
    return QualityPlan(
        num_classes=classes,
        num_steps=len(numbers),
        rank_classes=mean,
        rank_classes_least=int(np.min(of_ranks)),
        rank_ideal=rank_ideal,
        global_classes=float(np.mean(of_all)),
        global_ideal=expected_classes(classes, least_samples, size),
        verdict=_verdict(mean / rank_ideal, is_shuffled=not isinstance(data.order, SequentialOrder)),
    )


def _verdict(ratio: float, *, is_shuffled: bool) -> str:
    if not is_shuffled:
        return "A sequential source does not shuffle, which suits evaluation; train with `exact`."
    holds = f"a rank's batch holds {ratio:.0%} of the classes that a uniform draw would hold"
    if ratio >= _AS_GOOD:
        return f"Even with data sorted by class, {holds}: as good as uniform."
    if ratio >= _USABLE:
        return f"With data sorted by class, {holds}: well mixed, not quite uniform."
    way_out = "Pack with `--shuffle SEED`, which mixes classes in every shard, or use more lanes or a larger window."
    return f"With data sorted by class, {holds}: far from uniform.\n  {way_out}"


def draw(data: PlannedData, steps: Steps, start: int, *, path: str | os.PathLike[str], title: str) -> None:
    """Draw which place of the data set three ranks read in steps all through an epoch, one dot a sample.

    Args:
        data: The shards and their order.
        steps: Of the epoch.
        start: Position of its first sample in the endless sequence.
        path: Where to, `.png` or `.svg`; replaced as a whole if it is there.
        title: Above it.

    Raises:
        PipelineError: Another kind of file, or matplotlib is not installed.
        StorageError: The file cannot be written.
    """
    kind = Path(path).suffix.lower()[1:]
    if kind not in {"png", "svg"}:
        raise PipelineError(f"{path}: a picture is a .png or .svg file. Change its extension.")
    try:
        from matplotlib import figure, ticker
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as err:
        raise PipelineError(f"a picture needs matplotlib.\n  {install_extra('plot')}") from err

    picture = figure.Figure(figsize=(11, 6), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    for rank in range(min(len(_COLOURS), steps.world_size)):
        numbers, places = trace(data, steps, start, rank)
        size = min(20, max(4, 3000 / len(numbers)))
        beside = numbers + (rank - 1) * max(0.25, len(steps) / _DRAWN_STEPS / 4)  # so that no rank hides another
        axes.scatter(beside, places, s=size, linewidths=0, color=_COLOURS[rank], label=f"rank {rank}")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set(xlabel="step", ylabel="place in the data set", ylim=(-0.02, 1.02))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["first", "", "middle", "", "last"])
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_COLOURS), fontsize=8, frameon=False)
    stream = io.BytesIO()
    picture.savefig(stream, format=kind, metadata={"Date": None} if kind == "svg" else None)
    try:
        publish_bytes(Path(path), stream.getvalue())
    except OSError as err:
        raise StorageError(f"{path}: the picture cannot be written: {err.strerror}.", url=str(path)) from err


def trace(data: PlannedData, steps: Steps, start: int, rank: int) -> tuple[Ints, NDArray[np.float64]]:
    """Some samples of some steps of a rank, all through the epoch: step, and depth in the data set; (n,) each."""
    numbers = _evenly(_DRAWN_STEPS, max(1, len(steps)))
    rows = _evenly(_DRAWN_ROWS, steps.batch)
    order = data.order
    places = np.concatenate([dealt(order, start, steps, each, rank=rank)[rows] for each in numbers.tolist()])
    taken = order.take(np.minimum(places, steps.num_samples - 1) + start)
    return np.repeat(numbers, len(rows)), depths(data, taken, _DEPTHS) / _DEPTHS
