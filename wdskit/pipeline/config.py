"""A configuration: read, overridden, checked, with every problem told at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import BaseModel

from wdskit.dataset.braces import expand_parts
from wdskit.errors import ConfigError, Problem, StorageError
from wdskit.limits import MAX_CONFIG_BYTES
from wdskit.pipeline.document import read_document
from wdskit.pipeline.loader_specs import ErrorsSpec, LoaderSpec
from wdskit.pipeline.overrides import Override
from wdskit.pipeline.parsing import read_settings, read_stage, unknown_setting, unknown_stage
from wdskit.pipeline.plain import plain_tree
from wdskit.pipeline.problems import Flaw, Path, describe, did_you_mean, dotted, listing, show, wrong_kind
from wdskit.pipeline.rules import check_order
from wdskit.pipeline.spec_types import StageSpec
from wdskit.pipeline.specs import STAGES

VERSION = 1
SINGLE = "pipeline"
"""Name of the one pipeline that `pipeline:` holds."""

MAX_PROBLEMS = 100

_SETTINGS = ["version", "pipeline", "pipelines", "loader", "errors"]
_PIPELINE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

Stage = StageSpec | Callable[..., Any]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Config:
    """A checked configuration.

    Attributes:
        pipelines: Stages by pipeline name; what `pipeline:` holds is called "pipeline".
        loader: How they are run.
        errors: What becomes of bad samples.
        origin: Where it came from, for messages.
    """

    pipelines: Mapping[str, tuple[Stage, ...]]
    loader: LoaderSpec
    errors: ErrorsSpec = field(default_factory=ErrorsSpec)
    origin: str = field(default="", compare=False)

    def pipeline(self, name: str | None = None) -> tuple[Stage, ...]:
        """The stages of one pipeline. `name` may be left out where there is only one.

        Raises:
            ConfigError: It is needed, or there is none of this name.
        """
        names = list(self.pipelines)
        if name is None and len(names) == 1:
            return self.pipelines[names[0]]
        if name is None:
            rule = f"there are {len(names)} pipelines; say which: {listing(names)}."
        elif name in self.pipelines:
            return self.pipelines[name]
        else:
            near = did_you_mean(name, names) if type(name) is str else ""
            rule = f"there is no pipeline {show(name)}.{near or f' It has {listing(names)}.'}"
        raise ConfigError(problems=(Problem(self.origin, "", rule),))


def load_config(source: str | os.PathLike[str] | Mapping[str, Any], *, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration.

    Args:
        source: A YAML file, or the same as a dict. In a dict functions may stand where names do, a callable or a spec
            may be an item of a pipeline, and `version` may be left out.
        overrides: `a.b.c=VALUE` each, applied in order before anything is checked. VALUE is YAML; a list's item is
            named by its position, or a stage by its name where it stands once: `pipelines.train.stream.seed=3`.

    Raises:
        ConfigError: It has problems; all of them are listed.
        StorageError: The file cannot be read.
    """
    _check_arguments(source, overrides)
    check = _Check.of_mapping(source) if isinstance(source, Mapping) else _Check.of_file(source)
    if check.complete:
        for override in overrides:
            check.override(override)
        config = check.config()
        if config is not None and not check.problems:
            return config
    raise ConfigError(problems=check.told())


def pattern_rules(spec: Any) -> list[tuple[Path, str]]:
    """What can never name shards in a source's settings: places and rules. Nothing is looked for."""
    named: dict[Path, Any] = {(): getattr(spec, "shards", None)}
    named |= {("mixture", at): part.shards for at, part in enumerate(getattr(spec, "mixture", None) or ())}
    found: list[tuple[Path, str]] = []
    for path, shards in named.items():
        for text in [shards] if isinstance(shards, str) else shards or ():
            try:
                expand_parts(text)
            except StorageError as err:
                found.append(((*path, "shards"), " ".join(str(err).split())))
    return found


