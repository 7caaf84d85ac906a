"""The source `stream`, and the splitters `split_by_node` and `split_by_worker`. They decide which shards a process
opens.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from wdskit.config.types import CLASSES, Bool, Classes, Flaw, Kind, Natural, Shards, Text, Weights, listing, refuse
from wdskit.dataset.classes import check_labels
from wdskit.dataset.index import read_index
from wdskit.dataset.patterns import ShardList, check_found, find_shards, refuse_doubles
from wdskit.errors import PipelineError
from wdskit.order.draws import Draws
from wdskit.stages.base import Run
from wdskit.stages.sources import pattern_flaws
from wdskit.stages.streaming import StreamContext, StreamStage

DRAW = "__draw__"
_ORDINAL = "__ordinal__"
_PART_SEPARATOR = re.compile(r"::(?![^\[\]/]*\])")  # in `shards`; does not match inside http://[::1]/


class Stream(StreamStage):
    """The unplanned source: reads shards one after the other and needs no index."""

    name: ClassVar[str] = "stream"
    kind: ClassVar[Kind] = "source"
    order_version: ClassVar[int] = 2
    shorthand: ClassVar[str | None] = "shards"

    shards: Shards = Field(
        description="A path, URL, glob, brace pattern or folder, several joined by `::`, or a list of these.",
        examples=["train-{000000..000127}.tar"],
    )
    seed: Natural = Field(0, description="Seed of the shards' order and of everything random.")
    shuffle_shards: Bool = Field(
        True, description="Whether to shuffle the shards in each epoch; otherwise they keep the listed order."
    )
    resampled: Bool = Field(False, description="Whether to draw shards with replacement, without end.")
    weights: Weights | None = Field(
        None, description="Relative frequency of each `::`-part or list item of `shards`. Needs `resampled: true`."
    )
    upsampling: Text | None = Field(
        None, description="In place of `weights`, as in open_clip: relative frequency of each shard of a part, `1::2`."
    )
    split: Literal["none"] | None = Field(
        None, description="`none`: every rank and worker reads everything. Otherwise a missing splitter is an error."
    )
    check: Literal["none", "size", "sha256"] = Field(
        "size",
        description="What to check in a shard that has an index. `size`: its size, and each sample when it is read. "
        "`sha256`: also its digest. `none`: nothing.",
    )
    classes: Classes = CLASSES

    @model_validator(mode="after")
    def _check_together(self) -> Stream:
        weighted = [name for name in ("weights", "upsampling") if getattr(self, name) is not None]
        if weighted and not self.resampled:
            need = "needs" if len(weighted) == 1 else "need"
            raise refuse(f"{listing(weighted)} {need} sampling with replacement. Add `resampled: true`.")
        if self.weights is not None and self.upsampling is not None:
            raise refuse(
                "`weights` (of parts) and `upsampling` (of each shard of a part) exclude each other; remove one."
            )
        if self.resampled and not self.shuffle_shards:
            raise refuse("`resampled` draws shards at random, so `shuffle_shards: false` has no effect; remove one.")
        parts = [self.shards] if isinstance(self.shards, str) else self.shards
        num_parts = sum(len(_PART_SEPARATOR.split(part)) for part in parts)
        if self.weights is not None and len(self.weights) != num_parts:
            msg = f"{len(self.weights)} `weights` for {num_parts} parts of `shards`. Give one weight for each "
            raise refuse(f"{msg}`::`-part or list item.")
        if self.weights is not None and not math.isfinite(sum(self.weights)):
            raise refuse("the sum of `weights` is too large for a float. Divide all of them by the same number.")
        if self.upsampling is not None:
            try:
                parse_factors(self.upsampling, num_parts)
            except PipelineError as err:
                raise refuse(f"`upsampling` {err}") from None
        return self

    def flaws(self) -> list[Flaw]:
        """Return a flaw for each invalid shard pattern."""
        return pattern_flaws(self.shards)

    def bind(self, context: StreamContext) -> StreamSource:
        """Find the shards and the order of their draws, and return the source. Set `shards`, `draws` and `check` of
        `context`.

        Raises:
            StorageError: The shards cannot be listed, a shard is named twice, or a `classes.json` cannot be read.
            FolderIndexError: An index is invalid or does not match the files, or is missing with `check: sha256` or for
                a remote folder or glob; a run of `wdskit pack` in a folder without an index is unfinished; a
                `classes.json` is invalid; or the labels of two folders mean different classes.
        """
        found = find_shards(self.shards, read_index if self.check == "sha256" else None, is_absolute=True)
        check_found(found)
        refuse_doubles(found, "`resampled: true` with `upsampling` or `weights`")
        shards = ShardList.of(found)
        if self.classes == "same":
            check_labels(shards.folders, shards.folders.__getitem__)
        draws = Draws(
            len(shards.urls),
            seed=self.seed,
            shuffled=self.shuffle_shards,
            resampled=self.resampled,
            weights=self._shard_weights(shards),
        )
        context.shards, context.draws, context.check = shards, draws, self.check
        return StreamSource(context.run, shards, draws)

    def _shard_weights(self, shards: ShardList) -> list[float] | None:
        """Return the weight of each shard, in the order of `shards`; None if neither `weights` nor `upsampling` is set.

        With `weights`, the shards of a part share the weight of the part equally. With `upsampling`, each shard of a
        part has the factor of the part.
        """
        if self.weights is not None:
            sizes = Counter(shards.parts)
            return [self.weights[part] / sizes[part] for part in shards.parts]
        if self.upsampling is not None:
            factors = parse_factors(self.upsampling, shards.parts[-1] + 1)
            return [factors[part] for part in shards.parts]
        return None

    def fingerprint(self, shards: ShardList) -> dict[str, Any]:
        """Return everything that decides the draws, as plain JSON. Of the shards, only the file names count, and if
        all shards have an index entry also their sha256.
        """
        names = "\n".join(url.rpartition("/")[2] for url in shards.urls)
        digests = [entry.sha256 if entry else "" for entry in shards.entries]
        settings = self.model_dump(exclude={"shards", "check", "classes"})
        return {
            "source": self.name,
            "order_version": self.order_version,
            **{name: value for name, value in settings.items() if value is not None},
            "shards": hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest(),
            "content": hashlib.sha256("".join(digests).encode()).hexdigest() if all(digests) else None,
        }


def parse_factors(factors: str, num_parts: int) -> tuple[float, ...]:
    """Parse open_clip's `--train-data-upsampling-factors`, such as `1::2`. Return `num_parts` factors, one for each
    `::`-part of the shards.

    Raises:
        PipelineError: The number of factors is not `num_parts`, a factor is negative or not a finite number, or all
            factors are 0.
    """
    found = []
    for text in factors.split("::"):
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if not 0 <= factor < math.inf:
            msg = f"{reprlib.repr(text)} is not an upsampling factor: a number, 0 or more."
            raise PipelineError(f"{msg} Write one for each part, as 1::2.")
        found.append(factor)
    if len(found) != num_parts:
        msg = f"{reprlib.repr(factors)}: {len(found)} factors for {num_parts} parts of shards."
        raise PipelineError(f"{msg} Write one for each, as 1::2.")
    if not any(found):
        raise PipelineError(f"{reprlib.repr(factors)}: all factors are 0, so nothing would be drawn. Write 1::2.")
    return tuple(found)


class StreamSource:
    """Yields the draws of a stream. A draw is a dict with the `url` of a shard, the number of the draw (`__draw__`),
    and an ordinal (`__ordinal__`), by which splitters choose draws.

    The source sets the ordinal to the number of the draw. A splitter for N ranks or workers keeps the draws whose
    ordinal modulo N is the number of the rank or worker. The splitter divides the ordinals of the kept draws by N, so
    that the kept draws have consecutive ordinals for the next splitter.
    """

    def __init__(self, run: Run, shards: ShardList, draws: Draws) -> None:
        self.run = run
        self.shards = shards
        self.draws = draws

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the draws from `run.first_draw` to `run.stop_draw` - 1, or without end if `run.stop_draw` is None. End
        earlier if `run.stream` changes, because the process then runs another stream.
        """
        draw, stream = self.run.first_draw, self.run.stream
        while self.run.stream == stream and (self.run.stop_draw is None or draw < self.run.stop_draw):
            yield {"url": self.shards.urls[self.draws.shard(draw)], DRAW: draw, _ORDINAL: draw}
            draw += 1


