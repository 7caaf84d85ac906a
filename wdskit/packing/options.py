"""The options of `pack` and `reshard`: each is a name, a type, a default and a line of the command's help.

The command line is built from these classes, so `--help` loads this module. Functions import the slow modules.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from wdskit.errors import PackError
from wdskit.limits import MAX_PIXELS, MAX_SHARD_BYTES
from wdskit.text import as_int, parse_bytes

if TYPE_CHECKING:
    from wdskit.packing.changes import Changes
    from wdskit.packing.choice import Choice
    from wdskit.packing.division import Limits
    from wdskit.packing.labels import ClassNames
    from wdskit.packing.sources import SourceOptions
    from wdskit.packing.transforms import Transforms
    from wdskit.shards.split import Shares

_TOGETHER = ({"append", "part"}, {"append", "dry_run"}, {"overwrite", "dry_run"})


def option(default: Any, text: str, metavar: str = "", *, least: int | None = None, most: int | None = None) -> Any:
    """Return a dataclass field with the metadata that the command line shows.

    Args:
        default: Value of an option that is not given.
        text: The line in `--help`. It explains the meaning of None.
        metavar: Name of the value in `--help`; not for options that are on or off.
        least: Smallest allowed number; None for no limit.
        most: Largest allowed number; None for no limit.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "least": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The options that `pack` and `reshard` share. Each is explained by the argument of `pack` that has its name."""

    command: ClassVar[str]

    max_samples: int | None = option(None, "Most samples in a shard. Default: 10,000.", "N", least=1)
    max_bytes: int | str | None = option(None, "Most bytes in a shard's file: 200MB, 1GiB. Default: 1GB.", "SIZE")
    num_shards: int | None = option(None, "Exactly N shards of equal size. Turns off default limits.", "N", least=1)
    shuffle: int | None = option(None, "Shuffle with this seed. Default: keep the order.", "SEED", least=0)
    split: str | Mapping[str, object] | None = option(
        None, "Split the samples by key; each split has its own shards: train=0.9,val=0.1.", "SHARES"
    )
    pattern: str | None = option(None, "Names of the shards. Default: DEST's name and -%06d.tar.", "NAME")
    workers: int = option(1, "Processes that read and write.", "N", least=1)
    threads: int = option(1, "Threads of each process, for images.", "N", least=1)
    on: str | None = option(None, "Pack on a Ray cluster whose nodes see SOURCE and DEST.", "ray[://HOST:PORT]")
    part: str | None = option(None, "Fill part I of N, counted from 0; then run `wdskit pack-finish`.", "I/N")
    append: bool = option(False, "Add shards to those in DEST.")
    overwrite: bool = option(False, "Replace the shards in DEST.")
    restart: bool = option(False, "Remove what an unfinished run with other options left, and start again.")
    staging: str | os.PathLike[str] | None = option(  # noqa: RUF009 (a field)
        None, "Folder where shards for a URL wait for the upload. Default: in ~/.cache/wdskit.", "DIR"
    )
    dry_run: bool = option(False, "Show what would be written, but write nothing.")
    export: str | Sequence[str] = option((), "Run `wdskit export` at the end: open_clip,timm,energon,dali.", "KINDS")
    split_name: str = option("", "Name of the split for timm and energon. Default: from the shards' names.", "NAME")
    fields: Mapping[str, str] | Sequence[str] = option(
        (), "Make a field from a column or a JSON value: txt=caption, cls=label. Repeatable.", "FIELD=COLUMN"
    )
    classes: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None = option(  # noqa: RUF009 (a field)
        None, "Class names in order: a packed folder, a classes.json, or a text with one name per line.", "FILE"
    )
    validate: str | None = option(
        None, "Check images: none, magic, structure, decode. Default: structure; none for copies by reshard.", "LEVEL"
    )
    resize: int | None = option(None, "Shrink images with a longer side (see --resize-mode).", "PIXELS", least=1)
    resize_mode: str | None = option(None, "Side: shorter, longer; or a square: crop, pad. Default: shorter.", "MODE")
    upscale: bool = option(False, "With --resize, enlarge smaller images too.")
    format: str | None = option(None, "Convert images to this format. Default: keep theirs.", "jpg|webp|png")
    quality: int | None = option(None, "Quality of new jpg and webp. Default: 90.", "1..100", least=1, most=100)
    orient: bool = option(False, "Rotate images as their EXIF orientation says, and remove it.")
    background: str | None = option(None, "Colour for transparency and padding: white, #ff0000.", "COLOUR")
    image_fields: str | Sequence[str] = option(
        (), "Image fields to change if a sample has several: left.jpg,right.jpg.", "FIELDS"
    )
    mask_fields: str | Sequence[str] = option(
        (), "PNG masks that --resize and --orient move with the image, without blending: seg.png.", "FIELDS"
    )
    mask_fill: int | None = option(
        None, "Number of the mask pixels that --resize-mode pad adds, such as 255.", "N", least=0, most=65535
    )
    derive: str | Sequence[str] = option((), "Add metadata of the image to json: width,height,bytes,sha256.", "NAMES")
    max_pixels: int | None = option(None, "Most pixels of an image. Default: 100 million.", "N", least=1)

    def __post_init__(self) -> None:
        for name, value in [*vars(self).items()]:
            object.__setattr__(self, name, as_int(value))
        for name in ("export", "sidecars", "files", "omit"):
            value = getattr(self, name, ())
            if isinstance(value, str):
                object.__setattr__(self, name, tuple(part.strip() for part in value.split(",") if part.strip()))
        for name, what in (("workers", "processes"), ("threads", "threads")):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise PackError(f"{name}: {number!r} is not a number of {what}; 1 is this one.")
        if self.shuffle is not None and (type(self.shuffle) is not int or not 0 <= self.shuffle < 1 << 64):
            raise PackError(f"shuffle: the seed {self.shuffle!r} must be 0 or more, and below 2**64.")
        from wdskit.shards.export import parse_kinds

        parse_kinds(self.export)
        if self.export and self.part is not None:
            raise PackError("export: parts write no index. Run `wdskit export` after `wdskit pack-finish`.")
        _ = self.transforms, self.limits, self.part_of, self.shares, self.columns
        self._check_columns()
        self._check_together()
        if self.split_name and not self.export:
            raise PackError("split_name: it has no effect without export. Leave it out.")
        checks_pixels = self.transforms.validate not in {"none", "magic"} or self.transforms.changes_bytes
        if self.max_pixels is not None and not checks_pixels:
            msg = f"max_pixels: it has no effect with validate {self.transforms.validate}"
            raise PackError(f"{msg}, which does not read the size of images. Leave one of them out.")

    def _check_columns(self) -> None:
        """Refuse a field whose column describes an image that changes: the values of the field would be wrong."""
        if not self.transforms.changes_images:
            return
        from wdskit.packing.annotations import names_places
        from wdskit.packing.transforms import DERIVED

        for name, column in self.columns.items():
            is_place = self.transforms.moves_images and names_places(column)
            if is_place or re.split(r"[./\s]", column.strip())[-1].lower() in DERIVED:
                msg = f"fields: {name}={column} describes the image, which resize, format or orient changes."
                raise PackError(f"{msg} Make the field from the new shards: wdskit reshard --field {name}={column}")

    def _check_together(self) -> None:
        given = {name: getattr(self, name) for name in ("append", "overwrite", "dry_run", "part")}
        asked = [name for name, value in given.items() if value is not None and value is not False]
        for one, other in itertools.combinations(asked, 2):
            if {one, other} not in _TOGETHER:
                raise PackError(f"{one} and {other} cannot be combined. Leave one of them out.")
        if self.on is not None:
            from wdskit.packing.ray import check_address

            check_address(self.on)
            if self.workers > 1:
                raise PackError("`workers` and `on` cannot be combined: the cluster has its own workers.")
        if self.split is not None:
            if self.split_name:
                raise PackError("`split_name` and `split` cannot be combined: the shards are named after their splits.")
            if self.pattern is not None:
                raise PackError("`pattern` and `split` cannot be combined: the shards are named after their splits.")

    @cached_property
    def transforms(self) -> Transforms:
        """What happens to each sample."""
        from wdskit.packing.transforms import Transforms

        names = [one.name for one in fields(Transforms) if one.name != "max_pixels"]
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return Transforms(**values, max_pixels=MAX_PIXELS if self.max_pixels is None else self.max_pixels)

    @cached_property
    def limits(self) -> Limits:
        """How large shards may become, and how many there are."""
        from wdskit.packing.division import make_limits

        return make_limits(
            self.max_samples,
            parse_size(self.max_bytes) if isinstance(self.max_bytes, str) else self.max_bytes,
            num_shards=self.num_shards,
            by_count=self.transforms.changes_bytes,
        )

    @cached_property
    def part_of(self) -> tuple[int, int] | None:
        """Number of the part, from 0, and how many there are; None where the run is not divided."""
        return None if self.part is None else parse_part(self.part)

    @cached_property
    def columns(self) -> dict[str, str]:
        """Which column each field is made of, by the field's name."""
        from wdskit.packing.sources.records import parse_fields

        return parse_fields(self.fields)

    @cached_property
    def class_names(self) -> ClassNames | None:
        """The classes that there may be. A file of them is read here; `PackError` where it cannot be."""
        from wdskit.packing.labels import find_class_names

        return None if self.classes is None else find_class_names(self.classes)

    @cached_property
    def shares(self) -> Shares | None:
        """Name and share of each split; None where nothing is split."""
        from wdskit.shards.split import parse_shares

        return None if self.split is None else parse_shares(self.split)

    def to_dict(self) -> dict[str, object]:
        """The options that a shard can depend on, by name."""
        from wdskit.packing.transforms import transform_versions
        from wdskit.shards.split import format_shares

        versions = transform_versions(self.transforms)
        return {
            **self.limits.described(),
            "split": None if self.shares is None else format_shares(self.shares),
            "shuffle": self.shuffle,
            "append": self.append,
            **asdict(self.transforms),
            **{f"version of {name}": version for name, version in versions.items()},
        }


