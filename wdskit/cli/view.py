"""`wdskit view`: look through samples on a local page."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from wdskit.cli.options import OverridesOption, PipelineOption, Plugins, import_plugins


def view_command(
    shards: Annotated[
        str | None, typer.Argument(metavar="DIR", help="Indexed shards: a folder or a pattern. Omit it with --config.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this split of DIR, made by `wdskit split`.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Show the samples in the order of a pipeline.", rich_help_panel="Configuration"
        ),
    ] = None,
    pipeline: PipelineOption = None,
    overrides: OverridesOption = None,
    plugins: Plugins = None,
    rank: Annotated[
        int, typer.Option(metavar="R", min=0, help="The rank whose samples to show.", rich_help_panel="Configuration")
    ] = 0,
    world_size: Annotated[
        int, typer.Option(metavar="W", min=1, help="Ranks of the run.", rich_help_panel="Configuration")
    ] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(metavar="N", min=1, help="Ranks per node.", rich_help_panel="Configuration")
    ] = 8,
    epoch: Annotated[int, typer.Option(metavar="N", min=0, help="The epoch.", rich_help_panel="Configuration")] = 0,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Default: any free port.", show_default=False)
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Look through samples on a page in the browser.

    Shows images with their masks and boxes, JSON and classes; finds keys, and samples for which a filter is true. Only
    the index is read at the start. The page is on 127.0.0.1, opens only with the printed address, and needs no network.
    Ctrl-C ends it. The command needs the extra `view`: pip install ".[view]" in a clone of wdskit.

    Masks are further images of a sample that store numbers (`seg.png`). Boxes are `bbox`, `boxes` or `annotations` in
    the JSON of a sample, as in COCO: x, y, width, height in pixels.

    Examples:
        wdskit view data/train
        wdskit view data/train --split val --no-browser --port 8000
        wdskit view --config train.yaml --rank 3 --world-size 8
    """
    try:
        from wdskit.view.server import serve
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] not in {"starlette", "uvicorn", "anyio"}:
            raise
        from wdskit.errors import ConfigError
        from wdskit.text import install_extra

        raise ConfigError(f"a page needs Starlette and uvicorn.\n  {install_extra('view')}") from err
    from wdskit.view.samples import open_folder, open_order

    if (shards is None) == (config is None):
        raise typer.BadParameter("give either DIR, or --config with a pipeline.")
    if config is None:
        assert shards is not None
        given = {"--pipeline": pipeline, "--set": overrides, "--plugin": plugins, "--rank": rank, "--epoch": epoch}
        for option, value in (*given.items(), ("--world-size", world_size - 1), ("--gpus-per-node", gpus_per_node - 8)):
            if value:
                raise typer.BadParameter(f"{option} needs --config.")
        samples = open_folder(shards, split=split)
    else:
        if split is not None:
            raise typer.BadParameter("--split is for DIR; a pipeline names its own split.")
        import_plugins(plugins)
        samples = open_order(
            config,
            pipeline=pipeline,
            overrides=overrides or [],
            rank=rank,
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            epoch=epoch,
        )

    def show(address: str) -> None:
        print(f"{address}\nCtrl-C ends it.", flush=True)
        if browser:
            webbrowser.open(address)

    with contextlib.suppress(KeyboardInterrupt):
        serve(samples, port=port, on_start=show)
