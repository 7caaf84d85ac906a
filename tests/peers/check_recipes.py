"""Recipes of the pages that need a package which `make test` does not have. `make long` installs it and runs this."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import REPOSITORY

from wdskit import pack


@pytest.mark.parametrize("package", ["albumentations"])
def test_a_recipe_runs_as_written(package, tmp_path, load_tool):
    python = Path(sys.prefix, "peers", package, "bin", "python")
    assert python.exists(), f"{python} is not there. Run `make long WHAT=peers`."
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if f"import {package}" in block]
    load_tool("make_photos").make_photos(tmp_path / "photos", num=36, seed=0)
    pack(tmp_path / "photos", tmp_path / "data", split={"train": 1})
    (tmp_path / "recipe.py").write_text(block, encoding="utf-8")
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}, "capture_output": True}
    done = subprocess.run([python, "recipe.py"], text=True, timeout=120, check=False, **options)
    assert done.returncode == 0, done.stderr
