"""Folders of the tests and of the files that they read."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HELPERS = TESTS / "helpers"
GOLDEN = TESTS / "golden"
REPOSITORY = TESTS.parent
