"""`make_loader`: from a configuration or a pipeline to a loader for this rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wdskit.errors import ConfigError, PipelineError, Problem
from wdskit.loader.loader import Loader
from wdskit.pipeline.builder import Pipeline
from wdskit.pipeline.ranks import find_place
from wdskit.pipeline.specs import LoaderSpec


def make_loader(
    config: str | Path | Mapping[str, Any] | Pipeline,
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    transforms: Mapping[str, Callable[..., Any]] | None = None,
    plugins: Sequence[str] = (),
    rank: int | None = None,
    world_size: int | None = None,
    process_group: Any = None,
    workers: int | None = None,
    threads: int | None = None,
    prefetch: int | None = None,
    persistent_workers: bool | None = None,
    start_method: str | None = None,
    pin_memory: bool | None = None,
) -> Loader:
    """Make the loader of one pipeline for this rank.

    Args:
        config: A YAML file, the same as a dict, or a `Pipeline`.
        pipeline: Which of a configuration's pipelines; may be left out where there is one.
        overrides: `a.b.c=VALUE` each, as `wdskit config check --set` takes them.
        transforms: Functions by name, for `map` and the others, before those registered.
        plugins: Modules to import first, so that they register their functions. Never taken from a configuration.
        rank: With `world_size`. Without: the process group given, torch.distributed, torchrun's environment, Slurm's.
        world_size: With `rank`.
        process_group: A torch.distributed group whose rank and size count.
        workers: Worker processes, 0 for none; this and what follows overrule the configuration's `loader`.
        threads: Threads a process for one-to-one stages.
        prefetch: Items that each worker has ready ahead.
        persistent_workers: Whether workers live on between epochs.
        start_method: "fork", "spawn" or "forkserver".
        pin_memory: Whether batches come in page-locked memory, where there is a GPU.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: The pipeline cannot run as composed.
        StorageError, FolderIndexError: The shards cannot be listed.
        RankError: Rank or world size are contradictory.
    """
    for plugin in plugins:
        importlib.import_module(plugin)
    if isinstance(config, Pipeline):
        if pipeline is not None or overrides:
            raise PipelineError("make_loader(Pipeline, ...): `pipeline` and `overrides` belong to a configuration.")
        pipe, spec = config, LoaderSpec()
    else:
        from wdskit.pipeline.config import load_config  # a pipeline built in Python needs no YAML

        loaded = load_config(config, overrides=overrides)
        pipe, spec = Pipeline(loaded.pipeline(pipeline)), loaded.loader
    said = {
        "workers": workers,
        "threads": threads,
        "prefetch": prefetch,
        "persistent_workers": persistent_workers,
        "start_method": start_method,
        "pin_memory": pin_memory,
    }
    spec = _merge(spec, {name: value for name, value in said.items() if value is not None})
    place = find_place(rank, world_size, process_group)
    built = pipe.build(
        rank=place.rank,
        world_size=place.world_size,
        threads=spec.threads,
        max_workers=spec.workers,
        transforms=transforms,
    )
    return Loader(built, spec, process_group=process_group, told=rank is not None)


def _merge(spec: LoaderSpec, settings: Mapping[str, Any]) -> LoaderSpec:
    """A configuration's loader settings with the caller's over them, checked again."""
    from pydantic import ValidationError

    try:
        return LoaderSpec.model_validate({**spec.model_dump(), **settings})
    except ValidationError as err:
        problems = tuple(
            Problem("make_loader", ".".join(map(str, problem["loc"])), f"{problem['msg']}, not {problem['input']!r}.")
            for problem in err.errors(include_url=False)
        )
        raise ConfigError(problems=problems) from None
