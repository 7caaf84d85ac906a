"""Every stage, from Python and from YAML: equal specs, and the promised values."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from shards import fail_on_7, index_numbers, listed, write_pictures

from wdskit import Pipeline, PipelineError, SampleError
from wdskit.pipeline.settings import load_config
from wdskit.stages.registry import STAGES

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


def double(value):
    return 2 * value


def take_number(sample):
    return sample["json"]["number"]


def is_even(sample):
    return sample["json"]["number"] % 2 == 0


def keys_only(samples):
    return [sample["__key__"] for sample in samples]


FUNCTIONS = {f.__name__: f for f in (double, take_number, is_even, keys_only)}


def same(one: Any, other: Any) -> bool:
    """Return whether types, dtypes, shapes and values are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Ten pictures in shards of 4, 3 and 3."""
    return write_pictures(tmp_path_factory.mktemp("pictures"), [4, 3, 3])


@pytest.fixture
def pattern(pictures, monkeypatch):
    """The pattern of the pictures, also in the variable PICTURES."""
    folder = pictures[0].url.rpartition("/")[0]
    monkeypatch.setenv("PICTURES", f"{folder}/p-*.tar")
    return f"{folder}/p-*.tar"


def decoded(picture) -> dict[str, Any]:
    """Return the sample that `decode: rgb8` makes of a picture."""
    number = picture.number
    hidden = {"__key__": picture.key, "__url__": picture.url}
    fields = {"cls": number % 5, "json": {"number": number}, "txt": f"text {number}"}
    return {**hidden, picture.field: picture.pixels, **fields}


def changed(function: Callable[[Any], Any], pictures) -> list[Any]:
    """Return the decoded samples with changed images."""
    return [{**decoded(p), p.field: function(p.pixels)} for p in pictures]


def images_of(pictures) -> torch.Tensor:
    """Return the batch of the pictures' images, channels_last."""
    return torch.from_numpy(np.stack([p.pixels for p in pictures])).permute(0, 3, 1, 2)


def labels_of(pictures) -> torch.Tensor:
    return torch.tensor([p.number % 5 for p in pictures])


def batches(pictures, size: int) -> list[Any]:
    groups = [pictures[at : at + size] for at in range(0, len(pictures), size)]
    return [(images_of(group), labels_of(group), [p.key for p in group]) for group in groups]


@dataclass(frozen=True)
class Case:
    """One stage in Python and YAML, the stages before it, and its results for the ten pictures.

    `python` adds to `Pipeline().stream(...)`; `yaml` has the items after the source. `expected` gets the
    pictures. With `workers` or `ranks` the order is not compared: other tests do that.
    """

    name: str
    python: Callable[[Pipeline], Pipeline]
    yaml: str
    expected: Callable[[Any], list[Any]]
    workers: int = 0
    ranks: int = 1


DECODE = "- decode: rgb8\n"
TUPLES = DECODE + '- to_tuple: ["jpg;png", cls, __key__]\n'


def tuples(pipe: Pipeline) -> Pipeline:
    return pipe.decode("rgb8").to_tuple("jpg;png", "cls", "__key__")


