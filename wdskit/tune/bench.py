"""`wdskit.bench`: how fast loaders with several workers and threads are on this machine, next to a bare loop."""

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
from wdskit.pipeline.builder import Opened, Pipeline, open_pipeline
from wdskit.pipeline.ranks import find_rank
from wdskit.pipeline.settings import calls_functions, choose_workers
from wdskit.processes import cpu_s_of_tree, usable_cores
from wdskit.stages.sources import PlannedSource
from wdskit.stages.streaming import WithEpoch
from wdskit.text import as_int

Progress = Callable[[str, int, int], None]

_ENDLESS = 10**9  # batches of the measured epoch, because loaders pause between epochs
_WARM_UP_S = 0.2
_MANY = 16  # most processes that are tried with one thread each, because of their memory


class Measured(NamedTuple):
    """The median of repeats, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def spread_ratio(self) -> float:
        """Largest difference of a repeat from the median, divided by the median."""
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
    """The whole loader with one setting.

    Attributes:
        setting: Workers and threads.
        samples_per_s: Samples per second.
        cpu_ms: CPU time of the process and its workers per sample; None on systems other than Linux.
        first_batch_s: Time from the first `next()` to the first batch, including the start of the workers.
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
        batch: Samples of a batch of a rank; 1 without `batched`.
        world_size: Ranks of the run, of which one is measured.
        num_cpus: CPUs that this process may use.
        repeats: Number of measurements of each setting, made in turn.
        configured: The setting of the configuration, or the default of a loader.
        bare_samples_per_s: Rate at which one thread makes the same batches in a loop, without a loader.
        bare_cpu_ms: CPU time per sample of this loop.
        loaders: The result of each setting.
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
    """Measure a planned pipeline on this machine: a bare loop, and the loader with several workers and threads.

    All measurements take turns, `repeats` times, with the samples in the order of a run; after the end of an epoch the
    next one follows without a pause. Nothing is written, not even to `errors.dir`.

    Args:
        config: A YAML file, the same as a dict, or a `Pipeline`.
        pipeline: Name of the pipeline; needed only if the configuration has several.
        overrides: Settings to change, each as `a.b.c=VALUE`, as for `make_loader`.
        transforms: Functions by name, as for `make_loader`.
        plugins: Modules to import first, so that they register their functions.
        world_size: Ranks of the run; one of them is measured. Default: 1.
        workers: Worker processes to try, each with each of `threads`. Default: what suits the CPUs that this process
            may use, and the configured setting; if only `threads` is given, the configured workers.
        threads: Threads to try, with a default as for `workers`.
        seconds: Length of each measurement in seconds.
        repeats: Number of times that each measurement is made.
        progress: Called with the name of the next measurement, the number of those done, and the number of all.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: The pipeline is a stream, or cannot run with a given setting or with any; an argument is out of
            range; this process is one of several ranks; or a worker died.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or have no index.
        ShardError, SampleError: Reading or decoding fails.
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
    if world_size is None and (launched := find_rank()).world_size > 1:
        msg = f"bench measures one rank, but {launched.world_size} are running and would measure at the same time."
        once = f"Start it once, without torchrun, and with world_size={launched.world_size} (--world-size)"
        raise PipelineError(f"{msg}\n  {once}, on the CPUs of one rank (taskset).")
    subject = _Subject(opened, transforms, plugins, world_size or 1)
    settings = _choose_settings(subject, workers, threads)
    found = subject.measure_in_turns(settings, seconds, repeats, progress or (lambda *_: None))
    bare, bare_cpu_ms = map(Measured.of, zip(*found[None], strict=True))
    loaders = []
    for setting in settings:
        rates, of_cpu, first_batch_s = zip(*found[setting], strict=True)
        cpu_ms = None if None in of_cpu else Measured.of(of_cpu)
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
    """The measured pipeline, with an endless epoch, and its loaders.

    Raises:
        WdskitError: The pipeline cannot run.
    """

    def __init__(self, opened: Opened, transforms: Any, plugins: Sequence[str], world_size: int) -> None:
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
            self._errors["max_bad"] = 2**62  # the same bad sample may come again and again
        stages = [stage for stage in opened.pipe.stages if not isinstance(stage, WithEpoch)]
        self._pipe = Pipeline([*stages, WithEpoch(n=_ENDLESS)])
        self.program: Program = self.loader(_ALONE).program
        tables = self.program.reader.tables
        num_bytes = sum(float(table.counts @ table.sample_bytes()) for table in tables)
        self.sample_bytes = num_bytes / sum(int(table.counts.sum()) for table in tables)
        self._step = 0

    def loader(self, setting: Setting) -> PlannedLoader:
        """Make a new loader. Nothing starts before it is iterated."""
        settings = (
            self.spec.model_dump() | setting._asdict() | {"persistent_workers": False, "on": None}
        )  # its workers end with a pass, and run on this machine
        if not setting.workers:  # else each loader would log that these have no effect
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
        """Return the results of `measure_loader` by setting; under None those of `run_bare`."""
        jobs: list[Setting | None] = [None, *settings]
        found: dict[Setting | None, list[Any]] = {job: [] for job in jobs}
        self.run_bare(min(_WARM_UP_S, seconds))
        for number, job in enumerate([*found] * repeats):
            progress(str(job or "bare loop"), number, repeats * len(found))
            found[job].append(measure_loader(self.loader(job), seconds) if job else self.run_bare(seconds))
        progress("done", repeats * len(found), repeats * len(found))
        return found

    def run_bare(self, seconds: float) -> tuple[float, float]:
        """Make the next batches in this thread. Return samples/s and CPU ms per sample."""
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
    """Run a new loader with an endless epoch.

    Returns:
        Samples/s, CPU ms per sample (None on systems other than Linux), and seconds to the first batch.
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
        while (
            left and time.perf_counter() - start < seconds
        ):  # do not count the batches that were made during the start
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
    """Return the settings to measure. Default settings with which the pipeline cannot run are left out."""
    here = subject.configured
    wanted = [Setting(w, t) for w in workers or [here.workers] for t in threads or [here.threads]]
    is_asked = workers is not None or threads is not None
    if not is_asked:
        wanted += default_settings(usable_cores(), one_thread=subject.one_thread)
    found = []
    for setting in sorted(set(wanted)):
        try:
            subject.loader(setting)
        except PipelineError:
            if is_asked:
                raise
        else:
            found.append(setting)
    return found


def default_settings(num_cpus: int, *, one_thread: bool = False) -> list[Setting]:
    """Return the settings to try: one decoding thread per CPU, in this process, in one worker and in several.

    With `one_thread`, each process has one thread.
    """
    tried = [(0, 1), (0, 1 if one_thread else num_cpus)]
    workers = [each for each in (1, 2, 4, 8, min(num_cpus, _MANY)) if each <= num_cpus]
    tried += [(each, 1 if one_thread else num_cpus // each) for each in workers]
    return [Setting(*each) for each in dict.fromkeys(tried)]
