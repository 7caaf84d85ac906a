"""Configurations: from files and dicts, overrides, and back to YAML."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from wdskit.errors import ConfigError, StorageError
from wdskit.pipeline.loader_specs import LoaderSpec
from wdskit.pipeline.settings import Config, load_config
from wdskit.pipeline.specs import STAGES, parse_stage

# name: (shorthand, long form); where there is no shorthand the bare name is it
FORMS: dict[str, tuple[Any, Any]] = {
    "exact": ("a.tar", {"shards": "a.tar", "tail": "drop", "lanes": 240}),
    "resampled": ("a.tar", {"shards": "a.tar", "chunk": 64}),
    "sequential": ("a.tar", {"shards": "a.tar", "tail": "pad", "seed": 0}),
    "stream": ("a.tar", {"shards": "a.tar"}),
    "split_by_node": (None, {}),
    "split_by_worker": (None, {}),
    "tarfile_to_samples": (None, {}),
    "shuffle": (200, {"size": 200}),
    "select": ("keep", {"fn": "keep"}),
    "slice": ([10, 50, 2], {"start": 10, "stop": 50, "step": 2}),
    "decode": ("rgb8", {"images": "rgb8"}),
    "map": ("f", {"fn": "f"}),
    "map_dict": ({"jpg": "f"}, {"jpg": "f"}),
    "map_tuple": (["f", None], {"fns": ["f", None]}),
    "rename": ({"image": "jpg;png"}, {"image": "jpg;png"}),
    "resize": (256, {"size": 256}),
    "center_crop": ([224, 192], {"size": [224, 192]}),
    "random_resized_crop": (224, {"size": 224}),
    "random_flip": (0.25, {"p": 0.25}),
    "normalize": ("imagenet", {"preset": "imagenet"}),
    "to_tensor": (["jpg"], {"fields": "jpg"}),
    "to_tuple": ("jpg;png cls", {"fields": ["jpg;png", "cls"]}),
    "to_dict": (["jpg;png", "cls"], {"fields": "jpg;png cls"}),
    "batched": (64, {"size": 64}),
    "unbatched": (None, {}),
    "with_epoch": (100, {"n": 100}),
    "with_length": (100, {"n": 100}),
}
TEXT = """\
version: 1
pipelines:
  train:
    - stream: "a-{000..003}.tar"
    - split_by_node
    - shuffle: 200
    - map: f
    - map: {fn: g, global_rng: true}
    - random_flip
    - to_tuple: [jpg, cls]
    - batched: {size: 64, partial: false}
  val:
    - stream: {shards: [b.tar], seed: 5}
loader:
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return path


def load(text: str | bytes, folder: Path, *overrides: str) -> Config:
    path = folder / "config.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    return load_config(path, overrides=overrides)


def message(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides=overrides)
    return str(caught.value)


# ---- stages


def test_the_forms_cover_every_stage() -> None:
    """A new stage comes with its shorthand and its long form."""
    assert FORMS.keys() == STAGES.keys()


@pytest.mark.parametrize("name", STAGES)
def test_shorthand_and_long_form_are_one_spec(name: str) -> None:
    """And the spec's own shortest form reads back as the spec."""
    short, long = (parse_stage(name, value) for value in FORMS[name])
    assert short == long
    assert short.name == name
    assert parse_stage(name, short.shorten()) == short
    assert pickle.loads(pickle.dumps(short)) == short
    with pytest.raises(ValueError, match="frozen"):
        short.anything = 5


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_refuses_what_it_does_not_know(name: str) -> None:
    """Unknown settings and values of the wrong kind, each with a ConfigError."""
    for value in ({"nonsense": 1}, object(), {"a": object()}, [[[]]], 1.5j, b"x", {"": ""}, float("nan"), 10**5000, ""):
        with pytest.raises(ConfigError):
            parse_stage(name, value)


def test_an_unknown_stage_is_refused_with_the_nearest() -> None:
    """As in YAML, so in Python."""
    with pytest.raises(ConfigError, match=r"^pipeline: `shufle` is no stage\. Did you mean `shuffle`\?$"):
        parse_stage("shufle", 5)


def test_functions_may_stand_where_names_do() -> None:
    """In Python, not in YAML."""
    assert parse_stage("map", len).fn is len
    assert parse_stage("map_dict", {"cls": int}).fields == {"cls": int}
    assert parse_stage("map_tuple", [len, None]).fns == (len, None)
    assert parse_stage("batched", {"size": 4, "collate": list}).collate is list


# ---- files and dicts


def test_a_file_becomes_a_config(config_file: Path) -> None:
    """Pipelines in the order of the file, stages in theirs, defaults filled in."""
    config = load_config(config_file)
    assert list(config.pipelines) == ["train", "val"]
    names = [stage.name for stage in config.pipeline("train")]
    assert names == ["stream", "split_by_node", "shuffle", "map", "map", "random_flip", "to_tuple", "batched"]
    assert config.pipeline("val") == (parse_stage("stream", {"shards": ["b.tar"], "seed": 5}),)
    assert config.loader == LoaderSpec()
    assert config.origin == str(config_file)
    assert load_config(str(config_file)) == config