@dataclass(frozen=True, kw_only=True)
class PackOptions(WriteOptions):
    """The options of `pack`, for its argument `options`. The arguments of `pack` with the same names explain them.

    Raises:
        PackError: One is out of range, or two contradict each other.
        ConfigError: `export` names an unknown kind.
        SelectionError: The shares of `split` are wrong.
    """

    command = "pack"

    keys: str = option("given", "Keep keys, replace odd characters with _, or hash them.", "given|clean|hashed")
    skip_bad: bool = option(False, "Skip bad rows and list them in DEST/rejected.jsonl.")
    from_: str | None = option(None, "Kind of SOURCE, if its name does not show it; see above.", "KIND")
    sidecars: str | Sequence[str] = option(
        (), "Files with the same name and another ending: json,txt,seg.png (a.seg.png for a.jpg).", "EXT,..."
    )
    files: str | Sequence[str] = option((), "Files that become samples in place of images: wav,flac.", "EXT,...")
    images: str | os.PathLike[str] | None = option(  # noqa: RUF009 (a field)
        None, "Folder of the images that a COCO file names. Default: the folder of that file.", "DIR"
    )
    image_column: str | None = option(
        None, "Table's column with the image. Default: image, file_name, path, filepath.", "NAME"
    )
    key_column: str | None = option(None, "Table's column with the key. Default: key, else the image's path.", "NAME")
    allow_no_image: bool = option(False, "Also pack rows of a table that have no image.")
    omit: str | Sequence[str] = option((), "Columns to leave out of json; of a folder: path, class, cls.", "COLUMNS")
    require: str | Sequence[str] = option((), "Fields that each sample must have: jpg;png,json.", "FIELDS")
    missing: str | None = option(None, "What to do if such a field is missing. Default: error.", "error|warn|skip")
    duplicates: str = option(
        "keep", "Repeated images: keep, list in DEST/duplicates.jsonl, or leave out.", "keep|report|drop"
    )

    def __post_init__(self) -> None:
        from wdskit.packing.choice import check_word

        check_word("keys", self.keys, ("given", "clean", "hashed"))
        super().__post_init__()
        if self.append and self.duplicates != "keep":
            msg = "`append` and `duplicates` cannot be combined: the images that the folder holds are not compared."
            raise PackError(f"{msg} Leave out `duplicates`, or pack all images into a new folder.")

    @cached_property
    def source(self) -> SourceOptions:
        """How the source is read."""
        from wdskit.packing.sources import SourceOptions

        return SourceOptions(
            from_=self.from_,
            keys=self.keys,
            image_column=self.image_column,
            key_column=self.key_column,
            allow_no_image=self.allow_no_image,
            fields=self.columns,
            sidecars=self.sidecars,
            files=self.files,
            omit=self.omit,
            images=None if self.images is None else os.fspath(self.images),
            classes=self.class_names,
            in_order=self.shuffle is None or self.dry_run,
        )

    def to_dict(self) -> dict[str, object]:
        """The options that a shard can depend on, by name."""
        return {**super().to_dict(), "skip_bad": self.skip_bad, **self.source.to_dict()}

    def check_stream(self) -> None:
        """Refuse options that need a plan: the rows can be read only once.

        Raises:
            PackError: Such an option is set; the message names it.
        """
        names = ("shuffle", "num_shards", "dry_run", "part", "split", "on")
        asked = [name for name in names if getattr(self, name) not in {None, False}]
        asked += ["workers"] * (self.workers > 1) + ["duplicates"] * (self.duplicates != "keep")
        if asked:
            msg = f"{asked[0]}: rows that can be read only once are packed in one pass."
            raise PackError(f"{msg} Give a list, or leave it out.")


