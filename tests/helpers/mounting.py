"""Real disks that are full: what begins a command that may mount a small one."""

from __future__ import annotations

import subprocess


def namespace() -> list[str]:
    """What begins a command that may mount; nothing where that is forbidden."""
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["sh", "-c", "mount -t tmpfs -o size=4096 none /mnt && mount -o remount,size=8192 /mnt"]
    try:
        done = subprocess.run([*command, *mount], capture_output=True, check=False)
    except OSError:
        return []
    return command if done.returncode == 0 else []


MOUNTING = namespace()
