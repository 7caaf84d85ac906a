"""`wdskit.bench`: measure loaders with different numbers of workers and threads, and a bare loop, on this machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wdskit.engine.batch import BatchMaker
from wdskit.engine.program import Job, Program
from wdskit.errors import PipelineError
from wdskit.loader.loader import PlannedLoader
from wdskit.loader.make import make_loader
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.pipeline.settings import Config, WorkerCount, choose_workers
from wdskit.processes import usable_cores
from wdskit.stages.buckets import Bucketed
from wdskit.stages.sources import PlannedSource
from wdskit.stages.streaming import WithEpoch

Progress = Callable[[str, int, int], None]

_ENDLESS = 10**9  # batches of the measured epoch: it never ends, because loaders pause between epochs


@dataclass(frozen=True)
class LoaderBench:
    """The loader with one setting: medians of the measurements.

    Attributes:
        setting: Workers and threads.
        samples_per_s: Samples per second.
        first_batch_s: Seconds from the first `next()` to the first batch, including the start of the workers.
    """

    setting: WorkerCount
    samples_per_s: float
    first_batch_s: float


@dataclass(frozen=True)
class BenchResult:
    """The result of `bench`.

    Attributes:
        batch: Size of a rank's batch; 1 without `batched`.
        num_cpus: Number of CPUs that this process may use.
        repeats: Number of measurements of each setting, of which medians are given.
        configured: The workers and threads of the configuration, or a loader's defaults if it sets none.
        bare_samples_per_s: Samples per second of one thread that makes the same batches in a loop, without a loader.
        loaders: The measurements of each setting, sorted by setting.
    """

    batch: int
    num_cpus: int
    repeats: int
    configured: WorkerCount
    bare_samples_per_s: float
    loaders: tuple[LoaderBench, ...]


def bench(
    config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    transforms: Mapping[str, Callable[..., Any]] | None = None,
    plugins: Sequence[str] = (),
    workers: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    seconds: float = 1.0,
    repeats: int = 3,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure a planned pipeline on this machine: a bare loop, and loaders with different workers and threads.

    In each of `repeats` rounds, each setting is measured once. Samples have the order of a run, and epochs follow each
    other without a pause. Nothing is written to `errors.dir`. The cache of remote shards is filled as in a run.

    Args:
        config: The path of a YAML file, its content as a dict, or a `Pipeline`.
        pipeline: Name of the pipeline; needed only if the configuration has several.
        overrides: Settings to change, each as `a.b.c=VALUE`, as for `make_loader`.
        transforms: Functions and classes by name, for `map` and similar stages or as stages themselves.
        plugins: Modules to import first, so that they register their functions.
        workers: Numbers of worker processes to try, each with every number in `threads`. Default: the configured
            number.
        threads: Numbers of threads to try. Default: the configured number.
        seconds: Length of each measurement in seconds.
        repeats: Number of times that each setting is measured.
        progress: Called before each measurement with its name, the number of finished measurements, and the number of
            all measurements; after the last measurement, the name is `done`.

    Raises:
        ConfigError: The configuration, or a number of workers or threads, has problems; all are listed.
        PipelineError: The pipeline is a stream, has a `bucketed` stage, or cannot run with one of the settings. An
            argument is out of range. A worker died.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or do not have an index or column.
        ShardError, SampleError: Reading or decoding a sample failed.
    """
    if repeats < 1 or not 0 < seconds < float("inf"):
        raise PipelineError(f"bench(repeats={repeats!r}, seconds={seconds!r}): pass numbers above 0.")
    _, stages, configured_by = open_pipeline(config, pipeline, overrides)
    if not isinstance(stages[0], PlannedSource):
        msg = "bench: a stream cannot be measured, because it has no epoch that loaders with any workers share."
        raise PipelineError(f"{msg}\n  Index the shards (`wdskit index FOLDER`), and measure `exact`.")
    if any(isinstance(stage, Bucketed) for stage in stages):
        msg = "bench: a pipeline with `bucketed` cannot be measured, because its batches differ in size."
        raise PipelineError(f"{msg}\n  Measure it with `batched` in place of `bucketed`.")
    subject = _Subject(stages, configured_by, transforms, plugins)
    configured = subject.configured
    settings = sorted(
        {WorkerCount(w, t) for w in workers or [configured.workers] for t in threads or [configured.threads]}
    )
    for setting in settings:
        subject.loader(setting)  # raises before the first measurement if the pipeline cannot run
    results: dict[WorkerCount | None, list[tuple[float, ...]]] = {job: [] for job in (None, *settings)}
    num_jobs, tell = repeats * len(results), progress or (lambda *_: None)
    subject.run_bare(min(0.2, seconds))
    for number, job in enumerate([*results] * repeats):
        tell(str(job or "bare loop"), number, num_jobs)
        results[job].append(measure_loader(subject.loader(job), seconds) if job else subject.run_bare(seconds))
    tell("done", num_jobs, num_jobs)
    return BenchResult(
        batch=subject.program.epoch.batch,
        num_cpus=usable_cores(),
        repeats=repeats,
        configured=configured,
        bare_samples_per_s=_medians(results[None])[0],
        loaders=tuple(LoaderBench(setting, *_medians(results[setting])) for setting in settings),
    )


