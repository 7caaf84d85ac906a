"""`wdskit.load_config`: configurations, checked against the models of all stages and of the loader."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wdskit.config import export
from wdskit.config.load import Models, Stage, load
from wdskit.config.messages import did_you_mean, listing, show
from wdskit.errors import ConfigError, Problem
from wdskit.pipeline.loader_specs import ErrorsSpec, LoaderSpec
from wdskit.stages.fields import user_stage
from wdskit.stages.registry import registered_names
from wdskit.stages.specs import STAGES


def models(functions: Iterable[str] = ()) -> Models:
    """What configurations are checked against: wdskit's stages, what is registered, and these functions by name."""
    own = {name: user_stage(name) for name in (*registered_names(), *functions) if name not in STAGES}
    return Models({**STAGES, **own}, {"loader": LoaderSpec, "errors": ErrorsSpec})


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

    def to_yaml(self) -> str:
        """The configuration as YAML text that reads back as the same: defaults left out, shorthands where possible.

        Raises:
            ConfigError: It holds functions, which YAML can only name.
        """
        sections = {"loader": self.loader, "errors": self.errors}
        changed = {name: section.model_dump(exclude_defaults=True) for name, section in sections.items()}
        return export.to_yaml(self.pipelines, changed, self.origin)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any], *, overrides: Sequence[str] = (), functions: Iterable[str] = ()
) -> Config:
    """Read and check a configuration.

    Args:
        source: A YAML file, or the same as a dict. In a dict functions may stand where names do, a callable or a spec
            may be an item of a pipeline, and `version` may be left out.
        overrides: `a.b.c=VALUE` each, applied in order before anything is checked. VALUE is YAML; a list's item is
            named by its position, or a stage by its name where it stands once: `pipelines.train.stream.seed=3`.
        functions: Names that may stand for stages, besides wdskit's and those that are registered.

    Raises:
        ConfigError: It has problems; all of them are listed.
        StorageError: The file cannot be read.
    """
    pipelines, sections, origin = load(source, overrides, models(functions))
    return Config(pipelines, sections["loader"], sections["errors"], origin)


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of configuration files, for editors.

    It knows names, kinds and ranges; `wdskit config check` knows the order of stages too.
    """
    return export.json_schema(models())
