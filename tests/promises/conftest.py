"""Marks the promises that this version does not keep yet, each until the change that keeps it."""

from __future__ import annotations

import re

import pytest

NOT_YET: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the list: each must fail, so that no mark outlives its reason."""
    for item in items:
        name = f"{item.path.name}::{item.name}"
        if any(re.fullmatch(pattern, name) for pattern in NOT_YET):
            item.add_marker(pytest.mark.xfail(strict=True, reason="a later change keeps this promise"))
