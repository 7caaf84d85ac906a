"""A configuration as YAML: only what is not the default, shorthands where possible, and it reads back as the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from wdskit.errors import ConfigError, Problem
from wdskit.pipeline.config import SINGLE, VERSION, Config, Stage
from wdskit.pipeline.scalars import ScalarError, type_plain
from wdskit.pipeline.spec_types import StageSpec

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")


def config_to_yaml(config: Config) -> str:
    """The configuration as YAML text.

    Raises:
        ConfigError: It holds functions, which YAML can only name.
    """
    lines = [f"version: {VERSION}"]
    single = list(config.pipelines) == [SINGLE]
    if not single:
        lines.append("pipelines:")
    for name, stages in config.pipelines.items():
        lines.append(f"{'' if single else '  '}{_scalar(name)}:")
        lines += [f"{'  ' if single else '    '}- {_stage(stage, config.origin)}" for stage in stages]
    for name, spec in (("loader", config.loader), ("errors", config.errors)):
        settings = spec.model_dump(exclude_defaults=True)
        if settings:
            lines.append(f"{name}: {_value(settings, config.origin)}")
    return "\n".join(lines) + "\n"


def settings_to_yaml(name: str, settings: Mapping[str, Any]) -> str:
    """Settings that stand under one name, on one line: `loader: {workers: 1, threads: 4}`."""
    return f"{name}: {_value(settings, name)}"


def _stage(stage: Stage, origin: str) -> str:
    if not isinstance(stage, StageSpec):
        raise _has_function(origin)
    value = stage.shorten()
    return stage.name if value is None else f"{stage.name}: {_value(value, origin)}"


def _value(value: Any, origin: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)}: {_value(item, origin)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item, origin) for item in value) + "]"
    if value is not None and not isinstance(value, (str, int, float)):
        raise _has_function(origin)
    return _scalar(value)


def _key(name: str) -> str:
    return _scalar(str(name)).replace("$$", "$")  # variables are not filled into names


def _scalar(value: str | float | None) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str):
        return repr(value)
    text = value.replace("$", "$$")
    return text if _PLAIN.fullmatch(text) and _stays_text(text) else json.dumps(text, ensure_ascii=False)


def _stays_text(text: str) -> bool:
    try:
        return isinstance(type_plain(text), str)
    except ScalarError:
        return False


def _has_function(origin: str) -> ConfigError:
    rule = "it holds a function, which YAML can only name. Register it and use the name."
    return ConfigError(problems=(Problem(origin, "", rule),))
