"""`pack` and `reshard` as most tests call them: in one process, on a disk that flushes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disks import HastyDisk

import wdskit

_DEFAULTS = {"workers": 1, "disk": HastyDisk()}


def pack(source: Any, dest: Path, **options: Any) -> wdskit.PackResult:
    return wdskit.pack(source, dest, **{**_DEFAULTS, **options})


def reshard(source: Any, dest: Path, **options: Any) -> wdskit.PackResult:
    return wdskit.reshard(source, dest, **{**_DEFAULTS, **options})