@dataclass(frozen=True, kw_only=True)
class ReshardOptions(WriteOptions):
    """The options of `reshard`, for its argument `options`. The arguments of `reshard` explain them."""

    command = "reshard"

    filter: str | None = option(
        None, 'Keep samples for which this is true: "json.width >= 256 and cls in (1, 2)".', "EXPR"
    )
    missing: str = option("error", "What to do with samples that lack what the filter asks for.", "error|skip")
    sample: str | None = option(None, "Keep a share of the samples, by a hash of the key: 10%.", "SHARE")
    seed: int = option(0, "Seed of --sample; a different seed keeps different samples.", "N", least=0)
    keep: str | Sequence[str] | None = option(None, "Keep only these fields: jpg,cls.", "FIELDS")
    drop: str | Sequence[str] | None = option(None, "Drop these fields: txt.", "FIELDS")
    rename: str | Sequence[str] | Mapping[str, str] | None = option(
        None, "Rename fields: jpeg=jpg,class=cls.", "OLD=NEW"
    )
    keys: str = option("given", "Keep keys, replace odd characters with _, or hash them.", "given|clean|hashed")
    duplicate_keys: str = option("error", "If a key appears twice: stop, or keep its first sample.", "error|first")
    check: str = option("headers", "sha256: compare all bytes of the sources with their index first.", "headers|sha256")

    def __post_init__(self) -> None:
        from wdskit.packing.choice import check_word

        check_word("check", self.check, ("headers", "sha256"))
        check_word("duplicate_keys", self.duplicate_keys, ("error", "first"))
        _ = self.choice, self.changes
        super().__post_init__()

    @cached_property
    def transforms(self) -> Transforms:
        """As for `pack`; but where nothing changes images none is looked at."""
        from wdskit.packing.transforms import Transforms

        names = [one.name for one in fields(Transforms) if one.name not in {"max_pixels", "missing", "validate"}]
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        is_changed = self.resize or self.format or self.orient or self.derive
        validate = self.validate or ("structure" if is_changed else "none")
        max_pixels = MAX_PIXELS if self.max_pixels is None else self.max_pixels
        return Transforms(**values, validate=validate, max_pixels=max_pixels)

    @cached_property
    def choice(self) -> Choice:
        """Which samples stay."""
        from wdskit.packing.choice import make_choice

        return make_choice(filter=self.filter, missing=self.missing, sample=self.sample, seed=self.seed)

    @cached_property
    def changes(self) -> Changes:
        """What becomes of their fields and keys."""
        from wdskit.packing.changes import make_changes
        from wdskit.packing.sources.records import Records

        made = Records("", fields=self.columns, classes=self.class_names) if self.columns or self.class_names else None
        return make_changes(keep=self.keep, drop=self.drop, rename=self.rename, keys=self.keys, made=made)

    def to_dict(self) -> dict[str, object]:
        """The options that a shard can depend on, by name."""
        from wdskit.shards.sampling import parse_share

        return {
            **super().to_dict(),
            "command": "reshard",
            **self.changes.to_dict(),
            "filter": self.filter,
            "missing": self.missing,
            "sample": None if self.sample is None else str(parse_share(self.sample)),
            "seed": self.seed,
            "duplicate_keys": self.duplicate_keys,
        }


