"""Fixtures of all test files, and the order of the files."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from disks import HastyDisk
from fault_server import FaultServer
from folders import HELPERS, REPOSITORY, TESTS
from forking import Interpreter
from hypothesis import settings
from object_server import s3_server
from shards import write_numbers

from wdskit import cli
from wdskit.files import use_disk
from wdskit.native import native

# Variables of launchers, clusters and users' shells that would change the results of tests.
FOREIGN_SETTINGS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DATA")

# These files start first, the longest before the others, so that no long file starts last.
LONG = [
    "sizes/test_size_writers",
    "sizes/test_size_readers",
    "test_pages",
    "loader/test_faults",
    "promises/test_kills",
    "loader/test_pools",
    "promises/test_damage",
    "storage/test_objects",
    "test_safety",
    "loader/test_gather",
    "test_native",
    "loader/test_remote",
    "loader/test_soak",
    "test_configs_run",
    "stages/test_streaming",
    "promises/test_epochs",
]

# No deadline: the time of an example depends on the load of the machine.
settings.register_profile("wdskit", deadline=None)
settings.load_profile("wdskit")

# Imported once, not in each worker: 2.5 s of CPU time for torch, and 0.5 s for the rest.
multiprocessing.set_forkserver_preload(["torch", "webdataset", "pytest", "wdskit.loader.make"])

gc.disable()  # until all tests are collected: collecting them makes no garbage

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs like this
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the children of tests would ignore Ctrl-C too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: the files of `LONG` first."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).with_suffix("").as_posix(), len(LONG)))


def pytest_collection_finish() -> None:
    """Exclude 700,000 permanent objects from garbage collection: half a second per collection, here and in children."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _native_again():
    """Let `native` look for the module again after each test: a test may have set its environment."""
    yield
    native.cache_clear()


@pytest.fixture(autouse=True)
def _without_foreign_settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of launchers, stores and proxies from every test's environment."""
    if request.path.stem == "test_release":  # pip may need them
        return
    for name in [*os.environ]:
        is_of_store = name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_TOKEN", "STORAGE_", "SSL_CERT"))
        if name in FOREIGN_SETTINGS or name.startswith("SLURM_") or is_of_store or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def load_tool():
    """A function that returns the module of a script in tools/, tools/dev/ or tools/bench/."""

    def load(name: str) -> ModuleType:
        [path] = [*REPOSITORY.glob(f"tools/{name}.py"), *REPOSITORY.glob(f"tools/*/{name}.py")]
        spec = importlib.util.spec_from_file_location(f"tools_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a running S3 server. Tests share its bucket: each writes below a folder of its own."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def faults() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


@pytest.fixture
def hasty_disk() -> Iterator[None]:
    """What the test writes is not flushed."""
    with use_disk(HastyDisk()):
        yield


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory, load_tool) -> Path:
    """A folder with 48 photographs in 12 classes. Tests must not change it."""
    folder = tmp_path_factory.mktemp("photos") / "photos"
    load_tool("make_photos").make_photos(folder, num=48, seed=0)
    return folder


@pytest.fixture
def six(tmp_path: Path) -> str:
    """Six shards of 4 to 9 samples, 39 in all, without an index."""
    return write_numbers(tmp_path / "six", [4, 5, 6, 7, 8, 9])


@pytest.fixture(scope="session")
def script_environment() -> dict[str, str]:
    """An environment for children: this Python's commands first in PATH, no foreign settings, one torch thread."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_SETTINGS and not name.startswith(("SLURM_", "PYTEST_", "COV_"))
    }
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["PYTHONPATH"] = str(REPOSITORY)
    environment["OMP_NUM_THREADS"] = "1"
    environment["COLUMNS"] = "100"
    environment["NO_COLOR"] = "1"
    return environment


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """A Python that has loaded all of wdskit and finds the modules of tests/helpers."""
    paths = os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with Interpreter(tmp_path_factory.mktemp("python"), environment) as running:
        yield running


class Run:
    """Runs a command line in this process and returns exit code, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("COLUMNS", "100")

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["wdskit", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = self.capsys.readouterr()
        lines = [line.rstrip() for line in out.splitlines()]
        return end.value.code, "\n".join(lines), err.rstrip("\n")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys, monkeypatch)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, or Playwright's. While it is open, an event loop runs in this thread."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as running:
        try:
            opened = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as err:
            pytest.skip(f"no Chromium to start (`playwright install chromium`): {str(err).splitlines()[0]}")
        yield opened
        opened.close()
