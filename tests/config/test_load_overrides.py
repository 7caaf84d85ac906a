"""`a.b.c=VALUE` changes settings before they are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs import TEXT, load
from wdskit.errors import ConfigError
from wdskit.pipeline.settings import ErrorsSpec, LoaderSpec, load_config
from wdskit.stages.registry import parse_stage


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return path


OVERRIDES = [
    ("pipelines.train.stream.seed=3", "train", 0, {"shards": "a-{000..003}.tar", "seed": 3}),
    ("pipelines.train.0.stream.seed=3", "train", 0, {"shards": "a-{000..003}.tar", "seed": 3}),
    ("pipelines.train[0].stream.seed=3", "train", 0, {"shards": "a-{000..003}.tar", "seed": 3}),
    ("pipelines.val.stream.seed=3", "val", 0, {"shards": ["b.tar"], "seed": 3}),
    ("pipelines.val.stream.shards.0=c-{0..1}.tar", "val", 0, {"shards": ["c-{0..1}.tar"], "seed": 5}),
    ("pipelines.val.stream=c.tar", "val", 0, "c.tar"),
    ("pipelines.train.shuffle.size=50", "train", 2, 50),
    ("pipelines.train.shuffle.initial=50", "train", 2, {"size": 200, "initial": 50}),
    ("pipelines.train.3.map.global_rng=true", "train", 3, {"fn": "f", "global_rng": True}),
    ("pipelines.train.random_flip=0.1", "train", 5, 0.1),
    ("pipelines.train.5.random_flip.p=0.1", "train", 5, 0.1),
    ("pipelines.train.to_tuple=[png]", "train", 6, "png"),
    ("pipelines.train.to_tuple.fields.1=json", "train", 6, "jpg json"),
    ("pipelines.train.batched.partial= true", "train", 7, 64),
]


@pytest.mark.parametrize(("override", "pipeline", "index", "value"), OVERRIDES)
def test_overrides(config_file: Path, override: str, pipeline: str, index: int, value: Any) -> None:
    """An override names a stage by position or name, and changes or replaces a shorthand. Nothing else changes."""
    plain, changed = load_config(config_file), load_config(config_file, overrides=[override])
    name = plain.pipeline(pipeline)[index].name
    wanted = list(plain.pipeline(pipeline))
    wanted[index] = parse_stage(name, value)
    assert changed.pipeline(pipeline) == tuple(wanted)
    rest = {other for other in plain.pipelines if other != pipeline}
    assert all(changed.pipeline(other) == plain.pipeline(other) for other in rest)


def test_overrides_of_the_loader_and_of_whole_parts(config_file: Path) -> None:
    """Of two overrides the last one wins. A stage or a pipeline may be replaced."""
    config = load_config(
        config_file, functions={"f": dict},
        overrides=["loader.workers=4", "loader.workers=0", "loader.pin_memory=true", "errors.max_bad=3",
                   "pipelines.train.5=batched", "pipelines.train.1=f", "pipelines.train.f.by=3",
                   "pipelines.train.5={resize: 8}", "pipelines.test=[{stream: c.tar}]"],
    )  # fmt: skip
    assert config.pipeline("train")[1].settings == {"by": 3}
    assert config.loader == LoaderSpec(workers=0, pin_memory=True)
    assert config.errors == ErrorsSpec(max_bad=3)
    assert config.pipeline("train")[5] == parse_stage("resize", 8)
    assert config.pipeline("test") == (parse_stage("stream", "c.tar"),)


def test_null_removes_a_setting(config_file: Path) -> None:
    """Also one whose default is not null, and one that the file does not set."""
    given = [
        "loader.workers=4", "loader.prefetch=2", "errors.max_bad=3", "pipelines.train.shuffle.initial=5",
        "pipelines.train.stream.seed=9",
    ]  # fmt: skip
    removed = [
        "loader.workers=null", "loader.prefetch=", "loader.timeout=null", "errors.max_bad=null",
        "errors.transforms=null", "pipelines.train.shuffle.initial=null", "pipelines.train.stream.seed=null",
        "pipelines.train.batched.partial=~",
    ]  # fmt: skip
    plain, changed = load_config(config_file), load_config(config_file, overrides=given + removed)
    assert (changed.loader, changed.errors) == (LoaderSpec(), ErrorsSpec())
    assert changed.pipeline("train")[2] == parse_stage("shuffle", 200)
    assert changed.pipeline("train")[0].seed == 0
    assert plain.pipeline("train")[7].partial is False
    assert changed.pipeline("train")[7].partial is True
    for override, message in (
        ("loader.wokers=null", "no such setting"),
        ("pipelines.train.batched=null", "size is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(config_file, overrides=[override])


def test_a_schedule_of_weights_has_numbers_as_names(tmp_path: Path) -> None:
    mixture = "[{shards: a, weight: 1}, {shards: b, weight: 2}]"
    text = f"version: 1\npipeline:\n  - exact: {{mixture: {mixture}}}\n  - with_epoch: 5\n"
    config = load(text, tmp_path, "pipeline.exact.mixture.0.weight={0: 1, 100: 2}")
    assert config.pipeline()[0].mixture[0].weight == {0: 1, 100: 2}
    with pytest.raises(ConfigError, match="no such setting"):
        load(text, tmp_path, "pipeline.exact.mixture.0={0: 1}")


def test_an_override_replaces_what_cannot_be_read(tmp_path: Path) -> None:
    """A variable that is not set does not matter where --set gives the value."""
    text = "version: 1\npipeline:\n  - stream: ${WDSKIT_UNSET}/a.tar\n  - shuffle: 0\n"
    config = load(text, tmp_path, "pipeline.stream=b.tar", "pipeline.shuffle=5")
    assert config.pipeline() == (parse_stage("stream", "b.tar"), parse_stage("shuffle", 5))


BAD_OVERRIDES = {
    "loader.workers": "an override is written PATH=VALUE: loader.workers=4.",
    "=4": "no such setting. Known: `version`",
    "loader.workers=many": "loader.workers: Input should be a valid integer, not `many`.",
    "pipelines.train.batched={batch_size: 4}": (
        "pipelines.train[7].batched.batch_size: no such setting. Did you mean `size`?"
    ),
    "loader.num_workers=4": "loader.num_workers: no such setting. Did you mean `workers`?",
    "loader.workers.x=4": "no `x` in loader.workers.",
    "loader=[": "this is not plain YAML: ",
    "pipelines.trian.stream.seed=4": "no `trian` in pipelines. Did you mean `train`?",
    "pipelines.train.shufle=4": "no `shufle` in pipelines.train. Did you mean `shuffle`?",
    "pipelines.train.shuffle=0": "pipelines.train[2].shuffle.size: Input should be greater than or equal to 1, not 0.",
    "pipelines.train.map=4": "2 `map` in pipelines.train. Use its position.",
    "pipelines.train.9=shuffle": "no `9` in pipelines.train.",
    "pipelines.train.to_tuple.x=4": "pipelines.train[6].to_tuple.x: no such setting. Known: `fields`.",
    "pipelines.train.to_tuple.fields.7=a": "no `7` in pipelines.train[6].to_tuple.fields.",
    "pipelines.val.stream.shards.x=4": "no `x` in pipelines.val[0].stream.shards.",
    "version=2": "version: Input should be 1, not 2.",
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_problems_of_an_override_carry_its_name(config_file: Path, override: str) -> None:
    """The message begins with `--set a.b.c=VALUE:`; no other problem's message does."""
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, overrides=["loader.workers=3", override] if ".workers.x" in override else [override])
    found = [str(problem) for problem in caught.value.problems if problem.where == f"--set {override}"]
    assert len(found) == 1
    assert found[0].startswith(f"--set {override}: {BAD_OVERRIDES[override]}")
