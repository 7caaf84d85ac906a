"""Check that every import in wdskit/ points down, and the rules that go with the layers. `make lint` runs it.

    python tools/dev/check_layers.py [PACKAGE_FOLDER]

Prints a line `file:line: text` for each violation and exits 1 if there is one. Imports inside functions count as well:
laziness is about time, layers are about knowledge. Imports under `if TYPE_CHECKING:` count too, except in
wdskit/__init__.py, which names everything public for editors.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "wdskit"
LAYERS = [
    "testing", "cli", "page", "benchmark", "planning", "packing", "shards", "loader", "pipeline",
    "engine", "stages", "config", "order", "codecs", "dataset", "storage", "tar",
]  # fmt: skip
BASE = {"errors", "files", "limits", "native", "processes", "text"}
RANKS = {name: len(LAYERS) - place for place, name in enumerate(LAYERS)} | dict.fromkeys(BASE, 0)

# The modules of packing, highest first: each may import only modules after it. Other files of packing/ are not checked.
PACKING_STEPS = ["pack", "ray", "upload", "folder", "fill", "plan", "change_sample", "sources", "labels", "row"]

# `pipe.loader(...)` is the only method whose layer is below the code that it calls. It imports the package `wdskit`.
EXCEPTIONS = {
    ("pipeline/builder.py", "wdskit"),
    ("pipeline/builder.py", "wdskit.loader.loader"),
}

HEAVY = {"PIL", "numpy", "orjson", "pydantic", "simplejpeg", "torch", "webdataset", "yaml"}
ONLY_IN = {"PIL": "codecs", "simplejpeg": "codecs", "rich": "cli", "typer": "cli"}
IO_MODULES = {
    "asyncio", "glob", "http", "io", "mmap", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile", "urllib",
}  # fmt: skip
WRITERS = {"write_text", "write_bytes"}


@dataclass(frozen=True)
class Import:
    """One import: the module's dotted name, the line, and whether it runs at load time or is for type checkers only."""

    module: str
    line: int
    at_load: bool
    for_types: bool


