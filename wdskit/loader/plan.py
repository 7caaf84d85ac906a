"""`wdskit.plan`: in how many steps a run goes and what it reads, told from the index without a sample read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from wdskit.config.spec import parse_settings
from wdskit.errors import PipelineError
from wdskit.loader.opening import open_config
from wdskit.loader.picture import check_picture
from wdskit.loader.plan_epoch import open_epoch, plan_epoch
from wdskit.loader.plan_picture import draw
from wdskit.loader.plan_quality import measure
from wdskit.loader.plan_stream import plan_stream
from wdskit.loader.plan_types import EpochPlan, StreamPlan
from wdskit.pipeline.builder import Pipeline
from wdskit.pipeline.defaults import choose_crew
from wdskit.pipeline.loader_specs import LoaderSpec
from wdskit.pipeline.source_specs import PlannedSpec


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    world_size: int = 1,
    workers: int | None = None,
    gpus_per_node: int = 8,
    epoch: int = 0,
    quality: bool = False,
    classes: int | None = None,
    plot: str | os.PathLike[str] | None = None,
) -> EpochPlan | StreamPlan:
    """OnProgress what an epoch will be like, from the index alone.

    Args:
        config: A YAML file, the same as a dict, or a `Pipeline`.
        pipeline: Which of a configuration's pipelines; may be left out where there is one.
        overrides: `a.b.c=VALUE` each, as `make_loader` takes them.
        world_size: R, number of ranks.
        workers: Worker processes of a rank; without, the configuration's, or those that a loader would choose here.
        gpus_per_node: Ranks of a node.
        epoch: Which one: a schedule of weights makes them differ.
        quality: Whether to tell how far batches are from a uniform draw, of planned sources.
        classes: Number of classes for `quality`; without, those of `classes.json`, or 1000.
        plot: Where to draw a picture of the order, `.png` or `.svg`; of planned sources.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: It cannot run on so many ranks and workers, or an argument is out of range.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or have no index.
    """
    numbers = {"world_size": (world_size, 1), "gpus_per_node": (gpus_per_node, 1), "epoch": (epoch, 0)}
    numbers |= {} if workers is None else {"workers": (workers, 0)}
    for name, (value, least) in numbers.items():
        if type(value) is not int or value < least:
            raise PipelineError(f"plan({name}={value!r}): it is a whole number, {least} or more.")
    pipe, loader, errors = open_config(config, pipeline, overrides, caller="plan")
    if workers is not None:
        loader = parse_settings(LoaderSpec, loader.model_dump(exclude_unset=True) | {"workers": workers}, where="plan")
    if not isinstance(pipe.stages[0], PlannedSpec):
        if quality or plot is not None:
            raise PipelineError(
                "a stream's order is that of its shuffle buffers, which only running tells; plan `exact`."
            )
        return plan_stream(pipe, world_size, loader.workers, errors)
    if plot is not None:
        check_picture(plot)
    opened = open_epoch(pipe.stages, world_size, epoch)
    node_size = min(gpus_per_node, world_size)
    crew = choose_crew(loader, pipe.stages, {"LOCAL_WORLD_SIZE": str(node_size)})
    told = plan_epoch(opened, crew=crew, node_size=node_size)
    if plot is not None:
        draw(opened, plot, classes)
    return dataclasses.replace(told, quality=measure(opened, classes)) if quality else told
