"""`wdskit.bench`: measure loaders with different numbers of workers and threads, and a bare loop, on this machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wdskit.engine.batch import PlannedBatches
from wdskit.engine.program import Job, Program
from wdskit.errors import PipelineError
from wdskit.loader.make import make_loader
from wdskit.loader.planned import PlannedLoader
from wdskit.pipeline.builder import OpenedPipeline, Pipeline, open_pipeline
from wdskit.pipeline.ranks import find_rank
from wdskit.pipeline.settings import calls_functions, choose_workers
from wdskit.processes import cpu_s_of_tree, usable_cores
from wdskit.stages.buckets import Bucketed
from wdskit.stages.sources import PlannedSource
from wdskit.stages.streaming import WithEpoch
from wdskit.text import as_int

Progress = Callable[[str, int, int], None]

_ENDLESS = 10**9  # batches of the measured epoch: it never ends, because loaders pause between epochs
_WARM_UP_S = 0.2
_MAX_WORKERS = 16  # limit for the workers with one thread each in the default settings, because of their memory


class Measured(NamedTuple):
    """The median, the smallest and the largest value of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Return the median, the smallest and the largest of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def spread_ratio(self) -> float:
        """Largest difference between a value and the median, divided by the median; 0 if the median is 0."""
        return max(self.most - self.median, self.median - self.least) / self.median if self.median else 0.0


class Setting(NamedTuple):
    """Worker processes of a loader (0: none), and threads in each process."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return f"workers: {self.workers}, threads: {self.threads}"


_ALONE = Setting(0, 1)


@dataclass(frozen=True)
class LoaderBench:
    """The measurements of the loader with one setting.

    Attributes:
        setting: Workers and threads.
        samples_per_s: Samples per second.
        cpu_ms: CPU time per sample in ms, of this process and its workers. None if the loader has workers and the
            system is not Linux.
        first_batch_s: Seconds from the first `next()` to the first batch, including the start of the workers.
    """

    setting: Setting
    samples_per_s: Measured
    cpu_ms: Measured | None
    first_batch_s: Measured


@dataclass(frozen=True)
class BenchResult:
    """The result of `bench`.

    Attributes:
        sample_bytes: Mean bytes of a sample, headers and padding included.
        batch: Size of a rank's batch; 1 without `batched`.
        world_size: Number of ranks of the run; one of them is measured.
        num_cpus: Number of CPUs that this process may use.
        repeats: Number of measurements of each setting.
        configured: The workers and threads of the configuration, or a loader's defaults if it sets none.
        bare_samples_per_s: Samples per second of one thread that makes the same batches in a loop, without a loader.
        bare_cpu_ms: CPU time per sample of this loop, in ms.
        loaders: The measurements of each setting, sorted by setting.
    """

    sample_bytes: float
    batch: int
    world_size: int
    num_cpus: int
    repeats: int
    configured: Setting
    bare_samples_per_s: Measured
    bare_cpu_ms: Measured
    loaders: tuple[LoaderBench, ...]


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
        world_size: Number of ranks of the run; one of them is measured. Default: 1.
        workers: Numbers of worker processes to try, each with every number in `threads`. Default: the configured
            number. If `threads` is not passed either, settings that suit the CPUs of this process are added.
        threads: Numbers of threads to try. Default: the configured number.
        seconds: Length of each measurement in seconds.
        repeats: Number of times that each setting is measured.
        progress: Called before each measurement with its name, the number of finished measurements, and the number of
            all measurements; after the last measurement, the name is `done`.

    Raises:
        ConfigError: The configuration has problems; the first 100 are listed.
        PipelineError: The pipeline is a stream, has a `bucketed` stage, or cannot run with a setting that you passed.
            An argument is out of range. A worker died. Or this process is one of several ranks, and `world_size` is
            not passed.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or do not have an index or column.
        ShardError, SampleError: Reading or decoding a sample failed.
    """
    world_size, repeats, seconds = as_int(world_size), as_int(repeats), as_int(seconds)
    workers, threads = (
        [*map(as_int, value)] if isinstance(value, (list, tuple)) else value for value in (workers, threads)
    )
    lists: list[tuple[str, Any, int]] = [("workers", workers, 0), ("threads", threads, 1)]
    for name, value, least in lists:
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        if value is not None and not (is_list and all(type(each) is int and each >= least for each in value)):
            raise PipelineError(f"bench({name}={value!r}): pass a list of whole numbers, each {least} or more.")
    for name, number in (("world_size", 1 if world_size is None else world_size), ("repeats", repeats)):
        if type(number) is not int or number < 1:
            raise PipelineError(f"bench({name}={number!r}): pass a whole number, 1 or more.")
    if type(seconds) not in {int, float} or not 0 < seconds < float("inf"):
        raise PipelineError(f"bench(seconds={seconds!r}): pass a number above 0.")
    opened = open_pipeline(config, pipeline, overrides, caller="bench")
    if not isinstance(opened.pipe.stages[0], PlannedSource):
        msg = "bench: a stream cannot be measured, because it has no epoch that loaders with any workers share."
        raise PipelineError(f"{msg}\n  Index the shards (`wdskit index FOLDER`), and measure `exact`.")
    if any(isinstance(stage, Bucketed) for stage in opened.pipe.stages):
        msg = "bench: a pipeline with `bucketed` cannot be measured, because its batches differ in size."
        raise PipelineError(f"{msg}\n  Measure it with `batched` in place of `bucketed`.")
    if world_size is None and (launched := find_rank()).world_size > 1:
        msg = f"bench measures one rank, but {launched.world_size} are running and would measure at the same time."
        once = f"Start it once, without torchrun, and with world_size={launched.world_size} (--world-size)"
        raise PipelineError(f"{msg}\n  {once}, on the CPUs of one rank (taskset).")
    subject = _Subject(opened, transforms, plugins, world_size or 1)
    settings = _choose_settings(subject, workers, threads)
    results = subject.measure_in_turns(settings, seconds, repeats, progress or (lambda *_: None))
    bare, bare_cpu_ms = map(Measured.of, zip(*results[None], strict=True))
    loaders = []
    for setting in settings:
        rates, cpu_times, first_batch_s = zip(*results[setting], strict=True)
        cpu_ms = None if None in cpu_times else Measured.of(cpu_times)
        loaders.append(LoaderBench(setting, Measured.of(rates), cpu_ms, Measured.of(first_batch_s)))
    return BenchResult(
        sample_bytes=subject.sample_bytes,
        batch=subject.program.epoch.batch,
        world_size=subject.world_size,
        num_cpus=usable_cores(),
        repeats=repeats,
        configured=subject.configured,
        bare_samples_per_s=bare,
        bare_cpu_ms=bare_cpu_ms,
        loaders=tuple(loaders),
    )


