"""What the tests at real sizes share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _busy_cores() -> Iterator[None]:
    """Two processes take time from every thread, as on a cluster: what is wrong by a race shows."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for other in others:
        other.kill()
        other.wait()
