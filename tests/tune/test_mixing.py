"""How far batches are from a uniform draw: the measure is right and sees what is not uniform; and the picture."""

from __future__ import annotations

import math
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shards import write_numbers

import wdskit
from wdskit.errors import FolderIndexError, PipelineError, StorageError
from wdskit.order.deal import dealt
from wdskit.order.exact import ExactOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.order.steps import Steps
from wdskit.shards.index import index_folder
from wdskit.stages.sources import PlannedData
from wdskit.tune.mixing import depths, expected_classes, measure_quality, trace

COUNTS_OF_SHARDS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)

COUNTS = [20] * 30


class Table:
    """A data set that is nowhere."""

    def __init__(self, counts):
        self.counts = np.array(counts)


def planned(order, *parts):
    return PlannedData(tuple(map(Table, parts)), tuple(range(len(parts))), order, None, {})


def mean_classes(order, counts, steps, classes, start=0):
    data = planned(order, counts)
    return measure_quality(data, steps, start, classes, node_size=steps.world_size).rank_classes


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
        (pipe(folder, window=100, lanes=3), "well mixed, not quite uniform."),
        (pipe(folder, window=20, lanes=1), "far from uniform.\n  Pack with `--shuffle SEED`, which"),
        (pipe(folder, "sequential"), "A sequential source does not shuffle, which suits evaluation"),
    ]
    ratios = []
    for each, verdict in verdicts:
        quality = wdskit.plan(each, world_size=3, quality=True, classes=30).quality
        assert verdict in quality.verdict
        ratios.append(quality.rank_classes / quality.rank_ideal)
        assert quality.rank_classes_least <= quality.rank_classes <= quality.global_classes
        assert (quality.num_classes, quality.num_steps) == (30, 20)
    assert ratios[0] > 0.95 > ratios[1] > 0.8 > ratios[2] >= ratios[3]


def test_the_number_of_classes_is_given_or_found(folder, tmp_path):
    assert wdskit.plan(pipe(folder), quality=True).quality.num_classes == 600  # a thousand would not be filled
    write_numbers(tmp_path, COUNTS)
    index_folder(tmp_path, workers=1)
    (tmp_path / "classes.json").write_text('{"cat": 0, "dog": 1, "eel": 2}')
    assert wdskit.plan(pipe(tmp_path), quality=True).quality.num_classes == 3
    assert wdskit.plan(pipe(tmp_path), quality=True, classes=7).quality.num_classes == 7
    (tmp_path / "classes.json").write_text("7")
    with pytest.raises(FolderIndexError, match=r"classes\.json: it is not a list of class names"):
        wdskit.plan(pipe(tmp_path), quality=True)
    with pytest.raises(PipelineError, match=r"plan\(classes=0\)"):
        wdskit.plan(pipe(tmp_path), quality=True, classes=0)
    with pytest.raises(PipelineError, match=r"plan\(classes=7\): only `quality` counts classes"):
        wdskit.plan(pipe(tmp_path), classes=7)


def test_what_has_no_quality_says_so(folder):
    stream = wdskit.Pipeline().stream(str(folder))
    with pytest.raises(PipelineError, match="shuffle buffers, so only a run shows it"):
        wdskit.plan(stream, quality=True)
    with pytest.raises(PipelineError, match="does not fill one global batch"):
        wdskit.plan(pipe(folder, "sequential", batch=700), quality=True)


