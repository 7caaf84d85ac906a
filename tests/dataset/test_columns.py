"""Columns next to an index: stored values, refusals, and conditions compared with Python's own."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import HastyDisk, on
from formats import files_in
from hypothesis import given
from hypothesis import strategies as st
from shards import selected, write_shard

import wdskit
from wdskit import PackError, Pipeline, SelectionError, index_folder, pack, split
from wdskit.dataset.columns import Columns, TextColumn, Texts, columns, join_parts, pack_values
from wdskit.dataset.subset import Subset
from wdskit.dataset.where import Where

NAMES = "cls,json.score,json.kind,cap=json.caption.length,boxes=json.boxes.length,txt.length,json.deep.n"


def row(number: int) -> dict[str, Any]:
    chance = random.Random(number)
    document = {
        "score": number / 8,
        "kind": chance.choice(["photo", "drawing", "größe"]),
        "caption": "é" * chance.randrange(9),
        "boxes": [[0, 0, 1, 1]] * chance.randrange(4),
        "deep": {"n": -number},
    }
    if number % 5 == 0:
        del document["score"]
    if number % 7 == 0:
        del document["kind"]
    return {"__key__": f"k{number:03d}", "cls": number % 300, "json": document, "txt": "x" * (number % 3)}


ROWS = [row(number) for number in range(90)]
EXPECTED: dict[str, list[Any]] = {
    "cls": [each["cls"] for each in ROWS],
    "json.score": [each["json"].get("score", math.nan) for each in ROWS],
    "json.kind": [each["json"].get("kind", "") for each in ROWS],
    "cap": [len(each["json"]["caption"]) for each in ROWS],
    "boxes": [len(each["json"]["boxes"]) for each in ROWS],
    "txt.length": [len(each["txt"]) for each in ROWS],
    "json.deep.n": [each["json"]["deep"]["n"] for each in ROWS],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ninety samples in shards of 20, with columns made during packing."""
    folder = tmp_path_factory.mktemp("columns") / "data"
    on(HastyDisk(), pack, ROWS, folder, max_samples=20, columns=NAMES)
    return folder


def check_values(found: Columns, expected: dict[str, list[Any]]) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(found[name]), values)


def test_columns_are_what_the_samples_say(folder: Path) -> None:
    found = columns(folder)
    check_values(found, EXPECTED)
    kinds = {name: found.column(name).dtype for name in found}
    assert kinds == {
        "cls": "|u1", "json.score": "<f8", "json.kind": "|u1", "cap": "|u1", "boxes": "|u1", "txt.length": "|u1",
        "json.deep.n": "|i1",
    }  # fmt: skip
    kind = found["json.kind"]
    assert isinstance(kind, TextColumn)
    assert kind.values == ("", "drawing", "größe", "photo")
    assert (kind == "photo").tolist() == [value == "photo" for value in EXPECTED["json.kind"]]
    assert kind[3] == EXPECTED["json.kind"][3]
    assert not found["cls"].flags.writeable
    assert len(pickle.dumps(found)) < 4000


@pytest.mark.parametrize("workers", [1, 2])
def test_packed_appended_and_indexed_columns_are_the_same_bytes(folder: Path, tmp_path: Path, workers: int) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".npy"}
    other = tmp_path / "data"
    on(HastyDisk(), pack, ROWS[:40], other, max_samples=20, columns=NAMES, workers=workers)
    old = columns(other)  # maps its files after the append, as a worker of a loader that started before
    on(HastyDisk(), pack, ROWS[40:], other, max_samples=20, append=True)
    check_values(old, {name: values[:40] for name, values in EXPECTED.items()})
    lists = [json.loads((each / "columns.json").read_bytes()) for each in (other, folder)]
    assert lists[0].pop("before")["num_samples"] == 40
    assert {**lists[0], "sha256": ""} == {**lists[1], "sha256": ""}
    assert all((other / name).read_bytes() == data for name, data in files.items())
    (other / "columns.json").unlink()
    assert len(columns(other)) == 0
    report = index_folder(other, columns=NAMES, workers=workers)
    assert report.columns == tuple(EXPECTED)
    assert (other / "columns.json").read_bytes() == (folder / "columns.json").read_bytes()
    assert {path.name: path.read_bytes() for path in other.glob("*.npy")} == files
    split(other, "train=0.5,val=0.5")
    before = selected(other, "train")
    index_folder(other, drop_columns="cap,boxes", workers=workers)
    assert list(columns(other)) == [*(name for name in EXPECTED if name not in ("cap", "boxes")), "split"]
    assert selected(other, "train") == before
    assert len(list(other.glob("*.npy"))) == len(EXPECTED) - 1


