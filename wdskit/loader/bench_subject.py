"""The pipeline that `wdskit.bench` measures, in an epoch without end, and the settings that it can run with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wdskit.errors import PipelineError
from wdskit.loader.bench_advice import default_settings
from wdskit.loader.bench_types import Refused, Setting
from wdskit.loader.factory import make_loader
from wdskit.loader.opening import Opened
from wdskit.loader.planned import PlannedLoader
from wdskit.pipeline.builder import Pipeline
from wdskit.pipeline.defaults import calls_functions, choose_crew, usable_cores
from wdskit.pipeline.specs import WithEpochSpec

ENDLESS = 10**9
"""Batches of the epoch that is measured: no end of one, where loaders pause, falls into a measurement."""


class Subject:
    """The pipeline that is measured, in an epoch without end, and loaders of it.

    Attributes:
        one_thread: Whether it calls functions of the user's, which several threads call only where that is said.

    Raises:
        WdskitError: It could not run as it is.
    """

    def __init__(self, opened: Opened, transforms: Any, plugins: Sequence[str], world_size: int) -> None:
        self.spec = opened.loader
        self.pipe = opened.pipe
        crew = choose_crew(self.spec, self.pipe.stages)
        self.configured = Setting(crew.workers, crew.threads)
        self.one_thread = self.spec.threads in {None, 1} and calls_functions(self.pipe.stages)
        self.world_size = world_size
        self._transforms = transforms
        self._plugins = plugins
        self._errors = opened.errors.model_dump() | {"dir": None}
        self.loader(Setting(0, 1))  # tells what is wrong with the pipeline as it stands
        if opened.errors.max_bad:
            self._errors["max_bad"] = 2**62  # the same bad sample may come again and again
        stages = [stage for stage in self.pipe.stages if not isinstance(stage, WithEpochSpec)]
        self.pipe = Pipeline([*stages, WithEpochSpec(n=ENDLESS)])

    def loader(self, setting: Setting) -> PlannedLoader:
        """A new one. Nothing starts before it is iterated."""
        settings = self.spec.model_dump() | setting._asdict() | {"persistent_workers": False}  # they end with a pass
        loader = make_loader(
            self.pipe,
            transforms=self._transforms,
            plugins=self._plugins,
            rank=0,
            world_size=self.world_size,
            errors=self._errors,
            **settings,
        )
        assert isinstance(loader, PlannedLoader)
        return loader


def settings_of(
    subject: Subject, workers: Sequence[int] | None, threads: Sequence[int] | None, *, is_configured: bool
) -> tuple[list[Setting], list[Refused]]:
    """What to measure, and what cannot be.

    Raises:
        PipelineError: A setting that was asked for cannot run, or none can.
    """
    here = subject.configured
    is_asked = workers is not None or threads is not None
    if is_asked:
        pairs = ((w, t) for w in workers or [here.workers] for t in threads or [here.threads])
        wanted = [Setting(*pair) for pair in pairs]
    else:
        wanted = default_settings(usable_cores(), one_thread=subject.one_thread)
        wanted += [here] if is_configured else []
    found, refused = [], []
    for setting in sorted(set(wanted)):
        try:
            subject.loader(setting)
        except PipelineError as err:
            if is_asked:
                raise
            refused.append(Refused(setting, str(err)))
        else:
            found.append(setting)
    if not found:
        raise PipelineError(refused[0].reason)
    return found, refused
