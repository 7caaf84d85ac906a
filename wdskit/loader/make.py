"""`make_loader`, which makes the loader of this rank from a configuration or a `Pipeline`."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wdskit.config.types import parse_settings, show, wrong_kind
from wdskit.engine.stream import StreamPipeline
from wdskit.errors import ConfigError, PipelineError, Problem
from wdskit.loader.base import Loader
from wdskit.loader.planned import PlannedLoader
from wdskit.loader.stream import StreamLoader
from wdskit.pipeline.build import build_pipeline, warn_unused
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.pipeline.ranks import find_rank
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec, LoaderSpec, choose_workers
from wdskit.stages.base import is_function_name
from wdskit.stages.registry import STAGES
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
    ranks_per_node: int | None = None,
    workers: int | None = None,
    threads: int | None = None,
    on: str | None = None,
    prefetch: int | None = None,
    persistent_workers: bool | None = None,
    start_method: str | None = None,
    timeout: float | None = None,
    pin_memory: bool | None = None,
    device: str | None = None,
    errors: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
) -> Loader:
    """Make the loader of one pipeline for this rank.

    Args:
        config: Path of a YAML file, a dict with the same content, or a `Pipeline`.
        pipeline: Name of the pipeline; needed only if the configuration has several.
        overrides: Settings to change, each as `a.b.c=VALUE`, as for `wdskit config check --set`.
        transforms: Functions and classes by name, for `map` and similar stages or as stages themselves. They are used
            before registered ones.
        plugins: Modules to import first, so that they register their functions. A configuration cannot name them.
        rank: Needs `world_size`. Default: from `process_group`, torch.distributed, or the environment of torchrun or
            Slurm, in this order.
        world_size: Needs `rank`.
        process_group: A torch.distributed group, or one dimension of a DeviceMesh, that gives rank and world size. If
            `rank` is given too, it must be the rank in this group.
        ranks_per_node: Number of ranks on each machine, equal on every rank. Ranks of one machine share the bytes that
            they read. Default: from torchrun or Slurm if they or torch.distributed give the rank, else 1.
        workers: Number of worker processes, 0 for none. This and the following arguments override the configuration's
            `loader`. Default, if the stages of a planned source decode images and `threads` is not set: one per two
            cores of this machine, at most 8, with two threads each. Default, if the stages call functions of yours:
            one per core, at most 16, with one thread each. Otherwise 1. The ranks of a machine divide its cores.
        threads: Threads in each process, for one-to-one stages. Default: 1 if `workers` is 0, for a stream, with `on`,
            if there is little to do, or if functions of yours are called, because several threads would call them at
            the same time. Otherwise the cores of this machine, divided among its ranks and workers, at most 8.
        on: Where the workers of a planned source run: "ray" (the Ray cluster of the environment, which RAY_ADDRESS may
            name) or the address of a cluster, "ray://head:10001". Needs `workers`. Default: on this machine.
        prefetch: Largest number of batches that are made before the consumer asks for them. With a planned source, this
            is the number for all workers together, and at least two per worker. With a stream, this is the number for
            each worker. Default: 4; with small batches of a planned source more, because a worker makes up to 1,024
            samples together. After an epoch, the loader of a planned source keeps at most about 256 MiB of the next
            epoch.
        persistent_workers: Whether workers stay alive between epochs. Default: True. Workers of a stream always stay
            alive.
        start_method: "fork", "spawn" or "forkserver". Default: torch's default, but never "fork" once CUDA is
            initialised, or if a planned source reads shards in a store.
        timeout: Longest wait for a batch in seconds. Then the loader raises a PipelineError that names the worker and
            its sample. Default, and 0: no limit. Every wait of a minute is logged in any case, unless `workers` is 0
            and the source is a stream or `threads` is 1.
        pin_memory: Whether batches are in page-locked memory, if there is a GPU. Default: False.
        device: Device for the batches of a planned source: "cuda" (the current device) or "cuda:1". The next batch is
            copied to it on a separate CUDA stream while the consumer works; where possible, images are copied as uint8
            and normalized on the device. Default: batches stay in main memory.
        errors: What to do with bad samples, `{"max_bad": 10, "dir": "bad"}`; overrides the configuration's `errors`.
        cache: Where to keep parts of remote shards, `{"dir": "/nvme/wdskit", "size": "500GB"}`; overrides the
            configuration's `cache`.

    Raises:
        ConfigError: The configuration or an argument has problems; the message lists them.
        PipelineError: The stages, the settings and the machine do not fit together.
        StorageError, FolderIndexError: The file or the shards cannot be read, a planned source has no index, or a label
            means different classes in two folders.
        SelectionError: A split, condition or column of a source is missing or invalid.
        RankError: Rank and world size are invalid, or differ from `process_group`.
        Exception: The import of a module in `plugins` failed with this error.
    """
    _check_functions(transforms)
    _import_plugins(plugins)
    pipe, name, spec, error_spec, cache_spec = open_pipeline(
        config, pipeline, overrides, transforms or {}, caller="make_loader"
    )
    arguments = {
        "workers": workers,
        "threads": threads,
        "on": on,
        "prefetch": prefetch,
        "persistent_workers": persistent_workers,
        "start_method": start_method,
        "timeout": timeout,
        "pin_memory": pin_memory,
        "device": device,
        "ranks_per_node": ranks_per_node,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    given = parse_settings(LoaderSpec, arguments, where="make_loader")
    spec = spec.model_copy(update=given.model_dump(exclude_unset=True))
    if spec.on is not None:
        _check_cluster(spec, pipe)
    chosen = choose_workers(spec, pipe.stages)
    logger.info("workers: %d, threads: %d%s", chosen.workers, chosen.threads, chosen.reason and f" ({chosen.reason})")
    spec = spec.model_copy(update={"workers": chosen.workers, "threads": chosen.threads})
    if errors is not None:
        error_spec = parse_settings(ErrorsSpec, errors, where="make_loader: errors")
    if cache is not None:
        cache_spec = parse_settings(CacheSpec, cache, where="make_loader: cache")
    rank_info = find_rank(rank, world_size, process_group, ranks_per_node=spec.ranks_per_node)
    built = build_pipeline(
        pipe.stages,
        rank_info=rank_info,
        num_threads=chosen.threads,
        max_workers=chosen.workers,
        functions=transforms,
        errors=error_spec,
        cache=cache_spec,
    )
    warn_unused(built, spec, cache_spec)
    origin = {
        "name": name,
        "stages": pipe.stages,
        "process_group": process_group,
        "is_rank_given": rank is not None and process_group is None,
    }
    if isinstance(built, StreamPipeline):
        if spec.device is not None:
            raise PipelineError("device: a stream's batches stay in this machine's memory. Move them in your loop.")
        return StreamLoader(built, spec, error_spec, **origin)
    return PlannedLoader(built, spec, error_spec, **origin)


def _check_cluster(spec: LoaderSpec, pipe: Pipeline) -> None:
    """Check the settings of a loader whose workers run on a cluster.

    Raises:
        PipelineError: The source is a stream, or the number of workers is 0 or not set.
    """
    if not isinstance(pipe.stages[0], PlannedSource):
        msg = f"loader.on: {spec.on}: a stream continues only in the worker that started it, not on another node."
        raise PipelineError(f"{msg}\n  Index the shards (`wdskit index FOLDER`) and use `exact`, or leave `on` out.")
    if not spec.workers or "workers" not in spec.model_fields_set:
        what = "workers is 0" if "workers" in spec.model_fields_set else "workers is not set"
        msg = f"loader.on: {spec.on}: {what}, but the cores of this machine do not say how many a cluster can run."
        raise PipelineError(f"{msg}\n  Set their number, as in `loader: {{workers: 32, on: {spec.on}}}`.")


def _check_functions(functions: Mapping[str, Callable[..., Any]] | None) -> None:
    """Check the argument `transforms` of `make_loader`.

    Raises:
        ConfigError: `functions` is neither a dict nor None, a name is invalid or belongs to a stage of wdskit, or a
            value cannot be called.
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
        if name in STAGES:
            raise _refuse(f"transforms.{name}", f"`{name}` is a stage of wdskit. Use another name: `my_{name}`.")


def _import_plugins(plugins: Iterable[object]) -> None:
    """Import the modules of the argument `plugins` of `make_loader`.

    Raises:
        ConfigError: `plugins` is not a list of module names, or a module does not exist.
        Exception: The import of a module failed with this error.
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
                raise  # the plugin exists, and imports a module that does not
            rule = f"the module {show(err.name)} does not exist. Install it, or run Python where it can be imported."
            raise _refuse("plugins", rule) from err


def _refuse(argument: str, rule: str) -> ConfigError:
    return ConfigError(problems=(Problem("make_loader", argument, rule),))
