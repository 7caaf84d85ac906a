"""The order in which stages may follow each other."""

from __future__ import annotations

import itertools

import pytest

from wdskit.config.order import check_order
from wdskit.stages.registry import STAGES, parse_stage

VALUES = {
    "exact": "a.tar", "resampled": "a.tar", "sequential": "a.tar",
    "stream": "a.tar", "shuffle": 5, "decode": "rgb8", "map": "f", "map_dict": {"cls": "f"}, "map_tuple": ["f"],
    "select": "f", "rename": {"a": "b"}, "to_tuple": "jpg cls", "to_dict": "jpg cls", "batched": 4,
    "with_epoch": 5, "with_length": 5,
    "torchvision": ["RandomHorizontalFlip"],
    "multi_hot": {"from": "json.labels", "classes": 3},
    "bucketed": {"by": "n", "edges": [5], "global_size": 8},
    "resize": 5, "center_crop": 5, "random_resized_crop": 5, "normalize": "imagenet",
}  # fmt: skip
DICT_STAGES = [
    name for name, spec in STAGES.items() if spec.kind == "each" and name not in {"map", "map_tuple", "torchvision"}
]


def foreign(source):
    return source


def check(text: str) -> list[tuple[int, str]]:
    """Call check_order with stages from a text with spaces; `?` is a foreign stage."""
    return check_order([foreign if name == "?" else parse_stage(name, VALUES.get(name)) for name in text.split()])


FITS = [
    "stream",
    "stream split_by_node split_by_worker",
    "stream split_by_worker split_by_node shuffle decode",
    "stream decode map map_dict rename select resize normalize to_tuple map_tuple batched",
    "stream shuffle batched with_epoch",
    "stream decode to_dict normalize batched map select shuffle with_epoch with_length",
    "stream decode to_tuple batched map_tuple shuffle",
    "stream to_tuple map normalize",
    "stream map map_tuple",
    "stream batched ? decode batched map_tuple",
    "stream ? decode",
]
FITS += [
    "exact",
    "sequential with_epoch",
    "resampled decode map map_dict rename resize normalize to_tuple map_tuple batched map map_tuple with_epoch",
    "exact with_epoch decode to_dict batched",
]
MISFITS = [
    ("exact stream", 1, "a second source"),
    ("exact with_epoch batched with_epoch", 3, "is already at [1]"),
    ("exact batched decode", 2, "has made batches"),
    ("exact decode ? batched", 2, "call your own function with `map`"),
    *(
        (f"{source} decode {name}", 2, f"`{name}` cannot follow `{source}`")
        for source in ("exact", "resampled", "sequential")
        for name in ("select", "shuffle", "split_by_node", "split_by_worker", "with_length")
    ),
    ("? decode", 0, "starts with a source of wdskit"),
    ("stream ? split_by_node", 2, "picks shards"),
    ("stream decode split_by_node", 2, "which `decode` at [1] has opened"),
    ("stream with_epoch split_by_worker", 2, "picks shards"),
    ("stream split_by_node split_by_node", 2, "is already at [1]"),
    ("stream with_epoch batched", 2, "it must be last"),
    ("stream with_length batched", 2, "it must be last"),
    ("stream map_tuple", 1, "takes tuples"),
    ("stream batched map_tuple", 2, "takes tuples"),
    ("stream batched batched", 2, "is already at [1]"),
    ("stream batched map decode", 3, "has made batches"),
]


@pytest.mark.parametrize("text", FITS)
def test_pipelines_that_fit(text: str) -> None:
    """A pipeline that can work is not refused."""
    assert check(text) == []


@pytest.mark.parametrize(("text", "index", "rule"), MISFITS)
def test_pipelines_that_do_not(text: str, index: int, rule: str) -> None:
    """There is one problem, at the wrong stage."""
    found = check(text)
    assert [at for at, _ in found] == [index]
    assert rule in found[0][1]


def test_the_tail_of_a_planned_source_decides_about_the_last_batch() -> None:
    dropped = parse_stage("batched", {"size": 2, "partial": False})
    assert [check_order([parse_stage(name, "a"), dropped]) for name in ("stream", "exact")] == [
        [], [(1, "`partial: false` does nothing after `exact`, whose `tail` decides. Remove it.")]
    ]  # fmt: skip


@pytest.mark.parametrize("name", DICT_STAGES)
@pytest.mark.parametrize(
    ("before", "word"), [("to_tuple", "tuples"), ("batched", "batches"), ("to_tuple batched", "batches")]
)
def test_stages_of_samples_stand_before_tuples_and_batches(name: str, before: str, word: str) -> None:
    """Each stage is refused after tuples or batches, and allowed before them."""
    source = "exact" if name == "resize_to_bucket" else "stream"
    found = check(f"{source} {before} {name}")
    assert len(found) == 1
    assert word in found[0][1]
    assert name == "to_tuple" or check(f"{source} {name} to_tuple batched") == []


def test_every_triple_of_stages_has_an_answer() -> None:
    """No triple raises; a class has the answer of its spec; all but sources and splitters fit after a foreign stage."""
    specs = {name: parse_stage(name, VALUES.get(name)) for name in STAGES}
    for source, *names in itertools.product(["stream", "exact"], *[STAGES] * 3):
        stages = [specs[source], *(specs[name] for name in names)]
        found = check_order(stages)
        assert all(0 <= at < 4 and rule.endswith(".") for at, rule in found)
        assert check_order([type(stage) for stage in stages]) == found
    for spec in specs.values():
        is_misfit = spec.name in ("bucketed", "resize_to_bucket") or spec.kind in ("source", "splitter")
        assert not check_order([specs["stream"], foreign, spec]) or is_misfit