def check_package(folder: Path) -> list[str]:
    """Return the violations of all files under `folder`, sorted by file and line; then those between files."""
    sources = {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    violations: list[str] = []
    for inside, source in sources.items():
        found = sorted(check_source(inside, source))
        violations += [f"{folder.name}/{inside}:{line}: {what}" for line, what in found]
    trees = {inside: ast.parse(source) for inside, source in sources.items()}
    return violations + [f"{folder.name}/{what}" for what in (*repeated_classes(trees), *circles(trees))]


def repeated_classes(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield one text for each class name that several files define."""
    places: dict[str, list[str]] = {}
    for inside, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{inside}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{found[-1]}: {found[0]} defines a class {name} too; give one of them another name"


def circles(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield one text for each two files that import each other."""
    imported: dict[str, set[str]] = {}
    for inside, tree in trees.items():
        stems = {"/".join(item.module.split(".")[1:]) for item in imports_of(tree, inside)} - {""}
        imported[inside] = {f"{stem}{end}" for stem in stems for end in (".py", "/__init__.py")}
    for inside, others in imported.items():
        for other in sorted(others):
            if inside in imported.get(other, ()) and inside < other:
                yield f"{inside}:1: it and {other} import each other"


def check_source(inside: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each violation in one file; `inside` is its path in the package: `tar/reader.py`."""
    layer = inside.split("/", maxsplit=1)[0].removesuffix(".py")
    if layer not in RANKS and inside != "__init__.py":
        yield 1, f"`{layer}` is no layer of the design"
        return
    tree = ast.parse(source, filename=inside)
    for item in imports_of(tree, inside):
        if (inside, item.module) in EXCEPTIONS:
            continue
        if what := wrong_import(layer, item) or wrong_step(inside, item):
            yield item.line, what
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (what := wrong_call(layer, node)):
            yield node.lineno, what


def imports_of(tree: ast.Module, inside: str) -> Iterator[Import]:
    """Yield every import of the file, relative ones made absolute, `from wdskit import x` as `wdskit.x`."""
    package = [PACKAGE, *inside.split("/")[:-1]]
    stack: list[tuple[ast.AST, bool, bool]] = [(tree, True, False)]
    while stack:
        node, at_load, for_types = stack.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_load, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names] if module == PACKAGE else [module]
            yield from (Import(name, node.lineno, at_load, for_types) for name in names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            stack += [(child, False, True) for child in node.body] + [(child, at_load, False) for child in node.orelse]
        else:
            deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            stack += [(child, at_load and not deferred, for_types) for child in ast.iter_child_nodes(node)]


def wrong_import(layer: str, item: Import) -> str:
    """Return what is wrong with an import made in `layer`; empty if it is allowed."""
    parts = item.module.split(".")
    if parts[0] == PACKAGE:
        return wrong_own_import(layer, item, parts)
    if layer == "__init__" and item.at_load and parts[0] not in sys.stdlib_module_names:
        return f"`import {PACKAGE}` loads the standard library only, not {parts[0]}"
    if layer in BASE and parts[0] not in sys.stdlib_module_names:
        return f"{layer}.py uses the standard library only, not {parts[0]}"
    if layer == "order" and (parts[0] in IO_MODULES or parts[0] not in {*sys.stdlib_module_names, "numpy"}):
        return f"order/ is arithmetic on numpy: no {parts[0]}"
    if parts[0] in ONLY_IN and layer != ONLY_IN[parts[0]]:
        return f"only {ONLY_IN[parts[0]]}/ imports {parts[0]}"
    if layer == "cli" and item.at_load and parts[0] in HEAVY:
        return f"cli/ imports {parts[0]} inside the function that needs it, so that --help is quick"
    return ""


def wrong_own_import(layer: str, item: Import, parts: list[str]) -> str:
    """Return what is wrong with importing a part of this package from `layer`; empty if it is allowed."""
    target = parts[1] if len(parts) > 1 else ""
    if layer == "__init__":
        return "" if item.for_types else f"`import {PACKAGE}` loads nothing of {item.module}"
    if target == "__version__":
        return ""
    if target not in RANKS:
        return f"{item.module} is not a module of a layer; import from the module where the name lives"
    if layer == "order" and target not in {"order", "errors", "limits"}:
        return f"order/ is arithmetic and imports of {PACKAGE} only errors and limits, not {target}"
    if layer != target and RANKS[target] >= RANKS[layer] and not {layer, target} <= BASE:
        return f"an import points down: {layer} is not above {target}"
    return ""


def wrong_step(inside: str, item: Import) -> str:
    """Return what is wrong with an import between two modules of packing; empty if it is allowed."""
    if not inside.startswith("packing/") or not item.module.startswith(f"{PACKAGE}.packing."):
        return ""
    own, target = inside.split("/")[1].removesuffix(".py"), item.module.split(".")[2]
    if own != target and {own, target} <= {*PACKING_STEPS} and PACKING_STEPS.index(target) < PACKING_STEPS.index(own):
        return f"an import points down: packing/{own} is not above packing/{target}"
    return ""


def wrong_call(layer: str, node: ast.Call) -> str:
    """Return what is wrong with a call made in `layer`; empty if it is allowed."""
    name = ast.unparse(node.func)
    if layer != "cli" and (name == "print" or name in {"sys.stdout.write", "sys.stderr.write"}):
        return "only cli/ prints; elsewhere log or raise"
    if layer == "order" and name == "open":
        return "order/ does no I/O"
    writes = name.rpartition(".")[2] in WRITERS or (name == "open" and opens_for_writing(node))
    if layer != "files" and writes:
        return "only files.py writes data (publish, publish_bytes)"
    return ""


def opens_for_writing(node: ast.Call) -> bool:
    """Return whether a call of the builtin `open` has a literal mode that writes."""
    modes = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    return any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes)


def main(arguments: list[str]) -> int:
    """Print the violations; return the exit code."""
    default = Path(__file__).resolve().parents[2] / PACKAGE
    violations = check_package(Path(arguments[0]) if arguments else default)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
