"""`wdskit.bench`: how fast this machine reads, decodes and loads, and the workers and threads to take on it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from wdskit.config.export import settings_to_yaml
from wdskit.errors import PipelineError
from wdskit.loader.make import make_loader
from wdskit.loader.planned import PlannedLoader
from wdskit.loader.starting import choose_start_method
from wdskit.pipeline.builder import Opened, Pipeline, open_pipeline
from wdskit.pipeline.ranks import find_place
from wdskit.pipeline.settings import ONE_THREAD, calls_functions, choose_workers, usable_cores
from wdskit.stages.sources import PlannedSource
from wdskit.stages.streaming import WithEpoch
from wdskit.tune.measure import LoaderRate, Part, Parts, measure_loader

Progress = Callable[[str, int, int], None]

_ENDLESS = 10**9  # batches of the epoch that is measured: between two epochs loaders pause
_WARM_UP_S = 0.2
_NEAR = 0.95  # what reaches this share of the best is as good
_HERE = 0.8  # of its rate counts without workers, whose threads stop while the training process runs Python code
_MANY = 16  # processes above which each with a single thread is not tried: their batches take a lot of memory
_NOISE = 0.25


class Measured(NamedTuple):
    """The median of repeats, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def spread_ratio(self) -> float:
        """How far the repeats are from their median, at most, as a share of it."""
        return max(self.most - self.median, self.median - self.least) / self.median if self.median else 0.0


class Setting(NamedTuple):
    """How a loader is run: worker processes (0: none), and threads in each process."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return f"workers: {self.workers}, threads: {self.threads}"


@dataclass(frozen=True)
class PartBench:
    """Reading alone, or decoding alone, without a loader.

    Attributes:
        what: "read": the fields' bytes through the index, in the pipeline's order. "decode": the pipeline's stages,
            batches included, on samples that are in memory.
        processes: That work at the same time, and
        threads: in each.
        samples_per_s: All of them together.
        cpu_ms: CPU time of a sample.
    """

    what: Literal["read", "decode"]
    processes: int
    threads: int
    samples_per_s: Measured
    cpu_ms: Measured


@dataclass(frozen=True)
class LoaderBench:
    """The whole loader with one setting.

    Attributes:
        setting: Workers and threads.
        samples_per_s: Samples that it gives.
        limit_ratio: The same as a share of the fastest decoding of the same repeat.
        cpu_ms: CPU time of a sample, of the process and its workers; None where only Linux counts it.
        first_batch_s: From the first `next` to the first batch, the start of the workers included.
    """

    setting: Setting
    samples_per_s: Measured
    limit_ratio: Measured
    cpu_ms: Measured | None
    first_batch_s: Measured


@dataclass(frozen=True)
class Advice:
    """The setting to take.

    Attributes:
        setting: Workers and threads.
        yaml: It, and what else the configuration says of the loader, to paste.
        reason: Why, in a sentence.
        limit_ratio: The share of the fastest decoding that it reaches.
        warnings: What makes the figures doubtful, or is in the way of better ones.
    """

    setting: Setting
    yaml: str
    reason: str
    limit_ratio: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class BenchResult:
    """All that was measured.

    Attributes:
        sample_bytes: Mean bytes of the fields of the samples that were decoded.
        batch: Samples of a batch of a rank; 1 without `batched`.
        world_size: Ranks of the run of which one is measured.
        num_cpus: CPUs that this process may use.
        repeats: How often each was made, in turns.
        configured: The setting of the configuration; None of a `Pipeline`.
        parts: Reading and decoding alone.
        limit: Samples/s of the fastest decoding.
        loaders: One a setting.
        refused: Settings with which the pipeline cannot run, and why.
        advice: What follows.
    """

    sample_bytes: float
    batch: int
    world_size: int
    num_cpus: int
    repeats: int
    configured: Setting | None
    parts: tuple[PartBench, ...]
    limit: Measured
    loaders: tuple[LoaderBench, ...]
    refused: tuple[tuple[Setting, str], ...]
    advice: Advice


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
        progress: Called with what is measured next, how many measurements are behind it, and how many there are.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: It is a stream; it cannot run with a setting that was asked for, or with any; an argument is out
            of range; or this process is one of several ranks.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or have no index.
        ShardError, SampleError: Reading or decoding fails.
    """
    lists: list[tuple[str, Any, int]] = [("workers", workers, 0), ("threads", threads, 1)]
    for name, value, least in lists:
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
        if value is not None and not (is_list and all(type(each) is int and each >= least for each in value)):
            raise PipelineError(f"bench({name}={value!r}): it is a list of whole numbers, each {least} or more.")
    for name, number in (("world_size", 1 if world_size is None else world_size), ("repeats", repeats)):
        if type(number) is not int or number < 1:
            raise PipelineError(f"bench({name}={number!r}): it is a whole number, 1 or more.")
    if type(seconds) not in {int, float} or not 0 < seconds < float("inf"):
        raise PipelineError(f"bench(seconds={seconds!r}): it is a number above 0.")
    opened = open_pipeline(config, pipeline, overrides, caller="bench")
    if not isinstance(opened.pipe.stages[0], PlannedSource):
        msg = "bench: a stream cannot be read and decoded apart: only a run shows which sample comes where."
        raise PipelineError(f"{msg}\n  Index the shards (`wdskit index FOLDER`), and measure `exact`.")
    if world_size is None and (place := find_place()).world_size > 1:
        msg = f"bench measures one rank, and here are {place.world_size}, all of which would measure at the same time."
        once = f"Start it once, without torchrun, with world_size={place.world_size} (--world-size)"
        raise PipelineError(f"{msg}\n  {once}, on the CPUs of one rank (taskset).")
    subject = _Subject(opened, transforms, plugins, world_size or 1)
    is_configured = not isinstance(config, Pipeline)
    settings, refused = _choose_settings(subject, workers, threads, is_configured=is_configured)
    one_thread = subject.one_thread and all(setting.threads == 1 for setting in settings)
    pairs = dict.fromkeys([(1, 1), (1, usable_cores()), (usable_cores(), 1)])
    wanted = [Part("read", *pair) for pair in pairs]
    wanted += [Part("decode", *pair) for pair in pairs if pair[1] == 1 or not one_thread]
    program = subject.loader(Setting(0, 1)).pipeline.program
    with Parts(program, usable_cores(), choose_start_method(subject.spec.start_method)) as processes:
        for part in wanted:
            processes.run(part, min(_WARM_UP_S, seconds))
        jobs: dict[Part | Setting, Callable[[], Any]] = {part: partial(processes.run, part, seconds) for part in wanted}
        jobs |= {each: partial(subject.measure, each, seconds) for each in settings}
        found = _measure_in_turns(jobs, repeats, progress or (lambda *_: None))
    parts = tuple(
        PartBench(*part, *(Measured.of(values) for values in zip(*found[part], strict=True))) for part in wanted
    )
    limit = max((part for part in parts if part.what == "decode"), key=lambda part: part.samples_per_s.median)
    limits = [rate.samples_per_s for rate in found[Part("decode", limit.processes, limit.threads)]]
    loaders = tuple(_sum_up(setting, found[setting], limits) for setting in settings)
    chosen = choose(loaders)
    configured = subject.spec.model_dump(exclude_defaults=True, exclude={"workers", "threads"})
    advice = Advice(
        chosen.setting,
        settings_to_yaml("loader", chosen.setting._asdict() | configured),
        explain(chosen, loaders, parts),
        chosen.limit_ratio.median,
        tuple(warn(loaders, parts, num_cpus=usable_cores(), one_thread=one_thread)),
    )
    return BenchResult(
        sample_bytes=processes.sample_bytes,
        batch=program.plan.batch,
        world_size=subject.world_size,
        num_cpus=usable_cores(),
        repeats=repeats,
        configured=subject.configured if is_configured else None,
        parts=parts,
        limit=limit.samples_per_s,
        loaders=loaders,
        refused=tuple(refused),
        advice=advice,
    )


