"""`gather_valid`: collect the results of all ranks for a batch."""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from wdskit.errors import PipelineError, WdskitError, error_text
from wdskit.pipeline.ranks import as_group

Reduction = Literal["sum", "mean"]

_RECORD_BYTES = 512
"""Size of the description that each rank sends before any collective call that depends on its batch."""


@overload
def gather_valid(
    rows: Tensor,
    valid: Tensor | None,
    *,
    positions: Any = None,
    reduce: Reduction | None = None,
    group: Any = None,
) -> Tensor: ...
@overload
def gather_valid(
    rows: Sequence[Any], valid: Tensor | None, *, positions: Any = None, reduce: None = None, group: Any = None
) -> list[Any]: ...
def gather_valid(
    rows: Tensor | Sequence[Any],
    valid: Tensor | None,
    *,
    positions: Any = None,
    reduce: Reduction | None = None,
    group: Any = None,
) -> Tensor | list[Any]:
    """Collect the results of all ranks for a batch, each sample once.

    Every rank must call this function. If `rows` is a tensor and `reduce` is None, every rank must give the same number
    of rows, as `tail: pad` ensures. Without torch.distributed, this process is the only rank.

    With `tail: pad`, the rows are in the order of their samples. With `tail: drop`, the rows are ordered by rank, and
    `positions=loader.positions` sorts them by sample.

    Args:
        rows: A tensor (batch, ...) on the device of the group's backend, or a list of values that can be pickled.
        valid: The batch's mask, bool (batch,): the field `__valid__` if the batch is a dict, the last element if the
            batch is a tuple. None: all rows are valid.
        positions: `loader.positions` of the batch, (batch,): sorts the rows.
        reduce: None returns the rows. "sum" adds the valid rows, in float64 for floating point and int64 for whole
            numbers; without a valid row the sum is 0. "mean" divides their sum in float64 by their number.
        group: A torch.distributed group, or one dimension of a DeviceMesh, as given to the loader. Default: the default
            group.

    Returns:
        Without `reduce`: the valid rows of all ranks, as a tensor (num_valid, ...) or a list, like `rows`. With
        `reduce`: the sum or the mean of these rows, as a tensor with the shape of one row.

    Raises:
        PipelineError: On every rank. The mask or the positions of a rank do not fit its rows; the ranks differ in the
            dtype or shape of their rows, in `reduce`, or in whether they give positions; a value of a list cannot be
            pickled; `reduce` is another word, or is set and the rows are not a tensor; or `reduce` is "mean" and no
            rank has a valid row.
        Exception: Without torch.distributed, the error of pickle for a value that cannot be pickled.
        RankError: `group` is a DeviceMesh of several dimensions.
    """
    group = as_group(group)
    own = _RankRows()
    prepare = functools.partial(own.prepare, rows, valid, positions, reduce)
    kinds = [kind.decode() for kind in _exchange(prepare, group)]
    if len(set(kinds)) > 1:
        msg = ", ".join(f"rank {rank}: {kind}" for rank, kind in zip(_ranks(group), kinds, strict=True))
        way = "Give all rows one dtype, as with `rows.double()`, and one shape. For equal numbers, use `tail: pad`."
        raise PipelineError(f"gather_valid: the ranks give different rows ({msg}).\n  {way}")
    mask = own.mask
    if not isinstance(rows, Tensor):
        return _gather_objects(own, group)
    if reduce is not None:
        return _reduce(rows, mask.to(rows.device), reduce, group)
    dtype = rows.dtype
    rows = _as_supported(rows)
    whole = torch.cat(_all_gather(rows, group))
    wanted = torch.cat(_all_gather(mask.to(rows.device), group))
    if own.positions is not None:
        own_positions = own.positions.to(rows.device)
        in_order = torch.argsort(torch.cat(_all_gather(own_positions, group)), stable=True)
        whole, wanted = whole[in_order], wanted[in_order]
    return whole[wanted].view(dtype)


class _RankRows:
    """The checked rows of this rank. `prepare` sets the attributes.

    Attributes:
        mask: Which rows are valid, bool (batch,).
        positions: Position of each row in the epoch, int64 (batch,); None if the caller gives no positions.
        pickled: For a list, the pickled (position, is_valid, value) of each row; for a tensor, empty.
    """

    mask: Tensor
    positions: Tensor | None = None
    pickled = b""

    def prepare(self, rows: Tensor | Sequence[Any], valid: Tensor | None, positions: Any, reduce: Any) -> bytes:
        """Check the rows and set the attributes. Return an encoded text that the caller compares between ranks: dtype
        and shape of the rows, `reduce`, and whether positions are given. The number of rows of a list, or with
        `reduce`, is not in the text.

        Raises:
            PipelineError: The rows are one number, or the mask or the positions do not fit the rows. Or `reduce` is
                unknown, or is set and the rows are not a tensor.
            Exception: A row cannot be pickled.
        """
        if reduce not in (None, "sum", "mean"):
            raise PipelineError(f"gather_valid: reduce={reduce!r} is neither 'sum' nor 'mean'.")
        if reduce is not None and not isinstance(rows, Tensor):
            raise PipelineError(f"gather_valid: reduce={reduce!r} needs a tensor, not a {type(rows).__name__}.")
        if isinstance(rows, Tensor) and not rows.ndim:
            raise PipelineError("gather_valid: this is one number. Give a row for each sample, without a mean.")
        self.mask = torch.ones(len(rows), dtype=torch.bool) if valid is None else valid
        if self.mask.dtype != torch.bool or tuple(self.mask.shape) != (len(rows),):
            msg = f"gather_valid: {len(rows)} rows, but a mask of {tuple(self.mask.shape)} {self.mask.dtype}."
            raise PipelineError(f"{msg} Give the mask that came with the batch.")
        if positions is not None:
            self.positions = torch.as_tensor(positions, dtype=torch.int64)
            if tuple(self.positions.shape) != (len(rows),):
                msg = f"gather_valid: {len(rows)} rows, but positions of {tuple(self.positions.shape)}."
                raise PipelineError(f"{msg} Give `loader.positions` of this batch.")
        ordered = "" if positions is None else " with positions"
        if not isinstance(rows, Tensor):
            numbers = [0] * len(rows) if self.positions is None else self.positions.tolist()
            self.pickled = pickle.dumps(list(zip(numbers, self.mask.tolist(), rows, strict=True)))
            return f"a list{ordered}".encode()
        shape = tuple(rows.shape) if reduce is None else ("any", *rows.shape[1:])
        return f"{rows.dtype} {shape}{ordered}{'' if reduce is None else f' for a {reduce}'}".encode()


