"""The package itself: the modules that `import wdskit` loads, and its public names."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import wdskit


def modules_after(statement: str) -> list[str]:
    """Return the modules that `statement` loads in a new Python."""
    after = "import json; print(json.dumps(sorted(set(sys.modules) - idle)))"
    code = f"import sys; idle = set(sys.modules); {statement}; {after}"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_import_loads_the_standard_library_only() -> None:
    """`import wdskit` loads no other package, and none of its own modules."""
    loaded = modules_after("import wdskit")
    foreign = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"wdskit"}
    assert not foreign
    assert [name for name in loaded if name.startswith("wdskit")] == ["wdskit"]


@pytest.mark.parametrize("name", wdskit.__all__)
def test_every_public_name_exists(name: str) -> None:
    value = getattr(wdskit, name)
    assert name == "__version__" or value.__module__.startswith("wdskit.")


def test_editors_see_the_lazy_names() -> None:
    """The stub imports each lazy name from the module that defines it."""
    tree = ast.parse(Path(wdskit.__file__).with_suffix(".pyi").read_text())
    seen = {
        alias.name: statement.module
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == wdskit._HOMES


def test_no_public_name_is_the_name_of_a_package() -> None:
    folder = Path(wdskit.__file__).parent
    parts = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
    assert not parts & set(wdskit.__all__)


def test_every_public_error_is_a_wdskit_error() -> None:
    errors = [name for name in wdskit.__all__ if name.endswith("Error")]
    assert len(errors) >= 12
    assert all(issubclass(getattr(wdskit, name), wdskit.WdskitError) for name in errors)