def _medians(rounds: Sequence[tuple[float, ...]]) -> list[float]:
    """Return the median of each figure over all rounds."""
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


class _Subject:
    """The pipeline to measure. Its epoch is replaced by an endless one, because loaders pause between epochs.

    Raises:
        WdskitError: The pipeline cannot run. `make_loader` raises the same error.
    """

    def __init__(self, stages: Sequence[Any], config: Config, transforms: Any, plugins: Sequence[str]) -> None:
        spec = config.loader
        self.configured = choose_workers(spec, stages)
        self._settings = spec.model_dump(exclude_unset=True) | {"persistent_workers": False, "on": None}
        self._settings |= {"rank": 0, "world_size": 1, "transforms": transforms, "plugins": plugins}
        self._settings |= {"errors": config.errors.model_dump() | {"dir": None}}
        self._pipe = Pipeline(stages)
        loader = self.loader(WorkerCount(0, 1))  # raises if the unchanged pipeline cannot run
        if loader.program.reader.is_remote:
            self._settings["cache"] = config.cache.model_dump()
        if config.errors.max_bad:
            self._settings["errors"]["max_bad"] = 2**62  # the endless epoch repeats bad samples
        without_end = [stage for stage in stages if not isinstance(stage, WithEpoch)]
        self._pipe = Pipeline([*without_end, WithEpoch(n=_ENDLESS)])
        self.program: Program = self.loader(WorkerCount(0, 1)).program
        self._step = 0

    def loader(self, setting: WorkerCount) -> PlannedLoader:
        """Return a new loader with the workers and threads of `setting`. The workers start with the first batch.

        Raises:
            PipelineError: The pipeline cannot run with `setting`.
        """
        loader = make_loader(self._pipe, **self._settings | setting._asdict())
        assert isinstance(loader, PlannedLoader)
        return loader

    def run_bare(self, seconds: float) -> tuple[float]:
        """Make batches in this thread for at least `seconds`. Return samples/s."""
        layout, make = self.program.epoch, BatchMaker(self.program)
        steps = layout.steps(1)
        count, elapsed, start = 0, 0.0, time.perf_counter()
        while elapsed < seconds:
            make(make.open(Job(0, steps, self._step, self._step + 1))).result()
            self._step += 1
            count += layout.batch
            elapsed = time.perf_counter() - start
        return (count / elapsed,)


def measure_loader(loader: PlannedLoader, seconds: float) -> tuple[float, float]:
    """Measure a new loader for at least `seconds`, then close it. Its epoch must be endless.

    Batches that were made during the start of the workers are not measured; taking them may need `seconds` more. Return
    samples/s and the seconds to the first batch.
    """
    round_size = max(1, loader.spec.workers)  # several workers finish their batches at the same time
    items = iter(loader)
    try:
        start = time.perf_counter()
        next(items)
        first_batch_s = time.perf_counter() - start
        start, left = time.perf_counter(), loader.most_ahead
        # do not count the batches that were made during the start
        while left and time.perf_counter() - start < seconds:
            next(items)
            left -= 1
        count, elapsed, start = 0, 0.0, time.perf_counter()
        while elapsed < seconds:
            for _ in range(round_size):
                next(items)
            count += round_size * loader.program.epoch.batch
            elapsed = time.perf_counter() - start
        return count / elapsed, first_batch_s
    finally:
        items.close()  # type: ignore[attr-defined]  # a generator