def test_a_column_of_a_folder_without_samples_is_empty(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", {})
    index_folder(tmp_path, columns="cls", workers=1)
    assert (columns(tmp_path)["cls"].tolist(), columns(tmp_path).column("cls").check()) == ([], None)


@pytest.mark.parametrize("flip", [1, 0x40])  # another value, and a number without a value
@pytest.mark.parametrize("how", ["pack", "reshard"])
def test_a_damaged_column_is_not_appended_to(tmp_path: Path, flip: int, how: str) -> None:
    """Otherwise its wrong values would get a new digest."""
    other, more = tmp_path / "data", tmp_path / "more"
    on(HastyDisk(), pack, ROWS[:40], other, max_samples=20, columns="cls")
    on(HastyDisk(), pack, ROWS[40:], more, max_samples=20)
    split(other, "a=0.5,b=0.5")
    [file] = other.glob("split.*.npy")
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ flip]))
    before = files_in(other)
    with pytest.raises(SelectionError, match=r"column split: its .*\n  Run `wdskit index"):
        if how == "pack":
            on(HastyDisk(), pack, ROWS[40:], other, max_samples=20, append=True)
        else:
            on(HastyDisk(), wdskit.reshard, str(more), other, append=True)
    assert before.items() <= files_in(other).items()
    index_folder(other, workers=1)
    on(HastyDisk(), pack, ROWS[40:], other, max_samples=20, append=True)
    assert sum(map(len, (*selected(other, "a"), *selected(other, "b")))) == len(ROWS)


REFUSED = {
    "hight": r"columns: 'hight' cannot be a column. A column is width, height, cls",
    "../x": r"'../x' is not a valid name for a column",
    "cls,cls": r"columns: 'cls' is named twice",
    ",".join(f"c{number}=cls" for number in range(1001)): r"1,001 columns are more than the 1,000",
    "json.boxes": r"data-000000.tar: sample 'k000': column json.boxes: it is a list or .* json.boxes.length",
}


@pytest.mark.parametrize("names", REFUSED, ids=lambda names: names[:9])
def test_what_cannot_be_a_column_is_named(tmp_path: Path, names: str) -> None:
    on(HastyDisk(), pack, ROWS[:3], tmp_path / "data")
    before = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    with pytest.raises((SelectionError, wdskit.FolderIndexError), match=REFUSED[names]):
        index_folder(tmp_path / "data", columns=names)
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == before


def test_columns_that_do_not_fit_the_index_are_refused_with_the_command(tmp_path: Path) -> None:
    on(HastyDisk(), pack, ROWS[:30], tmp_path / "data", max_samples=20, columns="cls")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir() if "c" in path.name}
    on(HastyDisk(), pack, ROWS[30:50], tmp_path / "data", max_samples=20, append=True)
    for name, data in kept.items():
        if name == "columns.json" or name.endswith(".npy"):
            (tmp_path / "data" / name).write_bytes(data)
    again = rf"made for other shards than .*\n  Run `wdskit index {tmp_path}/data`"
    with pytest.raises(SelectionError, match=again):
        columns(tmp_path / "data")
    with pytest.raises(SelectionError, match=again):
        wdskit.plan(Pipeline().exact(str(tmp_path / "data"), where="cls > 3").batched(2))
    with pytest.raises(SelectionError, match=again):
        on(HastyDisk(), pack, ROWS[50:60], tmp_path / "data", append=True)
    index_folder(tmp_path / "data")
    assert columns(tmp_path / "data")["cls"].tolist() == EXPECTED["cls"][:50]
    with pytest.raises(PackError, match=r"/data: columns: new shards get those of the folder: \['cls'\]"):
        on(HastyDisk(), pack, ROWS[50:60], tmp_path / "data", append=True, columns="json.score")


