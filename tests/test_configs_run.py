"""Every file in configs/ works, on small data; files about ranks run with two ranks."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from folders import REPOSITORY

import wdskit

CONFIGS = REPOSITORY / "configs"
YAML_FILES = sorted(path.name for path in CONFIGS.glob("*.yaml"))
FOLDERS = {"demo.yaml": "all", "imagenet.yaml": "."}
SMALL_RUN = ["--epochs", "1", "--set", "loader.workers=0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """A folder with `train` and `val` for imagenet.yaml, and `all` for demo.yaml, packed from photographs."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"__key__": path.stem, "jpg": path, "cls": label}
        for label, name in enumerate(sorted(path.name for path in photos.iterdir()))
        for path in sorted((photos / name).iterdir())
    ]
    wdskit.pack(rows, folder / "train", max_samples=12)
    wdskit.pack(rows, folder / "val", max_samples=20)
    wdskit.pack(rows, folder / "all", max_samples=20, split="train=0.7,val=0.3")
    return folder


def run_command(
    command: list[str], *, environment: dict[str, str], **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run `command` in the repository's root."""
    return subprocess.run(
        command,
        cwd=CONFIGS.parent,
        env={**environment, **settings},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("name", YAML_FILES)
def test_a_yaml_file_passes_its_check(name: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wdskit config check` finds no problem, also if DATA is not set."""
    monkeypatch.chdir(REPOSITORY)
    code, out, err = run("config", "check", f"configs/{name}")
    assert code == 0, out + err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", YAML_FILES)
def test_train_pipelines_feed_two_ranks(name: str, rank: int, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks of two get full batches of normalised images, with the file's settings but fewer workers."""
    monkeypatch.setenv("DATA", str(data / FOLDERS[name]))
    smaller = ["loader.workers=2", "loader.pin_memory=false", "pipelines.train.batched.global_size=12"]
    loader = wdskit.make_loader(
        CONFIGS / name,
        pipeline="train",
        overrides=smaller,
        rank=rank,
        world_size=2,
    )
    batches = list(itertools.islice(loader, 2))
    assert len(batches) == 2
    for images, labels in batches:
        assert images.dtype == torch.float32
        assert images.shape[0] == labels.shape[0] == 6
        assert images.shape[1:] == ((3, 64, 64) if name == "demo.yaml" else (3, 224, 224))
        assert -3 < float(images.min()) < 0 < float(images.max()) < 3
        assert set(labels.tolist()) <= set(range(12))


def test_sbatch_trains_two_ranks(data: Path, tmp_path: Path, script_environment: dict[str, str]) -> None:
    """configs/train.sbatch runs as under Slurm on one node, with stand-ins for srun and scontrol; twice is no harm."""
    skip_options = 'while [[ $1 == --* ]]; do shift; done; exec "$@"'
    for name, text in {"srun": skip_options, "scontrol": "echo localhost"}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    settings = {
        "DATA": str(data),
        "CHECKPOINT": str(tmp_path / "run.pt"),
        "PATH": f"{tmp_path}{os.pathsep}{script_environment['PATH']}",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
    }
    command = ["bash", "configs/train.sbatch", *SMALL_RUN, "--set", "pipelines.train.batched.global_size=24"]
    done = run_command(command, environment=script_environment, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "over 48 samples, " in done.stdout  # 2 steps of 24
    assert " of val right\nall 1 epochs are done\n" in done.stdout
    again = run_command(command, environment=script_environment, **settings)
    assert (again.returncode, again.stdout) == (0, "all 1 epochs are done\n"), again.stderr
