"""The settings `loader`, `errors` and `cache`, `wdskit.load_config`, and the default number of workers and threads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field, PlainValidator, model_validator

from wdskit.config.load import SINGLE, Configuration, Stage, load, to_yaml
from wdskit.config.types import (
    WHOLE,
    Bool,
    Cluster,
    CountOrShare,
    Few,
    Settings,
    Text,
    did_you_mean,
    listing,
    refuse,
    show,
    wrong_kind,
)
from wdskit.dataset.remote import CACHE_PART_BYTES
from wdskit.dataset.shard_table import ShardTable
from wdskit.errors import ConfigError, Problem
from wdskit.order.mixture import MixtureOrder
from wdskit.order.weighted import WeightedOrder
from wdskit.pipeline.ranks import local_ranks
from wdskit.processes import usable_cores
from wdskit.stages.fields import Decode
from wdskit.stages.registry import known_stages
from wdskit.stages.run import RankInfo
from wdskit.stages.sources import PlannedData, PlannedSource
from wdskit.storage.cache import PartCache
from wdskit.text import as_int, format_at_least, format_bytes, parse_bytes, plural

DEFAULT_PREFETCH = 4

MAX_THREADS = 8
"""Limit for one process. More threads would wait for the GIL, which decoding and cropping hold 10 % of the time."""

THREADS_PER_WORKER = 2
"""Default number of threads of a worker.