KINDS = [
    st.lists(st.booleans()),
    st.lists(st.integers(-(2**40), 2**40)),
    st.lists(st.one_of(st.none(), st.integers(-300, 300))),
    st.lists(st.one_of(st.none(), st.floats(), st.integers(-9, 9))),
    st.lists(st.one_of(st.none(), st.sampled_from("abc"), st.just(""))),
]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_values_of_shards_joined_are_those_of_all(kind: Any, data: Any) -> None:
    values = data.draw(kind)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    parts = [pack_values(values[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    joined = join_parts(parts)
    if isinstance(joined, Texts):
        assert [joined.values[code] for code in joined.codes] == [value or "" for value in values]
    else:
        expected = [math.nan if value is None else value for value in values]
        np.testing.assert_array_equal(joined.astype(float), np.array(expected, dtype=float))
        assert joined.dtype.kind != "f" or not values or not all(isinstance(value, int) for value in values)


# --- conditions


CONDITIONS = [
    "cls >= 3 and cls < 40",
    "not cls in [1, 2, 3]",
    "cls not in (4, 5) or json.score > 2",
    "json.score * 2 - 1 > boxes + cap",
    "json.kind != 'photo' and json.kind in ['größe', 'drawing']",
    "2 < cls <= 20",
    "cls % 7 == 3 and cls // 2 > 3",
    "not -12 <= json.deep.n <= 12",
    "json.score == json.score",
    "'photo' == json.kind",
    "cls / 4 == 2.5",
    "txt.length == 2 and True",
    "-(1 in [1]) < cls - 2",
]


def as_python(text: str, at: int) -> bool:
    values = {name.replace(".", "_"): column[at] for name, column in EXPECTED.items()}
    for name in sorted(EXPECTED, key=len, reverse=True):
        text = text.replace(name, name.replace(".", "_"))
    return bool(eval(text, {}, values))


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_condition_holds_where_python_says_so(folder: Path, text: str) -> None:
    found = Where(text).mask(columns(folder))
    assert found.tolist() == [as_python(text, at) for at in range(len(ROWS))]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("json.a.if.b >", "where at 8: .* it cannot be read.*; 'if' is a keyword. .* NAME=json.a.if.b`"),
        ("cls", "a number is neither true nor false"),
        ("json.kind", "text is neither true nor false"),
        ("json.kind > 3", "a column of text can be compared with a text"),
        ("cls == 'a'", "'a' is not a number"),
        ("nope == 3", "there is no column 'nope'. The columns are cls, json.score, .*\n  Correct the name, or "),
        ("cls in 3", "`in` needs a list"),
        ("json.kind not in [1]", "a column of text is not a number"),
        ("__import__('os')", "Call is not supported"),
        ("cls" + ".a" * 998, "nested too deeply"),
        ("cls ** 99 > 1", "Pow is not supported"),
        ("cls * 9000000000000000000 * 3 > 1", "more than 64 bits"),
        ("cls > 99999999999999999999", "it holds"),
        (5, "where: '5': it names no column"),
        ("cls % 0 == 0", "a division of whole numbers by 0"),
    ],
)
def test_what_is_no_condition_is_refused(folder: Path, text: str, told: str) -> None:
    with pytest.raises(SelectionError, match=told):
        Where(text).mask(columns(folder))


@given(counts=st.lists(st.integers(0, 1200), min_size=1, max_size=6), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_a_subset_counts_and_finds_its_samples(counts: list[int], seed: int, share: float) -> None:
    chance = np.random.default_rng(seed)
    mask = chance.random(sum(counts)) < share
    subset = pickle.loads(pickle.dumps(Subset(np.array(counts), mask)))
    parts = np.split(mask, np.cumsum(counts)[:-1])
    assert subset.counts.tolist() == [int(part.sum()) for part in parts]
    for shard, part in enumerate(parts):
        places = np.arange(subset.counts[shard])
        assert subset.take(np.full(len(places), shard), places).tolist() == np.flatnonzero(part).tolist()


# --- planned sources


def keys_of(pipe: Pipeline, **options: Any) -> list[str]:
    loader = pipe.loader(workers=0, **options)
    return [key for batch in loader for key, valid in zip(batch["__key__"], batch["__valid__"], strict=True) if valid]


@pytest.mark.parametrize("source", ["exact", "sequential"])
def test_an_epoch_has_the_samples_of_the_condition_once(folder: Path, source: str) -> None:
    where = "json.score > 2 and json.kind in ['photo', 'größe']"
    expected = [each["__key__"] for at, each in enumerate(ROWS) if as_python(where, at)]
    for world_size in (1, 2, 3, 16):
        pipe = getattr(Pipeline(), source)(str(folder), where=where, tail="pad").decode().to_dict("__key__").batched(2)
        found = [keys_of(pipe, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sorted(itertools.chain.from_iterable(found)) == expected


def test_conditions_meet_splits_ranges_mixtures_and_several_folders(folder: Path, tmp_path: Path) -> None:
    on(HastyDisk(), pack, ROWS, tmp_path / "two", max_samples=7, columns="json.kind,cls")
    split(tmp_path / "two", "train=0.5,val=0.5")
    train = set(_keys_of_split(tmp_path / "two"))
    both = [
        str(tmp_path / "two" / "two-000001.tar"),
        str(folder / "data-*.tar"),
        str(tmp_path / "two/two-00000{3..5}.tar"),
    ]
    numbers = [*range(7, 14), *range(90), *range(21, 42)]
    pipe = Pipeline().sequential(both, where="cls % 2 == 0", range=[2, "100%"], tail="pad")
    expected = [ROWS[at]["__key__"] for at in numbers if EXPECTED["cls"][at] % 2 == 0][2:]
    assert keys_of(pipe.decode().to_dict("__key__").batched(4)) == expected
    pipe = Pipeline().sequential(str(tmp_path / "two"), where="json.kind == 'photo'", split="train", tail="pad")
    expected = [each["__key__"] for at, each in enumerate(ROWS) if EXPECTED["json.kind"][at] == "photo"]
    assert keys_of(pipe.decode().to_dict("__key__").batched(4)) == [key for key in expected if key in train]
    parts = [
        {"shards": str(folder), "where": "cls < 5", "repeat": 2},
        {"shards": str(tmp_path / "two"), "where": "cls > 84", "repeat": 1},
    ]
    pipe = Pipeline().exact(mixture=parts, tail="pad").decode().to_dict("__key__").batched(4)
    expected = [f"k{number:03d}" for number in sorted([*range(5), *range(5), *range(85, 90)])]
    assert sorted(keys_of(pipe)) == expected
    with pytest.raises(wdskit.FolderIndexError, match="there are no samples with `where: cls > 500`"):
        keys_of(Pipeline().sequential(str(folder), where="cls > 500").decode().to_dict("__key__").batched(4))


def _keys_of_split(folder: Path) -> list[str]:
    numbers = [7 * shard + number for shard, found in enumerate(selected(folder, "train")) for number in found]
    return [ROWS[number]["__key__"] for number in numbers]