def _check_arguments(source: object, overrides: object) -> None:
    """Refuse what is no configuration and no list of overrides."""
    if not isinstance(source, (str, os.PathLike, Mapping)):
        rule = wrong_kind(source, "the path of a YAML file is needed, or the same as a dict")
        raise ConfigError(problems=(Problem("config", "", rule),))
    if not isinstance(overrides, (list, tuple)) or not all(isinstance(text, str) for text in overrides):
        rule = wrong_kind(overrides, 'a list of texts is needed, as in ["loader.workers=4"]')
        raise ConfigError(problems=(Problem("overrides", "", rule),))


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a configuration file, one more than allowed where it is too long.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        with FilePath(path).open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or err
        raise StorageError(f"{path}: the configuration cannot be read: {reason}.", url=str(path)) from err


class _Check:
    """Collects the problems of one configuration."""

    def __init__(self, tree: Any, origin: str, places: dict[Path, str]) -> None:
        self.tree = tree
        self.origin = origin
        self.places = places
        self.problems: list[Problem] = []
        self.spoiled: set[Path] = set()
        self.complete = True
        self.needs_version = True

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> _Check:
        """The configuration in a YAML file."""
        if isinstance(path, str) and "\n" in path:
            rule = "this is text, not a path. Pass a path, or the configuration as a dict."
            raise ConfigError(problems=(Problem("load_config", "", rule),))
        document = read_document(read_file(path))
        check = cls(document.tree, str(path), {at: f"{path}:{line}" for at, line in document.lines.items()})
        check.problems = [Problem(f"{path}:{line}", dotted(at), rule) for line, at, rule in document.faults]
        check.spoiled, check.complete = document.spoiled, document.complete
        return check

    @classmethod
    def of_mapping(cls, source: Mapping[str, Any]) -> _Check:
        """The configuration in a dict, which is left as it is."""
        origin = "config dict"
        tree, flaws = plain_tree(source)
        check = cls(tree, origin, {(): origin})
        check.problems = [Problem(origin, dotted(at), rule) for at, rule in flaws]
        check.complete, check.needs_version = not flaws, False
        return check

    def override(self, text: str) -> None:
        """Change one setting; from then on its problems carry the override's name."""
        override = Override(text)
        found = override.apply(self.tree)
        self.problems += found
        if found:
            return
        path = override.path
        self.places = {at: place for at, place in self.places.items() if at[: len(path)] != path}
        self.places[path] = override.where
        mended = {at for at in self.spoiled if at[: len(path)] == path}
        self.spoiled -= mended
        self.problems = [problem for problem in self.problems if problem.path not in set(map(dotted, mended))]

    def told(self) -> tuple[Problem, ...]:
        """The problems in the order of the file, those of overrides last."""
        unique = sorted(dict.fromkeys(self.problems), key=lambda problem: self._line(problem.where))
        shown = unique[:MAX_PROBLEMS]
        if len(unique) > len(shown):
            shown.append(Problem(self.origin, "", f"{len(unique) - len(shown)} more problems are not shown."))
        return tuple(shown)

    def config(self) -> Config | None:
        """The configuration, or None where there are problems."""
        if not isinstance(self.tree, dict):
            self._note((), wrong_kind(self.tree, "a mapping with `version`, `pipelines` and `loader` is needed"))
            return None
        for name in self.tree:
            if name not in _SETTINGS:
                self._note((name,), unknown_setting(name, "A configuration", _SETTINGS))
        self._check_version()
        pipelines = self._pipelines()
        loader = self._settings("loader", LoaderSpec, "{workers: 4}")
        errors = self._settings("errors", ErrorsSpec, "{max_bad: 10}")
        return None if loader is None or errors is None else Config(pipelines, loader, errors, self.origin)

    def _line(self, where: str) -> int:
        line = where.rpartition(":")[2]
        return int(line) if where.startswith(f"{self.origin}:") and line.isdigit() else 1 << 30

    def _note(self, path: Path, rule: str) -> None:
        """Note a problem, unless the value there, or a part of it, is a stand-in for one that was told."""
        if any(path[: len(at)] == at or at[: len(path)] == path for at in self.spoiled):
            return
        near = next(path[:size] for size in range(len(path), -1, -1) if path[:size] in self.places or not size)
        self.problems.append(Problem(self.places.get(near, self.origin), dotted(path), rule))

    def _check_version(self) -> None:
        version = self.tree.get("version")
        if "version" not in self.tree:
            if self.needs_version:
                self._note((), f"`version` is missing. Write `version: {VERSION}` at the top.")
        elif isinstance(version, bool) or not isinstance(version, int):
            self._note(("version",), wrong_kind(version, "a whole number is needed"))
        elif version != VERSION:
            self._note(
                ("version",), f"this wdskit reads version {VERSION}, not {show(version)}. Use a matching wdskit."
            )

    def _pipelines(self) -> dict[str, tuple[Stage, ...]]:
        if "pipeline" in self.tree and "pipelines" in self.tree:
            self._note(("pipeline",), "`pipeline` and `pipelines` exclude each other; move it into `pipelines`.")
        if "pipelines" not in self.tree:
            if "pipeline" in self.tree:
                return {SINGLE: self._stages(("pipeline",), self.tree["pipeline"])}
            if not any(did_you_mean(name, ["pipeline", "pipelines"]) for name in self.tree):
                self._note((), "there is no pipeline. Write `pipeline:` and a list of stages.")
            return {}
        named = self.tree["pipelines"]
        if not isinstance(named, dict):
            hint = " Write `pipeline:` for a single one." if isinstance(named, list) else ""
            self._note(("pipelines",), wrong_kind(named, "a mapping of names to lists of stages is needed") + hint)
            return {}
        if not named:
            self._note(("pipelines",), "there is no pipeline in it. Write a name and a list of stages.")
        for name in named:
            if not _PIPELINE_NAME.fullmatch(name):
                self._note(("pipelines", name), f"{show(name)} is no name; use letters, digits, _ and -.")
        return {name: self._stages(("pipelines", name), items) for name, items in named.items()}

    def _stages(self, path: Path, items: Any) -> tuple[Stage, ...]:
        if not isinstance(items, list):
            self._note(path, wrong_kind(items, "a list of stages is needed, each line starting with `- `"))
            return ()
        read = [self._stage((*path, index), item) for index, item in enumerate(items)]
        for index, rule in check_order([known for _, known in read]):
            name = getattr(read[index][1], "name", None) if read else None
            self._note((*path, index, name) if name else (*path, index) if items else path, rule)
        return tuple(stage for stage, _ in read if stage is not None)

    def _stage(self, path: Path, item: Any) -> tuple[Stage | None, Any]:
        """A stage (None where it has problems), and what the order can know of it."""
        if isinstance(item, StageSpec) or (callable(item) and not isinstance(item, type)):
            return item, item
        if isinstance(item, dict) and len(item) == 1:
            name, value = next(iter(item.items()))
        elif isinstance(item, str):
            name, value = item, None
        else:
            self._note(path, self._no_stage(item))
            return None, None
        if name not in STAGES:
            self._note(path, unknown_stage(name))
            return None, None
        spec, flaws = read_stage(STAGES[name], value)
        if spec is not None:
            flaws = [Flaw(at, rule) for at, rule in pattern_rules(spec)]
        for flaw in flaws:
            self._note((*path, name, *flaw.path), flaw.rule)
        return spec, spec or STAGES[name]

    @staticmethod
    def _no_stage(item: Any) -> str:
        if isinstance(item, dict) and item:
            near = [name for name in item if name in STAGES]
            hint = " Indent its settings further than its name." if len(near) == 1 else " Write `- ` before each stage."
            return f"a stage is one name, but {listing(list(item)[:5])} stand together.{hint}"
        return f"{describe(item)}; a stage is needed, as in `- shuffle: 200` or `- split_by_node`."

    def _settings(self, name: str, model: type[Model], example: str) -> Model | None:
        settings = self.tree.get(name)
        if settings is not None and not isinstance(settings, dict):
            self._note((name,), wrong_kind(settings, f"a mapping is needed, as in {example}"))
            return None
        read, flaws = read_settings(model, settings or {})
        for flaw in flaws:
            self._note((name, *flaw.path), flaw.rule)
        return read