Measured in photographs/s on 4 cores, relative to four threads that only decode and crop: one process with four
threads 0.65, two processes with two threads 0.87, four with one thread 0.97. Two processes start sooner than four and
take 20 % less memory."""

MAX_TOTAL_THREADS = 16
"""Default limit for the threads of all workers together. With one thread per worker it limits the workers."""


Device = Annotated[str, Field(pattern=r"^cuda(:[0-9]+)?$")]
Workers = Annotated[int, Field(strict=True, ge=0, le=65_535), WHOLE]
Timeout = Annotated[float, Field(strict=True, ge=0, le=10**9)]
Budget = Annotated[CountOrShare, AfterValidator(lambda share: share if str(share).strip("0.%") else 0)]


class LoaderSpec(Settings):
    """The settings `loader`: how a pipeline is run."""

    workers: Workers = Field(
        1,
        description="Worker processes; 0: none. Default: 1, or for images and functions of yours what the cores allow.",
    )
    threads: Few | None = Field(
        None, description="Threads in each process. Default: 1, or for images without functions of yours up to 8."
    )
    on: Cluster | None = Field(
        None, description="Where workers run: `ray`, or the address of a cluster, ray://head:10001. Default: here."
    )
    prefetch: Few | None = Field(
        None,
        description="Limit for batches made ahead: in all of a planned source, per worker of a stream. Default: 4.",
    )
    persistent_workers: Bool = Field(
        True, description="Whether workers stay alive between epochs. A `stream` then goes on where its epoch ended."
    )
    start_method: Literal["fork", "spawn", "forkserver"] | None = Field(
        None, description="How workers start. Default: torch's default, but not `fork` after CUDA is initialised."
    )
    timeout: Timeout | None = Field(None, description="Seconds to wait for a batch before an error; 0: no limit.")
    pin_memory: Bool = Field(False, description="Whether batches are in page-locked memory, if there is a GPU.")
    device: Device | None = Field(
        None, description="`cuda` or `cuda:1`: where batches of a planned source go. Default: main memory."
    )
    ranks_per_node: Few | None = Field(
        None, description="Ranks of each machine; they read the same shards. Default: from the launcher, else 1."
    )


class ErrorsSpec(Settings):
    """The settings `errors`: what to do with bad samples (a field is missing, invalid or has a wrong size)."""

    max_bad: Budget = Field(
        0, description="Limit for the bad samples of a rank in an epoch: a number, or a share such as 0.1%."
    )
    dir: Text | None = Field(None, description="Folder for the lists of bad samples, one file per rank.")
    transforms: Bool = Field(False, description="Whether samples for which functions of yours fail count too.")

    @model_validator(mode="after")
    def _check_together(self) -> ErrorsSpec:
        for name in ("dir", "transforms"):
            if getattr(self, name) and not self.max_bad:
                raise refuse(f"`{name}` does nothing without a budget. Add `max_bad: 10`, or remove it.")
        return self


def _check_bytes(value: object) -> int:
    with suppress(ValueError):
        size = parse_bytes(value) if isinstance(value, str) else as_int(value)
        if type(size) is int and size > 0:
            return size
    raise refuse(wrong_kind(value, "a size is needed, as in 500GB"))


Bytes = Annotated[int, PlainValidator(_check_bytes)]


class CacheSpec(Settings):
    """The settings `cache`: where planned sources keep parts of remote shards on this machine."""

    dir: Text | None = Field(None, description="Folder of the cache, for all processes of one user on the machine.")
    size: Bytes | None = Field(None, description="Size of the cache: `500GB`.")

    @model_validator(mode="after")
    def _check_together(self) -> CacheSpec:
        if (self.dir is None) != (self.size is None):
            missing = "dir: /nvme/wdskit" if self.dir is None else "size: 500GB"
            raise refuse(f"`dir` and `size` belong together. Add `{missing}`.")
        return self

    def open(self) -> PartCache | None:
        """Return the cache; None if `dir` is not set.

        Raises:
            StorageError: The folder cannot be created or written, belongs to another user, or other users may write to
                it.
        """
        return None if self.dir is None or self.size is None else PartCache(str(Path(self.dir).absolute()), self.size)


class ConfigFile(Configuration):
    """The settings of a configuration file."""

    loader: LoaderSpec = LoaderSpec()
    errors: ErrorsSpec = ErrorsSpec()
    cache: CacheSpec = CacheSpec()


@dataclass(frozen=True)
class Config:
    """A checked configuration.

    Attributes:
        pipelines: The stages of each pipeline by name. The single pipeline of `pipeline:` has the name "pipeline".
        loader: The settings `loader`.
        errors: The settings `errors`.
        cache: The settings `cache`.
        origin: The path of the file, for messages.
        tree: The configuration as dicts and lists, with variables and overrides, but without defaults.
    """

    pipelines: Mapping[str, tuple[Stage, ...]]
    loader: LoaderSpec
    errors: ErrorsSpec = field(default_factory=ErrorsSpec)
    cache: CacheSpec = field(default_factory=CacheSpec)
    origin: str = field(default="", compare=False)
    tree: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def pipeline(self, name: str | None = None) -> tuple[Stage, ...]:
        """Return the stages of a pipeline. `name` is needed if the configuration has several pipelines.

        Raises:
            ConfigError: `name` is needed but None, or no pipeline has this name.
        """
        return self.choose(name)[1]

    def choose(self, name: str | None) -> tuple[str, tuple[Stage, ...]]:
        """Return the name and the stages of a pipeline. Raises the errors of `pipeline`."""
        if name is None and len(self.pipelines) == 1:
            return next(iter(self.pipelines.items()))
        if name is not None and name in self.pipelines:
            return name, self.pipelines[name]
        rule = f"there are {len(self.pipelines)} pipelines; say which (`--pipeline` or `pipeline=`): "
        if name is not None:
            rule = f"there is no pipeline {show(name)}.{did_you_mean(str(name), self.pipelines)} It has "
        rule += f"{listing(self.pipelines)}."
        raise ConfigError(problems=(Problem(self.origin, "", rule),))

    def to_yaml(self) -> str:
        """Return the configuration as YAML text. `load_config` reads the same configuration from this text.

        Raises:
            ConfigError: The configuration contains a function object. YAML can contain only names of functions.
        """
        return to_yaml(self.tree, self.origin)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> Config:
    """Read and check a configuration.

    Args:
        source: The path of a YAML file, or its content as a dict. A dict needs no `version`. It may contain functions
            instead of their names. An item of a pipeline may be a callable, or a stage such as `Shuffle(size=200)`.
        overrides: Settings to change before the checks, each as `PATH=VALUE`, applied in this order. VALUE is YAML. In
            PATH, an item of a list is named by its position. A stage that appears once in its pipeline may also be
            named by its name: `pipelines.train.stream.seed=3`.
        functions: Functions and classes by name that are stages too, besides the built-in and registered ones.

    Raises:
        ConfigError: The configuration has problems; all are listed.
        StorageError: The file cannot be read.
    """
    origin = "config dict" if isinstance(source, Mapping) else str(source)
    file, tree = load(source, overrides, known_stages(functions or {}), ConfigFile)
    named = file.pipelines or {SINGLE: file.pipeline or []}
    pipelines = {name: tuple(stages) for name, stages in named.items()}
    return Config(pipelines, file.loader, file.errors, file.cache, origin, tree)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of configuration files, for editors.

    The schema has names, types and ranges. It cannot check the order of stages; `wdskit config check` does.
    """
    return dict(json.loads(Path(__file__).with_name("wdskit.schema.json").read_bytes()))


class WorkerCount(NamedTuple):
    """The number of processes and threads that make batches.

    Attributes:
        workers: Worker processes; 0 if this process makes the batches.
        threads: Threads in each process.
    """

    workers: int
    threads: int

    def __str__(self) -> str:
        return f"workers: {self.workers}, threads: {self.threads}"


