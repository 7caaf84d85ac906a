"""tools/train.py resumes from its checkpoint: plain DDP, stopped in the middle of an epoch."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

import wdskit

CONFIG = """
version: 1
pipelines:
  train:
    - exact: {shards: SHARDS, seed: 7}
    - decode: rgb8
    - random_resized_crop: 32
    - normalize: imagenet
    - to_tuple: ["jpg;png", cls]
    - batched: {global_size: 8}
loader: {workers: 0}
"""


class Stopped(Exception):
    """Stands for the kill of a job."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> str:
    folder = tmp_path_factory.mktemp("packed") / "train"
    rows = [{"__key__": path.stem, "jpg": path, "cls": 3} for path in sorted(photos.glob("*/*.jpg"))]
    wdskit.pack(rows, folder, max_samples=12)
    return str(folder / "train-*.tar")


@pytest.fixture
def train(shards, tmp_path, load_tool, monkeypatch):
    """Train on several ranks with a checkpoint after each step; return the losses and the checkpoint."""
    tool = load_tool("train")

    def train(num_ranks: int, name: str, *, stop: int | None = None) -> tuple[list[float], dict]:
        config, path = tmp_path / "train.yaml", tmp_path / f"{name}.pt"
        config.write_text(CONFIG.replace("SHARDS", shards))
        words = ["--config", str(config), "--epochs", "2", "--save-every", "1", "--checkpoint", str(path)]
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        save, steps = tool.save_checkpoint, itertools.count(1)

        def save_and_stop(*args) -> None:
            save(*args)
            if next(steps) == stop:
                raise Stopped

        def run(_: int) -> list[float]:
            try:
                return tool.train(tool.read_options(), torch.device("cpu"))
            except Stopped:
                return []

        with monkeypatch.context() as patch:
            patch.setattr(tool, "save_checkpoint", save_and_stop)
            losses, *_ = run_ranks(num_ranks, run, tmp_path)
        return losses, torch.load(path, weights_only=True)

    return train


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_it_goes_on_from_its_checkpoint(train, num_ranks):
    """The weights are equal if the number of ranks stays; it also resumes on another number."""
    losses, whole = train(2, "whole")
    nothing, stopped = train(2, "stopped", stop=3)
    assert (len(losses), nothing) == (2, [])
    assert stopped["data"]["epoch"] == 0
    resumed, last = train(num_ranks, "stopped")
    assert len(resumed) == 2
    assert last["data"] == whole["data"]
    close = 0.0 if num_ranks == 2 else 1e-3
    torch.testing.assert_close(last["model"], whole["model"], rtol=close, atol=close)
    assert not all(torch.equal(weights, whole["model"][name]) for name, weights in stopped["model"].items())


def test_a_run_that_is_done_trains_no_more(train):
    losses, _ = train(1, "whole")
    again, _ = train(1, "whole")
    assert (len(losses), again) == (2, [])
