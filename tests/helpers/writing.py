"""`pack` and `reshard` as most tests call them: in one process, on a disk that flushes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from disks import HastyDisk, on

import wdskit
from wdskit.files import DISK, disk_in_use


def hastily(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function in one process; on a disk that flushes nothing, unless the test has chosen another one."""
    disk = HastyDisk() if disk_in_use() is DISK else disk_in_use()
    return on(disk, function, *args, **{"workers": 1, **options})


def pack(source: Any, dest: Path, **options: Any) -> wdskit.PackResult:
    return hastily(wdskit.pack, source, dest, **options)


def reshard(source: Any, dest: Path, **options: Any) -> wdskit.PackResult:
    return hastily(wdskit.reshard, source, dest, **options)