def choose_workers(spec: LoaderSpec, stages: Sequence[Any], environ: Mapping[str, str] = os.environ) -> WorkerCount:
    """Choose the number of worker processes of a loader, and of the threads in each process.

    Numbers that are set in `spec` are used. The defaults depend on the pipeline:

    - A planned pipeline with a stage that takes time, such as `decode` with images, `resize` or `multi_hot`: one worker
      per two cores, two threads each. If only `workers` is set, the workers divide the cores into threads.
    - Such a pipeline that also calls functions of the user or torchvision: one worker per core, one thread each.
    - All other pipelines, and workers on a cluster: one worker, one thread.
    - If only `threads` is set: one worker.
    - If `workers` is 0: one thread.

    The ranks of a machine share its cores. A process has at most `MAX_THREADS` threads by default, and all workers
    together at most `MAX_TOTAL_THREADS` if `workers` is not set.

    Args:
        spec: The settings.
        stages: The stages of the pipeline, its source first.
        environ: The environment variables. The cores are divided by `spec.ranks_per_node`, or by the number of ranks
            that the launcher's variables give for this machine, if it is larger.
    """
    workers, threads = spec.workers, spec.threads
    if threads is not None or not workers or spec.on is not None or not isinstance(stages[0], PlannedSource):
        return WorkerCount(workers, threads or 1)
    # a function may not allow two calls at once: a Hugging Face tokenizer keeps its padding between calls
    own = [*stages[1:], *(stage for part in stages[0].mixture or () for stage in part.stages)]
    is_one = any(getattr(stage, "calls_user", True) or getattr(stage, "collate", None) for stage in own)
    if all(map(_is_light, own)):
        return WorkerCount(workers, 1)
    cores = max(1, usable_cores() // max(1, spec.ranks_per_node or 1, local_ranks(environ)[0]))
    most = 1 if is_one else MAX_THREADS
    if "workers" not in spec.model_fields_set:
        most = min(most, THREADS_PER_WORKER)
        workers = max(1, min(MAX_TOTAL_THREADS, cores) // most)
    return WorkerCount(workers, max(1, min(most, cores // workers)))


def _is_light(stage: Any) -> bool:
    return getattr(stage, "is_light", False) or (isinstance(stage, Decode) and stage.images is None)


def describe_small_cache(size: int, needed: float, ranks_per_node: int) -> str:
    """Return the message about a cache that is too small for the shards that a node reads at once.

    Args:
        size: Bytes of the cache.
        needed: Bytes that the cache must hold.
        ranks_per_node: Ranks per node, for the message.
    """
    least = format_at_least(needed)
    msg = f"cache.size is {format_bytes(size)}, but a node of this run ({plural(ranks_per_node, 'rank')}) must keep"
    way = f"Set `cache.size: {least}` or more, `ranks_per_node`, a smaller `window`, fewer `lanes`, or no `cache`."
    return f"{msg} {least} of its shards at once.\n  {way}"


def _parts(table: ShardTable) -> tuple[float, float]:
    """Return two numbers of bytes of the parts of remote shards (see `remote.CACHE_PART_BYTES`) that contain samples of
    the table: the bytes of all parts, and the mean bytes of a part. (0, 0) for local shards. The first number is an
    estimate, never too small if the samples of each shard have equal sizes.
    """
    if not table.is_remote:
        return 0.0, 0.0
    sizes = table.sample_bytes()
    shards = table.file_counts * sizes
    num_bytes = float((table.remote * np.minimum(shards, table.counts * (CACHE_PART_BYTES + sizes))).sum())
    return num_bytes, float(np.minimum(shards, CACHE_PART_BYTES)[table.remote].mean())


def measure_cache(data: PlannedData, rank_info: RankInfo) -> tuple[float, int]:
    """Return (num_bytes, num_ahead): the bytes that the cache of a node must hold, and the number of positions after
    the current position for which parts can be fetched early.

    `num_ahead` is valid only if the cache holds at least 2 x `num_bytes`. For a weighted order, `num_bytes` is the
    node's share of all remote shards, and `num_ahead` is 0. A sequential order needs no cache: (0.0, 0).
    """
    orders: tuple[Any, ...] = data.order.parts if isinstance(data.order, MixtureOrder) else (data.order,)
    needed, ahead = 0.0, 0
    for number, order in enumerate(orders):
        tables = data.tables if len(orders) == 1 else data.tables[number : number + 1]
        whole = sum(_parts(table)[0] for table in {*tables})
        if isinstance(order, WeightedOrder):
            needed += whole
        elif num_lanes := getattr(order, "num_lanes", 0):
            window = num_lanes * order.window
            parts = num_lanes * max(_parts(table)[1] for table in tables)  # each lane reads one part at least
            needed += min(whole, max(parts, whole * window / order.num_samples))
            ahead = min(ahead or window // 2, window // 2)
    return needed * rank_info.ranks_per_node / rank_info.world_size, ahead
