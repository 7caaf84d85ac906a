"""`wdskit.bench` at work: all parts and loaders in turns, and what their repeats come to."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from wdskit.config.export import settings_to_yaml
from wdskit.loader.bench_advice import choose, explain, warn
from wdskit.loader.bench_loops import (
    STEP_SHARE,
    Busy,
    Rates,
    TrainingStep,
    measure_headspace,
    measure_loader,
    ready_item,
)
from wdskit.loader.bench_parts import Done, Parts, What
from wdskit.loader.bench_subject import Subject
from wdskit.loader.bench_types import Advice, BenchResult, LoaderBench, Measured, PartBench, Refused, Setting
from wdskit.loader.starting import choose_start_method
from wdskit.pipeline.defaults import usable_cores

WARM_UP_S = 0.2

SLOW = 3
"""A batch that takes so many times as long as a measurement is waited for once, not in each repeat."""

Progress = Callable[[str, int, int], None]


class _Line(NamedTuple):
    """A part that is measured."""

    what: What
    processes: int
    threads: int


class Turns:
    """Measures in turns, and sums up."""

    def __init__(
        self,
        subject: Subject,
        settings: Sequence[Setting],
        refused: Sequence[Refused],
        seconds: float,
        repeats: int,
        *,
        alone: bool,
        is_configured: bool,
    ) -> None:
        self.subject, self.settings, self.refused = subject, settings, refused
        self.seconds, self.repeats = seconds, repeats
        self.alone, self.is_configured = alone, is_configured
        self.num_cpus = usable_cores()
        self.one_thread = subject.one_thread and all(setting.threads == 1 for setting in settings)
        pairs = dict.fromkeys([(1, 1), (1, self.num_cpus), (self.num_cpus, 1)])
        whats: tuple[What, What] = ("read", "decode")
        lines = [_Line(what, *pair) for what in whats for pair in pairs]
        self.parts: dict[_Line, list[Done]] = {
            line: [] for line in lines if line.threads == 1 or line.what == "read" or not self.one_thread
        }
        self.rates: dict[Setting, list[Rates]] = {setting: [] for setting in settings}
        self.headspaces: dict[Setting, list[float]] = {setting: [] for setting in settings}
        self.step: TrainingStep | None = None

    def run(self, progress: Progress | None) -> BenchResult:
        """Measure."""
        pipeline = self.subject.loader(Setting(0, 1)).pipeline
        total = self.repeats * (len(self.parts) + 2 * len(self.settings))
        num_done = 0

        def tell(what: str) -> None:
            nonlocal num_done
            if progress is not None:
                progress(what, num_done, total)
            num_done += 1

        with Parts(pipeline, self.num_cpus, choose_start_method(self.subject.spec.start_method)) as parts:
            for line in self.parts:
                parts.run(**line._asdict(), seconds=min(WARM_UP_S, self.seconds))
            item = ready_item(pipeline)
            for _ in range(self.repeats):
                for line, found in self.parts.items():
                    tell(f"{line.what}, {line.processes} x {line.threads}")
                    found.append(parts.run(**line._asdict(), seconds=self.seconds))
                for setting in self.settings:
                    tell(f"loader, {setting.workers} x {setting.threads}")
                    self._measure_loader(setting, pipeline.plan.batch)
                    tell(f"headspace, {setting.workers} x {setting.threads}")
                    loader = self.subject.loader(setting)
                    self.headspaces[setting].append(measure_headspace(loader, item, self.seconds))
            if progress is not None:
                progress("done", total, total)
            return self._sum_up(pipeline, parts.sample_bytes)

    def _measure_loader(self, setting: Setting, batch: int) -> None:
        if self.step is None and not self.alone:
            self.step = TrainingStep(STEP_SHARE * batch / max(done.samples_per_s for done in self._limit()))
        rates = self.rates[setting]
        slow = rates and rates[0].beside_python is not None and batch / rates[0].beside_python > SLOW * self.seconds
        busy = Busy(not self.alone and not slow, self.step)
        rates.append(measure_loader(self.subject.loader(setting), self.seconds, busy))

    def _limit(self) -> list[Done]:
        """What decodes fastest, in each repeat."""
        decoders = [found for line, found in self.parts.items() if line.what == "decode"]
        return max(decoders, key=lambda found: statistics.median(done.samples_per_s for done in found))

    def _sum_up(self, pipeline: Any, sample_bytes: float) -> BenchResult:
        parts = tuple(_part(line, found) for line, found in self.parts.items())
        limit = self._limit()
        limits = [done.samples_per_s for done in limit]
        loaders = tuple(_loader(each, self.rates[each], self.headspaces[each], limits) for each in self.settings)
        chosen = choose(loaders)
        said = self.subject.spec.model_dump(exclude_defaults=True, exclude={"workers", "threads"})
        advice = Advice(
            chosen.setting,
            settings_to_yaml("loader", chosen.setting._asdict() | said),
            explain(chosen, loaders, parts),
            chosen.limit_ratio.median,
            chosen.cpu_ms and chosen.cpu_ms.median / statistics.median(map(_cpu_ms, limit)),
            warn(loaders, chosen, parts, num_cpus=self.num_cpus, one_thread=self.one_thread),
        )
        return BenchResult(
            source=self.subject.pipe.stages[0].name,
            num_shards=sum(map(len, pipeline.shards.tables)),
            sample_bytes=sample_bytes,
            batch=pipeline.plan.batch,
            world_size=self.subject.world_size,
            num_cpus=self.num_cpus,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            python=platform.python_version(),
            torch=torch.__version__,
            seconds=self.seconds,
            repeats=self.repeats,
            training_step_s=None if self.step is None else self.step.seconds,
            configured=self.subject.configured if self.is_configured else None,
            parts=parts,
            limit=Measured.of(limits),
            loaders=loaders,
            refused=tuple(self.refused),
            advice=advice,
        )


def _part(line: _Line, found: Sequence[Done]) -> PartBench:
    rates = Measured.of([done.samples_per_s for done in found])
    mean_bytes = sum(done.num_bytes for done in found) / sum(done.num_samples for done in found)
    return PartBench(*line, rates, rates.median * mean_bytes, Measured.of(list(map(_cpu_ms, found))))


def _cpu_ms(done: Done) -> float:
    return done.cpu_s * 1000 / done.num_samples


def _loader(
    setting: Setting, rates: Sequence[Rates], headspaces: Sequence[float], limits: Sequence[float]
) -> LoaderBench:
    first, alone, cpu_ms, beside_python, beside_training = zip(*rates, strict=True)
    ratios = [rate / limit for rate, limit in zip(alone, limits, strict=True)]
    return LoaderBench(
        setting,
        Measured.of(alone),
        Measured.of(ratios),
        _measured(cpu_ms),
        Measured.of(first),
        _measured(beside_python),
        _measured(beside_training),
        Measured.of(headspaces),
    )


def _measured(values: Sequence[float | None]) -> Measured | None:
    known = [value for value in values if value is not None]
    return Measured.of(known) if known else None
