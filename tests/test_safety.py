"""C10: only code that is named in Python runs, no content of shards and no text of a configuration."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from pathlib import Path

import canaries
import numpy as np
import pytest
import torch
import webdataset
from canaries import MARK
from shards import write_shard

import wdskit
from wdskit import ConfigError, DecodeError, Pipeline, SampleError, make_loader
from wdskit.codecs.images import IMAGE_SPECS
from wdskit.shards.index import index_folder

# --- all inputs of wdskit, under an audit hook


@pytest.fixture(scope="module")
def told(tmp_path_factory, script_environment):
    """The output of `canaries.py`: by run, its events, the files that canaries made, and the errors."""
    script = Path(canaries.__file__)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("canaries"))],
        env=script_environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


OWN_EVENTS = {
    f"pickle.find_class ('wdskit.{module}', '{name}')"
    for module, names in {
        "errors": ["SampleError", "WdskitError"],
        "engine.batch": ["Batch"],
        "engine.outcome": ["Outcome", "_unpickle_outcome"],
        "loader.stream": ["Item"],
        "loader.memory": ["Message"],
        "stages.run": ["Timings"],
        "storage.traffic": ["Traffic"],
    }.items()
    for name in names
}
"""Values that a worker process sends: batches, errors of samples, and the times of stages."""


def test_nothing_in_shards_rows_or_configurations_runs(told):
    """No process is started, no class is looked up for a pickle, no text is compiled or executed, no canary fires."""
    assert told["plain"]["fired"] == []
    assert set(told["plain"]["events"]) <= OWN_EVENTS


def test_all_of_it_is_an_error_of_wdskits_or_bytes(told):
    """Commands that decode nothing complete their work."""
    known = {name for name in wdskit.__all__ if isinstance(getattr(wdskit, name), type)}
    errors = set(told["plain"]["errors"])
    assert errors <= known | {"", "exit 0", "exit 1"}
    assert {"", "exit 0", "exit 1", "SampleError", "ConfigError", "StorageError"} <= errors


@pytest.mark.parametrize(
    ("mutant", "event", "file"),
    [
        ("decode_with_pickle", "pickle.find_class ('builtins', 'exec')", f"{MARK}.pkl"),
        ("open_with_a_shell", "subprocess.Popen '/bin/sh'", f"{MARK}.text"),
        ("map_by_import_path", "exec (", f"{MARK}.module"),
    ],
)
def test_the_hook_catches_what_it_is_there_for(told, mutant, event, file):
    assert file in told[mutant]["fired"]
    assert any(found.startswith(event) for found in told[mutant]["events"])


def test_every_canary_is_alive(tmp_path):
    """Each canary fires if its field is trusted, as in webdataset's decode, and in numpy and torch with pickle."""
    payloads = canaries.payloads(tmp_path)
    dead = []
    for field, data in payloads.items():
        if field.startswith("h"):
            continue
        try:
            if field == "torch.pth":
                torch.load(io.BytesIO(data), weights_only=False)
            elif field == "npy":
                np.load(io.BytesIO(data), allow_pickle=True)
            else:
                pickle.loads(data)
        finally:
            file = tmp_path / f"{MARK}.{field}"
            dead += [] if file.exists() else [field]
    assert dead == []
    for file in tmp_path.glob(f"{MARK}.*"):
        file.unlink()
    sample = {"__key__": "k", "pickle": payloads["pickle"]}
    list(webdataset.decode()([sample]))
    assert (tmp_path / f"{MARK}.pickle").exists()


# --- bytes stay bytes, or are an error with shard and key


@pytest.mark.parametrize("spec", [None, *IMAGE_SPECS])
def test_pickles_stay_the_bytes_they_were(tmp_path, spec):
    names = {"pkl", "pickle", "pyd", "pth", "npz", "torch.pth"}
    payloads = {field: data for field, data in canaries.payloads(tmp_path).items() if field in names}
    path = write_shard(tmp_path / "a.tar", {"k": payloads})
    (sample,) = Pipeline().stream(path).decode(spec).loader(workers=0)
    assert {field: sample[field] for field in payloads} == payloads
    assert not list(tmp_path.glob(f"{MARK}.*"))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("field", ["npy", "h0.npy", "h1.npy", "h2.npy", "h3.npy", "h4.npy", "cls", "json", "jpg"])
def test_a_payload_under_a_name_that_is_decoded_is_a_sample_error(tmp_path, field, workers):
    """The payloads are arrays of objects, headers that call functions, and pickles under other names."""
    data = canaries.payloads(tmp_path)[field]
    path = write_shard(tmp_path / "a.tar", {"good": {"txt": b"x"}, "bad": {field: data}})
    with pytest.raises(SampleError) as caught:
        list(Pipeline().stream(path).decode("rgb8").loader(workers=workers))
    assert (caught.value.stage, caught.value.shard, caught.value.key) == ("decode", str(path), "bad")
    assert str(caught.value).startswith(f"{path}: bad: decode failed: ")
    assert not list(tmp_path.glob(f"{MARK}.*"))


# --- bombs


DEEP = {"lists": b"[" * 100_000, "closed": b"[" * 100_000 + b"]" * 100_000, "objects": b'{"a":' * 100_000}


@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": 0, "threads": 2}, {"workers": 1}], ids=str)
@pytest.mark.parametrize("name", DEEP)
def test_json_of_a_hundred_thousand_levels_is_an_error(tmp_path, name, settings):
    """The process does not crash, not even in threads, whose stacks are small."""
    path = write_shard(tmp_path / "a.tar", {"k": {"json": DEEP[name]}})
    index_folder(tmp_path, workers=1)
    with pytest.raises(SampleError, match=r"k: decode failed: json: ") as caught:
        list(Pipeline().sequential(str(path)).decode().batched(1).loader(**settings))
    assert settings["workers"] or isinstance(caught.value.__cause__, DecodeError)


# --- configurations


def test_a_variable_is_text_whatever_it_holds(tmp_path, monkeypatch):
    """A variable is filled in once. It is never run, searched for another variable, or parsed as YAML."""
    path = write_shard(tmp_path / "a.tar", {"k": {"cls": b"1"}})
    text = 'version: 1\npipeline:\n- stream: "${WDSKIT_SHARDS}"\n- map: "${WDSKIT_MAP:-f}"\n'
    (tmp_path / "config.yaml").write_text(text)

    def load(**settings):
        return make_loader(tmp_path / "config.yaml", transforms={"f": str}, workers=0, **settings)

    monkeypatch.setenv("WDSKIT_SHARDS", str(path))
    assert len(list(load())) == 1
    for evil in canaries.commands(tmp_path):
        monkeypatch.setenv("WDSKIT_SHARDS", evil)
        with pytest.raises(wdskit.WdskitError):
            load()
        monkeypatch.setenv("WDSKIT_SHARDS", str(path))
        monkeypatch.setenv("WDSKIT_MAP", evil)
        with pytest.raises((ConfigError, wdskit.PipelineError)):
            load()
        monkeypatch.delenv("WDSKIT_MAP")
    monkeypatch.setenv("WDSKIT_SHARDS", "[a.tar, {seed: 1}, !!python/name:os.system]")
    with pytest.raises(wdskit.StorageError, match=r"\[a\.tar, \{seed: 1\}, !!python/name:os\.system\]"):
        load()
    assert not list(tmp_path.glob(f"{MARK}.*"))
