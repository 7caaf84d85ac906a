"""How well the batches of a planned source are mixed: `order.quality` for the data of a configuration."""

from __future__ import annotations

from pathlib import Path

from wdskit.dataset.classes import read_classes
from wdskit.errors import PipelineError
from wdskit.loader.plan_epoch import Epoch
from wdskit.loader.plan_types import QualityPlan, Spread
from wdskit.order.exact import ExactOrder
from wdskit.order.quality import SortedData, expected_classes, mixing, seen_again
from wdskit.order.sequential import SequentialOrder

DEFAULT_CLASSES = 1000

_AS_GOOD = 0.95  # of the classes of a uniform draw
_USABLE = 0.8
_WAY_OUT = "Pack with `--shuffle SEED`, which mixes classes in every shard, or use more lanes or a larger window."


def sorted_data(epoch: Epoch, classes: int | None) -> SortedData:
    """The data sets of an epoch as if sorted into `classes`, else into those of classes.json, else into 1000."""
    if classes is not None and (type(classes) is not int or classes < 1):
        raise PipelineError(f"plan(classes={classes!r}): it is a whole number, 1 or more.")
    tables = epoch.data.tables
    if classes is None:
        names = read_classes(Path(tables[0].folders[0]))
        classes = len(names) if names else DEFAULT_CLASSES
    least = min(int(table.counts.sum()) for table in tables)
    return SortedData([table.counts for table in tables], min(classes, least))


def measure(epoch: Epoch, classes: int | None = None) -> QualityPlan:
    """Compare an epoch's batches with a uniform draw.

    Args:
        epoch: The epoch.
        classes: Number of classes; None for those of classes.json, or 1000.
    """
    data = sorted_data(epoch, classes)
    order, steps = epoch.data.order, epoch.steps
    found = mixing(order, data, steps, epoch.start)
    if found is None:
        raise PipelineError(f"an epoch of {steps.num_samples} samples has no full global batch to be looked at.")
    num_samples = min(int(table.counts.sum()) for table in epoch.data.tables)
    again = None
    if isinstance(order, ExactOrder):
        number = epoch.start // order.num_samples
        again = Spread(*seen_again(order, number, steps.world_size, is_cut=epoch.is_cut))
    ideal = expected_classes(data.num_classes, num_samples, steps.batch)
    told = float(found.of_ranks.mean())
    return QualityPlan(
        num_classes=data.num_classes,
        rank_classes=told,
        rank_classes_least=int(found.of_ranks.min()),
        rank_ideal=ideal,
        global_classes=float(found.of_all.mean()),
        global_ideal=expected_classes(data.num_classes, num_samples, steps.global_batch),
        seen_again=again,
        seen_again_ideal=1 / steps.world_size,
        verdict=_verdict(told / ideal, is_shuffled=not isinstance(order, SequentialOrder)),
    )


def _verdict(ratio: float, *, is_shuffled: bool) -> str:
    if not is_shuffled:
        return "A sequential source does not shuffle, as evaluation wants it; train with `exact`."
    told = f"a rank's batch holds {ratio:.0%} of the classes that a uniform draw would hold"
    if ratio >= _AS_GOOD:
        return f"Even of data sorted by class, {told}: as good as uniform."
    if ratio >= _USABLE:
        return f"Of data sorted by class, {told}: well mixed, not quite uniform."
    return f"Of data sorted by class, {told}: far from uniform.\n  {_WAY_OUT}"