class SplitByNode(StreamStage):
    """Keep the shards that belong to this rank."""

    name: ClassVar[str] = "split_by_node"
    kind: ClassVar[Kind] = "splitter"

    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]]:
        """Return the function `split_by_node` with the run of `context`."""
        return functools.partial(split_by_node, context.run)


class SplitByWorker(StreamStage):
    """Keep the shards that belong to this worker process."""

    name: ClassVar[str] = "split_by_worker"
    kind: ClassVar[Kind] = "splitter"

    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]]:
        """Return the function `split_by_worker` with the run of `context`."""
        return functools.partial(split_by_worker, context.run)


# `foreign.splits_nodes` and `foreign.splits_workers` know these two functions by name.
def split_by_node(run: Run, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the draws of this rank: of R ranks, rank r gets the draws of `source` whose ordinal modulo R is r. Each
    yielded draw is a copy with a new ordinal (see `StreamSource`).
    """
    return _keep_share(source, run.rank_info.rank, run.rank_info.world_size)


def split_by_worker(run: Run, source: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the draws of this worker: of W workers, worker w gets the draws of `source` whose ordinal modulo W is w.
    Each yielded draw is a copy with a new ordinal (see `StreamSource`).
    """
    return _keep_share(source, run.worker, run.num_workers)


def _keep_share(source: Iterable[dict[str, Any]], part: int, num_parts: int) -> Iterator[dict[str, Any]]:
    for item in source:
        ordinal, rest = divmod(item[_ORDINAL], num_parts)
        if rest == part:
            yield {**item, _ORDINAL: ordinal}
