"""timm and open_clip train an epoch on wdskit's loaders, with shards of `pack`. `make long` installs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import HELPERS, REPOSITORY

from wdskit import pack

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 36 photographs of three classes, with captions."""
    base = tmp_path_factory.mktemp("train")
    sys.path.insert(0, str(REPOSITORY / "tools"))
    from make_photos import make_photos

    make_photos(base / "photos", num=36, seed=0)
    for path in (base / "photos").glob("*/*.jpg"):
        path.with_suffix(".txt").write_text(f"a photo of a {path.parent.name}")
    pack(base / "photos", base / "data", sidecars="txt", max_samples=10)
    return base / "data"


def train(package: str, *words: str) -> Any:
    [site] = Path(sys.prefix, "peers", package, "lib").glob(
        "python*/site-packages"
    )  # `make long WHAT=peers` creates it
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, HELPERS, site)))}
    command = [sys.executable, "-W", "ignore", str(HERE / f"train_with_{package}.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_timm_trains_an_epoch(folder: Path):
    found = train("timm", str(folder), "40")
    assert (found["steps"], found["samples"]) == (4, 32)
    assert len(set(found["keys"])) == 32
    assert 0 < found["loss"] < 100


def test_open_clip_trains_an_epoch(folder: Path):
    found = train("open_clip", str(folder))
    assert (found["steps"], found["epoch"]) == (4, 1)
    assert found["moved"] > 10
