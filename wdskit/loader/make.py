"""`make_loader`, which makes the loader of this rank from a configuration or a `Pipeline`."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wdskit.config.types import parse_settings
from wdskit.engine.stream import StreamPipeline
from wdskit.errors import PipelineError
from wdskit.loader.loader import Loader, PlannedLoader
from wdskit.loader.stream import StreamLoader
from wdskit.pipeline.build import build_pipeline
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.pipeline.ranks import find_rank
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec, LoaderSpec, choose_workers
from wdskit.stages.sources import PlannedSource

logger = logging.getLogger(__name__)


def make_loader(
    config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    transforms: Mapping[str, Callable[..., Any]] | None = None,
    plugins: Sequence[str] = (),
    rank: int | None = None,
    world_size: int | None = None,
    process_group: Any = None,
    errors: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
    **loader: Any,
) -> Loader:
    """Make the loader of one pipeline for this rank.

    Args:
        config: Path of a YAML file, a dict with the same content, or a `Pipeline`.
        pipeline: Name of the pipeline; needed only if the configuration has several.
        overrides: Settings to change, each as `a.b.c=VALUE`, as for `wdskit config check --set`.
        transforms: Functions and classes by name, for `map` and similar stages or as stages themselves. They are used
            before registered ones.
        plugins: Modules to import first, so that they register their functions. A configuration cannot name them.
        rank: Needs `world_size`. Default: from `process_group`, torch.distributed, or the launcher: torchrun, Slurm
            or mpirun, in this order.
        world_size: Needs `rank`.
        process_group: A torch.distributed group, or one dimension of a DeviceMesh, that gives rank and world size. If
            `rank` is given too, it must be the rank in this group.
        errors: What to do with bad samples, `{"max_bad": 10, "dir": "bad"}`; overrides the configuration's `errors`.
        cache: Where to keep parts of remote shards, `{"dir": "/nvme/wdskit", "size": "500GB"}`; overrides the
            configuration's `cache`.
        loader: The settings `loader` of a configuration, such as `workers=4` (docs/pipelines.md); they override the
            configuration's. None means the default.

    Raises:
        ConfigError: The configuration or an argument has problems; the message lists them.
        PipelineError: The stages, the settings and the machine do not fit together.
        StorageError, FolderIndexError: The file or the shards cannot be read, a planned source has no index, or a label
            means different classes in two folders.
        SelectionError: A split, condition or column of a source is missing or invalid.
        RankError: Rank and world size are invalid, or differ from `process_group`.
        ImportError: A module in `plugins` does not exist. Other errors of its import are raised unchanged.
    """
    for plugin in plugins:
        importlib.import_module(plugin)
    name, stages, settings = open_pipeline(config, pipeline, overrides, transforms)
    given = parse_settings(LoaderSpec, loader, where="make_loader")
    spec = settings.loader.model_copy(update=given.model_dump(exclude_unset=True))
    if spec.on is not None:
        _check_cluster(spec, stages)
    chosen = choose_workers(spec, stages)
    logger.info("%s", chosen)
    spec = spec.model_copy(update={"workers": chosen.workers, "threads": chosen.threads})
    error_spec = settings.errors if errors is None else parse_settings(ErrorsSpec, errors, where="make_loader: errors")
    cache_spec = settings.cache if cache is None else parse_settings(CacheSpec, cache, where="make_loader: cache")
    rank_info = find_rank(rank, world_size, process_group, ranks_per_node=spec.ranks_per_node)
    built = build_pipeline(
        stages,
        rank_info=rank_info,
        num_threads=chosen.threads,
        max_workers=chosen.workers,
        functions=transforms,
        errors=error_spec,
        cache=cache_spec,
    )
    is_rank_given = rank is not None and process_group is None
    origin: Any = {"name": name, "stages": stages, "process_group": process_group, "is_rank_given": is_rank_given}
    if isinstance(built, StreamPipeline):
        return StreamLoader(built, spec, error_spec, **origin)
    return PlannedLoader(built, spec, error_spec, **origin)


def _check_cluster(spec: LoaderSpec, stages: Sequence[Any]) -> None:
    """Check the settings of a loader whose workers run on a cluster.

    Raises:
        PipelineError: The source is a stream, or the number of workers is 0 or not set.
    """
    if not isinstance(stages[0], PlannedSource):
        msg = f"loader.on: {spec.on}: a stream continues only in the worker that started it, not on another node."
        raise PipelineError(f"{msg}\n  Index the shards (`wdskit index FOLDER`) and use `exact`, or leave `on` out.")
    if not spec.workers or "workers" not in spec.model_fields_set:
        msg = f"loader.on: {spec.on}: workers is not set, and the cores of this machine do not say how many to run."
        raise PipelineError(f"{msg}\n  Set their number, as in `loader: {{workers: 32, on: {spec.on}}}`.")
