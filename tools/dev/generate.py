"""Write the generated files: the stub of `Pipeline`, the schema of configurations, reference pages and pictures.

    python tools/dev/generate.py [--check]

With `--check` nothing is written, and the exit code is 1 if a file differs from what would be written.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

import wdskit
from wdskit import _PUBLIC as PUBLIC
from wdskit.config.types import StageSpec
from wdskit.loader.make import make_loader
from wdskit.pipeline.settings import LoaderSpec
from wdskit.stages.registry import STAGES

ROOT = Path(__file__).parents[2]

HEAD = """# `tools/dev/generate.py` writes this file from builder.py and the settings of the stages.

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias

from typing_extensions import Self

from wdskit.engine.program import Program
from wdskit.engine.stream import StreamPipeline
from wdskit.loader.loader import Loader
from wdskit.pipeline.settings import Config

Shards: TypeAlias = str | PathLike[str] | Sequence[str | PathLike[str]]
Function: TypeAlias = str | Callable[..., Any]
Size: TypeAlias = int | Sequence[int]
Fields: TypeAlias = str | Sequence[str]
"""

# Maps types of settings to types in a signature.
TYPES = {
    "FieldChoices": "Fields", "FieldNames": "Fields", "FieldName": "str", "Alternatives": "str", "Count": "int",
    "LaneCount": "int",
    "Natural": "int", "Cluster": "str", "Device": "str", "Timeout": "float", "Few": "int", "Workers": "int",
    "Number": "float", "Positive": "float", "Bool": "bool", "Text": "str", "Range": "Sequence[float]",
    "ShareRange": "Sequence[float]", "Channels": "Sequence[float]", "PositiveChannels": "Sequence[float]",
    "Weights": "Sequence[float]", "Bounds": "Sequence[int | str]", "Condition": "str",
    "Times": "Mapping[str, Any]", "Shapes": "Sequence[Sequence[int]]", "Edges": "Sequence[int]",
    "NumberOrNames": "int | Fields",
    "Transforms": "Sequence[Any]", "FieldKinds": "Mapping[str, Any]", "ImageSpec": "str",
    "Classes": 'Literal["same", "any"]', "Functions": "Sequence[Function | None]",
    "tuple[MixturePart, ...]": "Sequence[Mapping[str, Any]]", "Probability": "float",
}  # fmt: skip


# Maps types in a signature to words in docs/stages.md.
PLAIN_TYPES = {
    "Shards": "text or list", "Fields": "name or list", "Size": "number or [height, width]",
    "Function": "function or name",
    "Sequence[Mapping[str, Any]]": "list of mappings", "Sequence[float]": "list of numbers", "str": "text",
    "Mapping[str, Any]": "mapping", "Sequence[int]": "list of whole numbers", "Sequence[Any]": "list",
    "Sequence[Sequence[int]]": "list of [height, width]",
    "Sequence[int | str]": "[first, stop]",
    "dict[str, Function]": "mapping", "dict[str, str]": "mapping",
    "Sequence[Function | None]": "list of functions", "int": "whole number", "float": "number", "bool": "true or false",
}  # fmt: skip


SETTING_TYPES = {
    name: TYPES.get(kind.removesuffix(" | None"), kind.removesuffix(" | None"))
    for name, kind in inspect.get_annotations(LoaderSpec).items()
    if name in LoaderSpec.model_fields
}
"""The types of the settings `loader` in a signature."""

_ARGUMENT = re.compile(r"^    (\w+): (.*?)(?=^    \w|\Z)", re.MULTILINE | re.DOTALL)


def annotation_of(stage: type[StageSpec], name: str) -> str:
    """Return the type of a setting for a signature."""
    owner = next(cls for cls in stage.__mro__ if name in inspect.get_annotations(cls))
    text: str = inspect.get_annotations(owner)[name]
    text = re.sub(r"^Annotated\[(.*), (?:Strict|Field)\(.*\]$", r"\1", text).removesuffix(", Strict()")
    for word, meant in TYPES.items():
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", meant, text)
    return text


def parameter(stage: type[StageSpec], name: str, info: FieldInfo) -> str:
    """Return a parameter of a signature: `size: int`, or `initial: int | None = None`."""
    text = f"{name}: {annotation_of(stage, name)}"
    return text if info.is_required() else f"{text} = {info.default!r}"


def stage_method(name: str, stage: type[StageSpec]) -> str:
    """Return the source of the method that adds a stage."""
    fields = stage.model_fields
    first = stage.shorthand
    text = inspect.getdoc(stage) or ""
    if stage.is_mapping or stage.is_starred:
        assert first is not None
        inner = re.sub(r"^(?:dict|Sequence)\[(?:\w+, )?(.*)\]$", r"\1", annotation_of(stage, first))
        inner = inner.replace("Fields", "str")
        signature = f"self, /, **{first}: {inner}" if stage.is_mapping else f"self, *{stage.is_starred}: {inner}"
        shown = f"**{first}" if stage.is_mapping else f"*{stage.is_starred}"
        arguments = {shown: fields[first].description or ""}
    else:
        ordered = sorted(fields, key=lambda each: each != first)
        parameters = [parameter(stage, each, fields[each]) for each in ordered]
        if first in fields:
            parameters.insert(1, "*")
        elif parameters:
            parameters.insert(0, "*")
        if parameters[-1:] == ["*"]:
            parameters.pop()
        signature = ", ".join(["self", *parameters])
        signature += "," if len(signature) > 70 else ""
        arguments = {each: fields[each].description or "" for each in ordered}
    return method(name, signature, "Self", docstring(text, arguments))


def docstring(text: str, arguments: dict[str, str]) -> str:
    """Return the text, followed by a line for each argument."""
    if not arguments:
        return text
    lines = [textwrap.fill(f"{name}: {about}", 108, subsequent_indent="    ") for name, about in arguments.items()]
    return f"{text}\n\nArgs:\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def method(name: str, signature: str, returns: str, text: str) -> str:
    """Return the signature of a method, with its docstring."""
    return f'def {name}({signature}) -> {returns}:\n    """' + textwrap.indent(text, "    ").lstrip() + '"""\n'


def loader_method() -> str:
    """Return the signature of `loader`: the arguments of `make_loader` but `pipeline` and `overrides`, and all settings
    `loader` of a configuration.
    """
    source = inspect.getsource(make_loader)
    lines = source[source.index("    *,\n") : source.index("    **loader")].splitlines(keepends=True)
    arguments = [line for line in lines if not line.strip().startswith(("pipeline:", "overrides:"))]
    arguments += [f"    {name}: {SETTING_TYPES[name]} | None = None,\n" for name in LoaderSpec.model_fields]
    whole = inspect.getdoc(make_loader) or ""
    start, stop = whole.index("    transforms:"), whole.index("    loader:")
    about = {name: re.sub(r"\s+", " ", text).strip() for name, text in _ARGUMENT.findall(whole[start:stop])}
    about |= {name: field.description or "" for name, field in LoaderSpec.model_fields.items()}
    text = docstring("Make the loader of this pipeline for this rank: `wdskit.make_loader(self, ...)`.", about)
    return method("loader", "self,\n" + "".join(arguments), "Loader", text)


def builder_stub() -> str:
    """Return wdskit/pipeline/builder.pyi: the public names of builder.py, and a method for each stage."""
    methods = "\n".join([*(stage_method(name, stage) for name, stage in STAGES.items()), loader_method()])
    tree = ast.parse((ROOT / "wdskit/pipeline/builder.py").read_text())
    parts = [HEAD]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            is_pipeline = node.name == "Pipeline"
            for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(inner, ast.FunctionDef):
                    inner.body = inner.body[:1] if ast.get_docstring(inner) else [ast.Expr(ast.Constant(...))]
            if is_pipeline:
                hidden = ("loader", "__repr__")
                node.body = [each for each in node.body if getattr(each, "name", "") not in hidden]
                node.body.insert(1, ast.parse("stages: tuple[Any, ...]").body[0])
            parts.append(ast.unparse(node) + ("\n" + textwrap.indent(methods, "    ") if is_pipeline else ""))
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "builder.pyi", "-"]
    source = "\n".join(parts)
    return subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=True).stdout


STAGES_HEAD = """# Stages

