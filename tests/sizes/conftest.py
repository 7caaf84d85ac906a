"""Fixtures of the tests at real sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from real_sizes import large, small


@pytest.fixture(autouse=True, scope="module")
def _busy_cores() -> Iterator[None]:
    """Keep the cores busy with two processes, as on a cluster: races show. In `make test` other tests do that."""
    num = 0 if "PYTEST_XDIST_WORKER" in os.environ else 2
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.fixture(autouse=True, scope="module")
def _forgotten_samples() -> Iterator[None]:
    """Free the samples after the tests, because every later fork of this process would copy their memory."""
    yield
    large.cache_clear()
    small.cache_clear()
