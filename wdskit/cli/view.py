"""`wdskit view`: samples as one HTML page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from wdskit.cli.console import escape
from wdskit.cli.options import OverridesOption, PipelineOption, Plugins, import_plugins


def view_command(
    data: Annotated[
        str, typer.Argument(metavar="FOLDER|CONFIG", help="Indexed shards, or a YAML configuration of a pipeline.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write, FILE.html. Default: a temporary file.")
    ] = None,
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    num: Annotated[int, typer.Option(metavar="N", min=1, help="Most samples to show.")] = 48,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Draws other samples of a folder.")] = 0,
    where: Annotated[
        str | None,
        typer.Option(metavar="CONDITION", help="Only such samples of a folder: 'width >= 256'."),
    ] = None,
    pipeline: PipelineOption = None,
    overrides: OverridesOption = None,
    plugins: Plugins = None,
) -> None:
    """Show samples on a page in the browser.

    Writes one HTML file with images, masks and boxes over them, classes, text and JSON, under charts. Of a pipeline
    it shows what the stages make of the samples. The page holds everything and needs no network.

    Masks are further images of a sample that store numbers (`seg.png`). Boxes are the `bbox` in the JSON of a sample,
    and those in its list `annotations`, as in COCO: x, y, width, height in pixels.

    In Python: wdskit.view

    Examples:
        wdskit view data/train
        wdskit view data/train --where 'cls == 3' --out cats.html --no-open
        wdskit view train.yaml --pipeline train
    """
    from wdskit.page import view

    import_plugins(plugins)
    page = view(data, out=out, num=num, seed=seed, where=where, pipeline=pipeline, overrides=overrides or [])
    print(f"Wrote {escape(str(page))}.")
    if opens:
        webbrowser.open(page.resolve().as_uri())
