"""What the functions that look at a pipeline before a run take: a file, a dict, or a `Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from wdskit.errors import PipelineError
from wdskit.pipeline.builder import Pipeline
from wdskit.pipeline.settings import ErrorsSpec, LoaderSpec, load_config


class Opened(NamedTuple):
    """A pipeline whose stages fit together, and how it is run."""

    pipe: Pipeline
    loader: LoaderSpec
    errors: ErrorsSpec


def open_config(config: Any, pipeline: str | None, overrides: Sequence[str], *, caller: str) -> Opened:
    """The pipeline, checked, and how it is run.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: The stages do not fit together, or a `Pipeline` came with what belongs to a configuration.
    """
    if isinstance(config, Pipeline):
        if pipeline is not None or overrides:
            raise PipelineError(f"{caller}(Pipeline, ...): `pipeline` and `overrides` belong to a configuration.")
        config.check()
        return Opened(config, LoaderSpec(), ErrorsSpec())
    loaded = load_config(config, overrides=overrides)
    return Opened(Pipeline(loaded.pipeline(pipeline)), loaded.loader, loaded.errors)
