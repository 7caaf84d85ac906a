"""Folders of the tests and of the files that they read."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HELPERS = TESTS / "helpers"
GOLDEN = TESTS / "golden"
REPOSITORY = TESTS.parent
ALL = bool(os.environ.get("WDSKIT_ALL"))
"""Whether tests try every case, as in `make long`; by default they try a part of the cases of a long sweep."""


def copy_tracked(target: Path) -> Path:
    """Copy the repository's files that git tracks to the new folder `target`, and return it."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in names.rstrip("\0").split("\0"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target / name)
    return target