class _Subject:
    """The pipeline to measure. Its epoch is replaced by an endless one, because loaders pause between epochs.

    Raises:
        WdskitError: The pipeline cannot run. `make_loader` raises the same error.
    """

    def __init__(self, opened: OpenedPipeline, transforms: Any, plugins: Sequence[str], world_size: int) -> None:
        self.spec = opened.loader
        workers, threads, _ = choose_workers(self.spec, opened.pipe.stages)
        self.configured = Setting(workers, threads)
        self.one_thread = self.spec.threads in {None, 1} and calls_functions(opened.pipe.stages)
        self.world_size = world_size
        self._pipe = opened.pipe
        self._functions: dict[str, Any] = {"transforms": transforms, "plugins": plugins}
        self._errors = opened.errors.model_dump() | {"dir": None}
        self._cache: dict[str, Any] | None = None
        loader = self.loader(_ALONE)  # raises if the unchanged pipeline cannot run
        if loader.program.reader.is_remote:
            self._cache = opened.cache.model_dump()
            self.loader(_ALONE)
        if opened.errors.max_bad:
            self._errors["max_bad"] = 2**62  # the endless epoch repeats bad samples
        stages = [stage for stage in opened.pipe.stages if not isinstance(stage, WithEpoch)]
        self._pipe = Pipeline([*stages, WithEpoch(n=_ENDLESS)])
        self.program: Program = self.loader(_ALONE).program
        tables = self.program.reader.tables
        num_bytes = sum(float(table.counts @ table.sample_bytes()) for table in tables)
        self.sample_bytes = num_bytes / sum(int(table.counts.sum()) for table in tables)
        self._step = 0

    def loader(self, setting: Setting) -> PlannedLoader:
        """Return a new loader with the workers and threads of `setting`. The workers start with the first batch.

        Raises:
            PipelineError: The pipeline cannot run with `setting`.
        """
        # the workers end with the measurement, and run on this machine
        settings = self.spec.model_dump() | setting._asdict() | {"persistent_workers": False, "on": None}
        if not setting.workers:  # otherwise each loader would warn that these settings have no effect
            settings |= {"persistent_workers": None, "start_method": None}
            settings |= {"prefetch": None} if setting.threads == 1 else {}
        settings |= {"pin_memory": None} if self.spec.device is not None else {}
        settings |= {"rank": 0, "world_size": self.world_size, "errors": self._errors, "cache": self._cache}
        settings |= self._functions
        loader = make_loader(self._pipe, **settings)
        assert isinstance(loader, PlannedLoader)
        return loader

    def measure_in_turns(
        self, settings: Sequence[Setting], seconds: float, repeats: int, progress: Progress
    ) -> dict[Setting | None, list[Any]]:
        """Measure the bare loop and each setting, once in each of `repeats` rounds.

        Return a list of `repeats` results for each key: results of `measure_loader` for each setting, and of
        `run_bare` for the key None. `progress` is called as `bench` says.
        """
        results: dict[Setting | None, list[Any]] = {job: [] for job in (None, *settings)}
        self.run_bare(min(_WARM_UP_S, seconds))
        for number, job in enumerate([*results] * repeats):
            progress(str(job or "bare loop"), number, repeats * len(results))
            results[job].append(measure_loader(self.loader(job), seconds) if job else self.run_bare(seconds))
        progress("done", repeats * len(results), repeats * len(results))
        return results

    def run_bare(self, seconds: float) -> tuple[float, float]:
        """Make batches in this thread for at least `seconds`. Return samples/s and CPU ms per sample."""
        layout, make = self.program.epoch, PlannedBatches(self.program)
        steps = layout.steps(self.world_size)
        count, elapsed, cpu_s, start = 0, 0.0, time.process_time(), time.perf_counter()
        while elapsed < seconds:
            make(make.open(Job(0, steps, self._step, self._step + 1))).result()
            self._step += 1
            count += layout.batch
            elapsed = time.perf_counter() - start
        return count / elapsed, (time.process_time() - cpu_s) * 1000 / count


