"""`wdskit.plan`: in how many steps a run goes and what it reads, told from the index without a sample read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from wdskit.errors import PipelineError
from wdskit.loader.plan_epoch import plan_epoch
from wdskit.loader.plan_stream import plan_stream
from wdskit.loader.plan_types import EpochPlan, StreamPlan
from wdskit.pipeline.builder import Pipeline
from wdskit.pipeline.source_specs import PlannedSpec
from wdskit.pipeline.specs import ErrorsSpec, LoaderSpec


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    world_size: int = 1,
    workers: int | None = None,
    gpus_per_node: int = 8,
    epoch: int = 0,
) -> EpochPlan | StreamPlan:
    """Tell what an epoch will be like, from the index alone.

    Args:
        config: A YAML file, the same as a dict, or a `Pipeline`.
        pipeline: Which of a configuration's pipelines; may be left out where there is one.
        overrides: `a.b.c=VALUE` each, as `make_loader` takes them.
        world_size: R, number of ranks.
        workers: Worker processes of a rank; without, the configuration's.
        gpus_per_node: Ranks of a node.
        epoch: Which one: a schedule of weights makes them differ.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: It cannot run on so many ranks and workers, or an argument is out of range.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or have no index.
    """
    told = {"world_size": (world_size, 1), "gpus_per_node": (gpus_per_node, 1), "epoch": (epoch, 0)}
    told |= {} if workers is None else {"workers": (workers, 0)}
    for name, (value, least) in told.items():
        if type(value) is not int or value < least:
            raise PipelineError(f"plan({name}={value!r}): it is a whole number, {least} or more.")
    pipe, loader, errors = _read(config, pipeline, overrides)
    num_workers = loader.workers if workers is None else workers
    if isinstance(pipe.stages[0], PlannedSpec):
        return plan_epoch(pipe.stages, world_size, num_workers, min(gpus_per_node, world_size), epoch)
    return plan_stream(pipe, world_size, num_workers, errors)


def _read(config: Any, pipeline: str | None, overrides: Sequence[str]) -> tuple[Pipeline, LoaderSpec, ErrorsSpec]:
    """The pipeline, checked, and how it is run."""
    if isinstance(config, Pipeline):
        if pipeline is not None or overrides:
            raise PipelineError("plan(Pipeline, ...): `pipeline` and `overrides` belong to a configuration.")
        config.check()
        return config, LoaderSpec(), ErrorsSpec()
    from wdskit.pipeline.config import load_config  # a pipeline built in Python needs no YAML

    loaded = load_config(config, overrides=overrides)
    return Pipeline(loaded.pipeline(pipeline)), loaded.loader, loaded.errors
