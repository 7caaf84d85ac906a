"""Arguments and options that several commands have, with one text each."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from wdskit.cli.console import print_error

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A shard, a folder, or a pattern.", show_default=False)
]
EmptyFolderOption = Annotated[
    str, typer.Option("--to", metavar="DEST", help="Folder to write to, empty or not there.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
ReadersOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Processes that read. Default: the CPUs, fewer for little data.", show_default=False
    ),
]
PatternOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Names of the shards. Default: DEST's name and -%06d.tar.")
]
RestartOption = Annotated[
    bool, typer.Option("--restart", help="Remove what a run has written that was stopped, and begin anew.")
]
AlsoOption = Annotated[
    str | None,
    typer.Option(metavar="KINDS", help="Files for other readers too: wids,open_clip,timm,energon,dali."),
]
SplitNameOption = Annotated[
    str, typer.Option(metavar="NAME", help="The split for timm and energon. Default: from the shards' names.")
]
SplitOption = Annotated[
    str | None,
    typer.Option(metavar="SHARES", help="By key, each split with shards of its own: train=0.9,val=0.1."),
]
OnOption = Annotated[
    str | None,
    typer.Option(metavar="ray[://HOST:PORT]", help="A Ray cluster that packs; its nodes see SOURCE and DEST."),
]
PartOption = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Fill part I, from 0, of N; then `wdskit pack-finish DEST`."),
]
OnlyOption = Annotated[
    int | None, typer.Option(metavar="NUMBER", min=0, help="Fill this shard again, which is lost or damaged.")
]
ValidateOption = Annotated[
    str | None,
    typer.Option(metavar="LEVEL", help="Check images: none, magic, structure, decode. Default: see above."),
]
ResizeOption = Annotated[
    int | None, typer.Option(metavar="PIXELS", min=1, help="Make larger images smaller: pixels of a side.")
]
ResizeModeOption = Annotated[
    str | None,
    typer.Option(metavar="MODE", help="Side: shorter, longer, crop, pad (to a square). Default: shorter."),
]
UpscaleOption = Annotated[bool, typer.Option("--upscale", help="Make smaller images larger too.")]
FormatOption = Annotated[
    str | None, typer.Option("--format", metavar="jpg|webp|png", help="What images become. Default: as they are.")
]
QualityOption = Annotated[
    int | None, typer.Option(metavar="1..100", min=1, max=100, help="Of jpg and webp that are made. Default: 90.")
]
OrientOption = Annotated[bool, typer.Option("--orient", help="Turn images as EXIF says, and remove that tag.")]
BackgroundOption = Annotated[
    str | None, typer.Option(metavar="COLOUR", help="Behind transparent and around padded images: white, #ff0000.")
]
ImageFieldsOption = Annotated[
    str, typer.Option(metavar="FIELDS", help="Which images of a sample to change. Default: its only one.")
]
DeriveOption = Annotated[
    str, typer.Option(metavar="FACTS", help="Facts of the image for json: width,height,bytes,sha256.")
]
MaxPixelsOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Most pixels of an image. Default: 100 million.")
]
ThreadsOption = Annotated[int, typer.Option(metavar="N", min=1, help="Threads of each process, for images.")]
MaxSamplesOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Most samples in a shard. Default: 10,000.")
]
MaxBytesOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most bytes of a shard's file: 200MB, 1GiB, ... Default: 1GB.")
]
NumShardsOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="So many shards, equal within one sample, with no limits but yours."),
]
MultipleOfOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Equal shards, a multiple of N (ranks x workers), within the limits."),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="PKG",
        help="Import this module, which registers functions. Repeatable.",
        show_default=False,
    ),
]


def import_plugins(plugins: Sequence[str] | None) -> None:
    """Import them; like `python -m`, also from the current folder.

    Raises:
        typer.Exit: With code 2; one cannot be imported, which is printed.
    """
    for plugin in plugins or ():
        if os.getcwd() not in sys.path:  # noqa: PTH109 (sys.path holds text)
            sys.path.append(os.getcwd())  # noqa: PTH109
        try:
            importlib.import_module(plugin)
        except Exception as err:
            print_error(ImportError(f"--plugin {plugin}: cannot be imported: {type(err).__name__}: {err}"))
            raise typer.Exit(2) from err
