"""The typed methods of `Pipeline`: one a stage, and `loader`.

`tools/generate.py` writes this file from the stages' settings; change those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

if TYPE_CHECKING:
    from os import PathLike
    from typing import TypeAlias

    from wdskit.loader.base import Loader

    Shards: TypeAlias = str | PathLike[str] | Sequence[str | PathLike[str]]
    Function: TypeAlias = str | Callable[..., Any]
    Size: TypeAlias = int | Sequence[int]
    Fields: TypeAlias = str | Sequence[str]


class StageMethods(ABC):
    """What `Pipeline` has of its stages."""

    @abstractmethod
    def _with(self, name: str, value: object = None) -> Self:
        """One stage more, its settings checked; `value` is what stands behind its name in YAML."""

    def exact(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        schedule: Literal["step", "linear"] = "step",
        split: str | None = None,
        range: Sequence[int | str] | None = None,  # noqa: A002 (as in YAML)
        seed: int = 0,
        classes: Literal["same", "any"] = "same",
        lanes: int | None = None,
        window: int = 4096,
        homes: int = 1,
        tail: Literal["drop", "pad"] = "drop",
    ) -> Self:
        """A planned source: each sample exactly once an epoch, shuffled anew in each, over all ranks.

        Args:
            shards: A path, glob, brace pattern or folder, several joined by `::`, or a list of such; indexed.
            mixture: In place of `shards`: data sets, all with `weight` or all with `repeat`.
            schedule: How scheduled weights change.
            split: Only this split of the samples, made by `wdskit split`.
            range: Only a range of the samples: ["0%", "80%"], or their numbers.
            seed: Seed of the order and of everything random.
            classes: Whether the `classes.json` of all folders must name the same classes, or may be any.
            lanes: Parts of the data that are read side by side. Without: 240, or one for each 64 samples of a smaller
                data set.
            window: Samples of a lane that are shuffled with each other.
            homes: Groups of shards that keep their stretch of each epoch, so that a node reads about the same shards in
                all of them: for shards of a store and a `cache`, a few times the number of nodes.
            tail: What to do with an incomplete last global batch.
        """
        return self._with(
            "exact",
            {
                "shards": shards,
                "mixture": mixture,
                "schedule": schedule,
                "split": split,
                "range": range,
                "seed": seed,
                "classes": classes,
                "lanes": lanes,
                "window": window,
                "homes": homes,
                "tail": tail,
            },
        )

    def resampled(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        schedule: Literal["step", "linear"] = "step",
        split: str | None = None,
        range: Sequence[int | str] | None = None,  # noqa: A002 (as in YAML)
        seed: int = 0,
        classes: Literal["same", "any"] = "same",
        chunk: int = 64,
        lanes: int = 240,
        window: int = 4096,
        tail: Literal["drop", "pad"] = "drop",
    ) -> Self:
        """A planned source: samples drawn with replacement, a few neighbours at a time.

        Args:
            shards: A path, glob, brace pattern or folder, several joined by `::`, or a list of such; indexed.
            mixture: In place of `shards`: data sets, all with `weight` or all with `repeat`.
            schedule: How scheduled weights change.
            split: Only this split of the samples, made by `wdskit split`.
            range: Only a range of the samples: ["0%", "80%"], or their numbers.
            seed: Seed of the order and of everything random.
            classes: Whether the `classes.json` of all folders must name the same classes, or may be any.
            chunk: Consecutive samples that are drawn together.
            lanes: Parts of the sequence that are read side by side.
            window: Samples of a lane that are shuffled with each other.
            tail: What to do with an incomplete last global batch.
        """
        return self._with(
            "resampled",
            {
                "shards": shards,
                "mixture": mixture,
                "schedule": schedule,
                "split": split,
                "range": range,
                "seed": seed,
                "classes": classes,
                "chunk": chunk,
                "lanes": lanes,
                "window": window,
                "tail": tail,
            },
        )

    def sequential(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        schedule: Literal["step", "linear"] = "step",
        split: str | None = None,
        range: Sequence[int | str] | None = None,  # noqa: A002 (as in YAML)
        seed: int = 0,
        classes: Literal["same", "any"] = "same",
        tail: Literal["drop", "pad"] = "pad",
    ) -> Self:
        """A planned source: every sample once, in the order of the index; for evaluation.

        Args:
            shards: A path, glob, brace pattern or folder, several joined by `::`, or a list of such; indexed.
            mixture: In place of `shards`: data sets, all with `weight` or all with `repeat`.
            schedule: How scheduled weights change.
            split: Only this split of the samples, made by `wdskit split`.
            range: Only a range of the samples: ["0%", "80%"], or their numbers.
            seed: Seed of the order and of everything random.
            classes: Whether the `classes.json` of all folders must name the same classes, or may be any.
            tail: What to do with an incomplete last global batch.
        """
        return self._with(
            "sequential",
            {
                "shards": shards,
                "mixture": mixture,
                "schedule": schedule,
                "split": split,
                "range": range,
                "seed": seed,
                "classes": classes,
                "tail": tail,
            },
        )

    def stream(
        self,
        shards: Shards,
        *,
        seed: int = 0,
        shuffle_shards: bool = True,
        resampled: bool = False,
        weights: Sequence[float] | None = None,
        upsampling: str | None = None,
        split: Literal["none"] | None = None,
        check: Literal["none", "size", "sha256"] = "size",
        classes: Literal["same", "any"] = "same",
    ) -> Self:
        """The unplanned source: shards one after the other, no index needed.

        Args:
            shards: A path, URL, glob, brace pattern or folder, several joined by `::`, or a list of such.
            seed: Seed of the shards' order and of everything random.
            shuffle_shards: Whether to shuffle the shards in each epoch; otherwise they keep the listed order.
            resampled: Whether to draw shards with replacement, without end.
            weights: Relative frequency of each `::`-part or list item of `shards`. Needs `resampled: true`.
            upsampling: In place of `weights`, as in open_clip: relative frequency of each shard of a part, `1::2`.
            split: `none`: every rank and worker reads everything, on purpose, although a splitter is missing.
            check: What an indexed shard is compared with: its size and its samples as they are read, or its sha256.
            classes: Whether the `classes.json` of all folders must name the same classes, or may be any.
        """
        return self._with(
            "stream",
            {
                "shards": shards,
                "seed": seed,
                "shuffle_shards": shuffle_shards,
                "resampled": resampled,
                "weights": weights,
                "upsampling": upsampling,
                "split": split,
                "check": check,
                "classes": classes,
            },
        )

    def split_by_node(self) -> Self:
        """Keep the draws of this rank."""
        return self._with("split_by_node")

    def split_by_worker(self) -> Self:
        """Keep the draws of this worker process."""
        return self._with("split_by_worker")

    def tarfile_to_samples(self) -> Self:
        """Open the shards here. Without it they are opened at the first stage that is no splitter."""
        return self._with("tarfile_to_samples")

    def shuffle(self, size: int, *, initial: int | None = None) -> Self:
        """Shuffle in a buffer.

        Args:
            size: Number of values in the buffer.
            initial: Number of values in the buffer before the first one comes out.
        """
        return self._with("shuffle", {"size": size, "initial": initial})

    def select(self, fn: Function) -> Self:
        """Keep the values for which a function holds.

        Args:
            fn: A function, or the name of a registered one.
        """
        return self._with("select", {"fn": fn})

    def slice(self, *bounds: int | None) -> Self:
        """Some of the values, as Python's slice.

        Args:
            *bounds: Number after the last one, or start, stop and step. null: no end.
        """
        return self._with("slice", _one_or_all(bounds))

    def decode(
        self,
        images: str | None = None,
        *,
        only: Fields | None = None,
        fuse: bool = True,
        max_pixels: int = 100000000,
    ) -> Self:
        """Fields into values. Nothing is unpickled; fields of unknown names stay bytes.

        Args:
            images: What images become, in webdataset's terms; `index`: the numbers that masks store, one per pixel.
                Default: they stay bytes.
            only: The fields to decode. Default: all.
            fuse: Whether decoding and the crop directly after it run as one step, which decodes a large JPEG no larger
                than the crop needs. Its pixels then differ by about one level of 255.
            max_pixels: Largest width x height that an image's header may promise.
        """
        return self._with("decode", {"images": images, "only": only, "fuse": fuse, "max_pixels": max_pixels})

    def map(self, fn: Function, *, global_rng: bool = False) -> Self:
        """A function of each value.

        Args:
            fn: A function, or the name of a registered one. If it has a parameter `rng`, it gets a numpy Generator that
                depends only on the seed and the position of the sample.
            global_rng: Seed random, numpy and torch by position before each call.
        """
        return self._with("map", {"fn": fn, "global_rng": global_rng})

    def map_dict(self, /, **fields: Function) -> Self:
        """A function for each of some fields.

        Args:
            **fields: Field name: a function, or the name of a registered one.
        """
        return self._with("map_dict", fields)

    def map_tuple(self, *fns: Function | None) -> Self:
        """A function for each place of a tuple; null leaves an item as it is.

        Args:
            *fns: Functions, or names of registered ones; null leaves an item as it is.
        """
        return self._with("map_tuple", fns)

    def rename(self, /, **names: str) -> Self:
        """Fields under new names; other fields stay.

        Args:
            **names: New name: old name, or alternatives joined by `;`.
        """
        return self._with("rename", names)

    def resize(
        self,
        size: Size,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
    ) -> Self:
        """Resize images, antialiased.

        Args:
            size: The shorter side in pixels, which keeps the aspect ratio, or [height, width].
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
        """
        return self._with("resize", {"size": size, "fields": fields, "masks": masks})

    def center_crop(
        self,
        size: Size,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
    ) -> Self:
        """The middle of images; a smaller image is padded with zeros.

        Args:
            size: Both sides in pixels, or [height, width].
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
        """
        return self._with("center_crop", {"size": size, "fields": fields, "masks": masks})

    def random_resized_crop(
        self,
        size: Size,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (0.75, 1.3333333333333333),
    ) -> Self:
        """A random part of images, resized: the same part of all fields.

        Args:
            size: Both sides of the result in pixels, or [height, width].
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
            scale: Share of the image's area to crop, [low, high].
            ratio: Width over height of the crop, [low, high].
        """
        return self._with(
            "random_resized_crop", {"size": size, "fields": fields, "masks": masks, "scale": scale, "ratio": ratio}
        )

    def random_flip(
        self,
        p: float = 0.5,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
    ) -> Self:
        """Mirror images left to right: all fields or none.

        Args:
            p: Probability of mirroring.
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
        """
        return self._with("random_flip", {"p": p, "fields": fields, "masks": masks})

    def normalize(
        self,
        preset: Literal["imagenet"] | None = None,
        *,
        fields: Fields | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Self:
        """(image in 0..1 - mean) / std, as float32.

        Args:
            preset: Mean and std of ImageNet's training images.
            fields: The image fields to transform. Default: the sample's only image field.
            mean: 1 or 3 numbers, for values in 0..1. Needs `std`.
            std: 1 or 3 numbers, for values in 0..1. Needs `mean`.
        """
        return self._with("normalize", {"preset": preset, "fields": fields, "mean": mean, "std": std})

    def to_tensor(self, fields: Fields | None = None) -> Self:
        """Images as torch float32 (C, H, W) in 0..1.

        Args:
            fields: The image fields to transform. Default: the sample's only image field.
        """
        return self._with("to_tensor", {"fields": fields})

    def to_tuple(self, *fields: str) -> Self:
        """The named fields as a tuple.

        Args:
            *fields: Fields in order; `jpg;png` takes the first that a sample has.
        """
        return self._with("to_tuple", _one_or_all(fields))

    def to_dict(self, *fields: str) -> Self:
        """The named fields as a dict, each under the name of its first alternative.

        Args:
            *fields: Fields in order; `jpg;png` takes the first that a sample has.
        """
        return self._with("to_dict", _one_or_all(fields))

    def batched(
        self,
        size: int | None = None,
        *,
        global_size: int | None = None,
        partial: bool = True,
        collate: Function | None = None,
        ragged: Fields | None = None,
    ) -> Self:
        """Values into batches.

        Args:
            size: Samples per batch of one rank.
            global_size: In place of `size`: samples in the batches of all ranks together.
            partial: For a stream: whether to keep a last, smaller batch; otherwise it is dropped.
            collate: Name of a registered function: list of samples to batch.
            ragged: Fields with arrays of different lengths, which become values and offsets.
        """
        return self._with(
            "batched",
            {"size": size, "global_size": global_size, "partial": partial, "collate": collate, "ragged": ragged},
        )

    def unbatched(self) -> Self:
        """Batches into samples again."""
        return self._with("unbatched")

    def with_epoch(self, n: int) -> Self:
        """End an epoch after so many values of each rank; the stream goes on where it ended.

        Args:
            n: Samples before `batched`, batches after it; per rank.
        """
        return self._with("with_epoch", {"n": n})

    def with_length(self, n: int) -> Self:
        """What `len()` says; nothing else changes.

        Args:
            n: The length.
        """
        return self._with("with_length", {"n": n})

    def loader(
        self,
        *,
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
        """The loader of this pipeline for this rank: `wdskit.make_loader(self, ...)`.

        Args:
            transforms: Functions and classes by name, for `map` and the others or as stages, before those registered.
            plugins: Modules to import first, so that they register their functions. Never taken from a configuration.
            rank: With `world_size`. Without: the process group given, torch.distributed, torchrun's environment,
                Slurm's.
            world_size: With `rank`.
            process_group: A torch.distributed group whose rank and size count, or one dimension of a DeviceMesh. A
                `rank` beside it has to be that of the group.
            ranks_per_node: Ranks of each machine, which share what they read. Without: what torchrun or Slurm say,
                where they or torch.distributed say the rank; else 1. The same on every rank.
            workers: Worker processes, 0 for none; this and what follows overrule the configuration's `loader`. Without
                this and `threads`, where images are decoded or functions called behind a planned source: one for two of
                this machine's cores, shared by its ranks, at most 8, with two threads each; with functions of yours one
                for each core, at most 16, with one thread each; else 1.
            threads: Threads a process for one-to-one stages. Without: 1 if `workers` is 0, of a stream, where there is
                little to do, and where functions of yours are called, which several threads would call at the same
                time; else this machine's cores, shared by its ranks and workers, at most 8.
            prefetch: Batches made ahead of the consumer: of a planned source in all, at least two a worker; of a stream
                by each worker.
            persistent_workers: Whether workers live on between epochs.
            start_method: "fork", "spawn" or "forkserver". Without: torch's default, but never "fork" once CUDA is
                initialised.
            pin_memory: Whether batches come in page-locked memory, where there is a GPU.
            device: Where batches of a planned source go: "cuda", the current one, or "cuda:1". They are copied there on
                a stream of their own, one ahead; images cross as uint8, and are normalized there.
            stats: What the loader reports while it runs: every how many steps, or `{"every": 100, "file":
                "stats.jsonl", "port": 9400}`. `loader.stats()` needs no such setting.
            errors: What becomes of bad samples, `{"max_bad": 10, "dir": "bad"}`; overrules the configuration's
                `errors`.
            cache: Where parts of remote shards are kept, `{"dir": "/nvme/wdskit", "size": "500GB"}`; overrules the
                configuration's `cache`.
        """
        import wdskit  # the public name, because the loader stands a layer above

        pipeline: Any = self
        return wdskit.make_loader(
            pipeline,
            transforms=transforms,
            plugins=plugins,
            rank=rank,
            world_size=world_size,
            process_group=process_group,
            ranks_per_node=ranks_per_node,
            workers=workers,
            threads=threads,
            prefetch=prefetch,
            persistent_workers=persistent_workers,
            start_method=start_method,
            pin_memory=pin_memory,
            device=device,
            stats=stats,
            errors=errors,
            cache=cache,
        )


def _one_or_all(values: Sequence[Any]) -> Any:
    """What one argument is, or all of several."""
    return values[0] if len(values) == 1 else values
