"""`gather_valid`: collect the results of all ranks for a batch."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, distributed

from wdskit.errors import PipelineError
from wdskit.pipeline.ranks import as_group, group_store
from wdskit.stages import run

logger = logging.getLogger(__name__)


@overload
def gather_valid(rows: Tensor, valid: Tensor | None, *, group: Any = None) -> Tensor: ...
@overload
def gather_valid(rows: Sequence[Any], valid: Tensor | None, *, group: Any = None) -> list[Any]: ...
def gather_valid(rows: Tensor | Sequence[Any], valid: Tensor | None, *, group: Any = None) -> Tensor | list[Any]:
    """Collect the results of all ranks for a batch, each sample once.

    Every rank must call this function. After a minute, a rank that waits logs the ranks that have not called it.
    Without torch.distributed, this process is the only rank.

    Args:
        rows: A tensor (batch, ...), or a sequence of values that can be pickled. The number of rows may differ between
            ranks.
        valid: The batch's mask, bool (batch,): the field `__valid__`. None: all rows are valid.
        group: A torch.distributed group, or one dimension of a DeviceMesh, as given to the loader. Default: the default
            group.

    Returns:
        The valid rows of all ranks, as a tensor (num_valid, ...) on the device of `rows`, without gradients, or as a
        list. The rows are ordered by rank, which is the order of the samples with `tail: pad`.

    Raises:
        PipelineError: The mask does not fit the rows.
        RankError: `group` is a DeviceMesh of several dimensions.
    """
    mask = torch.ones(len(rows), dtype=torch.bool) if valid is None else valid
    if mask.dtype != torch.bool or tuple(mask.shape) != (len(rows),):
        msg = f"gather_valid: {len(rows)} rows, but a mask of {tuple(mask.shape)} {mask.dtype}."
        raise PipelineError(f"{msg} Give the mask that came with the batch.")
    if not isinstance(rows, Tensor):
        return list(itertools.chain.from_iterable(_gather([*itertools.compress(rows, mask.tolist())], group)))
    kept = rows.detach()[mask.to(rows.device)].contiguous()
    with torch.cuda.device_of(rows):  # NCCL sends objects through the current device
        parts = _gather((kept.dtype, kept.view(torch.uint8).cpu()), group)  # torch does not pickle uint16
    return torch.cat([part.view(dtype) for dtype, part in parts]).to(rows.device)


def _gather(value: Any, group: Any) -> list[Any]:
    """Return the value of each rank, in the order of ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    group = as_group(group) or distributed.group.WORLD
    values = [None] * distributed.get_world_size(group)
    with _name_missing_ranks(group):
        distributed.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def _name_missing_ranks(group: Any) -> Iterator[None]:
    """Return a context for a collective call. If the call takes a minute, log the ranks that have not made it."""
    store = group_store(group)
    keys = {rank: f"gather_valid/{group.group_name}/{rank}" for rank in distributed.get_process_group_ranks(group)}
    num_calls = store.add(keys[distributed.get_rank()], 1)

    def report() -> None:
        missing = [rank for rank, key in keys.items() if store.add(key, 0) < num_calls]
        logger.warning("gather_valid waits for ranks %s: every rank of the group must call it.", missing)

    timer = threading.Timer(run.REPORT_S, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