def _exchange(make: Callable[[], bytes], group: Any) -> list[bytes]:
    """Call `make` on this rank, and return the results of all ranks of a group in the order of ranks. Every rank must
    call this function. Each result is cut to `_RECORD_BYTES - 1` bytes, and zero bytes at its end are removed.

    Without torch.distributed, the list has only the whole result of this process.

    Raises:
        PipelineError: `make` failed on a rank. Every rank raises this error. The message names the failed rank.
        Exception: Without torch.distributed, the exception of `make`.
    """
    error = None
    try:
        record = b"\0" + make()
    except Exception as err:
        if not _is_distributed():
            raise
        error = err
        record = b"\1" + (str(err) if isinstance(err, WdskitError) else error_text(err)).encode()
    if not _is_distributed():
        return [record[1:]]
    # A group that was made without naming a backend has NCCL alone if there is a GPU.
    devices = [part.partition(":")[0] for part in torch.distributed.get_backend_config(group).split(",")]
    device = "cpu" if "cpu" in devices else devices[0]
    tensor = torch.frombuffer(bytearray(record[:_RECORD_BYTES].ljust(_RECORD_BYTES, b"\0")), dtype=torch.uint8)
    records = [bytes(part.tolist()) for part in _all_gather(tensor.to(device), group)]
    for rank, each in zip(_ranks(group), records, strict=True):
        if each[0]:
            text = each[1:].rstrip(b"\0").decode(errors="ignore")
            raise PipelineError(f"rank {rank} has refused its batch: {text}") from error
    return [each[1:].rstrip(b"\0") for each in records]


def _ranks(group: Any) -> list[int]:
    """Return the rank in the default group of each member of `group`. A `group` of None is the default group."""
    return torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD)


def _reduce(rows: Tensor, mask: Tensor, reduce: Reduction, group: Any) -> Tensor:
    """Return the sum or the mean of the rows of all ranks where `mask` is True. `mask` is on the device of `rows`.

    Raises:
        PipelineError: `reduce` is "mean", and no rank has a valid row.
    """
    has_fractions = rows.dtype.is_floating_point or reduce == "mean"
    dtype = torch.complex128 if rows.dtype.is_complex else torch.float64 if has_fractions else torch.int64
    total = _as_supported(rows)[mask].view(rows.dtype).to(dtype).sum(0)
    count = mask.sum()
    if _is_distributed():
        torch.distributed.all_reduce(total, group=group)
        torch.distributed.all_reduce(count, group=group)
    if reduce == "sum":
        return total
    if not count:
        raise PipelineError("gather_valid: the mean of no rows. No rank has a valid row.")
    return total / count


def _gather_objects(own: _RankRows, group: Any) -> list[Any]:
    """Return the valid values of all ranks, sorted by position; without positions, in the order of ranks.

    `own` has the rows of this rank, as a pickled list.
    """
    parts: list[Any] = [own.pickled]
    if _is_distributed():
        parts = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, own.pickled, group=group)
    rows = itertools.chain.from_iterable(map(pickle.loads, parts))
    in_order = sorted(rows, key=operator.itemgetter(0))  # stable
    return [row for _, is_valid, row in in_order if is_valid]


def _all_gather(rows: Tensor, group: Any) -> list[Tensor]:
    """Return the rows of each rank, in the order of ranks. The rows of all ranks have the same dtype and shape."""
    if not _is_distributed():
        return [rows]
    sent = rows.contiguous()  # channels_last rows, too: a backend may copy memory as it is
    if rows.dtype == torch.int16:  # gloo and NCCL do not have it
        sent = sent.view(torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, sent, group=group)
    return [part.view(rows.dtype) for part in parts]


def _as_supported(rows: Tensor) -> Tensor:
    """Return `rows` in a dtype that torch can index and `_all_gather` can send. Whole numbers and float8 become a view
    as uint8, int16, int32 or int64, the dtype with the same number of bytes. Other rows are returned unchanged.
    """
    if rows.dtype.is_complex or rows.dtype.itemsize > 8:
        return rows
    is_plain = rows.dtype.is_floating_point and rows.dtype.itemsize > 1
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return rows if is_plain or rows.dtype == torch.bool else rows.view(sizes[rows.dtype.itemsize])


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
