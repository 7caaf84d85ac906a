"""How many worker processes and threads there are where nobody says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wdskit.pipeline.loader_specs import LoaderSpec
from wdskit.pipeline.source_specs import PlannedSpec

MAX_THREADS = 8
"""More in one process wait for Python's lock: a tenth of a decode and crop holds it."""

THREADS_A_WORKER = 2
"""Photographs/s on 4 cores, of what as many threads of the bare chain do: four threads in one process 0.65, two in each
of two 0.87, four processes 0.97. Two processes start sooner than four and take a fifth less memory."""

MAX_WORKERS = 8

_LIGHT = frozenset({"rename", "to_tuple", "to_dict", "batched", "with_epoch", "with_length"})
"""Stages that hold Python's lock all the time: threads only make them wait."""


def choose_crew(spec: LoaderSpec, stages: Sequence[Any], environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Worker processes, and threads of each, of a loader.

    What is said counts. Pipelines with a planned source that decode images or call functions share the processor cores
    of this machine with the other ranks on it: two threads to a worker; or as many threads as there are cores for the
    workers that are said. All others have one worker with one thread: a stream's samples and state belong to its
    numbers of workers and threads, and where there is little to do, handing it over takes longer than doing it. Without
    workers a loader runs in the caller's thread, as torch's does.

    Args:
        spec: What is said.
        stages: The pipeline's specs, its source first.
        environ: Where torchrun and Slurm say how many ranks this machine has.
    """
    workers, threads = spec.workers, spec.threads
    if threads is not None or not workers or not _is_heavy(stages):
        return workers, threads or 1
    cores = max(1, usable_cores() // local_ranks(environ))
    most = 1 if any(getattr(stage, "global_rng", False) for stage in _at_work(stages)) else MAX_THREADS
    if "workers" not in spec.model_fields_set:
        most = min(most, THREADS_A_WORKER)
        workers = max(1, min(MAX_WORKERS, cores // most))
    return workers, max(1, min(most, cores // workers))


def _is_heavy(stages: Sequence[Any]) -> bool:
    return isinstance(stages[0], PlannedSpec) and not all(map(_is_light, _at_work(stages)))


def _at_work(stages: Sequence[Any]) -> list[Any]:
    return [*stages[1:], *(stage for part in stages[0].mixture or () for stage in part.stages)]


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