CASES = [
    Case("stream", lambda p: p, "", lambda ps: [p.number for p in ps]),
    Case(
        "split_by_node",
        lambda p: p.split_by_node().with_epoch(7),
        "- split_by_node\n- with_epoch: 7\n",
        lambda ps: [ps[at].number for at in (0, 1, 2, 3, 7, 8, 9, 4, 5, 6, 0, 1, 2, 3)],  # draws 0, 2 and 1, 3 of 3
        ranks=2,
    ),
    Case(
        "split_by_worker",
        lambda p: p.split_by_worker(),
        "- split_by_worker\n",
        lambda ps: [p.number for p in ps],
        workers=2,
    ),
    Case(
        "shuffle",
        lambda p: p.split_by_worker().shuffle(6, initial=3),
        "- split_by_worker\n- shuffle: {size: 6, initial: 3}\n",
        lambda ps: [p.number for p in ps],
        workers=2,
    ),
    Case("decode", lambda p: p.decode("rgb8"), DECODE, lambda ps: [decoded(p) for p in ps]),
    Case(
        "decode",
        lambda p: p.decode("rgb8", only="png cls", max_pixels=192).to_dict("jpg;png", "cls"),
        "- decode: {images: rgb8, only: [png, cls], max_pixels: 192}\n- to_dict: jpg;png cls\n",
        lambda ps: [{"jpg": p.pixels if p.number % 2 else bytes, "cls": p.number % 5} for p in ps],
    ),
    Case(
        "map",
        lambda p: p.decode().map("take_number").map("double", global_rng=True),
        "- decode\n- map: take_number\n- map: {fn: double, global_rng: true}\n",
        lambda ps: [2 * p.number for p in ps],
    ),
    Case(
        "map_dict",
        lambda p: p.decode().map_dict(cls="double", txt="double").to_dict("cls", "txt"),
        "- decode\n- map_dict: {cls: double, txt: double}\n- to_dict: [cls, txt]\n",
        lambda ps: [{"cls": 2 * (p.number % 5), "txt": f"text {p.number}" * 2} for p in ps],
    ),
    Case(
        "map_tuple",
        lambda p: p.decode().to_tuple("txt", "cls", "__key__").map_tuple(None, "double"),
        "- decode\n- to_tuple: txt cls __key__\n- map_tuple: [null, double]\n",
        lambda ps: [(f"text {p.number}", 2 * (p.number % 5), p.key) for p in ps],
    ),
    Case(
        "select",
        lambda p: p.decode().select("is_even").map("take_number"),
        "- decode\n- select: is_even\n- map: take_number\n",
        lambda ps: [p.number for p in ps if p.number % 2 == 0],
    ),
    Case(
        "rename",
        lambda p: p.decode("rgb8").rename(image="jpg;png", name="txt", cls="json", self="cls"),
        DECODE + '- rename: {image: "jpg;png", name: txt, cls: json, self: cls}\n',
        lambda ps: [
            {
                "__key__": p.key,
                "__url__": p.url,
                "image": p.pixels,
                "name": f"text {p.number}",
                "cls": {"number": p.number},
                "self": p.number % 5,
            }
            for p in ps
        ],
    ),
    Case(
        "to_tuple",
        lambda p: p.decode("rgb8").to_tuple("webp;jpg;png", "txt;cls", "__key__", "__url__"),
        DECODE + '- to_tuple: "webp;jpg;png txt;cls __key__ __url__"\n',
        lambda ps: [(p.pixels, f"text {p.number}", p.key, p.url) for p in ps],
    ),
    Case(
        "to_dict",
        lambda p: p.decode("rgb8").to_dict("webp;jpg;png", "__key__"),
        DECODE + '- to_dict: ["webp;jpg;png", __key__]\n',
        lambda ps: [{"webp": p.pixels, "__key__": p.key} for p in ps],
    ),
    Case("batched", lambda p: tuples(p).batched(4), TUPLES + "- batched: 4\n", lambda ps: batches(ps, 4)),
    Case(
        "batched",
        lambda p: tuples(p).batched(4, partial=False),
        TUPLES + "- batched: {size: 4, partial: false}\n",
        lambda ps: batches(ps, 4)[:2],
    ),
    Case(
        "batched",
        lambda p: p.batched(4, collate="keys_only"),
        "- batched: {size: 4, collate: keys_only}\n",
        lambda ps: [[p.key for p in ps[at : at + 4]] for at in (0, 4, 8)],
    ),
    Case(
        "batched",
        lambda p: p.decode("rgb8").to_dict("jpg;png", "json", "cls").batched(10),
        DECODE + "- to_dict: jpg;png json cls\n- batched: 10\n",
        lambda ps: [{"jpg": images_of(ps), "json": [{"number": n} for n in range(10)], "cls": labels_of(ps)}],
    ),
    Case(
        "multi_hot",
        lambda p: p.decode().multi_hot(source="json.number", classes=10).to_tuple("multi_hot", "__key__"),
        "- decode\n- multi_hot: {from: json.number, classes: 10}\n- to_tuple: multi_hot __key__\n",
        lambda ps: [(np.eye(10, dtype=np.float32)[p.number], p.key) for p in ps],
    ),
    Case(
        "with_epoch",
        lambda p: tuples(p).batched(4).with_epoch(2),
        TUPLES + "- batched: 4\n- with_epoch: 2\n",
        lambda ps: batches(ps[:8], 4),
    ),
    Case("with_length", lambda p: p.with_length(10), "- with_length: 10\n", lambda ps: [p.number for p in ps]),
    Case(
        "resize",
        lambda p: p.decode("rgb8").resize([12, 16]).resize(12, fields="jpg;png"),
        DECODE + '- resize: [12, 16]\n- resize: {size: 12, fields: "jpg;png"}\n',
        lambda ps: [decoded(p) for p in ps],  # the size of the pictures
    ),
    Case(
        "center_crop",
        lambda p: p.decode("rgb8").center_crop((6, 8)),
        DECODE + "- center_crop: [6, 8]\n",
        lambda ps: changed(lambda image: image[3:9, 4:12], ps),
    ),
    Case(
        "random_resized_crop",
        lambda p: p.decode("rgb8").random_resized_crop([12, 16], scale=[1, 1], ratio=(4 / 3, 4 / 3)),
        DECODE + f"- random_resized_crop: {{size: [12, 16], scale: [1, 1], ratio: [{4 / 3}, {4 / 3}]}}\n",
        lambda ps: [decoded(p) for p in ps],  # the only crop that fits
    ),
    Case(
        "random_flip",
        lambda p: p.decode("rgb8").random_flip(1),
        DECODE + "- random_flip: 1\n",
        lambda ps: changed(lambda image: image[:, ::-1], ps),
    ),
    Case(
        "normalize",
        lambda p: p.decode("rgb8").normalize(mean=MEAN, std=STD).select("is_even"),
        DECODE + f"- normalize: {{mean: {MEAN}, std: {STD}}}\n- select: is_even\n",
        lambda ps: changed(lambda image: np.float32((image / 255 - MEAN) / STD), ps[::2]),
    ),
    Case(
        "to_tensor",
        lambda p: p.decode("rgb8").to_tensor(fields=["jpg;png"]),
        DECODE + '- to_tensor: "jpg;png"\n',
        lambda ps: changed(lambda image: torch.from_numpy(np.float32(image) / 255).permute(2, 0, 1), ps),
    ),
]
IDS = [f"{case.name}-{at}" for at, case in enumerate(CASES)]


