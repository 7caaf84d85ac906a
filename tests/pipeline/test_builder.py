"""The builder: it accepts the same values as YAML, and refuses values with the same messages."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from shards import index_numbers, listed, number_of
from with_torchvision import make_importable

from configs import FORMS
from wdskit import ConfigError, Pipeline, PipelineError
from wdskit.pipeline.settings import load_config
from wdskit.stages.registry import STAGES, parse_stage
from wdskit.stages.streaming import Shuffle

make_importable()  # which of its transforms exist is known only then
BASE = Pipeline().stream("a.tar")
TUPLES = BASE.to_tuple("jpg")


def test_every_stage_is_a_method_with_the_names_and_defaults_of_its_spec():
    """A new setting is also an argument of the builder."""
    for name, spec in STAGES.items():
        method = inspect.signature(getattr(Pipeline, name))
        keywords = {p.name: p.default for p in method.parameters.values() if p.kind is p.KEYWORD_ONLY}
        for setting, default in keywords.items():
            info = spec.model_fields[setting]
            assert default is inspect.Parameter.empty if info.is_required() else info.default == default
        variadic = {p.kind for p in method.parameters.values()} & {inspect.Parameter.VAR_POSITIONAL}
        named = set(method.parameters) - {"self"}
        assert variadic or spec.is_mapping or named == set(spec.model_fields)


@pytest.mark.parametrize("name", FORMS)
def test_stage_is_the_same_from_python_and_yaml(name):
    settings = {
        "source" if name == "multi_hot" and key == "from" else key: value for key, value in FORMS[name][1].items()
    }
    several = settings.pop("fns", None) if name == "map_tuple" else None
    if name in ("to_tuple", "to_dict"):
        several = [settings.pop("fields")]
    [stage] = getattr(Pipeline(), name)(*several or (), **settings).stages
    assert stage == parse_stage(name, FORMS[name][0])


def test_each_line_of_the_stage_table_is_a_stage(load_tool):
    """The lines are valid in a configuration."""
    tool = load_tool("generate")
    for name, stage in STAGES.items():
        item = yaml.safe_load(tool.example(stage))
        written, value = next(iter(item.items())) if isinstance(item, dict) else (item, None)
        assert written == name
        assert parse_stage(name, value).name == name


BAD = [
    ("stream", {"shards": "a", "seed": -1}, lambda p: Pipeline().stream("a", seed=-1)),
    ("decode", {"images": "rgb8", "only": []}, lambda p: p.decode("rgb8", only=())),
    ("map", {"fn": "os.system"}, lambda p: p.map("os.system")),
    ("map_dict", {}, lambda p: p.map_dict()),
    ("map_tuple", {"fns": []}, lambda p: p.map_tuple()),
    ("to_tuple", {"fields": []}, lambda p: p.to_tuple()),
    ("to_dict", {"fields": ["jpg;png", "jpg"]}, lambda p: p.to_dict("jpg;png", "jpg")),
    ("batched", {"batch_size": 2, "partial": 1}, lambda p: p.batched(batch_size=2, partial=1)),
    ("resize", {"size": 5, "masks": ["a"], "fields": ["a"]}, lambda p: p.resize(5, masks=["a"], fields=["a"])),
    ("random_resized_crop", {"size": 5, "scale": [0.5, 2]}, lambda p: p.random_resized_crop(5, scale=[0.5, 2])),
]


@pytest.mark.parametrize(("name", "value", "python"), BAD, ids=[f"{name}-{at}" for at, (name, *_) in enumerate(BAD)])
def test_a_wrong_setting_is_refused_in_the_words_of_the_configuration(name, value, python):
    """The error comes when the method is called; only the place in the message differs."""
    with pytest.raises(ConfigError) as by_builder:
        python(BASE)
    before = {"stream": [], "map_tuple": [*TUPLES.stages]}.get(name, [*BASE.stages])
    with pytest.raises(ConfigError) as by_config:
        load_config({"pipeline": [*before, {name: value}]})
    assert all(problem.where == f"Pipeline.{name}" for problem in by_builder.value.problems)
    one, other = ({problem.rule for problem in err.value.problems} for err in (by_builder, by_config))
    assert one == other


def test_field_names_may_be_one_text_wherever_they_may_be_a_list():
    """The letters of the text are not taken for names."""
    assert BASE.to_tensor(fields="jpg right.png").stages[-1].fields == ("jpg", "right.png")
    assert BASE.decode("rgb8", only="jpg").stages[-1].only == ("jpg",)
    assert BASE.resize(5, fields="jpg", masks="png").stages[-1].masks == ("png",)
    assert BASE.to_tuple("jpg cls").stages == BASE.to_tuple("jpg", "cls").stages


def test_any_word_is_a_field_name():
    """Names of the builder's own parameters are allowed too."""
    words = ["name", "self", "value", "settings", "where", "fields", "cls"]
    assert BASE.rename(**dict.fromkeys(words, "jpg")).stages[-1].names == dict.fromkeys(words, "jpg")
    assert BASE.map_dict(**dict.fromkeys(words, len)).stages[-1].fields == dict.fromkeys(words, len)