A pipeline is a list of stages: first a source, then stages that process its samples. A stage has the same name and
settings in YAML and as a method of `wdskit.Pipeline`. `tools/dev/generate.py` writes this page from the stages.
"""


def stages_page() -> str:
    """Return docs/stages.md."""
    rows = [f"| [`{name}`](#{name}) | `- {example(stage)}` | {summary(stage)} |" for name, stage in STAGES.items()]
    table = "\n".join(["| Stage | In YAML | What it does |", "|---|---|---|", *rows])
    return "\n".join([STAGES_HEAD, table, "", *map(stage_section, STAGES.values())])


def summary(stage: type[StageSpec]) -> str:
    """Return the first paragraph of a stage's docstring on one line."""
    return " ".join((inspect.getdoc(stage) or "").partition("\n\n")[0].split())


def example(stage: type[StageSpec]) -> str:
    """Return a stage as YAML, with the examples of its required settings, or else of its shorthand."""
    fields = stage.model_fields
    needed = [name for name, info in fields.items() if info.is_required()]
    if not needed and stage.shorthand is not None and fields[stage.shorthand].examples:
        needed = [stage.shorthand]
    settings = stage.example or {name: (fields[name].examples or [None])[0] for name in needed}
    written: Any = stage.name
    if settings:
        short = list(settings) == [stage.shorthand]
        written = {stage.name: next(iter(settings.values())) if short else settings}
    text: str = yaml.safe_dump(written, default_flow_style=True, width=1000, sort_keys=False)
    text = text.removesuffix("...\n").strip()
    return text[1:-1] if settings else text


