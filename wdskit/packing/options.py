"""The options of `pack`, `reshard` and `select`.

Each option is declared once, as a field of a class: its name, type, default, the group and the text of the help. The
command line (`cli/options.py`), the keyword arguments of the functions (`takes_options`) and the table in
the API reference are made from the fields. `--help` loads this module, so slow modules are imported inside functions.
"""

# ruff: noqa: RUF009 (`option()` makes a field)

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, TypeVar

from typing_extensions import ParamSpec

from wdskit.errors import PackError
from wdskit.files import DISK, Disk
from wdskit.limits import MAX_SHARD_BYTES
from wdskit.text import as_int, parse_bytes

if TYPE_CHECKING:
    from wdskit.packing.changes import Changes
    from wdskit.packing.division import Limits
    from wdskit.packing.labels import ClassNames
    from wdskit.packing.row import OnProgress
    from wdskit.packing.sample_filter import Choice
    from wdskit.packing.sources.records import Records
    from wdskit.packing.transforms import Transforms
    from wdskit.shards.split import Shares

P = ParamSpec("P")
Source = TypeVar("Source")
Dest = TypeVar("Dest")
Options = TypeVar("Options")
Result = TypeVar("Result")

_ALLOWED_PAIRS = ({"append", "part"}, {"append", "dry_run"}, {"overwrite", "dry_run"})
GROUPS = ("Source", "Samples", "Fields", "Images", "Shards", "Run", "Existing shards, restart", "Other readers", "")
"""Groups of options, in the order of the help. The command line does not have the options of the group "", which take
Python objects.
"""


def option(
    group: str, default: Any, text: str, metavar: str = "", *, least: int | None = None, most: int | None = None
) -> Any:
    """Return a dataclass field with metadata for the command line and the reference.

    Args:
        group: Title in `--help`, one of `GROUPS`.
        default: Value of an option that is not given.
        text: The text in `--help` and in the reference. It explains the meaning of None.
        metavar: Name of the value in `--help`; not for options that are on or off.
        least: Smallest allowed number; None for no limit.
        most: Largest allowed number; None for no limit.
    """
    metadata = {"group": group, "help": text, "metavar": metavar, "least": least, "most": most}
    return field(default=default, metadata=metadata)


def declared_options(kind: type[RunOptions]) -> list[Field[Any]]:
    """Return the fields of a class of options, sorted by their group in the order of `GROUPS`."""
    return sorted(fields(kind), key=lambda opt: GROUPS.index(opt.metadata["group"]))


def choices_of(opt: Field[Any]) -> list[str]:
    """Return the values that the metavar of an option lists (`given|clean|hashed`); empty if it lists no values."""
    metavar = opt.metadata["metavar"]
    return metavar.split("|") if re.fullmatch(r"[a-z0-9]+(\|[a-z0-9]+)+", metavar) else []


