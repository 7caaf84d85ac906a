"""Describe pipelines in Python, with the names of stages in YAML, and open the pipelines of a configuration.

Each stage is a method of `Pipeline`, which is made from the settings of the stage. `tools/dev/generate.py` writes their
signatures and docstrings into `builder.pyi`, for editors and type checkers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wdskit.config.order import check_order
from wdskit.config.types import StageSpec, parse_settings, show
from wdskit.errors import PipelineError
from wdskit.pipeline.settings import CacheSpec, Config, ErrorsSpec, LoaderSpec, load_config
from wdskit.stages.registry import STAGES, parse_stage

if TYPE_CHECKING:
    from wdskit.engine.program import Program
    from wdskit.engine.stream import StreamPipeline
    from wdskit.loader.loader import Loader


class Pipeline:
    """An immutable description of a pipeline: one source, then stages. Each method returns a new, longer pipeline.

    ```python
    pipe = (Pipeline()
            .stream("train-*.tar", seed=7, resampled=True).split_by_node().split_by_worker().shuffle(2000)
            .decode("rgb8").random_resized_crop(224).normalize("imagenet")
            .to_tuple("jpg;png", "cls").batched(64).with_epoch(1000))
    loader = pipe.loader(workers=4)
    ```

    Methods that take a function accept a callable or the name of a registered function. A callable with a parameter
    `rng` gets a numpy Generator that depends only on the seed and on the sample's position.

    Args:
        stages: The first stages: callables, and settings of stages such as `stages.streaming.Shuffle(size=200)`.

    Raises:
        PipelineError: An item of `stages` is neither a stage nor a callable.
    """

    def __init__(self, stages: Sequence[Any] = ()) -> None:
        self.stages: tuple[Any, ...] = tuple(stages)
        for at, stage in enumerate(self.stages):
            _check_stage(stage, at)

    def __repr__(self) -> str:
        names = (str(getattr(stage, "name", getattr(stage, "__name__", repr(stage)))) for stage in self.stages)
        return f"Pipeline({' -> '.join(names)})"

    def stage(self, stage: Callable[..., Any]) -> Pipeline:
        """Return a new pipeline with one more stage, from outside wdskit.

        Args:
            stage: A stage of webdataset, or a callable that takes an iterator and returns an iterator.

        Raises:
            PipelineError: `stage` is neither a stage nor a callable.
        """
        return Pipeline((*self.stages, stage))

    def build(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        ranks_per_node: int | None = None,
        threads: int = 1,
        transforms: Mapping[str, Callable[..., Any]] | None = None,
        errors: Mapping[str, Any] | None = None,
        cache: Mapping[str, Any] | None = None,
    ) -> StreamPipeline | Program:
        """Build the running form of the pipeline for this rank.

        The result is a `webdataset.DataPipeline` for a stream. It is a `Program`, which only a loader can run, for a
        planned source such as `exact`.

        Args:
            rank: Rank of this process; needs `world_size`. Default: from `process_group`, torch.distributed, or the
                environment of the launcher, in this order; else rank 0 of 1.
            world_size: Number of ranks; needs `rank`.
            process_group: A torch.distributed group, or one dimension of a DeviceMesh, that gives rank and world size.
                If `rank` is also passed, it must be the rank in this group.
            ranks_per_node: Ranks of each machine. Default: from the launcher; 1 if it does not say so, or if `rank` or
                `process_group` is passed.
            threads: Threads in each process, for one-to-one stages.
            transforms: Functions by name, used before registered functions.
            errors: What to do with bad samples, as under `errors` in YAML.
            cache: Where to keep parts of remote shards, as under `cache` in YAML.

        Raises:
            ConfigError: `ranks_per_node`, `threads`, `errors` or `cache` is not valid.
            PipelineError: The stages do not fit together or do not fit the shards, or a function is unknown.
            StorageError, FolderIndexError: The shards cannot be listed, a planned source has no index, two folders use
                a label for different classes, or the cache's folder cannot be used.
            SelectionError: A split, condition or column of a planned source is missing or invalid.
            RankError: The rank, the world size or the ranks per node are invalid or contradict each other.
        """
        from wdskit.pipeline.build import build_pipeline
        from wdskit.pipeline.ranks import find_rank

        self.check()
        given = {"threads": threads, "ranks_per_node": ranks_per_node}
        spec = parse_settings(LoaderSpec, given, where="Pipeline.build")
        rank_info = find_rank(rank, world_size, process_group, ranks_per_node=spec.ranks_per_node)
        return build_pipeline(
            self.stages,
            rank_info=rank_info,
            num_threads=spec.threads or 1,
            functions=transforms,
            errors=parse_settings(ErrorsSpec, errors or {}, where="Pipeline.build: errors"),
            cache=parse_settings(CacheSpec, cache or {}, where="Pipeline.build: cache"),
        )

    def check(self) -> None:
        """Check that the stages fit together.

        Raises:
            PipelineError: Stages do not fit together. Each line of the message names a stage and the broken rule.
        """
        problems = check_order(self.stages)
        if problems:
            names = [getattr(stage, "name", repr(stage)) for stage in self.stages]
            raise PipelineError(
                "\n".join(f"stage {at} ({names[at] if names else 'none'}): {rule}" for at, rule in problems)
            )

    def loader(self, **settings: Any) -> Loader:
        """Make the loader of this pipeline for this rank: `wdskit.make_loader(self, ...)`."""
        import wdskit  # the public name, because the loader is a layer above

        return wdskit.make_loader(self, **settings)


def _check_stage(stage: object, at: int) -> None:
    """Check that `stage` can be stage number `at` of a pipeline.

    Raises:
        PipelineError: `stage` is neither a `StageSpec`, nor a callable, nor a stage of webdataset.
    """
    if isinstance(stage, StageSpec) or hasattr(stage, "run"):
        return
    if callable(stage) and not (isinstance(stage, type) and issubclass(stage, StageSpec)):
        return
    way_out = "a stage is a spec or a callable from iterator to iterator. Write .shuffle(200) for wdskit's own."
    raise PipelineError(f"stage {at}: {show(stage)}; {way_out}")


def _stage_method(stage: type[StageSpec]) -> Callable[..., Pipeline]:
    """Return the method that adds a stage. It takes the settings of the stage, the short form without its name."""
    short, kind = stage.shorthand, inspect.Parameter
    parameters = [kind("self", kind.POSITIONAL_ONLY)]
    if stage.is_mapping or stage.is_starred:
        parameters.append(kind(short or "", kind.VAR_KEYWORD if stage.is_mapping else kind.VAR_POSITIONAL))
    else:
        for name, info in sorted(stage.model_fields.items(), key=lambda each: each[0] != short):
            default = kind.empty if info.is_required() else info.default
            place = kind.POSITIONAL_OR_KEYWORD if name == short else kind.KEYWORD_ONLY
            parameters.append(kind(name, place, default=default))
    signature = inspect.Signature(parameters)

    def add(*args: Any, **settings: Any) -> Pipeline:
        takes_all = stage.is_mapping or stage.is_starred
        known = {name: value for name, value in settings.items() if takes_all or name in signature.parameters}
        given = signature.bind_partial(*args, **known).arguments
        pipe = given.pop("self")
        value: Any = given.get(short or "", {} if stage.is_mapping else ()) if takes_all else {**settings, **given}
        if stage.is_starred and len(value) == 1 and short != "fns":
            value = value[0]  # a list, or one text, with all names
        return Pipeline((*pipe.stages, parse_stage(stage.name, value, where=f"Pipeline.{stage.name}")))

    add.__name__, add.__qualname__, add.__doc__ = stage.name, f"Pipeline.{stage.name}", stage.__doc__
    add.__signature__ = signature  # type: ignore[attr-defined]
    return add


for _stage in STAGES.values():
    setattr(Pipeline, _stage.name, _stage_method(_stage))


def open_pipeline(
    config: Any,
    pipeline: str | None,
    overrides: Sequence[str],
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> tuple[str, tuple[Any, ...], Config]:
    """Check a configuration or a `Pipeline`. Return the name and the stages of one pipeline, and the configuration. A
    `Pipeline` has the name "pipeline" and default settings.

    Args:
        config: The path of a YAML file, the content as a dict, or a `Pipeline`.
        pipeline: Name of the pipeline; None for the only pipeline of the configuration, or with a `Pipeline`.
        overrides: Settings to change, each as `a.b.c=VALUE`, applied in order before any check.
        functions: Further functions by name that are stages.

    Raises:
        ConfigError: The configuration has problems; all are listed. Or it has no pipeline with this name, or
            has several and `pipeline` is None.
        StorageError: The file cannot be read.
        PipelineError: The stages do not fit together, or `pipeline` or `overrides` is passed with a `Pipeline`.
    """
    if not isinstance(config, Pipeline):
        loaded = load_config(config, overrides=overrides, functions=functions)
        return *loaded.choose(pipeline), loaded
    if pipeline is not None or overrides:
        raise PipelineError("`pipeline` and `overrides` belong to a configuration, not to a `Pipeline`.")
    config.check()
    return "pipeline", config.stages, Config({"pipeline": config.stages}, LoaderSpec())