def test_shards_may_be_paths(tmp_path, six):
    folder = tmp_path / "six"
    assert Pipeline().stream(folder).stages == Pipeline().stream(str(folder)).stages
    several = [folder / "s-000.tar", str(folder / "s-001.tar")]
    assert Pipeline().stream(several).stages[-1].shards == (str(several[0]), several[1])
    assert sorted(Pipeline().stream(Path(six).parent).map(number_of).loader(workers=0)) == list(range(39))
    assert load_config({"pipeline": [{"stream": folder}]}).pipeline()[0].shards == str(folder)


@pytest.mark.parametrize("value", [np.ones((3, 3)), torch.ones(2, 2), {"a": 1}, 0.5])
def test_what_is_no_list_of_numbers_is_refused(value):
    """The code must not ask for the truth value of an array."""
    with pytest.raises(ConfigError, match=r"^Pipeline\.normalize: normalize\.mean"):
        BASE.normalize(mean=value, std=value)


@pytest.mark.parametrize(
    "stage",
    ["shuffle", 5, None, [number_of], {"shuffle": 5}, BASE, Shuffle, (number_of,), object()],
    ids=["text", "number", "none", "list", "dict", "pipeline", "spec class", "tuple", "object"],
)
def test_what_can_be_no_stage_is_refused_when_it_is_added(stage):
    for add in (lambda: BASE.stage(stage), lambda: Pipeline([*BASE.stages, stage])):
        with pytest.raises(PipelineError, match=r"^stage 1: .*a spec or a callable from iterator"):
            add()
    with pytest.raises(PipelineError, match=r"^stage 0: "):
        Pipeline([stage])


def test_stages_that_do_not_fit_are_told_all_at_once():
    pipe = BASE.batched(4).resize(5).stream("b.tar")
    with pytest.raises(PipelineError) as caught:
        pipe.check()
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["stage 2 (resize)", "stage 3 (stream)"]
    for call in (pipe.build, pipe.loader):
        with pytest.raises(PipelineError, match="stage 2"):
            call()
    with pytest.raises(PipelineError, match=r"stage 0 \(none\): the pipeline is empty"):
        Pipeline().check()


def test_a_pipeline_never_changes(six):
    """A stage is added to a new pipeline; several loaders of one pipeline run at the same time."""
    base = listed(six)
    before = base.stages
    short, batched = base.map(number_of), base.batched(3, collate=len)
    first, second = short.loader(workers=0), short.loader(workers=0)
    pairs = list(zip(first, second, strict=True))
    assert pairs == [(number, number) for number in range(39)]
    assert list(batched.loader(workers=0)) == [3] * 13
    assert base.stages is before
    assert len(short.stages) == len(batched.stages) == len(before) + 1


def test_pipelines_can_be_joined_from_parts(six):
    source, tail = listed(six), Pipeline().map(number_of).batched(5).stages
    parts = Pipeline((*source.stages, *tail)).loader(workers=0)
    assert [number for part in parts for number in part] == list(range(39))


def test_lists_that_the_caller_changes_later_change_nothing(six):
    shards, fields = [six], ["cls", "__key__"]
    pipe = Pipeline().stream(shards).to_tensor(fields=fields)
    config = {"pipeline": [{"stream": shards}, {"rename": {"a": "b"}}, {"to_tuple": fields}]}
    loaded = load_config(config).pipelines["pipeline"]
    stages = str(pipe.stages), str(loaded)
    for values in (shards, fields):
        values.append(values[0])
    config["pipeline"][1]["rename"]["c"] = "d"
    assert (str(pipe.stages), str(loaded)) == stages


# --- settings of a loader that cannot be kept


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("numbers")
    return index_numbers(folder, [5, 4])


REFUSED: dict[str, Any] = {"threads": 2, "device": "cuda"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stream_cannot_do_is_refused_by_name(indexed: str, name: str) -> None:
    with pytest.raises(PipelineError, match=f"^{name}: "):
        Pipeline().stream(f"{indexed}/*.tar").loader(workers=0, **{name: REFUSED[name]})


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_folder_of_bad_samples_that_is_a_file_is_refused(indexed: str, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"'{tmp_path}/file"):
        Pipeline().exact(indexed).loader(workers=0, errors={"max_bad": 1, "dir": f"{tmp_path}/file{below}"})