def takes_options(
    kind: Callable[P, Options],
) -> Callable[[Callable[[Source, Dest, Options], Result]], Callable[Concatenate[Source, Dest, P], Result]]:
    """Return a decorator. It turns a function of (source, dest, options) into a function of (source, dest, **options).

    `kind` is the dataclass of the options; its fields become the keyword arguments, also in the signature, in the
    docstring and for type checkers. An unknown keyword raises a TypeError that names the most similar option. A missing
    source or dest, or a third positional argument, raises TypeError.
    """
    declared = declared_options(kind)  # type: ignore[arg-type]
    names = [opt.name for opt in declared]

    def decorate(function: Callable[[Source, Dest, Options], Result]) -> Callable[Concatenate[Source, Dest, P], Result]:
        signature = inspect.signature(function)
        own = [*signature.parameters.values()][:2]

        @functools.wraps(function)
        def run(*args: Any, **keywords: Any) -> Result:
            given = [*args, *(keywords.pop(opt.name) for opt in own[len(args) :] if opt.name in keywords)]
            unknown = next((name for name in keywords if name not in names), None)
            if unknown is not None:
                near = difflib.get_close_matches(unknown, names, n=1, cutoff=0)[0]
                raise TypeError(f"{function.__name__}: there is no option {unknown!r}. Did you mean {near!r}?")
            if len(given) != len(own):
                call = f"{function.__name__}({own[0].name}, {own[1].name}, option=value)"
                raise TypeError(
                    f"{function.__name__}: {len(given)} arguments without the options, not 2. Write {call}."
                )
            return function(given[0], given[1], kind(**keywords))  # type: ignore[call-arg]  # the fields of `kind`

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            *own,
            *(inspect.Parameter(opt.name, keyword, default=opt.default, annotation=opt.type) for opt in declared),
        ]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        lines = [f"    {opt.name}: {opt.metadata['help']}" for opt in declared]
        run.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options:", *lines])
        return run

    return decorate


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that `pack`, `reshard` and `select` share.

    Raises PackError if an option is out of range, or is not one of the listed words.
    """

    workers: int = option("Run", 1, "Processes that read and write.", "N", least=1)
    overwrite: bool = option("Existing shards, restart", False, "Replace the shards in DEST.")
    progress: OnProgress | None = option("", None, "Called from time to time with a `Progress`.")
    disk: Disk = option("", DISK, "Performs the file operations; tests replace it.")

    def __post_init__(self) -> None:
        for opt in fields(self):
            value = as_int(getattr(self, opt.name))
            object.__setattr__(self, opt.name, value)
            words = choices_of(opt)
            if words and value != opt.default and value not in words:
                raise PackError(f"{opt.name}: {value!r} is not one of {', '.join(map(repr, words))}.")
        for name, what in (("workers", "processes"), ("threads", "threads")):
            number = getattr(self, name, 1)
            if type(number) is not int or number < 1:
                raise PackError(f"{name}: {number!r} is not a number of {what}. Write 1 or more.")
        for name in ("shuffle", "seed"):
            seed = getattr(self, name, None)
            if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
                raise PackError(f"{name}: the seed {seed!r} must be 0 or more, and below 2**64.")


@dataclass(frozen=True, kw_only=True)
class SelectOptions(RunOptions):
    """The options of `select`.

    Raises:
        PackError: An option is out of range, or has no effect.
        SelectionError: The filter is not a valid expression.
        ConfigError: `sample` is not a valid share, such as `1%`.
    """

    filter: str | None = option(
        "Samples", None, 'Keep samples for which this is true: "json.width >= 256 and cls in (1, 2)".', "EXPR"
    )
    missing: str = option(
        "Samples", "error", "What to do with samples that lack what the filter asks for.", "error|skip"
    )
    sample: str | None = option(
        "Samples",
        None,
        "Keep a share of the samples, by a hash of the key: 10%. A larger share contains each smaller one.",
        "SHARE",
    )
    seed: int = option("Samples", 0, "Seed of --sample; a different seed keeps different samples.", "N", least=0)
    check: str = option(
        "Run", "headers", "sha256: compare all bytes of the sources with their index first.", "headers|sha256"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.choice

    @cached_property
    def choice(self) -> Choice:
        """The rule that decides which samples are kept."""
        from wdskit.packing.sample_filter import make_choice

        return make_choice(filter=self.filter, missing=self.missing, sample=self.sample, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class WriteOptions(RunOptions):
    """The options that `pack` and `reshard` share.

    Raises:
        PackError: An option is out of range or has no effect, or two options contradict each other.
        ConfigError: `export` names an unknown kind.
        SelectionError: `split` or `columns` is invalid.
    """

    command: ClassVar[str]

    keys: str = option(
        "Samples", "given", "Keep keys, replace odd characters with _, or hash them.", "given|clean|hashed"
    )
    fields: Mapping[str, str] | Sequence[str] = option(
        "Fields", (), "Make a field from a column or a JSON value: txt=caption, cls=label. Repeatable.", "FIELD=COLUMN"
    )
    classes: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None = option(
        "Fields",
        None,
        "Class names in order: a packed folder, a classes.json, or a text with one name per line.",
        "FILE",
    )
    derive: str | Sequence[str] = option(
        "Fields", (), "Add metadata of the image to json: width,height,bytes,sha256.", "NAMES"
    )
    validate: str | None = option(
        "Images",
        None,
        "Check images: none, magic, structure, decode. Default: structure; none for copies by reshard.",
        "LEVEL",
    )
    max_pixels: int | None = option("Images", None, "Most pixels of an image. Default: 100 million.", "N", least=1)
    resize: int | None = option(
        "Images", None, "Shrink images with a longer side (see --resize-mode).", "PIXELS", least=1
    )
    resize_mode: str | None = option(
        "Images", None, "Side: shorter, longer; or a square: crop, pad. Default: shorter.", "MODE"
    )
    upscale: bool = option("Images", False, "With --resize, enlarge smaller images too.")
    format: str | None = option("Images", None, "Convert images to this format. Default: keep theirs.", "jpg|webp|png")
    quality: int | None = option(
        "Images", None, "Quality of new jpg and webp. Default: 90.", "1..100", least=1, most=100
    )
    orient: bool = option("Images", False, "Rotate images as their EXIF orientation says, and remove it.")
    background: str | None = option("Images", None, "Colour for transparency and padding: white, #ff0000.", "COLOUR")
    image_fields: str | Sequence[str] = option(
        "Images", (), "Image fields to change if a sample has several: left.jpg,right.jpg.", "FIELDS"
    )
    mask_fields: str | Sequence[str] = option(
        "Images", (), "PNG masks that --resize and --orient move with the image, without blending: seg.png.", "FIELDS"
    )
    mask_fill: int | None = option(
        "Images", None, "Number of the mask pixels that --resize-mode pad adds, such as 255.", "N", least=0, most=65535
    )
    max_samples: int | None = option("Shards", None, "Most samples in a shard. Default: 10,000.", "N", least=1)
    max_bytes: int | str | None = option(
        "Shards", None, "Most bytes in a shard's file: 200MB, 1GiB. Default: 1GB.", "SIZE"
    )
    columns: str | Sequence[str] = option(
        "Shards", (), "Columns to write next to the index: width,height,cls,json.score,txt.length.", "NAMES"
    )
    num_shards: int | None = option(
        "Shards", None, "Exactly N shards of equal size. Turns off default limits.", "N", least=1
    )
    shuffle: int | None = option("Shards", None, "Shuffle with this seed. Default: keep the order.", "SEED", least=0)
    split: str | Mapping[str, object] | None = option(
        "Shards", None, "Split the samples by key; each split has its own shards: train=0.9,val=0.1.", "SHARES"
    )
    pattern: str | None = option("Shards", None, "Names of the shards. Default: DEST's name and -%06d.tar.", "NAME")
    threads: int = option("Run", 1, "Threads of each process, for images.", "N", least=1)
    on: str | None = option("Run", None, "Pack on a Ray cluster whose nodes see SOURCE and DEST.", "ray[://HOST:PORT]")
    part: str | None = option("Run", None, "Fill part I of N, counted from 0; then run `wdskit pack-finish`.", "I/N")
    dry_run: bool = option("Run", False, "Show what would be written, but write nothing.")
    append: bool = option("Existing shards, restart", False, "Add shards to those in DEST.")
    restart: bool = option(
        "Existing shards, restart", False, "Remove what an unfinished run with other options left, and start again."
    )
    staging: str | os.PathLike[str] | None = option(
        "Existing shards, restart",
        None,
        "Folder where shards for a URL wait for the upload. Default: in ~/.cache/wdskit.",
        "DIR",
    )
    export: str | Sequence[str] = option(
        "Other readers", (), "Run `wdskit export` at the end: open_clip,timm,energon,dali.", "KINDS"
    )
    split_name: str = option(
        "Other readers", "", "Name of the split for timm and energon. Default: from the shards' names.", "NAME"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("export", "sidecars", "files", "omit", "columns"):
            value = getattr(self, name, ())
            if isinstance(value, str):
                object.__setattr__(self, name, tuple(part.strip() for part in value.split(",") if part.strip()))
        from wdskit.shards.export import parse_kinds

        parse_kinds(self.export)
        if not self.split_name.isprintable():
            raise PackError(f"split_name: {self.split_name!r} holds characters that cannot be printed.")
        if self.columns:
            from wdskit.shards.column_values import parse_columns

            parse_columns(self.columns)
        if self.export and self.part is not None:
            raise PackError("export: parts write no index. Run `wdskit export` after `wdskit pack-finish`.")
        _ = self.transforms, self.limits, self.part_of, self.shares, self.made_fields
        self._check_columns()
        self._check_together()
        if self.split_name and not self.export:
            raise PackError("split_name: it has no effect without export. Leave it out.")
        checks_pixels = self.transforms.validate not in {"none", "magic"} or self.transforms.changes_bytes
        if self.max_pixels is not None and not checks_pixels:
            msg = f"max_pixels: it has no effect with validate {self.transforms.validate}"
            raise PackError(f"{msg}, which does not read the size of images. Leave one of them out.")

    def _check_columns(self) -> None:
        """Raise `PackError` if the options change images and a field is made from a column that describes the images.

        The last part of such a column's name is `width`, `height`, `bytes` or `sha256`; or, with `resize` or `orient`,
        the name is that of a place in the image, such as `bbox`. Fields with the names of images are not checked.
        """
        if not self.transforms.changes_images:
            return
        from wdskit.codecs.formats import is_image_field
        from wdskit.packing.described_fields import names_places
        from wdskit.packing.transforms import DERIVED

        for name, column in self.made_fields.items():
            if is_image_field(name):  # a file, as a mask is
                continue
            is_place = self.transforms.moves_images and names_places(column)
            if is_place or re.split(r"[./\s]", column.strip())[-1].lower() in DERIVED:
                msg = f"fields: {name}={column} describes the image, which resize, format or orient changes."
                raise PackError(f"{msg} Make the field from the new shards: wdskit reshard --field {name}={column}")

    def _check_together(self) -> None:
        given = {name: getattr(self, name) for name in ("append", "overwrite", "dry_run", "part")}
        asked = [name for name, value in given.items() if value is not None and value is not False]
        for one, other in itertools.combinations(asked, 2):
            if {one, other} not in _ALLOWED_PAIRS:
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
        """The checks and changes of each sample."""
        return self._make_transforms()

    def _make_transforms(self, **values: Any) -> Transforms:
        """Return the `Transforms` of these options. `values` are used instead of the options with these names."""
        from wdskit.packing.transforms import Transforms

        names = {opt.name for opt in fields(Transforms)} - values.keys()
        given = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        return Transforms(**given, **values)

    @cached_property
    def limits(self) -> Limits:
        """The limits of a shard, from `max_samples`, `max_bytes` and `num_shards`.

        Raises PackError if one of these options is invalid, or cannot be used with the other options.
        """
        from wdskit.packing.division import make_limits

        return make_limits(
            self.max_samples,
            parse_size(self.max_bytes) if isinstance(self.max_bytes, str) else self.max_bytes,
            num_shards=self.num_shards,
            by_count=self.transforms.changes_bytes,
        )

    @cached_property
    def part_of(self) -> tuple[int, int] | None:
        """Number of the part, from 0, and the number of parts; None for a run without parts."""
        return None if self.part is None else parse_part(self.part)

    @cached_property
    def made_fields(self) -> dict[str, str]:
        """The fields to make from columns: the column of each field, by field name."""
        from wdskit.packing.sources.records import parse_fields

        return parse_fields(self.fields)

    @cached_property
    def class_names(self) -> ClassNames | None:
        """The classes of the option `classes`; None without the option.

        Raises PackError if the classes cannot be read or are not valid.
        """
        from wdskit.packing.labels import find_class_names

        return None if self.classes is None else find_class_names(self.classes)

    @cached_property
    def shares(self) -> Shares | None:
        """The share of each split, by name; None without splits."""
        from wdskit.shards.split import parse_shares

        return None if self.split is None else parse_shares(self.split)

    def to_dict(self) -> dict[str, object]:
        """Return options that can change the bytes of shards, and the versions of the libraries that encode images, by
        name. Subclasses add more options.
        """
        from wdskit.packing.transforms import transform_versions
        from wdskit.shards.split import format_shares

        versions = transform_versions(self.transforms)
        return {
            **self.limits.described(),
            **({"columns": [*self.columns]} if self.columns else {}),
            "split": None if self.shares is None else format_shares(self.shares),
            "shuffle": self.shuffle,
            "append": self.append,
            **asdict(self.transforms),
            **{f"version of {name}": version for name, version in versions.items()},
        }


@dataclass(frozen=True, kw_only=True)
class PackOptions(WriteOptions):
    """The options of `pack`.

    Raises:
        PackError: An option is out of range or has no effect, or two options contradict each other.
        ConfigError: `export` names an unknown kind.
        SelectionError: `split` or `columns` is invalid.
    """

    command = "pack"

    from_: str | None = option(
        "Source",
        None,
        "Kind of SOURCE, if its name does not show it: folder, table, list, parquet, hf, coco, tar, zip.",
        "KIND",
    )
    sidecars: str | Sequence[str] = option(
        "Source",
        (),
        "Files with the same name and another ending: json,txt,seg.png (a.seg.png for a.jpg).",
        "EXT,...",
    )
    files: str | Sequence[str] = option(
        "Source", (), "Files that become samples in place of images: wav,flac.", "EXT,..."
    )
    images: str | os.PathLike[str] | None = option(
        "Source", None, "Folder of the images that a COCO file names. Default: the folder of that file.", "DIR"
    )
    image_column: str | None = option(
        "Source", None, "Table's column with the image. Default: image, file_name, path, filepath.", "NAME"
    )
    key_column: str | None = option(
        "Source", None, "Table's column with the key. Default: key, else the image's path.", "NAME"
    )
    allow_no_image: bool = option("Source", False, "Also pack rows of a table that have no image.")
    omit: str | Sequence[str] = option(
        "Source", (), "Columns to leave out of json; of a folder: path, class, cls.", "COLUMNS"
    )
    require: str | Sequence[str] = option("Samples", (), "Fields that each sample must have: jpg;png,json.", "FIELDS")
    missing: str | None = option(
        "Samples", None, "What to do if such a field is missing. Default: error.", "error|warn|skip"
    )
    skip_bad: bool = option("Samples", False, "Skip bad rows and list them in DEST/rejected.jsonl.")
    duplicates: str = option(
        "Samples",
        "keep",
        "Repeated images: keep, list in DEST/duplicates.jsonl, or leave out.",
        "keep|report|drop",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.append and self.duplicates != "keep":
            msg = "`append` and `duplicates` cannot be combined: the images that the folder holds are not compared."
            raise PackError(f"{msg} Leave out `duplicates`, or pack all images into a new folder.")

    @cached_property
    def records(self) -> Records:
        """The converter from records of a table or of JSON to rows. Its `folder` is empty; a reader sets it.
        Raises PackError if the classes of the option `classes` cannot be read or are not valid.
        """
        from wdskit.packing.sources.records import Records

        return Records(
            "", self.image_column, self.key_column, self.allow_no_image, self.made_fields, self.class_names, self.omit
        )

    @property
    def keeps_order(self) -> bool:
        """True if rows keep the source's order: without `shuffle`, or in a dry run, which packs no row."""
        return self.shuffle is None or self.dry_run

    def to_dict(self) -> dict[str, object]:
        """Return the options that can change the bytes of shards, by name."""
        names = (
            "skip_bad",
            "from_",
            "keys",
            "image_column",
            "key_column",
            "allow_no_image",
            "sidecars",
            "files",
            "omit",
        )
        return {
            **super().to_dict(),
            **{name: getattr(self, name) for name in names},
            "fields": self.made_fields,
            "images": None if self.images is None else os.fspath(self.images),
            "classes": None if self.class_names is None else self.class_names.describe(),
        }

    def check_stream(self) -> None:
        """Check that the options fit rows that can be read only once.

        Raises:
            PackError: `shuffle`, `num_shards`, `dry_run`, `part`, `split` or `on` is set, `workers` is over 1, or
                `duplicates` is not "keep".
        """
        given = {name: getattr(self, name) for name in ("shuffle", "num_shards", "dry_run", "part", "split", "on")}
        asked = [name for name, value in given.items() if value is not None and value is not False]
        asked += ["workers"] * (self.workers > 1) + ["duplicates"] * (self.duplicates != "keep")
        if asked:
            msg = f"{asked[0]}: rows that can be read only once are packed in one pass."
            raise PackError(f"{msg} Pass the rows as a list, or leave out `{asked[0]}`.")


