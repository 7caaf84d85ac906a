"""`make_loader`: its arguments, the order in which settings count, refusals, and two ranks of a stream."""

from __future__ import annotations

import logging
import multiprocessing

import pytest
import torch
from shards import number_of

import wdskit
from wdskit import ConfigError, Pipeline, PipelineError, make_loader
from wdskit.pipeline.settings import LoaderSpec, load_config
from wdskit.stages import registry

TEXT = """\
version: 1
pipelines:
  train:
    - stream: {shards: "${NUMBERS}", seed: 1}
    - split_by_node
    - split_by_worker
    - map: note
    - with_epoch: 6
  val:
    - stream: {shards: "${NUMBERS}", shuffle_shards: false}
    - map: note
loader: {workers: 0}
"""


@pytest.fixture
def config(tmp_path, six, monkeypatch):
    """A file with two pipelines of numbers."""
    monkeypatch.setenv("NUMBERS", six)
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return path


NOTE = {"note": number_of}


# --- arguments


def test_a_path_a_dict_and_a_pipeline_give_the_same(config, six):
    stages = load_config(config).pipeline("train")
    as_dict = {"pipelines": {"train": [*stages], "val": [{"stream": six}]}, "loader": {"workers": 0}}
    built = Pipeline().stream(six, seed=1).split_by_node().split_by_worker().map(number_of).with_epoch(6)
    loaders = [
        make_loader(config, pipeline="train", transforms=NOTE),
        make_loader(str(config), pipeline="train", transforms=NOTE),
        make_loader(as_dict, pipeline="train", transforms=NOTE),
        make_loader(built, workers=0),
        built.loader(workers=0),
    ]
    epochs = [[list(loader) for _ in range(2)] for loader in loaders]
    assert all(other == epochs[0] for other in epochs)
    assert [len(epoch) for epoch in epochs[0]] == [6, 6]


def test_arguments_count_over_overrides_over_the_file(config):
    def spec(**settings):
        return make_loader(config, pipeline="train", transforms=NOTE, **settings).spec

    assert spec() == LoaderSpec(workers=0, threads=1)
    overrides = ["loader.workers=1", "loader.prefetch=2"]
    assert spec(overrides=overrides) == LoaderSpec(workers=1, threads=1, prefetch=2)
    assert spec(overrides=overrides, workers=2) == LoaderSpec(workers=2, threads=1, prefetch=2)
    every = {"workers": 2, "threads": 1, "prefetch": 7, "persistent_workers": False, "start_method": "fork"}
    every |= {"timeout": 60.0}
    assert spec(**every) == LoaderSpec(**every)
    assert set(every) | {"pin_memory", "device", "ranks_per_node", "on"} == set(LoaderSpec.model_fields)


def test_wrong_arguments_are_all_named(six):
    expected = "make_loader: workers: Input should be a valid integer, not `2`.\n"
    expected += "make_loader: start_method: Input should be 'fork', 'spawn' or 'forkserver', not `frok`."
    with pytest.raises(ConfigError) as caught:
        make_loader(Pipeline().stream(six), workers="2", start_method="frok")
    assert str(caught.value) == expected


# --- functions and plugins


@pytest.fixture
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_FUNCTIONS", {})


@pytest.mark.usefixtures("_own_registry")
def test_functions_come_from_transforms_before_the_registry(config):
    wdskit.register("note")(lambda sample: -int(sample["cls"]))
    assert list(make_loader(config, pipeline="val"))[:3] == [0, -1, -2]
    assert list(make_loader(config, pipeline="val", transforms=NOTE))[:3] == [0, 1, 2]


@pytest.mark.usefixtures("_own_registry")
def test_plugins_register_their_functions(config, tmp_path, monkeypatch):
    package = tmp_path / "wdskit_test_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "notes.py").write_text(
        "import wdskit\n@wdskit.register('note')\ndef note(sample):\n    return 'plugin'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loader = make_loader(config, pipeline="val", plugins=["wdskit_test_plugin.notes"], workers=1, start_method="fork")
    assert set(loader) == {"plugin"}


# --- workers


# --- CUDA


@pytest.fixture
def cuda(monkeypatch):
    """Let torch report that CUDA was used in this process."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.usefixtures("cuda")
def test_fork_is_refused_once_cuda_is_initialised(six):
    pipe = Pipeline().stream(six).map(number_of)
    for source in (pipe, {"pipeline": [*pipe.stages], "loader": {"start_method": "fork"}}):
        with pytest.raises(PipelineError, match=r"CUDA is initialised, so workers cannot be forked\.\n  Use start"):
            make_loader(source, workers=1, start_method="fork")
    assert len(list(pipe.loader(workers=0))) == 39


def test_the_default_is_not_to_fork_once_cuda_is_initialised(six, monkeypatch):
    """A usual script moves its model to the GPU first, and its author need not know about forks."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "fork")  # as before Python 3.14
    loader = Pipeline().stream(six).map(number_of).loader(workers=1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert next(iter(loader)) in range(39)
    assert "ForkServerProcess" in {type(child).__name__ for child in multiprocessing.active_children()}


def test_the_default_start_method_stays_the_users_to_set(python, tmp_path, six):
    """Asking Python for the default would fix it, so wdskit does not ask."""
    script = f"""
import multiprocessing, wdskit
loader = wdskit.Pipeline().stream({six!r}).with_epoch(3).loader(workers=1)
multiprocessing.set_start_method("spawn")
"""
    (tmp_path / "script.py").write_text(script)
    done = python.start(tmp_path / "script.py").wait()
    assert (done.returncode, done.stderr) == (0, "")


def test_pin_memory_without_a_gpu_is_no_error(six):
    """Recipes contain `pin_memory: true`, and users first try them on a laptop."""
    pipe = Pipeline().stream(six).map(number_of).batched(4).with_epoch(3)
    for workers in (0, 1):
        batches = list(pipe.loader(workers=workers, pin_memory=True))
        assert len(batches) == 3
        assert all(batch.is_pinned() == torch.cuda.is_available() for batch in batches)


# --- ranks


def test_the_rank_is_that_of_the_moment_the_loader_is_made(config, monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.INFO, logger="wdskit"):
        loader = make_loader(config, pipeline="train", transforms=NOTE)
    assert "rank 1 of 2, 1 a node, from RANK and WORLD_SIZE" in caplog.text
    monkeypatch.setenv("RANK", "0")
    other = make_loader(config, pipeline="train", transforms=NOTE)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert list(loader) == list(make_loader(config, pipeline="train", transforms=NOTE, rank=1, world_size=2))
    assert list(other) == list(make_loader(config, pipeline="train", transforms=NOTE, rank=0, world_size=2))


# --- two ranks of two workers
