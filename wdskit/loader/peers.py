"""A debug check for tensor and pipeline parallelism: have all ranks that share a batch the same one?"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from wdskit.errors import PipelineError, RankError
from wdskit.pipeline.ranks import as_group

_DIGEST_BYTES = 16


def check_same_batches(batch: Any, group: Any = None) -> None:
    """Compare a batch across the ranks that should have the same one, with one all_gather of 16 bytes a rank.

    Every rank of the group calls it, and every one fails where one differs. Without torch.distributed it is one rank.

    Args:
        batch: Tensors, arrays, text, numbers, None, images, and lists, tuples, dicts and dataclasses of them.
        group: A torch.distributed group, or one dimension of a DeviceMesh: `mesh["tp"]`. The default group without.

    Raises:
        RankError: They differ; the ranks that do are named, as the default group counts them.
        PipelineError: The batch holds something that has no bytes to compare.
    """
    mine = _digest(batch)
    if not (dist.is_available() and dist.is_initialized()):
        return
    group = as_group(group)
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    digests = [bytes(part.tolist()) for part in parts]
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    most = max(digests, key=digests.count)  # of as many, the first
    differing = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != most]
    if differing:
        others = [rank for rank in ranks if rank not in differing]
        msg = f"ranks {_list(ranks)} should have the same batch, but {_list(differing)} "
        msg += f"{'have others' if len(differing) > 1 else 'has another'} than {_list(others)}."
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
        told = [getattr(value, name, None) for name in ("dtype", "shape", "mode", "size")]
        yield str(told).encode()
        yield value.tobytes()
    else:
        msg = f"check_same_batches: a {type(value).__name__} has no bytes to compare."
        raise PipelineError(f"{msg} Give it the part of the batch that is made of tensors, numbers and text.")
