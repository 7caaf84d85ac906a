"""What the tests at real sizes share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from real_sizes import large, small


@pytest.fixture(autouse=True, scope="module")
def _busy_cores() -> Iterator[None]:
    """Two processes take time from every thread, as on a cluster: what is wrong by a race shows. In `make test` other
    tests do that.
    """
    num = 0 if "PYTEST_XDIST_WORKER" in os.environ else 2
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.fixture(autouse=True, scope="module")
def _forgotten_samples() -> Iterator[None]:
    """What this process holds, each process that is forked from it later costs."""
    yield
    large.cache_clear()
    small.cache_clear()
