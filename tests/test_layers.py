"""tools/dev/check_layers.py finds every kind of violation. `make lint` runs it on wdskit."""

from __future__ import annotations

import pytest

VIOLATIONS = [
    ("tar/a.py", "import wdskit.dataset.index", "an import points down: tar is not above dataset"),
    ("tar/a.py", "def f():\n    from wdskit.cli import main", "an import points down: tar is not above cli"),
    ("packing/plan.py", "import wdskit.packing.fill", "packing/plan is not above packing/fill"),
    ("packing/sources/a.py", "from wdskit.packing.plan import Plan", "packing/sources is not above packing/plan"),
    ("files.py", "try:\n    import numpy\nexcept ImportError:\n    pass", "files.py uses the standard library only"),
    ("order/a.py", "import torch", "order/ is arithmetic on numpy: no torch"),
    ("order/a.py", "open('x')", "order/ does no I/O"),
    ("pipeline/a.py", "from PIL import Image", "only codecs/ imports PIL"),
    ("cli/a.py", "import torch", "cli/ imports torch inside the function that needs it"),
    ("loader/a.py", "def f():\n    print('x')", "only cli/ prints"),
    ("packing/a.py", "path.write_text('x')", "only files.py writes data"),
    ("__init__.py", "from wdskit.pipeline.builder import Pipeline", "`import wdskit` loads nothing of wdskit.pipeline"),
    ("helpers/a.py", "x = 1", "`helpers` is no layer of the design"),
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
