# `tools/dev/generate.py` writes this file from builder.py and the settings of the stages.

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias

from typing_extensions import Self

from wdskit.engine.program import Program
from wdskit.engine.stream import StreamPipeline
from wdskit.loader.loader import Loader
from wdskit.pipeline.settings import Config

Shards: TypeAlias = str | PathLike[str] | Sequence[str | PathLike[str]]
Function: TypeAlias = str | Callable[..., Any]
Size: TypeAlias = int | Sequence[int]
Fields: TypeAlias = str | Sequence[str]

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

    stages: tuple[Any, ...]

    def __init__(self, stages: Sequence[Any] = ()) -> None: ...
    def stage(self, stage: Callable[..., Any]) -> Pipeline:
        """Return a new pipeline with one more stage, from outside wdskit.

        Args:
            stage: A stage of webdataset, or a callable that takes an iterator and returns an iterator.

        Raises:
            PipelineError: `stage` is neither a stage nor a callable.
        """

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

    def check(self) -> None:
        """Check that the stages fit together.

        Raises:
            PipelineError: Stages do not fit together. Each line of the message names a stage and the broken rule.
        """
    def exact(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        split: str | None = None,
        where: str | None = None,
        range: Sequence[int | str] | None = None,
        seed: int = 0,
        classes: Literal["same", "any"] = "same",
        lanes: int | None = None,
        window: int = 4096,
        homes: int = 1,
        repeat: Mapping[str, Any] | None = None,
        tail: Literal["drop", "pad"] = "drop",
    ) -> Self:
        """A planned source: each sample at most once per epoch over all ranks, in a new random order each epoch. With
        `tail: pad`, exactly once; `tail: drop` leaves out the samples that do not fill a batch on all ranks. With
        `repeat`, each repetition counts as a sample.

        Args:
            shards: A path, glob, brace pattern or folder, several joined by `::`, or a list of these. The shards need
                an index.
            mixture: In place of `shards`: data sets, all with `weight` or all with `repeat`.
            split: Only this split of the samples, made by `wdskit split`.
            where: Only samples for which this condition on the columns of their folder is true. `wdskit index FOLDER
                --columns width,cls` makes columns.
            range: Only the samples from a first one up to, but without, a stop: ["0%", "80%"] or [0, 50000].
            seed: Seed of the order and of everything random.
            classes: Whether the `classes.json` of all folders must name the same classes, or may differ.
            lanes: Number of parts of the data that are read side by side. Default: 240, or one per 64 samples of a
                smaller data set.
            window: Number of samples of a lane that are shuffled together.
            homes: Number of groups of shards. A group keeps its place in every epoch, so that a node reads mostly the
                same shards in each epoch. For shards in a store with a `cache`: a few times the number of nodes.
            repeat: How often an epoch has a sample: as {column: NAME} says, 0 to 16 times.
            tail: What to do with an incomplete last global batch: `drop` leaves it out, `pad` fills it. With `pad`,
                each batch has a mask of the valid rows.
        """

    def resampled(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        split: str | None = None,
        where: str | None = None,
        range: Sequence[int | str] | None = None,
        seed: int = 0,
        classes: Literal["same", "any"] = "same",
        weights: str | None = None,
        balance: str | None = None,
        chunk: int = 64,
        lanes: int = 240,
        window: int = 4096,
        tail: Literal["drop", "pad"] = "drop",
    ) -> Self:
        """A planned source: samples drawn with replacement, in chunks of consecutive samples, or one by one by weights.

        Without `with_epoch`, an epoch has as many samples as the data. A mixture by weights needs `with_epoch`.

        Args:
            shards: A path, glob, brace pattern or folder, several joined by `::`, or a list of these. The shards need
                an index.
            mixture: In place of `shards`: data sets, all with `weight` or all with `repeat`.
            split: Only this split of the samples, made by `wdskit split`.
            where: Only samples for which this condition on the columns of their folder is true. `wdskit index FOLDER
                --columns width,cls` makes columns.
            range: Only the samples from a first one up to, but without, a stop: ["0%", "80%"] or [0, 50000].
            seed: Seed of the order and of everything random.
            classes: Whether the `classes.json` of all folders must name the same classes, or may differ.
            weights: A column with the weight of each sample: samples are drawn one by one, in proportion to it.
            balance: A column of classes or texts: samples are drawn one by one, each value equally often.
            chunk: Number of consecutive samples that are drawn together.
            lanes: Number of parts of the sequence that are read side by side.
            window: Number of samples of a lane that are shuffled together.
            tail: What to do with an incomplete last global batch: `drop` leaves it out, `pad` fills it. With `pad`,
                each batch has a mask of the valid rows.
        """

    def sequential(
        self,
        shards: Shards | None = None,
        *,
        mixture: Sequence[Mapping[str, Any]] | None = None,
        split: str | None = None,
        where: str | None = None,
        range: Sequence[int | str] | None = None,
        seed: int = 0,
        classes: Literal["same", "any"] = "same",
        tail: Literal["drop", "pad"] = "pad",
    ) -> Self:
        """A planned source for evaluation: every sample once, in the order of the index.

        The parts of a mixture with `repeat` come one after the other, each as often as its `repeat`.

        Args:
            shards: A path, glob, brace pattern or folder, several joined by `::`, or a list of these. The shards need
                an index.
            mixture: In place of `shards`: data sets, all with `weight` or all with `repeat`.
            split: Only this split of the samples, made by `wdskit split`.
            where: Only samples for which this condition on the columns of their folder is true. `wdskit index FOLDER
                --columns width,cls` makes columns.
            range: Only the samples from a first one up to, but without, a stop: ["0%", "80%"] or [0, 50000].
            seed: Seed of the order and of everything random.
            classes: Whether the `classes.json` of all folders must name the same classes, or may differ.
            tail: What to do with an incomplete last global batch: `drop` leaves it out, `pad` fills it. With `pad`,
                each batch has a mask of the valid rows.
        """

    def stream(
        self,
        shards: Shards,
        *,
        seed: int = 0,
        shuffle_shards: bool = True,
        resampled: bool = False,
        check: Literal["size", "sha256"] = "size",
        classes: Literal["same", "any"] = "same",
    ) -> Self:
        """The unplanned source: reads shards one after the other and needs no index.

        Args:
            shards: A path, URL, glob, brace pattern or folder, several joined by `::`, or a list of these. A shard that
                is named twice is read twice.
            seed: Seed of the shards' order and of everything random.
            shuffle_shards: Whether to shuffle the shards in each epoch; otherwise they keep the listed order.
            resampled: Whether to draw shards with replacement, without end.
            check: What to compare with the index, if the shards have one: only the `size` of each shard, or also its
                `sha256`.
            classes: Whether the `classes.json` of all folders must name the same classes, or may differ.
        """

    def split_by_node(self) -> Self:
        """Keep the shards that belong to this rank."""

    def split_by_worker(self) -> Self:
        """Keep the shards that belong to this worker process."""

    def shuffle(self, size: int, *, initial: int = 100) -> Self:
        """Shuffle the values in a buffer.

        Args:
            size: Number of values in the buffer.
            initial: Number of values in the buffer before the first one comes out; at most `size`.
        """

    def select(self, fn: Function) -> Self:
        """Keep the values for which a function returns true.

        Args:
            fn: A function, or the name of a registered one.
        """

    def decode(
        self,
        images: str | None = None,
        *,
        only: Fields | None = None,
        fuse: bool = True,
        max_pixels: int = 100000000,
    ) -> Self:
        """Decode fields to values. Nothing is unpickled; fields with unknown names stay bytes.

        So do fields that no later stage and not the output uses, damaged or not. A function for whole samples uses all.

        webdataset also decodes pickles (`pkl`, `pyd`, `pth`), `mp`, `msg`, `npz`, `ten`, `tb` and `*.gz`. They stay
        bytes. Decode them with `map_dict`.

        Args:
            images: What images become, in webdataset's terms such as `rgb8` or `pil`; `index`: the numbers that masks
                store, one per pixel. Default: images stay bytes.
            only: The fields to decode. Default: all.
            fuse: Whether decoding and the crop directly after it run as one step. Native code then decodes a large JPEG
                only as large as the crop needs; its pixels differ by about 1 of 255. Float images (`rgb`, ...) are
                resized as uint8 and become floats after it.
            max_pixels: Largest width x height that an image's header may give.
        """

    def map(self, fn: Function, *, global_rng: bool = False) -> Self:
        """Call a function for each value; its result is the new value.

        Args:
            fn: A function, or the name of a registered one. If it has a parameter `rng`, it gets a numpy Generator that
                depends only on the seed and the position of the sample.
            global_rng: Whether to seed random, numpy and torch before each call, from the seed and the position of the
                sample.
        """

    def map_dict(self, /, **fields: Function) -> Self:
        """Call a function for each named field; its result is the new value of the field. A missing field is an error.

        Args:
            **fields: Field name: a function, or the name of a registered one.
        """

    def map_tuple(self, *fns: Function | None) -> Self:
        """Call a function for each item of a tuple; its result is the new item. null leaves an item unchanged.

        Items after the last function stay unchanged. A tuple with fewer items than functions is an error.

        Args:
            *fns: Functions, or names of registered ones; null leaves an item unchanged.
        """

    def rename(self, /, **names: str) -> Self:
        """Give fields new names; other fields stay. A missing field, or a new name that another field has, is an error.

        Args:
            **names: New name: old name, or alternatives joined by `;`, the first that exists.
        """

    def resize(
        self,
        size: Size,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
    ) -> Self:
        """Resize images, bilinear with antialiasing; masks by nearest neighbour. Boxes in JSON do not change.

        Args:
            size: The shorter side in pixels, which keeps the aspect ratio, or [height, width].
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
        """

    def center_crop(
        self,
        size: Size,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
        mask_fill: int | None = None,
    ) -> Self:
        """Crop the middle of images; smaller images are padded with 0, smaller masks with `mask_fill`.

        Args:
            size: Both sides in pixels, or [height, width].
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
            mask_fill: The number around a mask that is smaller, such as 255. Without it such a mask is an error.
        """

    def random_resized_crop(
        self,
        size: Size,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (0.75, 1.3333333333333333),
    ) -> Self:
        """Crop a random part of images and resize it. All fields of a sample get the same part.

        Args:
            size: Both sides of the result in pixels, or [height, width].
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
            scale: Share of the image's area to crop, [low, high].
            ratio: Width over height of the crop, [low, high].
        """

    def random_flip(
        self,
        p: float = 0.5,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
    ) -> Self:
        """Mirror images left to right at random: all images and masks of a sample, or none. Boxes in JSON do not move.

        Args:
            p: Probability of mirroring.
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
        """

    def normalize(
        self,
        preset: Literal["imagenet"] | None = None,
        *,
        fields: Fields | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Self:
        """Compute (image - mean) / std as float32. The values of uint8 images are first divided by 255.

        Args:
            preset: Mean and std of ImageNet's training images.
            fields: The image fields to transform. Default: the sample's only image field.
            mean: 1 or 3 numbers, for values in 0..1. Needs `std`.
            std: 1 or 3 numbers, for values in 0..1. Needs `mean`.
        """

    def to_tensor(self, fields: Fields | None = None) -> Self:
        """Convert images to torch float32 (C, H, W), uint8 values to 0..1. No other transform can follow.

        Args:
            fields: The image fields to transform. Default: the sample's only image field.
        """

    def resize_to_bucket(
        self,
        *,
        fields: Fields | None = None,
        masks: Fields | None = None,
        crop: Literal["center", "random"] = "center",
    ) -> Self:
        """Resize images so that they cover the shape of their bucket, and crop the middle or a random part.

        Args:
            fields: The image fields to transform. Default: the sample's only image field.
            masks: Fields to transform with the same random values and nearest neighbour, such as segmentation masks.
            crop: Which part is kept.
        """

    def torchvision(
        self,
        transforms: Sequence[Any],
        *,
        fields: Mapping[str, Any] | None = None,
    ) -> Self:
        """Apply transforms of torchvision.transforms.v2 to an image with its masks, boxes, keypoints and labels.

        torch's random numbers depend on the seed, the stage and the sample's position. torch's global generator is not
        changed. Images and masks become tensors ([channels, ]height, width). An image of Pillow that is not a mask
        stays an image of Pillow. `MixUp` and `CutMix` take batches: call them in a `map` after `batched`.

        Args:
            transforms: Each item: the name of a class of torchvision.transforms.v2, or {Name: {setting: value}}; in
                Python also a transform object.
            fields: Maps each field to its kind: image, mask, labels, keypoints, or boxes as {boxes: xywh}, {boxes:
                xyxy} or {boxes: cxcywh}. The result for a path in JSON is stored as a field with the path as its name.
                Default: the only image field, as a mask after `decode: index`.
        """

    def multi_hot(self, *, source: str, classes: int | Fields, to: str = "multi_hot") -> Self:
        """Make a vector of the labels of a sample: 1 for each class that it has, 0 for the others; float32 (classes,).

        Args:
            source: The field with a list of class numbers or names, such as `json.labels`, or with one number or name.
                A label that is not in `classes` is an error.
            classes: The number of classes, whose labels are 0, 1, ..., or the names of the classes in order.
            to: The field that gets the vector.
        """

    def to_tuple(self, *fields: str) -> Self:
        """Make a tuple of the named fields. With `tail: pad`, also name `__valid__`, the mask of samples in a batch.

        Args:
            *fields: Fields, or paths in JSON, in order; `jpg;png` takes the first that a sample has. A missing field is
                an error.
        """

    def to_dict(self, *fields: str) -> Self:
        """Make a dict of the named fields, each under the name of its first alternative.

        Args:
            *fields: Fields, or paths in JSON, in order; `jpg;png` takes the first that a sample has. A missing field is
                an error.
        """

    def batched(
        self,
        size: int | None = None,
        *,
        collate: Function | None = None,
        ragged: Fields | None = None,
        global_size: int | None = None,
        partial: bool = True,
    ) -> Self:
        """Make batches of consecutive values. By default, arrays and numbers are stacked; other values become lists.

        Args:
            size: Samples per batch of one rank.
            collate: Function from a list of samples to a batch.
            ragged: Fields with arrays of different lengths, which become values and offsets.
            global_size: In place of `size`: samples in the batches of all ranks together.
            partial: For a stream: whether to keep a last, smaller batch; otherwise it is dropped. With a planned
                source, whose `tail` decides, false is an error.
        """

    def bucketed(
        self,
        *,
        collate: Function | None = None,
        ragged: Fields | None = None,
        by: str,
        shapes: Sequence[Sequence[int]] | None = None,
        edges: Sequence[int] | None = None,
        global_size: int | None = None,
        budget: int | None = None,
        divisor: int = 8,
    ) -> Self:
        """Make batches of one shape (`by: aspect`) or of similar length (`by: COLUMN`), in the place of `batched`.

        At each step all ranks have a batch of the same bucket. Each sample comes once in an epoch, or as often as the
        source's `repeat` says. If the last batch of a bucket is not full, the source's `tail` drops or pads this batch.

        Args:
            collate: Function from a list of samples to a batch.
            ragged: Fields with arrays of different lengths, which become values and offsets.
            by: `aspect`, from the columns width and height; or a column with the length of each sample.
            shapes: For `aspect`: [[height, width], ...]. Each sample gets the shape with the nearest aspect ratio.
            edges: For a column: the largest length of each bucket, ascending. A longer sample is an error.
            global_size: Samples in the batches of all ranks together.
            budget: In place of `global_size`: limit for samples x pixels of the shape, or samples x length of the
                bucket, in the batches of all ranks together.
            divisor: With `budget`: the samples in the batches of all ranks together are a multiple of `divisor`. Choose
                a multiple of the number of ranks.
        """

    def with_epoch(self, n: int) -> Self:
        """End an epoch after `n` values on each rank. The next epoch continues with the next value.

        Args:
            n: Number per rank: of samples before `batched`, of batches after it.
        """

    def with_length(self, n: int) -> Self:
        """Set the length that `len(loader)` returns. The values of an epoch do not change.

        Args:
            n: The length.
        """

    def loader(
        self,
        *,
        transforms: Mapping[str, Callable[..., Any]] | None = None,
        plugins: Sequence[str] = (),
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        errors: Mapping[str, Any] | None = None,
        cache: Mapping[str, Any] | None = None,
        workers: int | None = None,
        threads: int | None = None,
        on: str | None = None,
        prefetch: int | None = None,
        persistent_workers: bool | None = None,
        start_method: Literal["fork", "spawn", "forkserver"] | None = None,
        timeout: float | None = None,
        pin_memory: bool | None = None,
        device: str | None = None,
        ranks_per_node: int | None = None,
    ) -> Loader:
        """Make the loader of this pipeline for this rank: `wdskit.make_loader(self, ...)`.

        Args:
            transforms: Functions and classes by name, for `map` and similar stages or as stages themselves. They are
                used before registered ones.
            plugins: Modules to import first, so that they register their functions. A configuration cannot name them.
            rank: Needs `world_size`. Default: from `process_group`, torch.distributed, or the launcher: torchrun, Slurm
                or mpirun, in this order.
            world_size: Needs `rank`.
            process_group: A torch.distributed group, or one dimension of a DeviceMesh, that gives rank and world size.
                If `rank` is given too, it must be the rank in this group.
            errors: What to do with bad samples, `{"max_bad": 10, "dir": "bad"}`; overrides the configuration's
                `errors`.
            cache: Where to keep parts of remote shards, `{"dir": "/nvme/wdskit", "size": "500GB"}`; overrides the
                configuration's `cache`.
            workers: Worker processes; 0: none. Default: 1, or for images and functions of yours what the cores allow.
            threads: Threads in each process. Default: 1, or for images without functions of yours up to 8.
            on: Where workers run: `ray`, or the address of a cluster, ray://head:10001. Default: here.
            prefetch: Limit for batches made ahead: in all of a planned source, per worker of a stream. Default: 4.
            persistent_workers: Whether workers stay alive between epochs. A `stream` then goes on where its epoch
                ended.
            start_method: How workers start. Default: torch's default, but not `fork` after CUDA is initialised.
            timeout: Seconds to wait for a batch before an error; 0: no limit.
            pin_memory: Whether batches are in page-locked memory, if there is a GPU.
            device: `cuda` or `cuda:1`: where batches of a planned source go. Default: main memory.
            ranks_per_node: Ranks of each machine; they read the same shards. Default: from the launcher, else 1.
        """

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
