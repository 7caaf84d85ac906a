"""The sources of the pipeline builder: the first item of each chain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from wdskit.order.lanes import DEFAULT_LANES, DEFAULT_WINDOW
from wdskit.order.resampled import DEFAULT_CHUNK

if TYPE_CHECKING:
    from os import PathLike
    from typing import TypeAlias

    Shards: TypeAlias = str | PathLike[str] | Sequence[str | PathLike[str]]


class Sources(ABC):
    """What a `Pipeline` can begin with. Its methods are the pipeline's."""

    @abstractmethod
    def _with(self, name: str, value: object = None) -> Self:
        """One stage more."""

    def exact(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        schedule: str = "step",
        split: str | None = None,
        range: Sequence[int | str] | None = None,  # noqa: A002 (its name in YAML)
        seed: int = 0,
        classes: str = "same",
        lanes: int = DEFAULT_LANES,
        window: int = DEFAULT_WINDOW,
        tail: str = "drop",
    ) -> Self:
        """Each sample exactly once an epoch, shuffled anew in each, over all ranks. Needs an index.

        Args:
            shards: A path, glob, brace pattern or folder, several joined by `::`, or a list of such.
            mixture: Instead: data sets, each a dict of `shards`, `weight` or `repeat`, `split`, `range`, `stages`.
            schedule: "step" or "linear": how weights `{sample: weight, ...}` change.
            split: Only samples of this split, made by `wdskit split`.
            range: Only these samples: `("0%", "80%")`, or the number of the first and of the one behind the last.
            seed: Of the order and of all that is random.
            classes: "same": the `classes.json` of all folders must name the same classes; "any": labels are not used,
                or stages make them agree.
            lanes: Parts of the data that are read side by side.
            window: Samples of a lane that are shuffled with each other.
            tail: What becomes of samples that fill no global batch: "drop", another part each epoch, or "pad" with a
                mask.
        """
        common = _planned(shards, mixture, schedule, split, range, seed, classes, tail)
        return self._with("exact", common | {"lanes": lanes, "window": window})

    def resampled(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        schedule: str = "step",
        split: str | None = None,
        range: Sequence[int | str] | None = None,  # noqa: A002 (its name in YAML)
        seed: int = 0,
        classes: str = "same",
        chunk: int = DEFAULT_CHUNK,
        lanes: int = DEFAULT_LANES,
        window: int = DEFAULT_WINDOW,
        tail: str = "drop",
    ) -> Self:
        """Samples drawn with replacement, `chunk` neighbours at a time; the rest is as with `exact`."""
        common = _planned(shards, mixture, schedule, split, range, seed, classes, tail)
        return self._with("resampled", common | {"chunk": chunk, "lanes": lanes, "window": window})

    def sequential(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        schedule: str = "step",
        split: str | None = None,
        range: Sequence[int | str] | None = None,  # noqa: A002 (its name in YAML)
        seed: int = 0,
        classes: str = "same",
        tail: str = "pad",
    ) -> Self:
        """Every sample once, in the order of the index; the rest is as with `exact`. For evaluation: the last batch is
        padded to its full size, and batches carry a mask (`__valid__` in dicts, the last element of tuples).
        """
        return self._with("sequential", _planned(shards, mixture, schedule, split, range, seed, classes, tail))

    def stream(
        self,
        shards: Shards,
        *,
        seed: int = 0,
        shuffle_shards: bool = True,
        resampled: bool = False,
        weights: Sequence[float] | None = None,
        upsampling: str | None = None,
        split: str | None = None,
        check: str = "size",
        classes: str = "same",
    ) -> Self:
        """Read shards one after the other; needs no index.

        Args:
            shards: A path, URL, glob, brace pattern or folder, several joined by `::`, or a list of such.
            seed: Of the shards' order and of everything random behind it.
            shuffle_shards: Whether each epoch has its own seeded order of shards, or the order they are listed in.
            resampled: Whether shards are drawn with replacement, without end.
            weights: For resampled draws: how often each `::`-part or list item is drawn, relative to the others.
            upsampling: Instead, as open_clip writes it: how often each *shard* of a part is drawn, `1::2`.
            split: "none" says that every rank and worker is meant to read everything.
            check: What a shard is compared with, where its folder has an index: its "size", and number, fields and
                places of its samples as they are read; its "sha256" too (read once more before it is used); or "none".
                A local shard without an index is looked through for keys in two places first, unless it is "none".
            classes: As with `exact`.
        """
        settings = {
            "shards": shards,
            "seed": seed,
            "shuffle_shards": shuffle_shards,
            "resampled": resampled,
            "weights": weights,
            "upsampling": upsampling,
            "split": split,
            "check": check,
            "classes": classes,
        }
        return self._with("stream", settings)


def _planned(*values: object) -> dict[str, Any]:
    """The settings that planned sources share, by name."""
    names = ("shards", "mixture", "schedule", "split", "range", "seed", "classes", "tail")
    return dict(zip(names, values, strict=True))
