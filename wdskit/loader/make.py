"""`make_loader`: from a configuration or a pipeline to a loader for this rank."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wdskit.config.messages import show, wrong_kind
from wdskit.config.spec import parse_settings
from wdskit.engine.stream import StreamPipeline
from wdskit.errors import ConfigError, PipelineError, Problem
from wdskit.loader.base import Loader
from wdskit.loader.planned import PlannedLoader
from wdskit.loader.stream import StreamLoader
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.pipeline.ranks import find_place
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec, LoaderSpec, choose_workers
from wdskit.stages.base import is_function_name

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
    ranks_per_node: int | None = None,
    workers: int | None = None,
    threads: int | None = None,
    prefetch: int | None = None,
    persistent_workers: bool | None = None,
    start_method: str | None = None,
    pin_memory: bool | None = None,
    device: str | None = None,
    stats: int | Mapping[str, Any] | None = None,
    errors: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
) -> Loader:
    """Make the loader of one pipeline for this rank.

    Args:
        config: A YAML file, the same as a dict, or a `Pipeline`.
        pipeline: Which of a configuration's pipelines; may be left out where there is one.
        overrides: `a.b.c=VALUE` each, as `wdskit config check --set` takes them.
        transforms: Functions and classes by name, for `map` and the others or as stages, before those registered.
        plugins: Modules to import first, so that they register their functions. Never taken from a configuration.
        rank: With `world_size`. Without: the process group given, torch.distributed, torchrun's environment, Slurm's.
        world_size: With `rank`.
        process_group: A torch.distributed group whose rank and size count, or one dimension of a DeviceMesh. A `rank`
            beside it has to be that of the group.
        ranks_per_node: Ranks of each machine, which share what they read. Without: what torchrun or Slurm say, where
            they or torch.distributed say the rank; else 1. The same on every rank.
        workers: Worker processes, 0 for none; this and what follows overrule the configuration's `loader`. Without this
            and `threads`, where images are decoded or functions called behind a planned source: one for two of this
            machine's cores, shared by its ranks, at most 8, with two threads each; with functions of yours one for each
            core, at most 16, with one thread each; else 1.
        threads: Threads a process for one-to-one stages. Without: 1 if `workers` is 0, of a stream, where there is
            little to do, and where functions of yours are called, which several threads would call at the same time;
            else this machine's cores, shared by its ranks and workers, at most 8.
        prefetch: Batches made ahead of the consumer: of a planned source in all, at least two a worker; of a
            stream by each worker.
        persistent_workers: Whether workers live on between epochs.
        start_method: "fork", "spawn" or "forkserver". Without: torch's default, but never "fork" once CUDA is
            initialised.
        pin_memory: Whether batches come in page-locked memory, where there is a GPU.
        device: Where batches of a planned source go: "cuda", the current one, or "cuda:1". They are copied there on a
            stream of their own, one ahead; images cross as uint8, and are normalized there.
        stats: What the loader reports while it runs: every how many steps, or
            `{"every": 100, "file": "stats.jsonl", "port": 9400}`. `loader.stats()` needs no such setting.
        errors: What becomes of bad samples, `{"max_bad": 10, "dir": "bad"}`; overrules the configuration's `errors`.
        cache: Where parts of remote shards are kept, `{"dir": "/nvme/wdskit", "size": "500GB"}`; overrules the
            configuration's `cache`.

    Raises:
        ConfigError: The configuration or the arguments have problems; all of them are listed.
        PipelineError: The pipeline cannot run as composed.
        StorageError, FolderIndexError: The shards cannot be listed.
        RankError: Rank or world size are contradictory.
    """
    _check_functions(transforms)
    _import_plugins(plugins)
    pipe, name, spec, forgiven, kept = open_pipeline(
        config, pipeline, overrides, transforms or {}, caller="make_loader"
    )
    said = {
        "workers": workers,
        "threads": threads,
        "prefetch": prefetch,
        "persistent_workers": persistent_workers,
        "start_method": start_method,
        "pin_memory": pin_memory,
        "device": device,
        "stats": stats,
        "ranks_per_node": ranks_per_node,
    }
    settings = spec.model_dump(exclude_unset=True) | {name: value for name, value in said.items() if value is not None}
    spec = parse_settings(LoaderSpec, settings, where="make_loader")
    num_workers, num_threads, reason = choose_workers(spec, pipe.stages)
    logger.info("workers: %d, threads: %d%s", num_workers, num_threads, reason and f" ({reason})")
    spec = spec.model_copy(update={"workers": num_workers, "threads": num_threads})
    if errors is not None:
        forgiven = parse_settings(ErrorsSpec, errors, where="make_loader: errors")
    if cache is not None:
        kept = parse_settings(CacheSpec, cache, where="make_loader: cache")
    place = find_place(rank, world_size, process_group, ranks_per_node=spec.ranks_per_node)
    built = pipe.build(
        rank=place.rank,
        world_size=place.world_size,
        ranks_per_node=place.ranks_per_node,
        threads=num_threads,
        max_workers=num_workers,
        transforms=transforms,
        errors=forgiven,
        cache=kept,
    )
    origin = {
        "name": name,
        "process_group": process_group,
        "is_rank_given": rank is not None and process_group is None,
    }
    if isinstance(built, StreamPipeline):
        if spec.device is not None:
            raise PipelineError("device: a stream's batches stay in this machine's memory. Move them in your loop.")
        return StreamLoader(built, spec, **origin)
    return PlannedLoader(built, spec, forgiven, **origin)


def _check_functions(functions: Mapping[str, Callable[..., Any]] | None) -> None:
    """Refuse what a pipeline could not call by name.

    Raises:
        ConfigError: No mapping, a name that is none, a value that is no function.
    """
    if functions is None:
        return
    if not isinstance(functions, Mapping):
        raise _refuse("transforms", wrong_kind(functions, 'a dict is needed, as in {"my_augment": my_augment}'))
    for name, function in functions.items():
        if not is_function_name(name):
            raise _refuse("transforms", f"{show(name)} is not a valid name for a function (letters, digits, _).")
        if not callable(function):
            raise _refuse(f"transforms.{name}", wrong_kind(function, "a function is needed"))


def _import_plugins(plugins: Iterable[object]) -> None:
    """Import modules that the caller has named.

    Raises:
        ConfigError: No list of names, or no such module. Whatever a module itself raises stays as it is.
    """
    if isinstance(plugins, str):
        raise _refuse("plugins", wrong_kind(plugins, f'a list is needed, as in ["{plugins}"]'))
    for plugin in plugins:
        if not isinstance(plugin, str) or not all(part.isidentifier() for part in plugin.split(".")):
            raise _refuse("plugins", f"{show(plugin)} is not the name of a module.")
        try:
            importlib.import_module(plugin)
        except ModuleNotFoundError as err:
            if err.name is None or not f"{plugin}.".startswith(f"{err.name}."):
                raise  # a module that the plugin itself imports
            rule = f"there is no module {show(err.name)}. Install it, or run Python where it can be imported."
            raise _refuse("plugins", rule) from err


def _refuse(argument: str, rule: str) -> ConfigError:
    return ConfigError(problems=(Problem("make_loader", argument, rule),))
