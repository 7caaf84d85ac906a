"""The pipeline builder: the same stages under the same names as in YAML, in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from wdskit.config.rules import check_order
from wdskit.config.spec import parse_settings
from wdskit.errors import PipelineError
from wdskit.limits import MAX_PIXELS
from wdskit.pipeline.foreign import check_stage
from wdskit.pipeline.loader_specs import ErrorsSpec, LoaderSpec
from wdskit.pipeline.sources import Sources
from wdskit.pipeline.specs import parse_stage

if TYPE_CHECKING:
    from typing import TypeAlias

    from wdskit.loader.loader import Loader
    from wdskit.pipeline.planned import PlannedPipeline
    from wdskit.pipeline.streaming import StreamPipeline

    Fn: TypeAlias = str | Callable[..., Any]
    Size: TypeAlias = int | Sequence[int]
    Fields: TypeAlias = str | Sequence[str] | None


class Pipeline(Sources):
    """An immutable description of a pipeline: one source, then stages. Each method returns a longer one.

    ```python
    pipe = (Pipeline()
            .stream("train-*.tar", seed=7, resampled=True).split_by_node().split_by_worker().shuffle(2000)
            .decode("rgb8").random_resized_crop(224).normalize("imagenet")
            .to_tuple("jpg;png", "cls").batched(64).with_epoch(1000))
    loader = pipe.loader(workers=4)
    ```

    A function may be a callable or the name it was registered under. A callable with a parameter `rng` gets a numpy
    Generator that depends on the seed and on the sample's position only.

    Args:
        stages: Specs (`pipeline.specs`) and callables, as `Pipeline.stages` of another pipeline holds them.

    Raises:
        PipelineError: One of them is neither.
    """

    def __init__(self, stages: Sequence[Any] = ()) -> None:
        self.stages: tuple[Any, ...] = tuple(stages)
        for at, stage in enumerate(self.stages):
            check_stage(stage, at)

    def __repr__(self) -> str:
        names = (str(getattr(stage, "name", getattr(stage, "__name__", repr(stage)))) for stage in self.stages)
        return f"Pipeline({' -> '.join(names)})"

    def _with(self, name: str, value: object = None) -> Self:
        """One stage more, its settings checked; `value` is what stands behind the stage's name in YAML."""
        return type(self)((*self.stages, parse_stage(name, value, where=f"Pipeline.{name}")))

    def stage(self, stage: Callable[..., Any]) -> Pipeline:
        """A stage that is not wdskit's: any stage of webdataset, or a callable from iterator to iterator."""
        return Pipeline((*self.stages, stage))

    def split_by_node(self) -> Pipeline:
        """Keep every R-th draw: those of this rank."""
        return self._with("split_by_node")

    def split_by_worker(self) -> Pipeline:
        """Keep every W-th draw: those of this worker process."""
        return self._with("split_by_worker")

    def tarfile_to_samples(self) -> Pipeline:
        """Open the shards here. Without it they are opened at the first stage that is no splitter."""
        return self._with("tarfile_to_samples")

    def shuffle(self, size: int, *, initial: int | None = None) -> Pipeline:
        """Shuffle in a buffer of `size` values; giving starts once `initial` are there (default 100)."""
        return self._with("shuffle", {"size": size, "initial": initial})

    def decode(
        self, images: str | None = None, *, only: Fields = None, fuse: bool = True, max_pixels: int = MAX_PIXELS
    ) -> Pipeline:
        """Fields into values: images by one of webdataset's specs (rgb8, rgb, pil, torchrgb8, ...), json, txt, cls, npy
        by name. `index` is for masks and depth maps: the numbers that an image stores, of a palette the places in it,
        as an array (height, width), uint8, or int32 for more than 8 bits.

        Nothing is unpickled: fields of other names stay bytes. With a crop directly behind it, a large JPEG is decoded
        no larger than the crop needs, unless `fuse` is False.
        """
        return self._with("decode", {"images": images, "only": only, "fuse": fuse, "max_pixels": max_pixels})

    def map(self, fn: Fn, *, global_rng: bool = False) -> Pipeline:
        """A function of each value. `global_rng` seeds random, numpy and torch by position before each call."""
        return self._with("map", {"fn": fn, "global_rng": global_rng})

    def map_dict(self, /, **fields: Fn) -> Pipeline:
        """A function for each of some fields: `map_dict(cls=int)`; `map_dict(**{"seg.png": f})`."""
        return self._with("map_dict", fields)

    def map_tuple(self, *fns: Fn | None) -> Pipeline:
        """A function for each place of a tuple; None leaves a place as it is."""
        return self._with("map_tuple", {"fns": fns})

    def select(self, fn: Fn) -> Pipeline:
        """Keep the values for which `fn` holds."""
        return self._with("select", {"fn": fn})

    def rename(self, /, **names: str) -> Pipeline:
        """Fields under new names: `rename(image="jpg;png")`. Other fields stay."""
        return self._with("rename", names)

    def to_tuple(self, *fields: str) -> Pipeline:
        """The named fields as a tuple; `jpg;png` takes the first that a sample has, `__key__` and `__url__` are fields
        too.
        """
        return self._with("to_tuple", {"fields": _words(fields)})

    def to_dict(self, *fields: str) -> Pipeline:
        """The named fields as a dict, each under the name of its first alternative."""
        return self._with("to_dict", {"fields": _words(fields)})

    def batched(
        self,
        size: int | None = None,
        *,
        global_size: int | None = None,
        partial: bool = True,
        collate: Fn | None = None,
        ragged: Fields = None,
    ) -> Pipeline:
        """Batches of `size`, or of a rank's share of `global_size`; images as (B, C, H, W) in channels_last memory.

        `partial` allows a shorter last one, of a stream. `ragged` names fields with arrays of different lengths, which
        become a `Ragged`: values and offsets.
        """
        settings = {"size": size, "global_size": global_size, "partial": partial, "collate": collate, "ragged": ragged}
        return self._with("batched", settings)

    def unbatched(self) -> Pipeline:
        """Batches into samples again."""
        return self._with("unbatched")

    def slice(self, *bounds: int | None) -> Pipeline:
        """`slice(stop)` or `slice(start, stop[, step])` of what a rank yields."""
        return self._with("slice", bounds[0] if len(bounds) == 1 else bounds)

    def with_epoch(self, n: int) -> Pipeline:
        """End an epoch after `n` samples (before `batched`) or batches (behind it) of each rank; the stream goes on."""
        return self._with("with_epoch", {"n": n})

    def with_length(self, n: int) -> Pipeline:
        """What `len()` says; nothing else changes."""
        return self._with("with_length", {"n": n})

    def resize(self, size: Size, *, fields: Fields = None, masks: Fields = None) -> Pipeline:
        """Resize images: the shorter side to an int, or to [height, width]. Antialiased; masks by nearest."""
        return self._with("resize", {"size": size, "fields": fields, "masks": masks})

    def center_crop(self, size: Size, *, fields: Fields = None, masks: Fields = None) -> Pipeline:
        """The middle of images; smaller ones are padded with zeros."""
        return self._with("center_crop", {"size": size, "fields": fields, "masks": masks})

    def random_resized_crop(
        self,
        size: Size,
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        fields: Fields = None,
        masks: Fields = None,
    ) -> Pipeline:
        """A random part of images, resized: `scale` is its share of the area, `ratio` its width over its height."""
        settings = {"size": size, "scale": scale, "ratio": ratio, "fields": fields, "masks": masks}
        return self._with("random_resized_crop", settings)

    def random_flip(self, p: float = 0.5, *, fields: Fields = None, masks: Fields = None) -> Pipeline:
        """Mirror images left to right with probability `p`."""
        return self._with("random_flip", {"p": p, "fields": fields, "masks": masks})

    def normalize(
        self,
        preset: str | None = None,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        fields: Fields = None,
    ) -> Pipeline:
        """(image in 0..1 - mean) / std as float32; `preset` is "imagenet"."""
        return self._with("normalize", {"preset": preset, "mean": mean, "std": std, "fields": fields})

    def to_tensor(self, *, fields: Fields = None) -> Pipeline:
        """Images as torch float32 (C, H, W) in 0..1."""
        return self._with("to_tensor", {"fields": fields})

    def build(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        threads: int = 1,
        max_workers: int = 16,
        transforms: Mapping[str, Callable[..., Any]] | None = None,
        errors: Mapping[str, Any] | ErrorsSpec | None = None,
    ) -> StreamPipeline | PlannedPipeline:
        """The running form, a `webdataset.DataPipeline`, for this rank.

        Args:
            rank: With `world_size`, else found as `pipeline.ranks` says.
            world_size: With `rank`.
            process_group: A torch.distributed group whose rank and size count, or one dimension of a DeviceMesh. A
                `rank` beside it has to be that of the group.
            threads: Threads for one-to-one stages, in each process.
            max_workers: Most DataLoader workers it will be used with.
            transforms: Functions by name, before those registered.
            errors: What becomes of bad samples, as under `errors` in YAML.

        Raises:
            ConfigError: `threads` or `errors` is wrong.
            PipelineError: The stages do not fit together.
            StorageError, FolderIndexError: The shards cannot be listed.
            RankError: Rank or world size are contradictory.
        """
        from wdskit.pipeline.compose import compose
        from wdskit.pipeline.ranks import find_place

        self.check()
        num_threads = parse_settings(LoaderSpec, {"threads": threads}, where="Pipeline.build").threads or 1
        place = find_place(rank, world_size, process_group)
        if not isinstance(errors, ErrorsSpec):
            errors = parse_settings(ErrorsSpec, errors or {}, where="Pipeline.build: errors")
        return compose(
            self.stages,
            place=place,
            num_threads=num_threads,
            max_workers=max_workers,
            functions=transforms,
            errors=errors,
        )

    def check(self) -> None:
        """Refuse stages that do not fit together, all at once.

        Raises:
            PipelineError: Each line names a stage and its rule.
        """
        found = check_order(self.stages)
        if found:
            names = [getattr(stage, "name", repr(stage)) for stage in self.stages]
            raise PipelineError(
                "\n".join(f"stage {at} ({names[at] if names else 'none'}): {rule}" for at, rule in found)
            )

    def loader(self, **settings: Any) -> Loader:
        """`wdskit.make_loader(self, ...)`, which says what `settings` there are."""
        import wdskit  # the public name, because the loader stands a layer above

        return wdskit.make_loader(self, **settings)


def _words(fields: Sequence[str]) -> str | Sequence[str]:
    """Webdataset's spelling too: one string with spaces between the fields."""
    return fields[0] if len(fields) == 1 and isinstance(fields[0], str) else fields
