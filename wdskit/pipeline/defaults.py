"""How many worker processes and threads there are where nobody says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wdskit.pipeline.loader_specs import LoaderSpec
from wdskit.stages.fields import UserStage
from wdskit.stages.source_specs import PlannedSpec

MAX_THREADS = 8
"""More in one process wait for Python's lock: a tenth of a decode and crop holds it."""

THREADS_A_WORKER = 2
"""Photographs/s on 4 cores, of what as many threads of the bare chain do: four threads in one process 0.65, two in each
of two 0.87, four processes 0.97. Two processes start sooner than four and take a fifth less memory."""

MAX_AT_WORK = 16
"""Threads of all workers together that a default has at most: as many processes where each has one."""

_LIGHT = frozenset({"rename", "to_tuple", "to_dict", "batched", "with_epoch", "with_length"})
"""Stages that hold Python's lock all the time: threads only make them wait."""


_CALLS = frozenset({"map", "map_dict", "map_tuple", "select"})

ONE_THREAD = "functions of yours run in one thread a process unless `threads` says otherwise"


class Crew(NamedTuple):
    """How many make batches.

    Attributes:
        workers: Worker processes; 0 for none.
        threads: Of each process.
        reason: Why it has one thread, where the pipeline's functions are the reason; else empty.
    """

    workers: int
    threads: int
    reason: str = ""


def choose_crew(spec: LoaderSpec, stages: Sequence[Any], environ: Mapping[str, str] = os.environ) -> Crew:
    """Worker processes, and threads of each, of a loader.

    What is said counts. Pipelines with a planned source that decode images or call functions share the processor cores
    of this machine with the other ranks on it. Those of built-in stages alone have two threads to a worker; or as many
    threads as there are cores for the workers that are said. Those that call functions of the user's have workers of
    one thread: such a function may not be one that two threads can call at once (a Hugging Face tokenizer keeps its
    padding from call to call). All others have one worker with one thread: a stream's samples and state belong to its
    numbers of workers and threads, and where there is little to do, handing it over takes longer than doing it. Without
    workers a loader runs in the caller's thread, as torch's does.

    Args:
        spec: What is said.
        stages: The pipeline's specs, its source first.
        environ: Where torchrun and Slurm say how many ranks this machine has.
    """
    workers, threads = spec.workers, spec.threads
    if threads is not None or not workers or not isinstance(stages[0], PlannedSpec):
        return Crew(workers, threads or 1)
    is_one = calls_functions(stages)
    reason = ONE_THREAD if is_one else ""
    if all(map(_is_light, _at_work(stages))):
        return Crew(workers, 1, reason)
    cores = max(1, usable_cores() // local_ranks(environ))
    most = 1 if is_one else MAX_THREADS
    if "workers" not in spec.model_fields_set:
        most = min(most, THREADS_A_WORKER)
        workers = max(1, min(MAX_AT_WORK, cores) // most)
    return Crew(workers, max(1, min(most, cores // workers)), reason)


def calls_functions(stages: Sequence[Any]) -> bool:
    """Whether a pipeline with a planned source calls functions of the user's, to make samples or batches."""
    return any(
        getattr(stage, "name", None) in _CALLS
        or isinstance(stage, UserStage)
        or getattr(stage, "collate", None) is not None
        for stage in _at_work(stages)
    )


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
