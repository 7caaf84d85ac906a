"""Rows and metrics of an evaluation, over all ranks and without the padding of its last batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from wdskit.errors import PipelineError
from wdskit.pipeline.ranks import as_group

Reduction = Literal["sum", "mean"]


@overload
def gather_valid(
    rows: Tensor, valid: Tensor | None, *, reduce: Reduction | None = None, group: Any = None
) -> Tensor: ...
@overload
def gather_valid(rows: Sequence[Any], valid: Tensor | None, *, reduce: None = None, group: Any = None) -> list[Any]: ...
def gather_valid(
    rows: Tensor | Sequence[Any], valid: Tensor | None, *, reduce: Reduction | None = None, group: Any = None
) -> Tensor | list[Any]:
    """Collect what all ranks have computed for a batch, each sample once.

    Every rank calls it, with as many rows; `tail: pad` sees to that. Without torch.distributed it is one rank.

    Args:
        rows: A tensor (batch, ...) on the device of the group's backend, or a list of anything that pickles.
        valid: The batch's mask, bool (batch,): `__valid__` of a dict, the last element of a tuple. None: all are valid.
        reduce: None gives the rows. "sum" adds the valid ones up, "mean" divides by their number too, both as float64
            for floating point and int64 for whole numbers.
        group: A torch.distributed group, or one dimension of a DeviceMesh, as the loader was given; the default group
            without.

    Returns:
        The valid rows of all ranks in the order of their samples, (num_valid, ...), or a list; or the reduced (...).

    Raises:
        PipelineError: The mask does not fit the rows, or a mean of no row is asked for.
    """
    group = as_group(group)
    mask = torch.ones(len(rows), dtype=torch.bool) if valid is None else valid
    if mask.dtype != torch.bool or tuple(mask.shape) != (len(rows),):
        msg = f"gather_valid: {len(rows)} rows, but a mask of {tuple(mask.shape)} {mask.dtype}."
        raise PipelineError(f"{msg} Give the mask that came with the batch.")
    if not isinstance(rows, Tensor):
        return _gather_objects(rows, mask, group)
    if reduce is not None:
        return _reduce(rows, mask.to(rows.device), reduce, group)
    whole = _interleave(_all_gather(rows, group))
    return whole[_interleave(_all_gather(mask.to(rows.device), group))]


def _reduce(rows: Tensor, mask: Tensor, reduce: Reduction, group: Any) -> Tensor:
    exact = rows.dtype.is_floating_point or reduce == "mean"
    total = rows[mask].to(torch.float64 if exact else torch.int64).sum(0)
    count = mask.sum()
    if _is_distributed():
        torch.distributed.all_reduce(total, group=group)
        torch.distributed.all_reduce(count, group=group)
    if reduce == "sum":
        return total
    if not count:
        raise PipelineError("gather_valid: the mean of no row. No rank had a valid one.")
    return total / count


def _gather_objects(rows: Sequence[Any], mask: Tensor, group: Any) -> list[Any]:
    mine = list(zip(rows, mask.tolist(), strict=True))
    parts: list[Any] = [mine]
    if _is_distributed():
        parts = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, mine, group=group)
    return [row for row_of_ranks in zip(*parts, strict=True) for row, is_valid in row_of_ranks if is_valid]


def _all_gather(rows: Tensor, group: Any) -> list[Tensor]:
    if not _is_distributed():
        return [rows]
    parts = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, rows.contiguous(), group=group)
    return parts


def _interleave(parts: list[Tensor]) -> Tensor:
    """Rank r's j-th row is sample j * R + r of the batch of all ranks."""
    return torch.stack(parts, dim=1).flatten(0, 1)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