class _Subject:
    """The pipeline that is measured, in an epoch without end, and loaders of it.

    Raises:
        WdskitError: It could not run as it is.
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
        self.loader(Setting(0, 1))  # refuses the pipeline as it stands where it could not run
        if opened.errors.max_bad:
            self._errors["max_bad"] = 2**62  # the same bad sample may come again and again
        stages = [stage for stage in opened.pipe.stages if not isinstance(stage, WithEpoch)]
        self._pipe = Pipeline([*stages, WithEpoch(n=_ENDLESS)])

    def loader(self, setting: Setting) -> PlannedLoader:
        """A new one. Nothing starts before it is iterated."""
        settings = self.spec.model_dump() | setting._asdict() | {"persistent_workers": False}  # they end with a pass
        settings |= {"rank": 0, "world_size": self.world_size, "errors": self._errors, **self._functions}
        loader = make_loader(self._pipe, **settings)
        assert isinstance(loader, PlannedLoader)
        return loader

    def measure(self, setting: Setting, seconds: float) -> LoaderRate:
        """Run a loader for some time."""
        return measure_loader(self.loader(setting), seconds)


def _choose_settings(
    subject: _Subject, workers: Sequence[int] | None, threads: Sequence[int] | None, *, is_configured: bool
) -> tuple[list[Setting], list[tuple[Setting, str]]]:
    """What to measure, and what cannot be."""
    here = subject.configured
    is_asked = workers is not None or threads is not None
    if is_asked:
        wanted = [Setting(w, t) for w in workers or [here.workers] for t in threads or [here.threads]]
    else:
        wanted = default_settings(usable_cores(), one_thread=subject.one_thread) + ([here] if is_configured else [])
    found, refused = [], []
    for setting in sorted(set(wanted)):
        try:
            subject.loader(setting)
        except PipelineError as err:
            if is_asked:
                raise
            refused.append((setting, str(err)))
        else:
            found.append(setting)
    if not found:
        raise PipelineError(refused[0][1])
    return found, refused


def default_settings(num_cpus: int, *, one_thread: bool = False) -> list[Setting]:
    """What to try: threads of this process, of one worker and of several, one decoder a CPU; or processes of one thread
    only.
    """
    if one_thread:
        tried = [(workers, 1) for workers in (0, 1, 2, 4, 8, min(num_cpus, _MANY)) if workers <= num_cpus]
    else:
        tried = [(0, 1), (0, num_cpus)]
        tried += [(workers, num_cpus // workers) for workers in (1, 2, 4, 8, _MANY) if workers <= num_cpus]
        tried += [(num_cpus, 1)] if num_cpus <= _MANY else []
    return [Setting(*each) for each in dict.fromkeys(tried)]


def _measure_in_turns(
    jobs: Mapping[Part | Setting, Callable[[], Any]], repeats: int, progress: Progress
) -> dict[Part | Setting, list[Any]]:
    """What each job gives each time."""
    found: dict[Part | Setting, list[Any]] = {name: [] for name in jobs}
    for number, name in enumerate([*jobs] * repeats):
        progress(str(name), number, repeats * len(jobs))
        found[name].append(jobs[name]())
    progress("done", repeats * len(jobs), repeats * len(jobs))
    return found


def _sum_up(setting: Setting, rates: Sequence[LoaderRate], limits: Sequence[float]) -> LoaderBench:
    samples_per_s, cpu_ms, first_batch_s = zip(*rates, strict=True)
    return LoaderBench(
        setting,
        Measured.of(samples_per_s),
        Measured.of([rate / limit for rate, limit in zip(samples_per_s, limits, strict=True)]),
        None if None in cpu_ms else Measured.of(cpu_ms),
        Measured.of(first_batch_s),
    )


def choose(loaders: Sequence[LoaderBench]) -> LoaderBench:
    """Of the settings that are as good as the best, the one with the fewest worker processes but at least one, then
    with the fewest threads. Without workers 0.8 of the rate counts.
    """
    rates = [each.samples_per_s.median * (1 if each.setting.workers else _HERE) for each in loaders]
    near = [each for each, rate in zip(loaders, rates, strict=True) if rate >= _NEAR * max(rates)]
    return min(near, key=lambda each: (each.setting.workers == 0, each.setting))


def explain(chosen: LoaderBench, loaders: Sequence[LoaderBench], parts: Sequence[PartBench]) -> str:
    """Why this one, in a sentence."""
    rate = chosen.samples_per_s.median
    read, decode = (
        max(part.samples_per_s.median for part in parts if part.what == what) for what in ("read", "decode")
    )
    if read < decode and rate >= 0.7 * read:
        return f"reading is what limits: it gives {read:,.0f} samples/s where {decode:,.0f} could be decoded."
    decoding = {(part.processes, part.threads): part.samples_per_s.median for part in parts if part.what == "decode"}
    num_cpus = max(processes for processes, _ in decoding)
    by_threads, by_processes = decoding.get((1, num_cpus)), decoding[num_cpus, 1]
    if chosen.setting.workers > 1 and by_threads is not None and by_processes > 1.15 * by_threads:
        msg = f"the stages wait for Python's lock (GIL): threads of one process decode {by_threads:,.0f} samples/s, "
        return f"{msg}as many processes {by_processes:,.0f}."
    others = [each for each in loaders if each.setting != chosen.setting]
    if not others:
        return "no other was tried."
    best = max(others, key=lambda each: each.samples_per_s.median)
    if best.setting.workers == 0 and best.samples_per_s.median * _NEAR > rate:
        msg = f"{best.setting} gives {best.samples_per_s.median:,.0f} samples/s and this {rate:,.0f}, but threads of "
        return f"{msg}the training process stop while it runs Python code."
    if best.samples_per_s.median > rate:
        return f"nothing is faster by more than {1 - _NEAR:.0%}, and of those as fast it needs the fewest processes."
    return f"it is the fastest: {rate:,.0f} samples/s, and {best.samples_per_s.median:,.0f} with {best.setting}."


def warn(
    loaders: Sequence[LoaderBench], parts: Sequence[PartBench], *, num_cpus: int, one_thread: bool = False
) -> Iterator[str]:
    """What makes the figures doubtful, or better ones impossible."""
    if one_thread:
        yield f"{ONE_THREAD}, so no more were tried.\n  Where more may call them at once, try --threads 1,4."
    spread = max(each.samples_per_s.spread_ratio for each in loaders)
    if spread > _NOISE:
        msg = f"repeats of one setting differ by up to {spread:.0%} from their median: this machine has other work too."
        yield f"{msg}\n  Run it when it is quiet, or with more --repeats."
    read, decode = (min(part.cpu_ms.median for part in parts if part.what == what) for what in ("read", "decode"))
    if read > decode:
        msg = f"reading a sample takes {read:.2g} ms of CPU and decoding it {decode:.2g}: reading decides here, and the"
        yield f"{msg} decode limit\n  is out of reach."
    if max(max(1, each.setting.workers) * each.setting.threads for each in loaders) < num_cpus:
        yield f"no setting that was tried uses all {num_cpus} CPUs; the decode limit does."
