"""An environment for each contestant that needs one.

It sees the packages of the environment that runs the benchmark, so torch is the same for all, and has its own versions
of whatever else it asks for. What would bring another torch, or torchvision, is left out: see `KEPT_OUT`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from peers.catalogue import Contestant

KEPT_OUT = ("torch", "torchvision", "torchcodec")

_LIST_REQUIREMENTS = f"""
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
for name in sys.argv[1:]:
    for one in map(Requirement, requires(Requirement(name).name) or []):
        if one.name.lower() not in {KEPT_OUT} and not (one.marker and not one.marker.evaluate({{"extra": ""}})):
            print(one.name + str(one.specifier))
"""


class NotInstalled(Exception):
    """Why a contestant is not there, in a line."""


def python_of(contestant: Contestant, venvs: Path, *, install: bool) -> str:
    """The interpreter that runs a contestant.

    Raises:
        NotInstalled: It cannot be installed, or is not and shall not be.
    """
    if not contestant.install:
        return sys.executable
    home = venvs / contestant.name
    python = home / "bin" / "python"
    done = home / "installed.txt"
    wanted = "\n".join(contestant.install)
    if done.exists() and done.read_text() == wanted:
        return str(python)
    if not install:
        raise NotInstalled("not installed, and --no-install was given")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (packages / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    try:
        pip(python, "--no-deps", *contestant.install)
        needed = subprocess.run(
            [str(python), "-c", _LIST_REQUIREMENTS, *contestant.install], check=True, capture_output=True, text=True
        )
        if needed.stdout.split():
            pip(python, *needed.stdout.split())
    except NotInstalled as error:
        note = f" ({contestant.build})" if contestant.build else ""
        raise NotInstalled(f"{error}{note}") from None
    done.write_text(wanted)
    return str(python)


def pip(python: Path, *words: str) -> None:
    """Install into an environment."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q"]
    done = subprocess.run([*command, *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise NotInstalled(reason(done.stderr))


def reason(stderr: str) -> str:
    """The line of an output that says why, without places of this machine or addresses."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|fatal|\w*(Error|Exception|NotFound))\b", line)]
    return scrub(errors[0] if errors else (lines or ["no reason given"])[-1])[:200]


def scrub(text: str) -> str:
    """Without paths (their last part stays) and addresses."""
    text = re.sub(r"host='[^']*'", "host=(address)", text)
    text = re.sub(r"\b\w+://\S+", "(address)", text)
    return re.sub(r"(?<![\w.])(/[\w.+@-]+)+", lambda found: found.group().rsplit("/", 1)[-1], text)


def last_line(lines: Sequence[str]) -> str:
    """What a process said last."""
    return scrub(next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing"))[:200]
