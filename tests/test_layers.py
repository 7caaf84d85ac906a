"""tools/dev/check_layers.py finds every kind of violation, and finds no violation in wdskit."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

VIOLATIONS = [
    ("tar/a.py", "import wdskit.dataset.index", "an import points down: tar is not above dataset"),
    ("tar/a.py", "from wdskit.storage.urls import open_stream", "an import points down: tar is not above storage"),
    ("tar/a.py", "def f():\n    from wdskit.cli import main", "an import points down: tar is not above cli"),
    ("packing/plan.py", "import wdskit.packing.fill", "packing/plan is not above packing/fill"),
    ("packing/sources/a.py", "from wdskit.packing.plan import Plan", "packing/sources is not above packing/plan"),
    ("loader/a.py", "from wdskit.shards.verify import verify", "an import points down: loader is not above shards"),
    ("errors.py", "import wdskit.tar", "an import points down: errors is not above tar"),
    ("files.py", "try:\n    import numpy\nexcept ImportError:\n    pass", "files.py uses the standard library only"),
    ("tar/a.py", "from wdskit import Pipeline", "wdskit.Pipeline is not a module of a layer"),
    ("order/a.py", "import torch", "order/ is arithmetic on numpy: no torch"),
    ("order/a.py", "import numpy, os.path", "order/ is arithmetic on numpy: no os"),
    ("order/a.py", "from wdskit.files import publish", "order/ is arithmetic and imports of wdskit only"),
    ("order/a.py", "open('x')", "order/ does no I/O"),
    ("pipeline/a.py", "from PIL import Image", "only codecs/ imports PIL"),
    ("packing/a.py", "from rich.table import Table", "only cli/ imports rich"),
    ("cli/a.py", "import torch", "cli/ imports torch inside the function that needs it"),
    ("loader/a.py", "def f():\n    print('x')", "only cli/ prints"),
    ("packing/a.py", "path.write_text('x')", "only files.py writes data"),
    ("packing/a.py", "open(path, mode='r+')", "only files.py writes data"),
    ("__init__.py", "from wdskit.pipeline.builder import Pipeline", "`import wdskit` loads nothing of wdskit.pipeline"),
    ("__init__.py", "import numpy", "`import wdskit` loads the standard library only, not numpy"),
    ("helpers/a.py", "x = 1", "`helpers` is no layer of the design"),
]

ALLOWED = [
    ("cli/a.py", "def f():\n    import torch\n    from wdskit.packing.api import pack\n    print(pack)"),
    ("cli/a.py", "import typer\nfrom rich.table import Table"),
    ("packing/fill.py", "import wdskit.packing.plan"),
    ("packing/a.py", "from wdskit.shards.verify import verify\nfrom wdskit.errors import PackError"),
    ("shards/a.py", "from wdskit.loader.make import make_loader"),
    ("loader/a.py", "import torch\nfrom wdskit.pipeline.builder import Pipeline"),
    ("pipeline/a.py", "from wdskit.order.keys import philox\nfrom wdskit.stages import specs"),
    (
        "order/a.py",
        "import math, numpy as np\nfrom wdskit.order.keys import philox\nfrom wdskit.errors import WdskitError",
    ),
    ("codecs/a.py", "import simplejpeg\nfrom PIL import Image"),
    ("tar/a.py", "from . import header\nfrom .header import build\nfrom wdskit.files import Buffer\nopen(path, 'rb')"),
    ("files.py", "from wdskit.errors import StorageError\nopen(path, 'wb')"),
    ("cli/__init__.py", "from wdskit import __version__"),
    ("pipeline/builder.py", "def f():\n    import wdskit"),
    ("__init__.py", "if TYPE_CHECKING:\n    from wdskit.pipeline.builder import Pipeline"),
]


@pytest.fixture
def check(load_tool):
    return load_tool("check_layers").check_source


@pytest.mark.parametrize(("inside", "source", "what"), VIOLATIONS)
def test_a_violation_is_found(check, inside: str, source: str, what: str) -> None:
    """Each rule catches a source that breaks it, once."""
    found = list(check(inside, source))
    assert len(found) == 1
    assert what in found[0][1]


@pytest.mark.parametrize(("inside", "source"), ALLOWED)
def test_what_is_allowed_passes(check, inside: str, source: str) -> None:
    """The rules leave alone what the layers allow."""
    assert list(check(inside, source)) == []


def test_the_line_is_that_of_the_violation(check) -> None:
    """Editors jump to this line."""
    assert [line for line, _ in check("order/a.py", "import math\n\n\ndef f():\n    import torch\n")] == [5]


def test_the_command_prints_file_and_line_and_fails(tmp_path: Path, repository: Path) -> None:
    """A violation prints `file:line: text`, with exit code 1; a clean package prints nothing, with exit code 0."""
    package = tmp_path / "wdskit"
    (package / "tar").mkdir(parents=True)
    (package / "tar" / "a.py").write_text("import os\nimport wdskit.cli\nprint(os)\n")
    command = [sys.executable, str(repository / "tools" / "dev" / "check_layers.py"), str(package)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "wdskit/tar/a.py:2: an import points down: tar is not above cli",
        "wdskit/tar/a.py:3: only cli/ prints; elsewhere log or raise",
    ]
    (package / "tar" / "a.py").write_text("import os\n")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


BETWEEN_FILES = {
    "a class twice": (
        {"tar/a.py": "class One: ...", "shards/b.py": "x = 1\n\nclass One: ..."},
        ["wdskit/tar/a.py:1: shards/b.py:3 defines a class One too; give one of them another name"],
    ),
    "a circle": (
        {"tar/a.py": "import wdskit.tar.b", "tar/b.py": "def f():\n    from wdskit.tar.a import x"},
        ["wdskit/tar/a.py:1: it and tar/b.py import each other"],
    ),
    "a circle with a package": (
        {"tar/__init__.py": "from wdskit.tar.a import x", "tar/a.py": "from wdskit.tar import y"},
        ["wdskit/tar/__init__.py:1: it and tar/a.py import each other"],
    ),
    "none": ({"tar/a.py": "class One: ...", "tar/b.py": "import wdskit.tar.a"}, []),
}


@pytest.mark.parametrize("case", BETWEEN_FILES)
def test_rules_between_files(load_tool, tmp_path, case) -> None:
    files, expected = BETWEEN_FILES[case]
    tool = load_tool("check_layers")
    for inside, source in files.items():
        path = tmp_path / "wdskit" / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert tool.check_package(tmp_path / "wdskit") == expected


def test_an_exception_is_for_one_import_of_one_file(load_tool, repository: Path) -> None:
    """Each exception is still needed, and allows no other import."""
    tool = load_tool("check_layers")
    for inside, module in tool.EXCEPTIONS:
        tree = ast.parse((repository / "wdskit" / inside).read_text())
        assert module in {item.module for item in tool.imports_of(tree, inside)}
        assert list(tool.check_source("pipeline/other.py", f"import {module}"))
    assert list(tool.check_source("pipeline/builder.py", "import wdskit.loader.make"))


def test_wdskit_keeps_its_layers(load_tool, repository: Path) -> None:
    """The current package has no violation."""
    assert load_tool("check_layers").check_package(repository / "wdskit") == []
