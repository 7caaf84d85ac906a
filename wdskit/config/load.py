"""Read a configuration, apply overrides, and check the result. One error lists the first 100 problems."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from pydantic import BaseModel

from wdskit.config.messages import Path, did_you_mean, dotted, show, unknown_setting, wrong_kind
from wdskit.config.overrides import apply_override
from wdskit.config.rules import check_order, check_patterns
from wdskit.config.spec import Stages, StageSpec, read_item, read_settings
from wdskit.config.yaml_reader import Document, read_dict, read_yaml
from wdskit.errors import ConfigError, Problem, StorageError
from wdskit.limits import MAX_CONFIG_BYTES

VERSION = 1
SINGLE = "pipeline"
"""The setting for a single pipeline, and the name of that pipeline."""

MAX_PROBLEMS = 100

_PIPELINE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_EXAMPLES = {"loader": "{workers: 4}", "errors": "{max_bad: 10}", "cache": "{dir: /nvme/wdskit, size: 500GB}"}

Stage = StageSpec | Callable[..., Any]


class Models(NamedTuple):
    """The pydantic classes that check the parts of a configuration.

    Attributes:
        stages: Maps the name of each stage to its class.
        sections: Maps `loader`, `errors` and `cache` to their classes.
    """

    stages: Stages
    sections: Mapping[str, type[BaseModel]]


class LoadedConfig(NamedTuple):
    """A configuration without problems.

    Attributes:
        pipelines: The stages of each pipeline by name. The single pipeline of `pipeline:` has the name "pipeline".
        sections: Maps `loader`, `errors` and `cache` to their checked settings.
        origin: The path of the file, for messages.
    """

    pipelines: dict[str, tuple[Stage, ...]]
    sections: dict[str, Any]
    origin: str


def load(source: object, overrides: object, models: Models) -> LoadedConfig:
    """Read and check a configuration.

    Args:
        source: The path of a YAML file, or its content as a dict. A dict is not changed and needs no `version`.
        overrides: Texts `a.b.c=VALUE`, applied in order before the checks.
        models: The models of stages and sections.

    Raises:
        ConfigError: The configuration has problems, or an argument has a wrong type. The first `MAX_PROBLEMS` problems
            are listed in the order of the file; the problems of overrides come last.
        StorageError: The file cannot be read.
    """
    if not isinstance(overrides, (list, tuple)) or not all(isinstance(text, str) for text in overrides):
        rule = wrong_kind(overrides, 'a list of texts is needed, as in ["loader.workers=4"]')
        raise ConfigError(problems=(Problem("overrides", "", rule),))
    if isinstance(source, Mapping):
        check = _ConfigChecker(read_dict(source), "config dict", models)
    elif isinstance(source, (str, os.PathLike)):
        check = _ConfigChecker(read_yaml(_read_file(source)), str(source), models)
    else:
        rule = wrong_kind(source, "the path of a YAML file is needed, or the same as a dict")
        raise ConfigError(problems=(Problem("config", "", rule),))
    return check.run(overrides)


def _read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a configuration file. If the file is too long, return `MAX_CONFIG_BYTES + 1` bytes.

    Raises:
        ConfigError: `path` has several lines: the caller passed the text of a configuration.
        StorageError: The file cannot be read.
    """
    if isinstance(path, str) and "\n" in path:
        rule = "this is text, not a path. Pass a path, or the configuration as a dict."
        raise ConfigError(problems=(Problem("load_config", "", rule),))
    try:
        with FilePath(path).open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or err
        raise StorageError(f"{path}: the configuration cannot be read: {reason}.", url=str(path)) from err


