"""How many threads a worker process has where nobody says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wdskit.pipeline.source_specs import PlannedSpec

MAX_THREADS = 8
"""More in one process wait for Python's lock: of a decode and crop a twentieth holds it."""

_LIGHT = frozenset({"rename", "to_tuple", "to_dict", "batched", "with_epoch", "with_length"})
"""Stages that hold Python's lock all the time: threads only make them wait."""


def default_threads(stages: Sequence[Any], num_workers: int, environ: Mapping[str, str] = os.environ) -> int:
    """Threads of each worker process of a pipeline.

    Those of a planned source that decode images or call functions share the processor cores of this machine with the
    other ranks on it, at most `MAX_THREADS`. All others have one: a stream's state belongs to its number of threads; a
    loader without workers runs in the caller's thread, as torch's does.

    Args:
        stages: The pipeline's specs, its source first.
        num_workers: Worker processes.
        environ: Where torchrun and Slurm say how many ranks this machine has.
    """
    source = stages[0]
    if not num_workers or not isinstance(source, PlannedSpec):
        return 1
    at_work = [*stages[1:], *(stage for part in source.mixture or () for stage in part.stages)]
    if all(map(_is_light, at_work)) or any(getattr(stage, "global_rng", False) for stage in at_work):
        return 1
    return max(1, min(MAX_THREADS, usable_cores() // (local_ranks(environ) * num_workers)))


def _is_light(stage: Any) -> bool:
    name = getattr(stage, "name", None)  # of a function put in by `stage`, none
    return name in _LIGHT or (name == "decode" and stage.images is None)


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Processor cores that this process may use: those it is bound to, or fewer where a container's share is less.

    Args:
        quota: Linux's file with the microseconds of processor time in a period, and its length.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        used, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, int(used) // int(period)))
    except (OSError, ValueError):  # not in a container, or no limit: `max`
        return cores


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks on this machine, as torchrun or Slurm tells; 1 where neither does."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = environ.get(name, "")
        if value.isdecimal() and int(value):
            return int(value)
    return 1
