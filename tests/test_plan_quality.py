"""`plan(quality=True)` and its picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shards import write_numbers

import wdskit
from wdskit.errors import FolderIndexError, PipelineError, StorageError
from wdskit.loader.plan_epoch import open_epoch
from wdskit.loader.plan_picture import trace
from wdskit.loader.plan_quality import sorted_data
from wdskit.shards.index import index_folder

COUNTS = [20] * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "data"
    write_numbers(folder, COUNTS)
    index_folder(folder, workers=1)
    return folder


def pipe(folder, kind="exact", batch=10, **options):
    return getattr(wdskit.Pipeline(), kind)(str(folder), **options).batched(batch)


def test_the_verdict_follows_the_numbers(folder):
    verdicts = [
        (pipe(folder, window=600, lanes=1), "as good as uniform."),
        (pipe(folder, window=67, lanes=9), "well mixed, not quite uniform."),
        (pipe(folder, window=20, lanes=1), "far from uniform.\n  Pack with `--shuffle SEED`, which"),
        (pipe(folder, "sequential"), "A sequential source does not shuffle, as evaluation wants it"),
    ]
    ratios = []
    for each, verdict in verdicts:
        quality = wdskit.plan(each, world_size=3, quality=True, classes=30).quality
        assert verdict in quality.verdict
        ratios.append(quality.rank_classes / quality.rank_ideal)
        assert quality.rank_classes_least <= quality.rank_classes <= quality.global_classes
        assert (quality.num_classes, quality.seen_again_ideal) == (30, 1 / 3)
    assert ratios[0] > 0.95 > ratios[1] > 0.8 > ratios[2] >= ratios[3]


def test_what_is_seen_again_is_told_of_passes_only(folder):
    quality = wdskit.plan(pipe(folder, lanes=9), world_size=3, quality=True).quality
    assert quality.seen_again.least <= quality.seen_again.mean <= quality.seen_again.most
    assert wdskit.plan(pipe(folder, "resampled"), quality=True).quality.seen_again is None
    assert wdskit.plan(pipe(folder), quality=True).quality.seen_again == (1, 1, 1)
    assert wdskit.plan(pipe(folder)).quality is None


def test_the_number_of_classes_is_told_or_found(folder, tmp_path):
    assert wdskit.plan(pipe(folder), quality=True).quality.num_classes == 600  # a thousand would not be filled
    write_numbers(tmp_path, COUNTS)
    index_folder(tmp_path, workers=1)
    (tmp_path / "classes.json").write_text('{"cat": 0, "dog": 1, "eel": 2}')
    assert wdskit.plan(pipe(tmp_path), quality=True).quality.num_classes == 3
    assert wdskit.plan(pipe(tmp_path), quality=True, classes=7).quality.num_classes == 7
    (tmp_path / "classes.json").write_text("7")
    with pytest.raises(FolderIndexError, match=r"classes\.json: it is no list of class names"):
        wdskit.plan(pipe(tmp_path), quality=True)
    with pytest.raises(PipelineError, match=r"plan\(classes=0\)"):
        wdskit.plan(pipe(tmp_path), quality=True, classes=0)


def test_what_has_no_quality_says_so(folder):
    stream = wdskit.Pipeline().stream(str(folder))
    with pytest.raises(PipelineError, match="shuffle buffers, which only running tells"):
        wdskit.plan(stream, quality=True)
    with pytest.raises(PipelineError, match="no full global batch"):
        wdskit.plan(pipe(folder, "sequential", batch=700), quality=True)


def test_the_trace_is_what_a_rank_reads(folder):
    """Places in the data set of every sample of every step, as a real loader yields them."""
    stages = pipe(folder, batch=5, lanes=7, window=30)
    epoch = open_epoch(stages.stages, 4, 2)
    told = trace(epoch, sorted_data(epoch, 10), 3, 1)
    reading = wdskit.Pipeline().exact(str(folder), lanes=7, window=30).decode("rgb8").to_tuple("cls").batched(5)
    loader = reading.loader(workers=0, rank=3, world_size=4)
    loader.set_epoch(3)
    numbers = np.concatenate([numbers.numpy() for (numbers,) in loader])
    assert np.array_equal(np.rint(told.depths * 600), numbers)
    assert told.steps.tolist() == [step for step in range(30) for _ in range(5)]


def test_a_picture_is_drawn(folder, tmp_path):
    """Whole files, in the three colours of three ranks; of every source."""
    for kind in ("exact", "resampled", "sequential"):
        path = tmp_path / f"{kind}.png"
        wdskit.plan(pipe(folder, kind), world_size=4, plot=path)
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        assert min(pixels.shape[:2]) > 500
        for colour in ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0x00, 0x9E, 0x73)):
            assert (pixels == colour).all(axis=2).sum() > 300
    wdskit.plan(pipe(folder), plot=str(tmp_path / "one.SVG"))
    assert ET.parse(tmp_path / "one.SVG").getroot().tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "exact.png",
        "one.SVG",
        "resampled.png",
        "sequential.png",
    ]


def test_a_picture_that_cannot_be_drawn_is_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(PipelineError, match=r"a\.gif: a picture is drawn as \.png or \.svg"):
        wdskit.plan(pipe(folder), plot=tmp_path / "a.gif")
    with pytest.raises(StorageError, match=r"no/a\.png: the picture cannot be written: No such file"):
        wdskit.plan(pipe(folder), plot=tmp_path / "no" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PipelineError, match=r"needs matplotlib.\n  Install it: pip install 'wdskit\[plot\]'"):
        wdskit.plan(pipe(folder), plot=tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