def run_case(pipe: Pipeline, case: Case) -> list[Any]:
    """Return the items of all ranks in one epoch; undecoded samples as their numbers."""
    items = []
    for rank in range(case.ranks):
        where = {"rank": rank, "world_size": case.ranks, "transforms": FUNCTIONS}
        loader = pipe.loader(workers=case.workers, **where)
        assert case.name != "with_length" or len(loader) == 10
        found = [bare(item) for item in loader]
        if not case.workers:  # what workers that are not forked get
            pickled = pickle.loads(pickle.dumps(pipe.build(**where)))
            assert close([bare(item) for item in pickled], found)
        items += found
    return sorted(items) if case.workers else items


def bare(item: Any) -> Any:
    """Return an undecoded sample as its number, undecoded fields as their type."""
    if not isinstance(item, dict):
        return item
    if isinstance(item.get("json"), bytes):
        return int(item["__key__"][1:])
    return {name: bytes if isinstance(value, bytes) else value for name, value in item.items()}


def test_the_table_covers_every_stage_of_a_stream():
    assert {case.name for case in CASES} == {
        name
        for name, spec in STAGES.items()
        if not spec.is_planned and name not in ("bucketed", "resize_to_bucket", "torchvision")  # in other files
    }


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_stage_is_the_same_from_python_and_yaml(case, pattern, pictures, tmp_path):
    """The specs are equal, and each pipeline yields the values of the table, also after it was pickled."""
    built = case.python(Pipeline().stream(pattern, shuffle_shards=False))
    text = f'version: 1\npipeline:\n- stream: {{shards: "${{PICTURES}}", shuffle_shards: false}}\n{case.yaml}'
    (tmp_path / "config.yaml").write_text(text)
    of_yaml = Pipeline(load_config(tmp_path / "config.yaml").pipeline())
    assert built.stages == of_yaml.stages
    expected = case.expected(pictures)
    assert expected
    for pipe in (built, of_yaml):
        assert close(run_case(pipe, case), expected)


