"""Foreign stages, such as webdataset's: tests of what a stage does, and positions for the values that it yields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from wdskit.config.types import StageSpec, show
from wdskit.errors import PipelineError
from wdskit.stages.base import FOREIGN, Origin, Run

_BY_NODE = frozenset(["split_by_node", "single_node_only"])
_OPENERS = frozenset(["tarfile_samples", "tarfile_to_samples"])


def check_stage(stage: object, at: int) -> None:
    """Check that an object can be a stage of a pipeline. `at` is the number of the stage.

    Raises:
        PipelineError: `stage` is neither a `StageSpec`, nor a callable, nor a stage of webdataset. As stage 0, a
            DataLoader or an IterableDataset of torch is also accepted. The class of a stage is not accepted.
    """
    if isinstance(stage, StageSpec) or hasattr(stage, "run"):
        return
    if callable(stage) and not (isinstance(stage, type) and issubclass(stage, StageSpec)):
        return
    if at == 0 and _is_torch_source(stage):
        return
    way_out = "a stage is a spec or a callable from iterator to iterator. Write .shuffle(200) for wdskit's own."
    raise PipelineError(f"stage {at}: {show(stage)}; {way_out}")


def splits_nodes(stage: Any) -> bool:
    """Return True if a stage keeps only the shards of its rank: its function is named `split_by_node` or
    `single_node_only`.
    """
    return _function_name(stage) in _BY_NODE


def splits_workers(stage: Any) -> bool:
    """Return True if a stage keeps only the shards of its worker: its function is named `split_by_worker`."""
    return _function_name(stage) == "split_by_worker"


def takes_shards(stage: Any) -> bool:
    """Return True if a foreign stage takes shards and yields shards: `splits_nodes` or `splits_workers` returns True,
    or the stage's function is named `non_empty`.
    """
    return splits_nodes(stage) or splits_workers(stage) or _function_name(stage) == "non_empty"


def opens_shards(stage: Any) -> bool:
    """Return True if a stage takes shards and yields samples: the stage of wdskit, or the function of the foreign
    stage, is named `tarfile_samples` or `tarfile_to_samples`.
    """
    return (stage.name if isinstance(stage, StageSpec) else _function_name(stage)) in _OPENERS


def is_webdatasets(stage: Any) -> bool:
    """Return whether a stage, an object or a function, is defined in the package webdataset."""
    return str(getattr(stage, "__module__", "")).partition(".")[0] == "webdataset"


class Renumber:
    """Gives each value that a foreign stage yields a new position.

    Args:
        run: The running pipeline.
        each_epoch: Whether the stage is after `with_epoch`. If so, a position contains the running epoch, otherwise the
            epoch in which the stream started.
    """

    def __init__(self, run: Run, *, each_epoch: bool) -> None:
        self.run = run
        self.each_epoch = each_epoch

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value of `source`. Before each value, set `run.origin` to the value's new position: the epoch, the
        rank, the worker, and the number of the value, counted from 0 in each call. The shard and the key of the origin
        are `__url__` and `__key__` of the value; empty if the value is not a dict or lacks them.
        """
        run = self.run
        part = FOREIGN | run.rank_info.rank << 31 | run.worker
        epoch = run.epoch if self.each_epoch else run.first_epoch
        for number, value in enumerate(source):
            url, key = (value.get("__url__", ""), value.get("__key__", "")) if isinstance(value, dict) else ("", "")
            run.origin = Origin(str(url), str(key), number, epoch, part, epoch=run.epoch)
            yield value


def _function_name(stage: Any) -> str:
    """Return the name of the function that a stage calls; empty if the function has no name. A stage may be a function,
    a partial, or a filter of webdataset.
    """
    inner = getattr(stage, "f", None) or getattr(stage, "func", None) or stage
    return str(getattr(inner, "__name__", ""))


def _is_torch_source(stage: object) -> bool:
    if not hasattr(stage, "__iter__") or isinstance(stage, (str, list, tuple, dict)):
        return False
    from torch.utils.data import DataLoader, IterableDataset  # an instance exists, so torch is loaded

    return isinstance(stage, (IterableDataset, DataLoader))
