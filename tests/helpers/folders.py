"""Where the tests and what they read stand."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HELPERS = TESTS / "helpers"
GOLDEN = TESTS / "golden"
REPOSITORY = TESTS.parent