class _ConfigChecker:
    """Checks one configuration and collects its problems.

    Attributes:
        places: Maps the path of each setting to (line, place). The place is the text for messages, such as
            `train.yaml:12` or `--set loader.workers=4`. Problems are sorted by their lines.
        problems: (line, problem) for each problem so far.
    """

    def __init__(self, document: Document, origin: str, models: Models) -> None:
        self.document = document
        self.origin = origin
        self.models = models
        self.places: dict[Path, tuple[int, str]] = {(): (0, origin)}
        self.places |= {path: (line, f"{origin}:{line}") for path, line in document.lines.items()}
        self.problems: list[tuple[int, Problem]] = []

    def run(self, overrides: Sequence[str]) -> LoadedConfig:
        """Apply the overrides and return the checked configuration.

        Raises:
            ConfigError: The configuration or an override has problems; the first `MAX_PROBLEMS` are listed.
        """
        for text in overrides if self.document.tree is not None else ():
            self._override(text)
        for flaw in self.document.flaws:
            where = f"{self.origin}:{flaw.line}" if flaw.line else self.origin
            self.problems.append((flaw.line, Problem(where, dotted(flaw.path), flaw.rule)))
        is_read = self.document.tree is not None or not self.document.flaws
        loaded = self._check_tree() if is_read else None
        if loaded is not None and not self.problems:
            return loaded
        unique = sorted(dict.fromkeys(self.problems), key=itemgetter(0))
        shown = [problem for _, problem in unique[:MAX_PROBLEMS]]
        if len(unique) > len(shown):
            shown.append(Problem(self.origin, "", f"{len(unique) - len(shown)} more problems are not shown."))
        raise ConfigError(problems=tuple(shown))

    def _override(self, text: str) -> None:
        """Apply the override `text` to the tree, or collect its problems.

        Later problems of the changed setting name the override instead of a line.
        """
        place = sys.maxsize, f"--set {text if len(text) <= 200 else text[:199] + '…'}"
        path, flaws = apply_override(self.document.tree, text, self.models.stages, self.models.sections)
        self.problems += [(place[0], Problem(place[1], dotted(flaw.path), flaw.rule)) for flaw in flaws]
        if flaws:
            return
        self.places = {at: old for at, old in self.places.items() if at[: len(path)] != path} | {path: place}
        self.document.flaws = [flaw for flaw in self.document.flaws if flaw.path[: len(path)] != path]

    def _note(self, path: Path, rule: str) -> None:
        """Collect a problem of the setting at `path`, with the message `rule`.

        Do nothing if the value at `path`, a value inside it, or a mapping or list that contains it could not be read.
        """
        if any(flaw.unread and flaw.path[: len(path)] == path[: len(flaw.path)] for flaw in self.document.flaws):
            return
        near = next(path[:size] for size in range(len(path), -1, -1) if path[:size] in self.places)
        line, where = self.places[near]
        self.problems.append((line, Problem(where, dotted(path), rule)))

    def _check_tree(self) -> LoadedConfig | None:
        """Check all settings and collect their problems. The result is valid only if there are no problems.

        Return None if the tree is not a mapping.
        """
        tree = self.document.tree
        if not isinstance(tree, dict):
            self._note((), wrong_kind(tree, "a mapping with `version`, `pipelines` and `loader` is needed"))
            return None
        known = ["version", "pipeline", "pipelines", *self.models.sections]
        for name in tree:
            if name not in known:
                self._note((name,), unknown_setting(name, "A configuration", known))
        self._check_version(tree)
        pipelines = self._pipelines(tree)
        sections = {name: self._section(name, tree.get(name)) for name in self.models.sections}
        return LoadedConfig(pipelines, sections, self.origin)

    def _check_version(self, tree: dict[str, Any]) -> None:
        version = tree.get("version", VERSION)
        if "version" not in tree and self.document.lines:  # the lines are empty for a dict
            self._note((), f"`version` is missing. Write `version: {VERSION}` at the top.")
        elif isinstance(version, bool) or not isinstance(version, int):
            self._note(("version",), wrong_kind(version, "a whole number is needed"))
        elif version != VERSION:
            rule = f"this wdskit reads version {VERSION}, not {show(version)}. Use a matching wdskit."
            self._note(("version",), rule)

    def _pipelines(self, tree: dict[str, Any]) -> dict[str, tuple[Stage, ...]]:
        if "pipelines" not in tree:
            if "pipeline" in tree:
                return {SINGLE: self._stages(("pipeline",), tree["pipeline"])}
            if not any(did_you_mean(name, ["pipeline", "pipelines"]) for name in tree):
                self._note((), "there is no pipeline. Write `pipeline:` and a list of stages.")
            return {}
        if "pipeline" in tree:
            self._note(("pipeline",), "`pipeline` and `pipelines` exclude each other; move it into `pipelines`.")
        named = tree["pipelines"]
        if not isinstance(named, dict):
            hint = " Write `pipeline:` for a single one." if isinstance(named, list) else ""
            self._note(("pipelines",), wrong_kind(named, "a mapping of names to lists of stages is needed") + hint)
            return {}
        if not named:
            self._note(("pipelines",), "there is no pipeline in it. Write a name and a list of stages.")
        for name in named:
            if not _PIPELINE_NAME.fullmatch(name):
                self._note(("pipelines", name), f"{show(name)} is not a valid name; use letters, digits, _ and -.")
        return {name: self._stages(("pipelines", name), items) for name, items in named.items()}

    def _stages(self, path: Path, items: Any) -> tuple[Stage, ...]:
        if not isinstance(items, list):
            self._note(path, wrong_kind(items, "a list of stages is needed, each line starting with `- `"))
            return ()
        stages = [self._stage((*path, at), item) for at, item in enumerate(items)]
        for at, rule in check_order(stages):
            name = getattr(stages[at], "name", None) if items else None
            self._note((*path, at, name) if name else (*path, at) if items else path, rule)
        return tuple(stages)

    def _stage(self, path: Path, item: Any) -> Any:
        """Return the stage that `item` describes, and collect its problems. `path` is the place of `item` in the tree.

        Return a function unchanged. Return the class of the stage if its settings are invalid. Return None if `item`
        names no known stage.
        """
        if callable(item) and not isinstance(item, type):
            return item
        spec, flaws = read_item(self.models.stages, item)
        if spec is not None and not isinstance(item, StageSpec):
            flaws = check_patterns(spec)
        for flaw in flaws:
            self._note((*path, *flaw.path), flaw.rule)
        return spec or (self.models.stages.get(str(flaws[0].path[0])) if flaws[0].path else None)

    def _section(self, name: str, settings: Any) -> BaseModel | None:
        if settings is not None and not isinstance(settings, dict):
            self._note((name,), wrong_kind(settings, f"a mapping is needed, as in {_EXAMPLES[name]}"))
            return None
        section, flaws = read_settings(self.models.sections[name], settings or {})
        for flaw in flaws:
            self._note((name, *flaw.path), flaw.rule)
        return section