Options = TypeVar("Options", bound=WriteOptions)


def given_options(kind: type[Options], options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """The options of a call: the object, or those of the keywords.

    Raises:
        PackError: Both are given.
    """
    known = {one.name: one.default for one in fields(kind)}
    given = {name: value for name, value in keywords.items() if name in known and value is not known[name]}
    if options is None:
        return kind(**given)
    if given:
        raise PackError(f"{next(iter(given))}: it excludes `options`. Use dataclasses.replace(options, ...).")
    return options


def parse_size(text: str) -> int:
    """Return the number of bytes in `text`: `200MB`, `1.5 GiB` or a number of bytes.

    Raises:
        PackError: The text is not a size of a shard.
    """
    with contextlib.suppress(ValueError):
        if (num_bytes := parse_bytes(text)) < MAX_SHARD_BYTES:
            return num_bytes
    raise PackError(f"max_bytes: {text!r} is not a size of a shard. Write 200MB, 1.5GiB or a number of bytes.")


def parse_part(text: str) -> tuple[int, int]:
    """Return the number of a part, from 0, and the number of parts: `3/8` gives (3, 8), the fourth of eight parts.

    Raises:
        PackError: The text is not a part.
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if part >= parts:
        parts = parts or 8
        raise PackError(f"part: {text!r} is not a part. The parts of {parts} are 0/{parts} to {parts - 1}/{parts}.")
    return part, parts
