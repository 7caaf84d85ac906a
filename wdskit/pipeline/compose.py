"""From the description of a pipeline to the list of stages that runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from wdskit.codecs.images import is_image_field
from wdskit.dataset.patterns import ShardList, list_shards
from wdskit.errors import PipelineError
from wdskit.order.draws import Draws
from wdskit.pipeline.board import Board
from wdskit.pipeline.buffering import Batched, EpochCut, Renumber, Select, Shuffle, Slice, Unbatched
from wdskit.pipeline.collate import Collate
from wdskit.pipeline.counting import count_of, patience_of
from wdskit.pipeline.each import Each, Step
from wdskit.pipeline.foreign import is_webdatasets, opens_shards, takes_shards
from wdskit.pipeline.functions import Call, Decode, MapDict, MapTuple, OnValue, Rename, ToDict, ToTuple, Transform
from wdskit.pipeline.fuse_plan import FusedSpec, fuse
from wdskit.pipeline.fused import fused_step
from wdskit.pipeline.reading import OpenTars, Silence, SplitByNode, SplitByWorker, StreamSource
from wdskit.pipeline.registry import resolve
from wdskit.pipeline.run import Place, Run
from wdskit.pipeline.spec_types import StageSpec
from wdskit.pipeline.streaming import Layout, StreamPipeline
from wdskit.pipeline.transforms import make_transform

Functions = Mapping[str, Callable[..., Any]]

_UNKNOWN_SHARDS = 1000  # what a source that does not say is taken to have, before silence is an error
_MAX_PASSES = 64  # times as many draws as shards, at random, before those that never came are given up


def compose(
    specs: Sequence[Any],
    *,
    place: Place,
    num_threads: int = 1,
    max_workers: int = 16,
    functions: Functions | None = None,
) -> StreamPipeline:
    """Make the running form of a pipeline.

    Args:
        specs: One source, then stages, as `rules.check_order` accepts them; a callable is a stage of its own.
        place: Rank and world size.
        num_threads: Threads for one-to-one stages, in each process.
        max_workers: Most worker processes it will be used with.
        functions: The caller's functions by name, before the registry's.

    Raises:
        PipelineError: A function is unknown, or an option does not fit the shards.
        StorageError, FolderIndexError: The shards cannot be listed.
    """
    return _Composer(specs, place, num_threads, max_workers, functions or {}).compose()


class _Composer:
    """Walks the specs once; what it knows of the values on the way decides how later stages are made."""

    def __init__(
        self, specs: Sequence[Any], place: Place, num_threads: int, max_workers: int, functions: Functions
    ) -> None:
        self.specs = fuse(specs)
        self.max_workers = max_workers
        self.functions = functions
        seed = getattr(specs[0], "seed", 0)
        self.run = Run(place, seed, num_threads)
        self.stages: list[Any] = []
        self.steps: list[Step] = []
        self.seen: defaultdict[str, Iterator[int]] = defaultdict(count)
        self.images: set[str] = set()  # fields that hold images under names that do not say so
        self.slots: frozenset[int] = frozenset()  # places of images in a tuple
        self.shards: ShardList | None = None
        self.draws: Draws | None = None
        self.cut: int | None = None
        self.tars: int | None = None
        self.opened = False
        self.length: int | None = None

    def compose(self) -> StreamPipeline:
        for at, spec in enumerate(self.specs):
            if isinstance(spec, StageSpec):
                self._open_before(spec.kind not in ("source", "splitter", "open"), at)
                self._add(spec)
            else:
                self._add_foreign(spec, at)
        self._open_before(needed=True, at=len(self.specs))
        self._flush()
        layout = Layout(
            draws=self.draws,
            cut=self.cut,
            tars=self.tars,
            split_none=getattr(self.specs[0], "split", None) == "none",
            count=count_of(self.stages, self.cut),
            length=self.length,
            stateless=self._stateless(),
        )
        keepers = [stage for stage in self.stages[: self.cut] if isinstance(stage, (Shuffle, Each))]
        capacity = sum(getattr(stage, "size", 2 * self.run.num_threads) + 2 for stage in keepers)
        board = Board(max(1, self.max_workers), len(keepers), capacity if self.cut is not None else 0)
        return StreamPipeline(self.stages, self.run, layout, board)

    def _add(self, spec: StageSpec) -> None:
        """Add one of our stages."""
        if spec.kind == "each":
            self.steps.append(self._step(spec))
        else:
            self._flush()
            stage = getattr(self, f"_stage_{spec.name}")(spec, self._label(spec))
            self.stages += [] if stage is None else [stage]

    def _label(self, spec: StageSpec) -> str:
        """Name and ordinal, the key of the stage's random numbers."""
        return f"{spec.name}:{next(self.seen[spec.name])}"

    def _step(self, spec: StageSpec) -> Step:
        """A one-to-one stage, or several that run as one."""
        if isinstance(spec, FusedSpec):
            steps = [self._step(stage) for stage in spec.stages]
            return fused_step(spec.stages, steps, frozenset(self.images))
        return Step(spec.name, self._function(spec, self._label(spec)))

    def _flush(self) -> None:
        """Run the one-to-one stages collected so far as one."""
        if self.steps:
            name = "-".join(step.name for step in self.steps)
            self.stages.append(Each(self.run, name, tuple(self.steps)))
            self.steps = []

    def _add_foreign(self, stage: Any, at: int) -> None:
        """Add a stage that is not ours as it is; what it does to values and their order is unknown."""
        if at and not self.opened and takes_shards(stage):
            self.stages.append(self._own_splitter(stage) or stage)
            return
        opens = opens_shards(stage)
        self._open_before(at > 0 and not opens, at)
        self.opened = self.opened or opens or (at == 0 and not _opens_later(self.specs))
        self._flush()
        self.stages.append(stage)
        if self.opened:
            self.stages.append(Renumber(self.run, each_epoch=self.cut is not None))

    def _own_splitter(self, stage: Any) -> SplitByNode | SplitByWorker | None:
        """Ours for webdataset's, which counts from where a stream goes on and not from its first draw, and finds no
        rank in workers that are spawned. None for a source that is not ours: its shards have no numbers.
        """
        if self.draws is None or not is_webdatasets(stage):
            return None
        if stage.__name__ == "split_by_node":
            return SplitByNode(self.run)
        return SplitByWorker(self.run) if stage.__name__ == "split_by_worker" else None

    def _open_before(self, needed: bool, at: int) -> None:  # noqa: FBT001 (private, named where it is called)
        """Open the shards here, unless that has happened or an explicit stage will do it later."""
        if needed and not self.opened and not _opens_later(self.specs[at:]):
            self._open()

    def _open(self) -> None:
        self._flush()
        self.opened = True
        self.tars = len(self.stages)
        shards = self.shards
        listed = [] if shards is None else zip(shards.urls, shards.entries, strict=True)
        entries = {url: entry for url, entry in listed if entry is not None}
        source = self.specs[0]
        urls = getattr(source if shards is None else shards, "urls", None) or range(_UNKNOWN_SHARDS)
        silence = Silence(
            self.run,
            num_shards=len(urls if shards is None else set(urls)),  # one may be listed twice
            max_draws=len(urls) * (_MAX_PASSES if getattr(source, "shuffle_shards", True) else 1),
            patience=patience_of(self.specs, self.run.num_threads),
        )
        self.stages.append(OpenTars(self.run, entries, silence, check=getattr(source, "check", "size")))

    # Sources, splitters and the stages that hold values or change their number.

    def _stage_stream(self, spec: Any, _: str) -> StreamSource:
        shards = list_shards(spec.shards, need_index=spec.check == "sha256")
        weights = None if spec.weights is None else _shard_weights(spec.weights, shards)
        self.shards = shards
        self.draws = Draws(
            len(shards.urls),
            seed=spec.seed,
            shuffled=spec.shuffle_shards,
            resampled=spec.resampled,
            weights=weights,
        )
        return StreamSource(self.run, shards, self.draws)

    def _stage_split_by_node(self, _: Any, __: str) -> SplitByNode:
        return SplitByNode(self.run)

    def _stage_split_by_worker(self, _: Any, __: str) -> SplitByWorker:
        return SplitByWorker(self.run)

    def _stage_tarfile_to_samples(self, _: Any, __: str) -> None:
        self._open()

    def _stage_shuffle(self, spec: Any, label: str) -> Shuffle:
        initial = 100 if spec.initial is None else spec.initial
        return Shuffle(self.run, label, spec.size, initial, each_epoch=self.cut is not None)

    def _stage_select(self, spec: Any, label: str) -> Select:
        return Select(self.run, self._call("select", spec.fn, label))

    def _stage_slice(self, spec: Any, _: str) -> Slice:
        return Slice(self.run, spec.start, spec.stop, spec.step)

    def _stage_batched(self, spec: Any, _: str) -> Batched:
        own = Collate(self.slots, frozenset(self.images))
        function = own if spec.collate is None else self._resolve("batched", spec.collate)
        return Batched(self.run, function, spec.size, partial=spec.partial)

    def _stage_unbatched(self, _: Any, __: str) -> Unbatched:
        return Unbatched(self.run)

    def _stage_with_epoch(self, spec: Any, _: str) -> EpochCut:
        self.cut = len(self.stages)
        return EpochCut(self.run, spec.n)

    def _stage_with_length(self, spec: Any, _: str) -> None:
        self.length = spec.n

    # One-to-one stages.

    def _function(self, spec: Any, label: str) -> Any:
        """The step that a one-to-one spec describes."""
        match spec.name:
            case "decode":
                return OnValue(Decode(spec.images, spec.only, spec.max_pixels))
            case "map":
                return Call(self.run, label, self._resolve("map", spec.fn), global_rng=self._global_rng(spec))
            case "map_dict":
                calls = {field: self._call("map_dict", fn, f"{label}:{field}") for field, fn in spec.fields.items()}
                return MapDict(calls)
            case "map_tuple":
                fns = enumerate(spec.fns)
                return MapTuple([fn and self._call("map_tuple", fn, f"{label}:{place}") for place, fn in fns])
            case "rename":
                self.images |= {new for new, olds in spec.names.items() if self._is_image(olds)}
                return OnValue(Rename(spec.names))
            case "to_tuple":
                self.slots = frozenset(place for place, names in enumerate(spec.fields) if self._is_image(names))
                return OnValue(ToTuple(spec.fields))
            case "to_dict":
                self.images |= {names.split(";")[0] for names in spec.fields if self._is_image(names)}
                return OnValue(ToDict(spec.fields))
            case _:
                return Transform(self.run, label, make_transform(spec, frozenset(self.images)))

    def _global_rng(self, spec: Any) -> bool:
        if spec.global_rng and self.run.num_threads > 1:
            msg = "map: global_rng seeds one generator for the whole process, which "
            msg += f"{self.run.num_threads} threads share."
            raise PipelineError(f"{msg}\n  Take `rng` as a parameter instead, or use threads: 1.")
        return bool(spec.global_rng)

    def _is_image(self, names: str) -> bool:
        return any(name in self.images or is_image_field(name) for name in names.split(";"))

    def _call(self, stage: str, fn: Any, label: str) -> Call:
        return Call(self.run, label, self._resolve(stage, fn))

    def _resolve(self, stage: str, fn: Any) -> Callable[..., Any]:
        if not isinstance(fn, str):
            return fn  # type: ignore[no-any-return]  # the spec has checked that it is callable
        try:
            return resolve(fn, self.functions)
        except PipelineError as err:
            raise PipelineError(f"{stage}: {err}") from err

    def _stateless(self) -> str:
        """Why what stands before with_epoch cannot be taken over by another process, "" where it can."""
        if self.draws is None:
            return "a source that is not wdskit's"
        batched = False
        for stage in self.stages[: self.cut]:
            if isinstance(stage, Renumber):
                return "a stage that is not wdskit's"
            if isinstance(stage, (Unbatched, Slice)):
                return type(stage).__name__.lower()
            if batched and (isinstance(stage, Shuffle) or (isinstance(stage, Each) and self.run.num_threads > 1)):
                return f"{stage.name} behind batched"
            batched = batched or isinstance(stage, Batched)
        return ""


def _opens_later(specs: Sequence[Any]) -> bool:
    """Whether one of these opens the shards itself."""
    return any(opens_shards(spec) for spec in specs)


def _shard_weights(weights: Sequence[float], shards: ShardList) -> list[float]:
    """A part's weight, spread over its shards."""
    sizes = Counter(shards.parts)
    return [weights[part] / sizes[part] for part in shards.parts]
