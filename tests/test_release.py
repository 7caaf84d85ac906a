"""The released sdist and wheel, and wdskit as a user installs it. `make long WHAT=release` runs all tests, CI a part.

In CI the packages that wdskit needs are those of this environment; `make long` downloads them, and also the oldest
versions that pyproject.toml allows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest
from folders import ALL, REPOSITORY, copy_tracked
from packaging.requirements import Requirement

import wdskit

EXTRAS = ("tables",)  # `make long WHAT=release` tries the oldest versions of their packages
OLDEST_TESTS = (
    *("order", "tar", "config", "cli", "codecs", "shards", "storage/test_objects.py", "test_view.py"),
    *("packing/test_plan.py", "packing/sources", "promises/test_orders.py", "promises/test_same_bytes.py"),
    *("stages/images", "stages/test_fields.py", "loader/test_planned.py"),
)
USE = """
import os, sys
import wdskit

print(os.path.dirname(wdskit.__file__))
print(all(getattr(wdskit, name) is not None for name in wdskit.__all__))
pipe = wdskit.Pipeline().exact("data", seed=7).decode("rgb8").random_resized_crop(32).to_tuple("jpg", "cls").batched(8)
for step, (images, labels) in enumerate(pipe.loader()):
    if step < 2:
        print(*images.shape, images.dtype, len(labels))
"""

_ONLY_RELEASE = pytest.mark.skipif(not ALL, reason="for `make long WHAT=release`: it downloads")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as a user does, without this repository on Python's path; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1", "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-6000:]}"
    return done.stdout


def build(what: str, source: Path, folder: Path) -> Path:
    """Build the sdist or the wheel of `source` into `folder`, as pip does without a C compiler, and return its path."""
    code = f"import setuptools.build_meta as b; print(); print(b.build_{what}({str(folder)!r}))"
    return folder / run("env", "CC=false", sys.executable, "-c", code, cwd=source).splitlines()[-1]


def tracked(*folders: str) -> set[str]:
    """Return the paths of the files that git tracks."""
    return set(run("git", "ls-files", "-z", *folders, cwd=REPOSITORY).rstrip("\0").split("\0"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the folder that the sdist unpacks to; both are built without a C compiler."""
    folder = tmp_path_factory.mktemp("built")
    source = copy_tracked(folder / "source")
    archive = build("sdist", source, folder)
    assert archive.name == f"wdskit-{wdskit.__version__}.tar.gz"
    shutil.unpack_archive(archive, folder)
    return build("wheel", source, folder), folder / archive.name.removesuffix(".tar.gz")


def metadata_of(wheel: Path) -> PathDistribution:
    """Return the metadata of a wheel."""
    [folder] = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    return PathDistribution(folder)


def link_needed(wheel: Path, packages: Path) -> None:
    """Put links to the installed packages that a wheel needs, and only these, into another environment."""
    waiting, known = list(metadata_of(wheel).requires or []), set()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in known or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        known.add(requirement.name)
        found = distribution(requirement.name)
        waiting += found.requires or []
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(found.locate_file(top))


@pytest.fixture(scope="module", params=["linked", pytest.param("downloaded", marks=_ONLY_RELEASE)])
def installed(request, built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands' folder of an environment that has the wheel, the packages in its metadata, and no others."""
    home, wheel = tmp_path_factory.mktemp("installed") / "venv", built[0]
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    if request.param == "linked":
        link_needed(wheel, Path(sysconfig.get_path("purelib", vars={"base": str(home)})))
        run(*pip, "--no-deps", "--no-index", wheel, cwd=home)
    else:
        run(*pip, "--constraint", REPOSITORY / "constraints.txt", "torch", cwd=home)
        run(*pip, wheel, cwd=home)
    return home / "bin"


def test_the_sdist_holds_every_tracked_file(built: tuple[Path, Path]) -> None:
    """The sdist also has the metadata of a release. Packagers of wdskit run the tests from it."""
    unpacked = built[1]
    found = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert {path for path in found if "egg-info" not in path} == tracked() | {"PKG-INFO", "setup.cfg"}


def test_the_wheel_holds_the_package_its_licence_and_nothing_else(built: tuple[Path, Path]) -> None:
    wheel = built[0]
    about = f"wdskit-{wdskit.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "wdskit/py.typed" in names
    about_names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert names == tracked("wdskit") | {f"{about}/{name}" for name in about_names}


def test_the_wheel_says_what_pyproject_says(built: tuple[Path, Path]) -> None:
    """The wheel has the version of the package, the declared requirements, and the README as its description."""
    found = metadata_of(built[0])
    project = (REPOSITORY / "pyproject.toml").read_text()
    [table] = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    declared = re.findall(r'"([^"]+)"', table)
    assert (found.version, found.metadata["License-Expression"]) == (wdskit.__version__, "Apache-2.0")
    assert sorted(line for line in found.requires or () if "extra ==" not in line) == sorted(declared)
    assert found.metadata.get_payload() == (REPOSITORY / "README.md").read_text()


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, unpacked = built
    assert build("wheel", unpacked, tmp_path).read_bytes() == wheel.read_bytes()


def test_what_is_installed_packs_verifies_and_loads(installed: Path, photos: Path, tmp_path: Path) -> None:
    """The test runs outside of the checkout, and imports each public name."""
    wdskit_command = installed / "wdskit"
    assert run(wdskit_command, "--version", cwd=tmp_path) == f"wdskit {wdskit.__version__}, without native code\n"
    assert "\n  pack " in run(wdskit_command, "--help", cwd=tmp_path)
    run(wdskit_command, "pack", photos, "data", "--max-samples", "20", cwd=tmp_path)
    assert "48 samples" in run(wdskit_command, "verify", "data", cwd=tmp_path)
    place, *lines = run(installed / "python", "-W", "error", "-c", USE, cwd=tmp_path).splitlines()
    assert Path(place).is_relative_to(installed.parent)
    assert lines == ["True", *["8 3 32 32 torch.uint8 8"] * 2]
    run(sys.executable, "-m", "pip", "--python", installed / "python", "check", cwd=tmp_path)


@_ONLY_RELEASE
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the oldest torch and numpy have no wheels for Python 3.13")
def test_the_oldest_versions_that_are_allowed_work(built: tuple[Path, Path], tmp_path: Path) -> None:
    """A part of the tests runs with them, from the sdist; all other packages are as new as possible."""
    wheel, unpacked = built
    asked = [Requirement(line) for line in metadata_of(wheel).requires or ()]
    oldest = [
        f"{one.name}=={min(part.version for part in one.specifier)}"
        for one in asked
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in EXTRAS)
    ]
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    client = "httpx<0.27"  # the tests of the oldest Starlette need it
    tools = ["pytest", "pytest-xdist", "hypothesis", "psutil", client]
    run(*pip, wheel, *oldest, *tools, cwd=tmp_path)
    run(*pip, "--no-deps", "scikit-image", cwd=tmp_path)  # only the photographs, not its requirements
    # Warnings of other packages about each other.
    newest = ["-p", "no:anyio", "-W", "ignore:'click:DeprecationWarning", "-W", "ignore:The anyio:DeprecationWarning"]
    # The wording of the error for an unknown option depends on typer's version.
    words = ["-q", "-n", "auto", "--dist", "loadfile", *newest, "-k", "not max-sample"]
    words += ["--ignore", "tests/config/test_types.py"]  # needs torchvision
    out = run(python, "-m", "pytest", *words, *(f"tests/{name}" for name in OLDEST_TESTS), cwd=unpacked)
    print(*oldest, out.splitlines()[-1], sep="\n")