def stage_section(stage: type[StageSpec]) -> str:
    """Return the section of a stage: its docstring and a table of its settings."""
    lines = [f"## {stage.name}", "", inspect.getdoc(stage) or "", ""]
    if stage.model_fields:
        lines += ["| Setting | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, info in stage.model_fields.items():
        kind = plain_type(annotation_of(stage, name))
        default = "" if info.is_required() else f"`{json.dumps(info.default)}`"
        lines.append(f"| `{info.alias or name}` | {kind} | {default} | {info.description or ''} |")
    return "\n".join([*lines, ""]) if stage.model_fields else "\n".join(lines)


def plain_type(text: str) -> str:
    """Return a type of a signature in words, without None: the default shows None."""
    text = re.sub(r" \| None$", "", text)
    if text in PLAIN_TYPES:
        return PLAIN_TYPES[text]
    text = re.sub(
        r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " or ").replace("'", "").replace('"', ""), text
    )
    return " or ".join(PLAIN_TYPES.get(each, each) for each in text.split(" | "))


def schema() -> str:
    """Return the JSON schema of configuration files: in the package, and for editors under docs/."""
    import config_schema  # next to this script, and found only when it runs

    return json.dumps(config_schema.json_schema(STAGES), indent=2, ensure_ascii=False) + "\n"


def package_stub() -> str:
    """Return wdskit/__init__.pyi: imports for type checkers, which do not see names that are loaded on access."""
    lines = [f"from wdskit.{module} import {name} as {name}\n" for module, names in PUBLIC.items() for name in names]
    names = "".join(f'    "{name}",\n' for name in wdskit.__all__)
    head = "# `tools/dev/generate.py` writes this file from `_PUBLIC`.\n\n"
    more = "__version__: str\n_PUBLIC: dict[str, tuple[str, ...]]\n_HOMES: dict[str, str]\n"
    return f"{head}{''.join(lines)}\n__all__ = [\n{names}]\n\n{more}"


FILES: dict[str, Callable[[], str]] = {
    "wdskit/__init__.pyi": package_stub,
    "wdskit/pipeline/builder.pyi": builder_stub,
    "docs/stages.md": stages_page,
    "docs/wdskit.schema.json": schema,
    "wdskit/pipeline/wdskit.schema.json": schema,
}


def main(arguments: list[str]) -> int:
    """Write the files, or compare them with `--check`. Returns the exit code."""
    import pictures  # next to this script, and found only when it runs
    import reference

    made = {name: make() for name, make in {**FILES, **reference.PAGES, **pictures.PICTURES}.items()}
    stale = [name for name, text in made.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    for name in stale:
        if "--check" in arguments:
            print(f"{name}: not what the source says. Run python tools/dev/generate.py.")
        else:
            (ROOT / name).parent.mkdir(exist_ok=True)
            (ROOT / name).write_text(made[name])
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