def measure_loader(loader: PlannedLoader, seconds: float) -> tuple[float, float | None, float]:
    """Measure a new loader for at least `seconds`, then close it. Its epoch must be endless.

    Batches that were made during the start of the workers are not measured; taking them may need `seconds` more.

    Returns:
        Samples/s, CPU ms per sample (None if the loader has workers and the system is not Linux), and seconds to the
        first batch.
    """
    program, workers = loader.program, loader.spec.workers
    cpu_time = cpu_s_of_tree if workers else time.process_time
    round_size = max(1, workers)  # several workers finish their batches at the same time
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
        count, elapsed, cpu_s, start = 0, 0.0, cpu_time(), time.perf_counter()
        while elapsed < seconds:
            for _ in range(round_size):
                next(items)
            count += round_size * program.epoch.batch
            elapsed = time.perf_counter() - start
        cpu_s_now = cpu_time()
        cpu_ms = None if cpu_s is None or cpu_s_now is None else (cpu_s_now - cpu_s) * 1000 / count
        return count / elapsed, cpu_ms, first_batch_s
    finally:
        items.close()  # type: ignore[attr-defined]  # a generator


def _choose_settings(subject: _Subject, workers: Sequence[int] | None, threads: Sequence[int] | None) -> list[Setting]:
    """Return the settings to measure, sorted and without duplicates.

    If `workers` or `threads` is passed: every combination of these numbers, with the configured number in place of
    None. If both are None: the configured setting and `default_settings`, without settings that the pipeline cannot
    use.

    Raises:
        PipelineError: The pipeline cannot run with a setting that the user passed.
    """
    configured = subject.configured
    wanted = [Setting(w, t) for w in workers or [configured.workers] for t in threads or [configured.threads]]
    is_user_choice = workers is not None or threads is not None
    if not is_user_choice:
        wanted += default_settings(usable_cores(), one_thread=subject.one_thread)
    usable = []
    for setting in sorted(set(wanted)):
        try:
            subject.loader(setting)
        except PipelineError:
            if is_user_choice:
                raise
        else:
            usable.append(setting)
    return usable


def default_settings(num_cpus: int, *, one_thread: bool = False) -> list[Setting]:
    """Return the settings to measure by default, from one thread without workers to about `num_cpus` threads in total.

    With `one_thread`, each process has one thread.
    """
    tried = [(0, 1), (0, 1 if one_thread else num_cpus)]
    workers = [each for each in (1, 2, 4, 8, min(num_cpus, _MAX_WORKERS)) if each <= num_cpus]
    tried += [(each, 1 if one_thread else num_cpus // each) for each in workers]
    return [Setting(*each) for each in dict.fromkeys(tried)]