def close(values: Any, expected: Any) -> bool:
    """Return as `same`, but floats may differ in the last digits, and the memory layout may differ."""
    if isinstance(values, (list, tuple)) and type(values) is type(expected):
        return len(values) == len(expected) and all(map(close, values, expected))
    if isinstance(values, dict) and isinstance(expected, dict):
        return list(values) == list(expected) and all(close(values[key], expected[key]) for key in values)
    if isinstance(values, np.ndarray) and values.dtype == np.float32 == expected.dtype:
        return values.shape == expected.shape and np.allclose(values, expected, rtol=0, atol=1e-6)
    return same(values, expected)


# --- errors


FAILING = {
    "map": lambda p: p.map(fail_on_7),
    "map_dict": lambda p: p.map_dict(cls=lambda data: 1 / (int(data) - 7)),
    "map_tuple": lambda p: p.to_tuple("__key__", "cls").map_tuple(None, lambda data: 1 / (int(data) - 7)),
    "select": lambda p: p.select(fail_on_7),
    "batched": lambda p: p.batched(1, collate=lambda samples: fail_on_7(samples[0])),
    "decode": lambda p: p.rename(json="cls").map(lambda s: {**s, "json": b"{" if s["json"] == b"7" else b"1"}).decode(),
    "to_tuple": lambda p: p.map(lambda s: {} if s["cls"] == b"7" else s).to_tuple("jpg;cls"),
    "to_dict": lambda p: p.map(lambda s: {} if s["cls"] == b"7" else s).to_dict("cls"),
    "rename": lambda p: p.map(lambda s: {} if s["cls"] == b"7" else s).rename(a="cls"),
}


@pytest.mark.parametrize("stage", FAILING)
@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": 1, "start_method": "fork"}], ids=["here", "worker"])
def test_a_failing_stage_names_itself_the_shard_and_the_key(six, stage, settings):
    with pytest.raises(SampleError) as caught:
        list(FAILING[stage](listed(six)).loader(**settings))
    err = caught.value
    assert (err.stage, err.key, err.shard.rpartition("/")[2]) == (stage, "n000007", "s-001.tar")
    assert str(err).startswith(f"{err.shard}: n000007: {stage} failed: ")


def raise_stop(value):
    raise StopIteration


@pytest.mark.parametrize("stage", ["map", "select", "batched"])
def test_a_stop_iteration_of_a_users_function_does_not_end_the_stream(six, stage):
    stages = {"map": {"fn": raise_stop}, "select": {"fn": raise_stop}, "batched": {"size": 2, "collate": raise_stop}}
    pipe = Pipeline(load_config({"pipeline": [*listed(six).stages, {stage: stages[stage]}]}).pipeline())
    with pytest.raises(SampleError, match="StopIteration"):
        list(pipe.loader(workers=0))


def test_a_schedule_without_a_weight_is_refused(tmp_path):
    index_numbers(tmp_path, [4, 5])
    part = {"shards": str(tmp_path), "weight": {0: 1, 1000: 0}}
    pipe = Pipeline().exact(mixture=[part, part]).batched(2).with_epoch(5)
    with pytest.raises(PipelineError, match=r"exact: mixture: .* at every position one part must have a weight"):
        pipe.loader(workers=0)
