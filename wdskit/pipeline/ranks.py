"""Rank and world size, found once in the main process; worker processes get it.

Ranks of one node, which read the same shards, are known where launchers say how many there are. Every rank has to be
told the same, or samples would come twice or never: what does not fit is an error.

The order: what the caller says; a process group the caller gives; torch.distributed where it is initialised; torchrun's
RANK and WORLD_SIZE; Slurm's, where a step has all of the job's tasks; else one rank. The choice is logged. Where the
caller gives numbers and a group, they have to agree.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from wdskit.errors import RankError
from wdskit.stages.base import Place
from wdskit.text import as_int

_TORCHRUN = "LOCAL_WORLD_SIZE"
_EVEN_TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")  # of each node: `4(x8)`, or `4` where there is one

logger = logging.getLogger(__name__)


def find_place(
    rank: int | None = None,
    world_size: int | None = None,
    process_group: Any = None,
    environ: Mapping[str, str] = os.environ,
    *,
    ranks_per_node: int | None = None,
) -> Place:
    """Rank and world size of this process, and how many ranks its machine has.

    Args:
        rank: Said by the caller, together with `world_size`.
        world_size: Said by the caller.
        process_group: A `torch.distributed` group whose rank and size count, or one dimension of a `DeviceMesh`.
        environ: The environment to look into.
        ranks_per_node: Ranks of each machine, said by the caller. Without: what torchrun or Slurm say, where they or
            torch.distributed say the rank; else 1.

    Raises:
        RankError: Half of a pair, numbers that are no rank and world size, or others than those of the group; machines
            with different numbers of ranks.
    """
    ranks_per_node = as_int(ranks_per_node)
    place, why = _find(as_int(rank), as_int(world_size), process_group, environ)
    if place.world_size < 1 or not 0 <= place.rank < place.world_size:
        raise RankError(
            f"rank {place.rank} of {place.world_size} ({why}): a rank is 0 or more and below the world size."
        )
    if ranks_per_node is None and rank is None and process_group is None and place.world_size > 1:
        ranks_per_node = _ranks_per_node(place, environ)
    place = place._replace(ranks_per_node=1 if ranks_per_node is None else ranks_per_node)
    if place.world_size % place.ranks_per_node:
        msg = f"ranks_per_node is {place.ranks_per_node}, and the {place.world_size} ranks are not a multiple of it."
        raise RankError(f"{msg}\n  {_UNEVEN}")
    logger.info("rank %d of %d, %d a node, from %s", *place, why)
    return place


_UNEVEN = "Where machines have different numbers of ranks, set `ranks_per_node: 1` (loader) on all of them."


def _ranks_per_node(place: Place, environ: Mapping[str, str]) -> int:
    """What torchrun or Slurm say. Ranks that would find different numbers are refused: of those of uneven machines, and
    of those that are not dealt to machines in blocks, one at least sees that something does not fit.
    """
    num, source = local_ranks(environ)
    if not source or (source != _TORCHRUN and environ.get("SLURM_STEP_NUM_TASKS") != str(place.world_size)):
        return 1
    local = environ.get("LOCAL_RANK" if source == _TORCHRUN else "SLURM_LOCALID")
    fits = num > 0 and place.world_size % num == 0 and (local is None or local == str(place.rank % num))
    if not fits or environ.get("GROUP_WORLD_SIZE", str(place.world_size // num)) != str(place.world_size // num):
        where = f"{source} is {environ[source]}" + ("" if local is None else f" and the local rank {local}")
        msg = f"rank {place.rank} of {place.world_size}: {where}, so machines do not have equal blocks of ranks."
        raise RankError(f"{msg}\n  {_UNEVEN}")
    return num


def local_ranks(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the number of ranks on this machine, and the variable of torchrun or Slurm that gives it.

    Returns:
        (0, name) if the variable is invalid or machines differ; (0, "") without a variable.
    """
    for name in (_TORCHRUN, "SLURM_STEP_TASKS_PER_NODE"):
        if name in environ:
            match = _EVEN_TASKS.fullmatch(environ[name].strip())
            return (int(match[1]) if match else 0), name
    return 0, ""


def _find(
    rank: int | None, world_size: int | None, process_group: Any, environ: Mapping[str, str]
) -> tuple[Place, str]:
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise RankError(f"rank={rank}, world_size={world_size}: give both or neither.")
        if type(rank) is not int or type(world_size) is not int:
            raise RankError(f"rank={rank!r}, world_size={world_size!r}: both are whole numbers.")
        if process_group is not None and (group := group_place(process_group))[:2] != (rank, world_size):
            msg = f"rank={rank}, world_size={world_size}, but the process group has rank {group.rank} of"
            raise RankError(f"{msg} {group.world_size}.\n  Give one of the two: process_group, or rank and world_size.")
        return Place(rank, world_size), "the arguments"
    if process_group is not None:
        return group_place(process_group), "the process group"
    initialised = initialised_place()
    if initialised is not None:
        return initialised, "torch.distributed"
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return Place(_number(environ, "RANK"), _number(environ, "WORLD_SIZE")), "RANK and WORLD_SIZE"
    num_tasks = environ.get("SLURM_NTASKS", "1")
    if num_tasks.isdigit() and int(num_tasks) > 1 and environ.get("SLURM_STEP_NUM_TASKS") == num_tasks:
        return Place(_number(environ, "SLURM_PROCID"), int(num_tasks)), "Slurm"
    return Place(0, 1), "default"


def initialised_place() -> Place | None:
    """The default process group's, None where torch.distributed is not initialised (or not even imported)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Place(distributed.get_rank(), distributed.get_world_size())


def group_place(process_group: Any) -> Place:
    """This process's rank and size in a process group, or in a `DeviceMesh` of one dimension.

    Raises:
        RankError: This process is not in it, or the mesh has several dimensions.
    """
    import torch.distributed as dist

    process_group = as_group(process_group)
    place = Place(dist.get_rank(process_group), dist.get_world_size(process_group))
    if place.rank < 0:
        raise RankError("process_group: this process is not in the group. Make the loader in the group's ranks only.")
    return place


def as_group(process_group: Any) -> Any:
    """The process group of a `DeviceMesh` of one dimension; a group, and None, as they are.

    Raises:
        RankError: The mesh has several dimensions.
    """
    if not hasattr(process_group, "mesh_dim_names"):
        return process_group
    if process_group.ndim != 1:
        names = process_group.mesh_dim_names
        shape = f"{process_group.ndim} dimensions ({', '.join(names) if names else 'without names'})"
        way = "" if names else "Name its dimensions, mesh_dim_names=(...). "
        msg = f"process_group: this mesh has {shape}.\n  {way}Pass the one that the data is split over: "
        raise RankError(f'{msg}process_group=mesh["dp"].')
    return process_group.get_group()


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not text.strip().isdigit():
        problem = "is not set" if text is None else f"is {text!r}, not a number"
        raise RankError(f"{name} {problem}. torchrun sets RANK and WORLD_SIZE; set both or neither.")
    return int(text)