def test_which_pipeline() -> None:
    """One needs no name; of several the names are listed."""
    one = load_config({"pipeline": [{"stream": "a.tar"}]})
    assert one.pipeline() == one.pipeline("pipeline") == (parse_stage("stream", "a.tar"),)
    two = load_config({"pipelines": {"train": [{"stream": "a.tar"}], "val": [{"stream": "b.tar"}]}})
    with pytest.raises(ConfigError, match="2 pipelines; say which: `train` and `val`"):
        two.pipeline()
    with pytest.raises(ConfigError, match=r"no pipeline `vall`\. Did you mean `val`"):
        two.pipeline("vall")


def test_a_dict_may_hold_functions_stages_and_specs(config_file: Path) -> None:
    """It is left as it is, and foreign stages are kept."""

    def stage(source):
        return source

    spec = parse_stage("shuffle", 5)
    source = {
        "pipeline": [{"stream": ("a.tar",)}, stage, spec, {"map": len}, "split_by_node"],
        "loader": {"workers": 0},
    }
    before = copy.deepcopy(source)
    stages = load_config(source, overrides=["pipeline.stream.seed=3"]).pipeline()
    assert source == before
    assert stages[0].shards == ("a.tar",)
    assert stages[0].seed == 3
    assert stages[1] is stage
    assert stages[2] is spec
    assert stages[3].fn is len


def test_problems_of_a_dict_say_where() -> None:
    """There is no line, so the path has to do."""
    assert message({"pipeline": [{"stream": {"shards": "a", "seed": True}}]}) == (
        "config dict: pipeline[0].stream.seed: true is a truth value; a whole number is needed."
    )
    assert message({"pipeline": [{"stream": "a", 5: 1}], "version": 1}).startswith(
        "config dict: pipeline[0]: the name 5"
    )


def test_a_dict_that_holds_itself_is_refused() -> None:
    """As are one too deep and one that is too much."""
    loop: dict[str, Any] = {}
    loop["pipeline"] = loop
    assert "deeper than 32" in message(loop)
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert "deeper than 32" in message({"pipeline": deep})
    wide: Any = "x"
    for _ in range(30):
        wide = [wide, wide]
    assert "more than 100000 values" in message({"pipeline": wide})


@pytest.mark.parametrize("path", ["missing.yaml", ".", "a\0b", "x" * 5000])
def test_an_unreadable_file_is_a_storage_error(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a problem of the configuration."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="the configuration cannot be read") as caught:
        load_config(path)
    assert caught.value.url == path


def test_yaml_text_instead_of_a_path_is_pointed_out() -> None:
    """A mistake easily made."""
    assert "this is text, not a path" in message(TEXT)


def test_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In values, typed afterwards."""
    monkeypatch.setenv("WDSKIT_A", "7")
    text = "version: 1\npipeline:\n  - stream:\n      shards: ${WDSKIT_A}/${WDSKIT_B:-b}.tar\n      seed: ${WDSKIT_A}\n"
    source = load(text, tmp_path).pipeline()[0]
    assert (source.shards, source.seed) == ("7/b.tar", 7)


def test_no_more_than_a_hundred_problems_are_listed(tmp_path: Path) -> None:
    """And the rest is counted."""
    lines = message({"pipeline": [{"stream": "a"}] + [{"shuffle": 0}] * 300}).splitlines()
    assert len(lines) == 101
    assert lines[-1] == "config dict: 200 more problems are not shown."
    with pytest.raises(ConfigError) as caught:
        load("version: 1\n" * 5000, tmp_path)
    assert len(caught.value.problems) <= 101


# ---- back to YAML


def test_show_reads_back_equal(config_file: Path, tmp_path: Path) -> None:
    """Only what is not the default, in shorthands."""
    config = load_config(config_file, overrides=["loader.threads=8", "pipelines.train.stream=$$a yes"])
    text = config.to_yaml()
    assert (
        text
        == """\
version: 1
pipelines:
  train:
    - stream: "$$a yes"
    - split_by_node
    - shuffle: 200
    - map: f
    - map: {fn: g, global_rng: true}
    - random_flip
    - to_tuple: [jpg, cls]
    - batched: {size: 64, partial: false}
  val:
    - stream: {shards: [b.tar], seed: 5}
loader: {threads: 8}
"""
    )
    assert load(text, tmp_path) == config


def test_a_config_with_functions_cannot_be_written() -> None:
    """YAML can only name them."""
    for stage in (len, {"map": len}):
        with pytest.raises(ConfigError, match="holds a function"):
            load_config({"pipeline": [{"stream": "a"}, stage]}).to_yaml()