def test_the_trace_is_what_a_rank_reads(folder):
    """Places in the data set of every sample of every step, as a real loader yields them."""
    order = ExactOrder(COUNTS, seed=0, lanes=7, window=30)
    steps, places = trace(planned(order, COUNTS), Steps(600, 5, 4, "drop"), 3 * 600, 3)
    reading = wdskit.Pipeline().exact(str(folder), lanes=7, window=30).decode("rgb8").to_tuple("cls").batched(5)
    loader = reading.loader(workers=0, rank=3, world_size=4)
    loader.set_epoch(3)
    numbers = np.concatenate([numbers.numpy() for (numbers,) in loader])
    assert np.array_equal(np.rint(places * 600), numbers)
    assert steps.tolist() == [step for step in range(30) for _ in range(5)]


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
    with pytest.raises(PipelineError, match=r"a\.gif: a picture is a \.png or \.svg file"):
        wdskit.plan(pipe(folder), plot=tmp_path / "a.gif")
    with pytest.raises(StorageError, match=r"no/a\.png: the picture cannot be written: No such file"):
        wdskit.plan(pipe(folder), plot=tmp_path / "no" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PipelineError, match=r"needs matplotlib.\n  Install it: `pip install '\.\[plot\]'` in a clone"):
        wdskit.plan(pipe(folder), plot=tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@given(size=st.integers(1, 12), num_classes=st.integers(1, 12), batch=st.integers(1, 150))
def test_expected_classes_are_those_of_the_hypergeometric_law(size, num_classes, batch):
    total = size * num_classes
    none = math.comb(total - size, batch) / math.comb(total, batch) if batch <= total else 0
    assert expected_classes(num_classes, total, batch) == pytest.approx(num_classes * (1 - none))


def test_expected_classes_stay_exact_for_a_billion_samples():
    with_replacement = 1000 * (1 - (1 - 1 / 1000) ** 256)
    assert expected_classes(1000, 10**9, 256) == pytest.approx(with_replacement, rel=1e-5)


@given(counts=COUNTS_OF_SHARDS, num_classes=st.integers(1, 9))
def test_sorted_data_have_classes_of_equal_size_from_the_first_sample_to_the_last(counts, num_classes):
    total = sum(counts)
    num_classes = min(num_classes, total)
    order = SequentialOrder(counts)
    classes = depths(planned(order, counts), order.take(np.arange(total)), num_classes)
    assert (np.diff(classes) >= 0).all()
    sizes = np.bincount(classes, minlength=num_classes)
    assert sizes.max() - sizes.min() <= 1


def test_each_part_of_a_mixture_has_all_classes():
    data = planned(None, [4, 4], [2])
    assert depths(data, (np.array([0, 1, 2, 2]), np.array([3, 0, 0, 1])), 2).tolist() == [0, 1, 0, 1]


def test_quality_counts_the_classes_of_each_ranks_batch():
    counts = [5, 0, 30, 16]
    order, steps, start = ExactOrder(counts, seed=3, lanes=3, window=4), Steps(51, 4, 3, "drop"), 51 * 7
    found = measure_quality(planned(order, counts), steps, start, 10)
    of_ranks, of_all = [], []
    for step in range(4):
        taken = [order.take(start + dealt(order, start, steps, step, rank=rank)) for rank in range(3)]
        classes = [set(depths(planned(order, counts), each, 10).tolist()) for each in taken]
        of_ranks += map(len, classes)
        of_all.append(len(set.union(*classes)))
    assert (found.num_steps, found.rank_classes_least) == (4, min(of_ranks))
    assert (found.rank_classes, found.global_classes) == pytest.approx((np.mean(of_ranks), np.mean(of_all)))


def test_quality_looks_at_few_of_many_steps():
    data = planned(SequentialOrder([10**6]), [10**6])
    found = measure_quality(data, Steps(10**6, 64, 8, "pad"), 0, 10)
    assert found.num_steps == 24
    assert found.rank_classes < 1.1


def test_a_uniform_permutation_is_as_good_as_uniform_and_a_small_window_is_not():
    """One lane and one window of everything is a uniform permutation; the measure sees that a poor shuffle is not."""
    counts, steps = [100] * 50, Steps(5000, 40, 5, "drop")
    ideal = expected_classes(100, 5000, 40)

    def mean(lanes, window):
        orders = [ExactOrder(counts, seed=seed, lanes=lanes, window=window) for seed in range(5)]
        return np.mean([mean_classes(order, counts, steps, 100) for order in orders])

    assert mean(1, 5000) == pytest.approx(ideal, rel=0.01)
    assert mean(1, 200) < 0.5 * ideal
    assert mean(1, 250) < 0.5 * mean(4, 250)
