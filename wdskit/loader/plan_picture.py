"""A picture of an order: which place of the data set each step of a rank reads, and how well its batches are mixed."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.loader.picture import COLOURS, GREY, save_picture
from wdskit.loader.plan_epoch import Epoch
from wdskit.loader.plan_quality import sorted_data
from wdskit.order.quality import SortedData, expected_classes, mixing

NUM_RANKS = 3
NUM_STEPS = 120
NUM_OF_BATCH = 16


class Trace(NamedTuple):
    """What one rank reads: steps and places in the data set (0 its beginning, 1 its end), (n,) each."""

    steps: NDArray[np.int64]
    depths: NDArray[np.float64]


def trace(epoch: Epoch, data: SortedData, rank: int, number: int) -> Trace:
    """Some steps of a rank, all through epoch `number` counted from this one, and some samples of each."""
    steps = epoch.steps
    size = steps.global_batch
    num_full = max(1, steps.num_samples // size)
    numbers = np.unique(np.linspace(0, num_full - 1, min(NUM_STEPS, num_full)).round().astype(np.int64))
    rows = np.unique(np.linspace(0, steps.batch - 1, min(NUM_OF_BATCH, steps.batch)).round().astype(np.int64))
    places = (numbers[:, None] * size + rows * steps.world_size + rank).ravel()
    places = np.minimum(places, steps.num_samples - 1) + epoch.start + number * steps.num_samples
    return Trace(np.repeat(numbers, len(rows)), data.depths(*epoch.data.order.take(places)))


def draw(epoch: Epoch, path: str | os.PathLike[str], classes: int | None = None) -> None:
    """Draw an epoch and the next one.

    Args:
        epoch: The first of the two.
        path: Where to, `.png` or `.svg`; replaced as a whole if it is there.
        classes: As `plan_quality.sorted_data` takes it.

    Raises:
        StorageError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = sorted_data(epoch, classes)
    figure = Figure(figsize=(11, 7.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    figure.suptitle(_title(epoch), fontsize=12, x=0.01, ha="left")
    left = figure.add_subplot(grid[0, 0])
    for number, axes in enumerate((left, figure.add_subplot(grid[0, 1], sharey=left))):
        _draw_reads(axes, epoch, data, number)
    left.set_ylabel("place in the data set")
    left.set_yticks([0, 0.25, 0.5, 0.75, 1], ["first", "", "middle", "", "last"])
    figure.legend(*left.get_legend_handles_labels(), loc="upper right", ncols=NUM_RANKS, fontsize=9, markerscale=4)
    _draw_classes(figure.add_subplot(grid[1, :]), epoch, data)
    save_picture(figure, path)


def _title(epoch: Epoch) -> str:
    steps = epoch.steps
    lanes = getattr(epoch.source, "lanes", None)
    how = "" if lanes is None else f", {lanes} lanes, windows of {getattr(epoch.source, 'window', 0):,}"
    return (
        f"{epoch.source.name}: {steps.num_samples:,} samples on {steps.world_size} ranks, batches of {steps.batch}{how}"
    )


def _draw_reads(axes: Any, epoch: Epoch, data: SortedData, number: int) -> None:
    """One dot a sample: the step in which a rank reads it, and where it stands."""
    spacing = epoch.steps.num_samples / epoch.steps.global_batch / NUM_STEPS
    for rank in range(min(NUM_RANKS, epoch.steps.world_size)):
        told = trace(epoch, data, rank, number)
        beside = told.steps + (rank - 1) * max(0.25, spacing / 4)  # so that no rank hides another
        axes.scatter(
            beside,
            told.depths,
            s=min(20, max(4, 3000 / len(beside))),
            linewidths=0,
            color=COLOURS[rank],
            label=f"rank {rank}",
        )
    axes.set_title(
        f"what ranks read in epoch {epoch.start // epoch.steps.num_samples + number}", fontsize=10, loc="left"
    )
    _count_steps(axes)
    axes.set_ylim(-0.02, 1.02)
    axes.tick_params(labelleft=number == 0)


def _draw_classes(axes: Any, epoch: Epoch, data: SortedData) -> None:
    """Classes in a rank's batch through the epoch, beside those of a uniform draw."""
    steps = epoch.steps
    found = mixing(epoch.data.order, data, steps, epoch.start)
    least = min(int(table.counts.sum()) for table in epoch.data.tables)
    ideal = expected_classes(data.num_classes, least, steps.batch)
    axes.axhline(ideal, color=GREY, linestyle="--", linewidth=1.2, label=f"uniform draw: {ideal:.1f}")
    if found is not None:
        mean = found.of_ranks.mean(axis=1)
        axes.fill_between(
            found.steps,
            found.of_ranks.min(axis=1),
            found.of_ranks.max(axis=1),
            color=COLOURS[0],
            alpha=0.2,
            linewidth=0,
            label="all ranks",
        )
        axes.plot(found.steps, mean, color=COLOURS[0], marker="o", markersize=3, label=f"mean: {mean.mean():.1f}")
    axes.set_ylim(0, 1.15 * max(ideal, 1 if found is None else found.of_ranks.max()))
    axes.set_title(
        f"different classes in a rank's batch, were the data sorted into {data.num_classes:,}", fontsize=10, loc="left"
    )
    _count_steps(axes)
    axes.set_ylabel("classes")
    axes.legend(loc="best", fontsize=8, ncols=3, framealpha=0.9)


def _count_steps(axes: Any) -> None:
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
