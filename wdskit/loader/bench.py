"""`wdskit.bench`: how fast this machine reads, decodes and loads, and the workers and threads to take on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wdskit.errors import PipelineError
from wdskit.loader.bench_picture import draw_bench
from wdskit.loader.bench_run import Progress, Turns
from wdskit.loader.bench_subject import Subject, settings_of
from wdskit.loader.bench_types import BenchResult
from wdskit.loader.opening import open_config
from wdskit.loader.picture import check_picture
from wdskit.pipeline.builder import Pipeline
from wdskit.pipeline.ranks import find_place
from wdskit.pipeline.source_specs import PlannedSpec


def bench(
    config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    transforms: Mapping[str, Callable[..., Any]] | None = None,
    plugins: Sequence[str] = (),
    world_size: int | None = None,
    workers: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    seconds: float = 1.0,
    repeats: int = 3,
    alone: bool = False,
    plot: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure a planned pipeline on this machine: its parts alone, and the loader with several workers and threads.

    All is measured in turns, `repeats` times, with the samples in the order of a run; where an epoch ends, the next one
    follows without a pause. Nothing is written: `errors.dir` stays as it is.

    Args:
        config: A YAML file, the same as a dict, or a `Pipeline`.
        pipeline: Which of a configuration's pipelines; may be left out where there is one.
        overrides: `a.b.c=VALUE` each, as `make_loader` takes them.
        transforms: Functions by name, as `make_loader` takes them.
        plugins: Modules to import first, so that they register their functions.
        world_size: Ranks of the run; one of them is measured. Without: 1.
        workers: Worker processes to try, each with each of `threads`. Without both, what suits the CPUs that this
            process may use, and the configuration's setting; without one, the configuration's.
        threads: Threads to try.
        seconds: Length of each measurement.
        repeats: How often each is made.
        alone: Whether to leave out what is measured beside a busy Python thread and beside training.
        plot: Where to draw a picture of it, `.png` or `.svg`.
        progress: Told what is measured next, how many measurements are behind it, and how many there are.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: It is a stream; it cannot run with a setting that was asked for, or with any; an argument is out
            of range; or this process is one of several ranks.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or have no index.
        ShardError, SampleError: Reading or decoding fails.
    """
    _check_list("workers", [0] if workers is None else workers, least=0)
    _check_list("threads", [1] if threads is None else threads, least=1)
    _check_count("world_size", 1 if world_size is None else world_size)
    _check_count("repeats", repeats)
    _check_seconds(seconds)
    if plot is not None:
        check_picture(plot)
    opened = open_config(config, pipeline, overrides, caller="bench")
    if not isinstance(opened.pipe.stages[0], PlannedSpec):
        msg = "bench: a stream cannot be read and decoded apart: what stands at a place of it, only running tells."
        raise PipelineError(
            f"{msg}\n  Index the shards (`wdskit index FOLDER`) and measure them with `exact` as source."
        )
    subject = Subject(opened, transforms, plugins, _ranks(world_size))
    is_configured = not isinstance(config, Pipeline)
    settings, refused = settings_of(subject, workers, threads, is_configured=is_configured)
    turns = Turns(subject, settings, refused, seconds, repeats, alone=alone, is_configured=is_configured)
    result = turns.run(progress)
    if plot is not None:
        draw_bench(result, plot)
    return result


def _check_list(name: str, numbers: object, *, least: int) -> None:
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str) and len(numbers) > 0
    if not is_list or any(type(each) is not int or each < least for each in numbers):  # type: ignore[attr-defined]
        raise PipelineError(f"bench({name}={numbers!r}): it is a list of whole numbers, each {least} or more.")


def _check_count(name: str, number: object) -> None:
    if type(number) is not int or number < 1:
        raise PipelineError(f"bench({name}={number!r}): it is a whole number, 1 or more.")


def _check_seconds(seconds: object) -> None:
    if type(seconds) not in {int, float} or not 0 < seconds < float("inf"):  # type: ignore[operator]
        raise PipelineError(f"bench(seconds={seconds!r}): it is a number above 0.")


def _ranks(world_size: int | None) -> int:
    """Ranks of the run.

    Raises:
        PipelineError: This process is one of several ranks, which would all measure at once.
    """
    if world_size is None and (place := find_place()).world_size > 1:
        msg = f"bench measures one rank, and here are {place.world_size}, all of which would measure at the same time."
        raise PipelineError(
            f"{msg}\n  Start it once, without torchrun, with world_size={place.world_size} (--world-size), on the CPUs "
            "of one rank (taskset)."
        )
    return world_size or 1
