"""What ranks do together: gather what each computed for a batch, and compare batches that they should share."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from wdskit.errors import PipelineError, RankError
from wdskit.pipeline.ranks import as_group

Reduction = Literal["sum", "mean"]

_DIGEST_BYTES = 16


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
    """Collect what all ranks have computed for a batch, each sample once.

    Every rank must call it with the same number of rows, as `tail: pad` ensures. Without torch.distributed, this
    process is the only rank.

    With `tail: pad`, the rows are in the order of their samples. With `tail: drop`, the rows of one rank follow those
    of another, and `positions=loader.positions` sorts them by sample.

    Args:
        rows: A tensor (batch, ...) on the device of the group's backend, or a list of values that can be pickled.
        valid: The batch's mask, bool (batch,): `__valid__` of a dict, the last element of a tuple. None: all are valid.
        positions: `loader.positions` of the batch, (batch,): sorts the rows.
        reduce: None returns the rows. "sum" adds the valid rows, in float64 for floating point and int64 for whole
            numbers; "mean" divides their sum in float64 by their number.
        group: A torch.distributed group, or one dimension of a DeviceMesh, as given to the loader. Default: the default
            group.

    Returns:
        The valid rows of all ranks, (num_valid, ...) or a list; with `reduce` their sum or mean (...).

    Raises:
        PipelineError: The mask does not fit the rows, or there is no valid row for a mean.
    """
    group = as_group(group)
    mask = torch.ones(len(rows), dtype=torch.bool) if valid is None else valid
    if mask.dtype != torch.bool or tuple(mask.shape) != (len(rows),):
        msg = f"gather_valid: {len(rows)} rows, but a mask of {tuple(mask.shape)} {mask.dtype}."
        raise PipelineError(f"{msg} Give the mask that came with the batch.")
    if not isinstance(rows, Tensor):
        return _gather_objects(rows, mask, positions, group)
    if reduce is not None:
        return _reduce(rows, mask.to(rows.device), reduce, group)
    whole = torch.cat(_all_gather(rows, group))
    wanted = torch.cat(_all_gather(mask.to(rows.device), group))
    if positions is not None:
        own = torch.as_tensor(positions, dtype=torch.int64, device=rows.device)
        in_order = torch.argsort(torch.cat(_all_gather(own, group)), stable=True)
        whole, wanted = whole[in_order], wanted[in_order]
    return whole[wanted]


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
        raise PipelineError("gather_valid: the mean of no rows. No rank has a valid row.")
    return total / count


def _gather_objects(rows: Sequence[Any], mask: Tensor, positions: Any, group: Any) -> list[Any]:
    numbers = [0] * len(rows) if positions is None else [int(each) for each in positions]
    mine = list(zip(numbers, mask.tolist(), rows, strict=True))
    parts: list[Any] = [mine]
    if _is_distributed():
        parts = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(parts, mine, group=group)
    found = sorted(itertools.chain.from_iterable(parts), key=operator.itemgetter(0))  # stable
    return [row for _, is_valid, row in found if is_valid]


def _all_gather(rows: Tensor, group: Any) -> list[Tensor]:
    if not _is_distributed():
        return [rows]
    parts = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, rows.contiguous(), group=group)
    return parts


def check_same_batches(batch: Any, group: Any = None) -> None:
    """Check that all ranks of a group have the same batch, with one all_gather of 16 bytes per rank.

    Every rank of the group must call it; if one batch differs, it fails on every rank. Without torch.distributed there
    is nothing to compare.

    Args:
        batch: Tensors, arrays, text, numbers, None, images, and lists, tuples, dicts and dataclasses of them.
        group: A torch.distributed group, or one dimension of a DeviceMesh: `mesh["tp"]`. Default: the default group.

    Raises:
        RankError: The batches differ; the message names the ranks, by their numbers in the default group.
        PipelineError: The batch holds something that has no bytes to compare.
    """
    mine = _digest(batch)
    if not _is_distributed():
        return
    group = as_group(group)
    backend = torch.distributed.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, tensor, group=group)
    digests = [bytes(part.tolist()) for part in parts]
    ranks = torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD)
    most = max(digests, key=digests.count)  # of as many, the first
    differing = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != most]
    if differing:
        others = [rank for rank in ranks if rank not in differing]
        msg = f"ranks {_list(ranks)} should have the same batch, but {_list(differing)} "
        msg += f"{'differ' if len(differing) > 1 else 'differs'} from {_list(others)}."
        raise RankError(
            f'{msg}\n  Make the loader of each with process_group=mesh["dp"], load the same state, and draw random '
            "numbers from `rng` only."
        )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _digest(batch: Any) -> bytes:
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in _parts(batch):
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


def _parts(value: Any) -> Iterator[bytes]:
    """What a value is made of, as bytes; two values that differ differ here."""
    yield type(value).__name__.encode()
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield str(len(value)).encode()
        for key, each in value.items():
            yield from _parts(key)
            yield from _parts(each)
    elif isinstance(value, (list, tuple)):
        yield str(len(value)).encode()
        for each in value:
            yield from _parts(each)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        yield str(value.shape).encode()
        yield from _parts(value.tolist())
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        yield bytes(value)
    elif isinstance(value, (str, int, float, complex)) or value is None:
        yield repr(value).encode()
    elif hasattr(value, "tobytes"):  # numpy's arrays and numbers, PIL's images
        shape = [getattr(value, name, None) for name in ("dtype", "shape", "mode", "size")]
        yield str(shape).encode()
        yield value.tobytes()
    else:
        msg = f"check_same_batches: a {type(value).__name__} has no bytes to compare."
        raise PipelineError(f"{msg} Give it the part of the batch that is made of tensors, numbers and text.")


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
