"""Find rank and world size, once, in the main process. Worker processes receive the result.

The first source that exists is used, and the choice is logged:

1. the caller's arguments, which must agree with the process group if there is one
2. the caller's process group
3. torch.distributed, if it is initialised
4. RANK and WORLD_SIZE of torchrun
5. the variables of Slurm, if the step has all tasks of the job
6. the variables of mpirun, PMI, PMIx or Horovod
7. the default: one rank

The ranks of a node read the same shards. If ranks used different numbers of ranks per node, samples would be repeated
or missing. Contradicting numbers are therefore an error. `PlannedLoader._compare_ranks` in loader/loader.py compares
what the ranks read.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from wdskit.errors import RankError
from wdskit.stages.run import RankInfo
from wdskit.text import as_int

_MPI = ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI", "PMIX", "HOROVOD")
"""Starts of the variables `..._RANK` and `..._SIZE` of launchers that are not torch's."""

_LOCAL = {
    "LOCAL_WORLD_SIZE": ("LOCAL_RANK", ""),
    "SLURM_STEP_TASKS_PER_NODE": ("SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "OMPI_COMM_WORLD_LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPI_LOCALNRANKS": ("MPI_LOCALRANKID", "PMI_SIZE"),
}
"""Maps variables with the ranks of a machine to those of the local rank and of all ranks that it counts ("": any)."""

_EVEN_TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")  # tasks per node: `4(x8)`, or `4` with one node
_UNEVEN = "If machines have different numbers of ranks, set `ranks_per_node: 1` (loader) on all of them."

logger = logging.getLogger(__name__)


def find_rank(
    rank: int | None = None,
    world_size: int | None = None,
    process_group: Any = None,
    environ: Mapping[str, str] = os.environ,
    *,
    ranks_per_node: int | None = None,
) -> RankInfo:
    """Return rank and world size of this process, and the number of ranks of its machine.

    Args:
        rank: Rank of this process; needs `world_size`. None: from `process_group`, torch.distributed, or the
            environment of the launcher, in this order; else rank 0 of 1.
        world_size: Number of ranks; needs `rank`.
        process_group: A `torch.distributed` group, or one dimension of a `DeviceMesh`, whose rank and size are used.
        environ: The environment variables.
        ranks_per_node: Ranks of each machine. Default: from the launcher; 1 if it does not say so, or if `rank` or
            `process_group` is passed.

    Raises:
        RankError: Only one of `rank` and `world_size` is passed, they are out of range or differ from the group, an
            environment variable is not valid, machines have different numbers of ranks, `world_size` is not a multiple
            of `ranks_per_node`, or `group_rank` refuses `process_group`.
    """
    (found, size, _), why = _detect_rank(as_int(rank), as_int(world_size), process_group, environ)
    if not 0 <= found < size:
        raise RankError(f"rank {found} of {size} ({why}): a rank is 0 or more and below the world size.")
    if ranks_per_node is None:
        is_given = rank is not None or process_group is not None
        ranks_per_node = 1 if is_given or size == 1 else _ranks_per_node(found, size, environ)
    if size % ranks_per_node:
        msg = f"ranks_per_node is {ranks_per_node}, and the {size} ranks are not a multiple of it."
        raise RankError(f"{msg}\n  {_UNEVEN}")
    logger.info("rank %d of %d, %d a node, from %s", found, size, ranks_per_node, why)
    return RankInfo(found, size, ranks_per_node)


def _ranks_per_node(rank: int, world_size: int, environ: Mapping[str, str]) -> int:
    """Return the number of ranks on each machine according to its launcher.

    Return 1 if the launcher does not say it, or if it counts other ranks than `world_size`.

    Raises:
        RankError: The machines have different numbers of ranks, or the ranks of a machine are not consecutive. Not
            every rank can see this, but at least one rank of the run raises.
    """
    num, source = local_ranks(environ)
    local_name, size_name = _LOCAL.get(source, ("", ""))
    if not source or (size_name and environ.get(size_name) != str(world_size)):
        return 1
    local = environ.get(local_name)
    fits = num > 0 and world_size % num == 0 and (local is None or local == str(rank % num))
    if not fits or environ.get("GROUP_WORLD_SIZE", str(world_size // num)) != str(world_size // num):
        where = f"{source} is {environ[source]}" + ("" if local is None else f" and the local rank {local}")
        msg = f"rank {rank} of {world_size}: {where}, so machines do not have equal blocks of ranks."
        raise RankError(f"{msg}\n  {_UNEVEN}")
    return num


def local_ranks(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Read the number of ranks on this machine from an environment variable of its launcher.

    Returns:
        The number, and the name of the variable. (0, name) if the variable is invalid, or says that machines have
        different numbers of ranks. (0, "") if no such variable is set.
    """
    for name in _LOCAL:
        if name in environ:
            match = _EVEN_TASKS.fullmatch(environ[name].strip())
            return (int(match[1]) if match else 0), name
    return 0, ""


def _detect_rank(
    rank: int | None, world_size: int | None, process_group: Any, environ: Mapping[str, str]
) -> tuple[RankInfo, str]:
    """Return rank and world size, and the name of the source that gave them.

    Raises:
        RankError: Only one of `rank` and `world_size` is passed, a number is invalid, the arguments differ from the
            process group, or `group_rank` refuses `process_group`.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise RankError(f"rank={rank}, world_size={world_size}: give both or neither.")
        if type(rank) is not int or type(world_size) is not int:
            raise RankError(f"rank={rank!r}, world_size={world_size!r}: both are whole numbers.")
        if process_group is not None and (group := group_rank(process_group))[:2] != (rank, world_size):
            msg = f"rank={rank}, world_size={world_size}, but the process group has rank {group.rank} of"
            raise RankError(f"{msg} {group.world_size}.\n  Give one of the two: process_group, or rank and world_size.")
        return RankInfo(rank, world_size), "the arguments"
    if process_group is not None:
        return group_rank(process_group), "the process group"
    initialised = initialised_rank()
    if initialised is not None:
        return initialised, "torch.distributed"
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return RankInfo(_number(environ, "RANK"), _number(environ, "WORLD_SIZE")), "RANK and WORLD_SIZE"
    num_tasks = environ.get("SLURM_NTASKS", "1")
    if num_tasks.isdecimal() and int(num_tasks) > 1 and environ.get("SLURM_STEP_NUM_TASKS") == num_tasks:
        return RankInfo(_number(environ, "SLURM_PROCID"), int(num_tasks)), "Slurm"
    for name in _MPI:
        if {f"{name}_RANK", f"{name}_SIZE"} <= environ.keys():
            return RankInfo(_number(environ, f"{name}_RANK"), _number(environ, f"{name}_SIZE")), name
    return RankInfo(0, 1), "default"


def initialised_rank() -> RankInfo | None:
    """Return rank and world size of the default process group; None if torch.distributed is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return RankInfo(distributed.get_rank(), distributed.get_world_size())


def group_rank(process_group: Any) -> RankInfo:
    """Return rank and world size of this process in a process group, or in a `DeviceMesh` of one dimension.
    RankError: This process is not in the group.
    """
    import torch.distributed as dist

    process_group = as_group(process_group)
    rank_info = RankInfo(dist.get_rank(process_group), dist.get_world_size(process_group))
    if rank_info.rank < 0:
        raise RankError("process_group: this process is not in the group. Make the loader in the group's ranks only.")
    return rank_info


def as_group(process_group: Any) -> Any:
    """Return the process group of a `DeviceMesh` of one dimension. Return any other value unchanged."""
    return process_group.get_group() if hasattr(process_group, "mesh_dim_names") else process_group


def group_store(process_group: Any) -> Any:
    """Return the store that the ranks of a process group share, of torch's class `Store`. Its keys belong to this
    group. Return None if there is no process group, or if its backend has no store.
    """
    if initialised_rank() is None:
        return None
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (torch has no public way)
    ranks = dist.get_process_group_ranks(as_group(process_group))  # groups side by side may read different data
    return store and dist.PrefixStore(f"wdskit/{ranks}", store)  # type: ignore[attr-defined]


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return the whole number, 0 or more, in an environment variable. Raise RankError if the variable is not set or has
    another value.
    """
    text = environ.get(name)
    if text is None or not text.strip().isdecimal():
        problem = "is not set" if text is None else f"is {text!r}, not a number"
        raise RankError(f"{name} {problem}. torchrun sets RANK and WORLD_SIZE, srun sets SLURM_PROCID.")
    return int(text)
