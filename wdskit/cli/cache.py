"""`wdskit cache`: parts of remote shards that are kept on this machine."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import escape, format_bytes, numbers_table, plural, print_json, print_tables, show_steps
from wdskit.cli.options import (
    Command,
    ConfigArgument,
    JsonOption,
    OverridesOption,
    PipelineOption,
    Plugins,
    import_plugins,
)
from wdskit.errors import ConfigError, StorageError
from wdskit.files import describe_missing

if TYPE_CHECKING:
    from wdskit.storage.cache import PartFile

app = typer.Typer(help="Inspect, fill and empty the folder that caches parts of remote shards.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `cache: {dir: ...}` names.")]


@app.command("ls", cls=Command)
def ls_command(folder: Folder, json: JsonOption = False) -> None:
    """List the shards that have parts in the cache: parts, bytes, and the time of last use.

    Examples:
        wdskit cache ls /nvme/wdskit
    """
    shards: dict[str, list[PartFile]] = defaultdict(list)
    for part in _parts(folder):
        shards[part.name.shard].append(part)
    num_bytes = sum(part.num_bytes for parts in shards.values() for part in parts)
    rows = [
        (shard, len(parts), sum(part.num_bytes for part in parts), max(part.used_s for part in parts))
        for shard, parts in sorted(shards.items())
    ]
    if json:
        names = ("shard", "num_parts", "num_bytes", "used_s")
        print_json({"num_bytes": num_bytes, "shards": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    titles = ("shard", "parts", "size", "last used")
    cells = [
        (shard[:16], str(num), format_bytes(size), time.strftime("%Y-%m-%d %H:%M", time.localtime(used_s)))
        for shard, num, size, used_s in rows
    ]
    if cells:
        print_tables([numbers_table(titles, cells)])
    print(f"{escape(str(folder))}: parts of {plural(len(shards), 'shard')}, {format_bytes(num_bytes)}.")


@app.command("prune", cls=Command)
def prune_command(
    folder: Folder,
    to: Annotated[str, typer.Option(metavar="SIZE", help="How much to keep, such as 100GB; 0 removes all.")],
) -> None:
    """Remove the least recently used parts, and files that killed processes left.

    Examples:
        wdskit cache prune /nvme/wdskit --to 100GB
    """
    from wdskit.storage.cache import prune
    from wdskit.text import parse_bytes

    try:
        num_bytes = 0 if to == "0" else parse_bytes(to)
    except ValueError:
        raise ConfigError(f"--to: {to!r} is not a size. Write 100GB, or 0.") from None
    _parts(folder)
    removed = prune(folder, num_bytes)
    freed = sum(part.num_bytes for part in removed)
    print(f"Removed {plural(len(removed), 'part')}, {format_bytes(freed)}.")


@app.command("warm", cls=Command)
def warm_command(
    config: ConfigArgument,
    pipeline: PipelineOption = None,
    overrides: OverridesOption = None,
    plugins: Plugins = None,
) -> None:
    """Fetch the shards of a pipeline into its cache folder before it runs, as many as fit into the cache.

    Examples:
        wdskit cache warm train.yaml --pipeline train
    """
    from wdskit.engine.reader import SampleReader
    from wdskit.pipeline.builder import open_pipeline

    import_plugins(plugins)
    opened = open_pipeline(config, pipeline, overrides or [], caller="cache warm")
    kept, source = None if opened.cache.dir is None else opened.cache.open(), opened.pipe.stages[0]
    if kept is None:
        raise ConfigError(f"{config}: it sets no cache folder. Add `cache: {{dir: /nvme/wdskit, size: 500GB}}`.")
    if not getattr(source, "is_planned", False):
        raise ConfigError(f"{config}: `{source.name}` does not use the cache; exact, sequential and resampled do.")
    data = source.plan()
    with show_steps() as show:
        num_fit = SampleReader(data.tables, data.parts, kept).warm(lambda done, total: show("fetching", done, total))
    num_bytes, num_shards = sum(part.num_bytes for part in _parts(kept.folder)), sum(map(len, data.tables))
    fit = "" if num_fit == num_shards else f" {num_fit} of {plural(num_shards, 'shard')} fit."
    print(f"{escape(str(kept.folder))}: {format_bytes(num_bytes)} are kept.{fit}")


def _parts(folder: Path) -> list[PartFile]:
    from wdskit.storage.cache import parts_of

    if not folder.is_dir():
        raise StorageError(f"{folder}: {describe_missing(str(folder), 'folder')}", url=str(folder))
    return list(parts_of(folder))