@dataclass(frozen=True, kw_only=True)
class ReshardOptions(WriteOptions, SelectOptions):
    """The options of `reshard`.

    Raises:
        PackError: An option is out of range or has no effect, or two options contradict each other.
        ConfigError: `export` names an unknown kind, or `sample` is not a share.
        SelectionError: The filter, `split` or `columns` is invalid.
    """

    command = "reshard"

    duplicate_keys: str = option(
        "Samples", "error", "If a key appears twice: stop, or keep its first sample.", "error|first"
    )
    keep: str | Sequence[str] | None = option("Fields", None, "Keep only these fields: jpg,cls.", "FIELDS")
    drop: str | Sequence[str] | None = option("Fields", None, "Drop these fields: txt.", "FIELDS")
    rename: str | Sequence[str] | Mapping[str, str] | None = option(
        "Fields", None, "Rename fields: jpeg=jpg,class=cls.", "OLD=NEW"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transforms.moves_images:
            from wdskit.codecs.fields import is_json_field
            from wdskit.codecs.formats import is_image_field
            from wdskit.packing.described_fields import names_places

            for name, new in self.changes.rename.items():
                is_checked = any(is_image_field(each) or is_json_field(each) for each in (name, new))
                if names_places(name) and not names_places(new) and not is_checked:
                    msg = (
                        f"rename: {name} holds places in the image by its name. As {new}, these places would stay where"
                    )
                    raise PackError(
                        f"{msg} they are, although resize or orient moves the pixels. Rename it in another run."
                    )
        _ = self.changes

    @cached_property
    def transforms(self) -> Transforms:
        """The checks and changes of each sample.

        Without `validate`, images are checked only if an option changes them, if `derive` is set, or if `rename` gives
        a field the name of another image format; and `cls` is checked only if `rename` gives a field this name.
        """
        from wdskit.codecs.formats import is_image_field, promised_format
        from wdskit.dataset.classes import CLASS_FIELD

        is_changed = self.resize or self.format or self.orient or self.derive
        is_renamed = any(
            is_image_field(new) and not (is_image_field(name) and promised_format(name) == promised_format(new))
            for name, new in self.changes.rename.items()
        )
        makes_label = any(new == CLASS_FIELD != name for name, new in self.changes.rename.items())
        return self._make_transforms(
            validate=self.validate or ("structure" if is_changed else "magic" if is_renamed or makes_label else "none"),
            checks_labels=makes_label or self.validate is not None,
            missing=None,  # in reshard, `missing` is for the filter
        )

    @cached_property
    def changes(self) -> Changes:
        """The changes to the fields and keys of samples."""
        from wdskit.packing.changes import make_changes
        from wdskit.packing.sources.records import Records

        made = (
            Records("", fields=self.made_fields, classes=self.class_names)
            if self.made_fields or self.class_names
            else None
        )
        return make_changes(keep=self.keep, drop=self.drop, rename=self.rename, keys=self.keys, made=made)

    def to_dict(self) -> dict[str, object]:
        """Return the options that can change the bytes of shards, by name."""
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


def parse_size(text: str) -> int:
    """Return the number of bytes in `text`: `200MB`, `1.5 GiB` or a number of bytes.

    Raises:
        PackError: `text` is not a size, or is `MAX_SHARD_BYTES` or more.
    """
    with contextlib.suppress(ValueError):
        if (num_bytes := parse_bytes(text)) < MAX_SHARD_BYTES:
            return num_bytes
    raise PackError(f"max_bytes: {text!r} is not a size of a shard. Write 200MB, 1.5GiB or a number of bytes.")


def parse_part(text: str) -> tuple[int, int]:
    """Return the number of a part, from 0, and the number of parts: `3/8` gives (3, 8), the fourth of eight parts.

    Raises:
        PackError: `text` is not `I/N` with I below N.
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if part >= parts:
        parts = parts or 8
        raise PackError(f"part: {text!r} is not a part. The parts of {parts} are 0/{parts} to {parts - 1}/{parts}.")
    return part, parts
