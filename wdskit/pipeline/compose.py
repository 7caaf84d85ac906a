"""From the description of a pipeline to the list of stages that runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from wdskit.config.spec import StageSpec
from wdskit.dataset.braces import parse_factors
from wdskit.dataset.classes import check_labels
from wdskit.dataset.patterns import ShardList, list_shards
from wdskit.dataset.unfinished import refuse_part
from wdskit.engine.board import Board
from wdskit.engine.footing import keeping
from wdskit.engine.planned import PlannedPipeline
from wdskit.engine.sample import Each, together
from wdskit.engine.splits import Layout
from wdskit.engine.streaming import StreamPipeline
from wdskit.errors import PipelineError
from wdskit.order.draws import Draws
from wdskit.pipeline.counting import count_of, patience_of
from wdskit.pipeline.loader_specs import ErrorsSpec
from wdskit.pipeline.planning import compose_planned
from wdskit.stages.base import Context, PerSampleStage, Place, Run, Step
from wdskit.stages.batching import Batcher, Unbatcher
from wdskit.stages.buffering import EpochCut, Renumber, Select, Shuffle, Slice
from wdskit.stages.foreign import is_webdatasets, opens_shards, takes_shards
from wdskit.stages.images.fused import fuse
from wdskit.stages.planned_data import ORDER_VERSION
from wdskit.stages.reading import OpenTars, Silence, SplitByNode, SplitByWorker, StreamSource
from wdskit.stages.registry import Functions, resolve

_UNKNOWN_SHARDS = 1000  # what a source that does not say is taken to have, before silence is an error
_MAX_PASSES = 64  # times as many draws as shards, at random, before those that never came are given up


def compose(
    specs: Sequence[Any],
    *,
    place: Place,
    num_threads: int = 1,
    max_workers: int = 16,
    functions: Functions | None = None,
    errors: ErrorsSpec | None = None,
) -> StreamPipeline | PlannedPipeline:
    """Make the running form of a pipeline.

    Args:
        specs: One source, then stages, as `rules.check_order` accepts them; a callable is a stage of its own.
        place: Rank and world size.
        num_threads: Threads for one-to-one stages, in each process.
        max_workers: Most worker processes it will be used with.
        functions: The caller's functions by name, before the registry's.
        errors: What becomes of bad samples.

    Raises:
        PipelineError: A function is unknown, or an option does not fit the shards.
        StorageError, FolderIndexError: The shards cannot be listed.
    """
    errors = errors or ErrorsSpec()
    if getattr(specs[0], "is_planned", False):
        return compose_planned(specs, place=place, num_threads=num_threads, functions=functions or {}, errors=errors)
    if errors.max_bad:
        msg = "errors: a stream has no positions at which another sample could stand in for a bad one."
        raise PipelineError(f"{msg}\n  Use the source `exact`, or `select` what is good.")
    return _Composer(specs, place, num_threads, max_workers, functions or {}).compose()


class _Composer:
    """Walks the specs once; what it knows of the values on the way decides how later stages are made."""

    def __init__(
        self, specs: Sequence[Any], place: Place, num_threads: int, max_workers: int, functions: Functions
    ) -> None:
        self.specs = fuse(specs)
        self.max_workers = max_workers
        self.run = Run(place, getattr(specs[0], "seed", 0), num_threads)
        self.context = Context(self.run, lambda name: resolve(name, functions), specs)
        self.stages: list[Any] = []
        self.steps: list[Step] = []
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
            stateless=self._stateless(self.stages[: self.cut]),
            unsaved=self._stateless(self.stages),
            batch=next((stage.size for stage in self.stages if isinstance(stage, Batcher)), 1),
            fingerprint=self._fingerprint(),
        )
        num_keepers, capacity = keeping(self.stages[: self.cut])
        board = Board(max(1, self.max_workers), num_keepers, capacity if self.cut is not None else 0)
        return StreamPipeline(self.stages, self.run, layout, board)

    def _add(self, spec: StageSpec) -> None:
        """Add one of our stages."""
        if isinstance(spec, PerSampleStage):
            self.steps.append(spec.step(self.context))
            return
        self._flush()
        stage = getattr(self, f"_stage_{spec.name}")(spec, self.context.label(spec))
        if stage is not None:
            self.stages.append(stage)

    def _flush(self) -> None:
        """Run the one-to-one stages collected so far as one."""
        if self.steps:
            self.stages.append(together(self.run, self.steps))
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
        entries = (
            {}
            if shards is None
            else {url: entry for url, entry in zip(shards.urls, shards.entries, strict=True) if entry is not None}
        )
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
        refuse_part(spec.shards, shards)
        if spec.classes == "same":
            folders = shards.folders
            check_labels(folders, folders.__getitem__)
        weights = None
        if spec.weights is not None:
            weights = _shard_weights(spec.weights, shards)
        elif spec.upsampling is not None:
            factors = parse_factors(spec.upsampling, shards.parts[-1] + 1)
            weights = [factors[part] for part in shards.parts]
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
        return Select(self.run, self.context.call("select", spec.fn, label))

    def _stage_slice(self, spec: Any, _: str) -> Slice:
        return Slice(self.run, spec.start, spec.stop, spec.step)

    def _stage_batched(self, spec: Any, _: str) -> Batcher:
        return spec.start(self.context)  # type: ignore[no-any-return]

    def _stage_unbatched(self, spec: Any, _: str) -> Unbatcher:
        return spec.start(self.context)  # type: ignore[no-any-return]

    def _stage_with_epoch(self, spec: Any, _: str) -> EpochCut:
        self.cut = len(self.stages)
        return EpochCut(self.run, spec.n)

    def _stage_with_length(self, spec: Any, _: str) -> None:
        self.length = spec.n

    def _fingerprint(self) -> dict[str, Any]:
        """What the order of samples follows from; where the shards lie and what is done to a sample is left out."""
        if self.shards is None:
            return {}
        names = "\n".join(url.rpartition("/")[2] for url in self.shards.urls)
        digests = [entry.sha256 if entry else "" for entry in self.shards.entries]
        content = hashlib.sha256("".join(digests).encode()).hexdigest() if all(digests) else None
        told = self.specs[0].model_dump(exclude={"shards", "check", "classes"})
        kinds = ("splitter", "open", "stream", "batch", "epoch")
        stages = [spec.name for spec in self.specs[1:] if getattr(spec, "kind", None) in kinds]
        sizes = [getattr(stage, "size", getattr(stage, "n", None)) for stage in self.stages]
        return {
            "source": "stream",
            "order_version": ORDER_VERSION,
            **{name: value for name, value in told.items() if value is not None},
            "shards": hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest(),
            "content": content,
            "stages": stages,
            "sizes": [size for size in sizes if size is not None],
        }

    def _stateless(self, stages: Sequence[Any]) -> str:
        """Why what these stages hold cannot be taken over by another process, "" where it can."""
        if self.draws is None:
            return "a source that is not wdskit's"
        batched = False
        for stage in stages:
            if isinstance(stage, Renumber):
                return "a stage that is not wdskit's"
            if isinstance(stage, (Unbatcher, Slice)):
                return "slice" if isinstance(stage, Slice) else "unbatched"
            if batched and (isinstance(stage, Shuffle) or (isinstance(stage, Each) and self.run.num_threads > 1)):
                return f"{stage.name} behind batched"
            batched = batched or isinstance(stage, Batcher)
        return ""


def _opens_later(specs: Sequence[Any]) -> bool:
    """Whether one of these opens the shards itself."""
    return any(opens_shards(spec) for spec in specs)


def _shard_weights(weights: Sequence[float], shards: ShardList) -> list[float]:
    """A part's weight, spread over its shards."""
    sizes = Counter(shards.parts)
    return [weights[part] / sizes[part] for part in shards.parts]
