"""`wdskit config`: check a configuration, show all of its settings, print the JSON schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wdskit.cli.console import escape, print_error
from wdskit.cli.options import Command, ConfigArgument, OverridesOption, Plugins, import_plugins
from wdskit.errors import StorageError
from wdskit.text import hide_secrets

if TYPE_CHECKING:
    from wdskit.pipeline.settings import Config

app = typer.Typer(help="Check and show configuration files.", no_args_is_help=True)


@app.command(cls=Command)
def check(config: ConfigArgument, overrides: OverridesOption = None, plugins: Plugins = None) -> None:
    """Print the problems of CONFIG, one per line; if it has none, its pipelines. Python: wdskit.load_config.

    Opens no shards. The classes.json files of local folders are compared: pipelines of one CONFIG must number classes
    alike.

    Exit code: 0 without problems, 1 with problems, 2 if CONFIG or a plugin cannot be read.

    Examples:
        wdskit config check configs/imagenet.yaml
        wdskit config check train.yaml --set loader.workers=4 --plugin my_stages
    """
    from wdskit.pipeline.class_check import check_pipelines

    import_plugins(plugins)
    loaded = _load(config, overrides)
    check_pipelines(loaded.pipelines.values())
    print(f"{escape(str(config))}: ok")
    for name, stages in loaded.pipelines.items():
        names = " -> ".join(getattr(stage, "name", "?") for stage in stages)
        print(f"{name}: {names}")
    unknown = _unregistered(loaded)
    if unknown:
        print(f"Note: not registered here: {', '.join(unknown)}. Name the module that registers them with --plugin.")


@app.command(cls=Command)
def show(config: ConfigArgument, overrides: OverridesOption = None, plugins: Plugins = None) -> None:
    """Print CONFIG with variables and --set filled in.

    The output loads as the same pipelines. The query of a URL, which may be a signature, is left out.

    Exit code: 0 without problems, 1 with problems, 2 if CONFIG or a plugin cannot be read.

    Examples:
        wdskit config show configs/imagenet.yaml --set loader.workers=4
    """
    import_plugins(plugins)
    sys.stdout.write(hide_secrets(_load(config, overrides).to_yaml()))


@app.command(cls=Command)
def schema() -> None:
    """Print the JSON schema of configuration files, for editors. Python: wdskit.pipeline.settings.json_schema.

    Examples:
        wdskit config schema > wdskit.schema.json
    """
    from wdskit.pipeline.settings import json_schema

    print(json.dumps(json_schema(), indent=2))


def _load(file: Path, overrides: list[str] | None) -> Config:
    """Return the configuration in `file` with the overrides.

    Raises:
        ConfigError: The configuration has problems; all are listed.
        typer.Exit: With code 2 if the file cannot be read. The error is printed.
    """
    from wdskit.pipeline.settings import load_config

    try:
        return load_config(file, overrides=overrides or [])
    except StorageError as err:
        print_error(err)
        raise typer.Exit(2) from err


def _unregistered(config: Config) -> list[str]:
    """Return the names of functions that pipelines call but that are not registered: each once, in the file's order."""
    from wdskit.stages.registry import registered_names

    called: list[Any] = []
    for stage in (stage for stages in config.pipelines.values() for stage in stages):
        called += [getattr(stage, "fn", None), getattr(stage, "collate", None), *getattr(stage, "fns", ())]
        if getattr(stage, "name", "") == "map_dict":
            called += getattr(stage, "fields", {}).values()
    names = dict.fromkeys(name for name in called if isinstance(name, str))
    return [name for name in names if name not in registered_names()]
