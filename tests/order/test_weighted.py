"""Orders from columns: weights, balance and repeated samples, compared with counts and plain Python."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import HastyDisk, on

import wdskit
from wdskit import Pipeline, SelectionError, pack, split
from wdskit.order.weighted import WeightedOrder
from wdskit.stages.sources import Exact, Resampled


def make(counts: list[int], weights: Any, seed: int = 0) -> WeightedOrder:
    return WeightedOrder(counts, np.asarray(weights, float).take, num_samples=sum(counts), seed=seed)


def pairs(order: WeightedOrder, positions: Any) -> list[tuple[int, int]]:
    return list(zip(*(each.tolist() for each in order.take(positions)), strict=True))


def test_samples_are_drawn_in_proportion_to_their_weights():
    chance = np.random.default_rng(1)
    counts = [300, 0, 17, 1, 682]
    weights = chance.random(1000) * (chance.random(1000) < 0.5)
    order = make(counts, weights)
    shards, samples = order.take(np.arange(400_000))
    numbers = np.concatenate([[0], np.cumsum(counts)])[shards] + samples
    found = np.bincount(numbers, minlength=1000)
    expected = weights / weights.sum() * 400_000
    assert not found[weights == 0].any()
    used = weights > 0
    chi2 = float(((found - expected)[used] ** 2 / expected[used]).sum())
    assert chi2 < used.sum() + 5 * np.sqrt(2 * used.sum())


def test_a_position_draws_the_same_sample_for_ever_alone_or_in_company():
    order = make([5, 70, 3], np.arange(78))
    positions = np.array([0, 1, 2, 1023, 1024, 10**12, 2**61])
    assert pairs(order, positions) == PINNED
    assert [pair for position in positions for pair in pairs(order, [position])] == PINNED
    assert pairs(pickle.loads(pickle.dumps(order)), positions) == PINNED
    assert pairs(make([5, 70, 3], np.arange(78), seed=1), positions) != PINNED


PINNED = [(1, 51), (1, 39), (1, 54), (1, 29), (1, 58), (2, 1), (1, 63)]


@pytest.mark.parametrize("seed", range(20))
def test_no_sample_of_weight_0_is_ever_drawn(seed: int):
    """One weight of any size is among zeros and tiny weights: rounding never selects a neighbour."""
    chance = random.Random(seed)
    counts = [chance.randrange(1, 400) for _ in range(4)]
    weights = np.zeros(sum(counts))
    for _ in range(chance.randrange(1, 4)):
        weights[chance.randrange(len(weights))] = 10.0 ** chance.randrange(-300, 300)
    order = make(counts, weights)
    shards, samples = order.take(np.arange(3000))
    numbers = np.concatenate([[0], np.cumsum(counts)])[shards] + samples
    assert (weights[numbers] > 0).all()


# --- planned sources


ROWS = [
    {
        "__key__": f"k{n:03d}",
        "cls": 0 if n < 100 else n % 3,
        "json": {
            "w": n,
            "kind": "often" if n % 10 else "rare",
            "times": n % 3,
            "f": n / 3,
            "neg": n - 1,
            "huge": 1e307,
            "rare": n % 10 == 0,
        },
    }
    for n in range(120)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "data"
    columns = "cls,json.w,json.kind,json.times,json.f,json.neg,json.huge,rare=json.rare"
    on(HastyDisk(), pack, ROWS, folder, max_samples=25, columns=columns)
    split(folder, "train=0.5,val=0.5")
    return folder


def numbers_of(pipe: Pipeline, **options: Any) -> list[int]:
    pipe = pipe.decode().to_dict("__key__").batched(5)
    loader = pipe.loader(**{"workers": 0, **options})
    return [
        int(key[1:])
        for batch in loader
        for key, valid in zip(batch["__key__"], batch.get("__valid__", [True] * 5), strict=True)
        if valid
    ]


def drawn(folder: Path, count: int = 40_000, **settings: Any) -> Counter[int]:
    """Return the samples at the first positions, without reading them."""
    data = Resampled(**{"shards": str(folder), **settings}).plan()
    shards, samples = data.order.take(np.arange(count))
    [table] = data.tables
    return Counter((25 * shards + table.numbers(shards, samples)).tolist())


def check_shares(found: Counter[Any], expected: dict[Any, float]) -> None:
    total = found.total()
    assert found.keys() == expected.keys()
    for value, share in expected.items():
        assert abs(found[value] - share * total) < 6 * np.sqrt(share * total)


def test_weights_meet_where_range_and_split(folder: Path):
    for settings, kept in (
        ({}, range(1, 120)),
        ({"where": "json.kind == 'rare'"}, range(10, 120, 10)),
        ({"range": [10, 40]}, range(10, 40)),
        ({"where": "json.w % 2 == 1", "range": ["50%", "100%"]}, range(61, 120, 2)),
    ):
        found = drawn(folder, weights="json.w", **settings)
        total = sum(kept)
        check_shares(found, {number: number / total for number in kept})
    shards = [str(folder / f"data-00000{number}.tar") for number in (0, 2)]  # two parts of the column
    kept = {number: number if number < 25 else number + 25 for number in range(1, 50)}
    expected = {number: weight / sum(kept.values()) for number, weight in kept.items()}
    check_shares(drawn(folder, shards=shards, weights="json.w"), expected)
    data = Resampled(shards=str(folder), weights="json.w", split="train").plan()
    assert data.num_samples == int((wdskit.columns(folder)["split"] == "train").sum())


def test_balance_makes_each_value_equally_likely(folder: Path):
    kinds = Counter[str]()
    for number, times in drawn(folder, balance="json.kind").items():
        kinds[ROWS[number]["json"]["kind"]] += times
    check_shares(kinds, {"rare": 0.5, "often": 0.5})
    classes = Counter[int]()
    for number, times in drawn(folder, balance="cls", where="json.w >= 90").items():
        assert number >= 90
        classes[ROWS[number]["cls"]] += times
    check_shares(classes, {0: 1 / 3, 1: 1 / 3, 2: 1 / 3})


def test_every_sample_is_there_as_often_as_repeat_says(folder: Path):
    for settings, expected in (
        ({"repeat": {"column": "rare"}}, {n: n % 10 == 0 for n in range(120)}),
        ({"repeat": {"column": "json.times"}}, {n: n % 3 for n in range(120)}),
        ({"repeat": {"column": "json.times"}, "where": "json.w > 60"}, {n: n % 3 for n in range(61, 120)}),
        ({"repeat": {"column": "json.times"}, "range": [5, 25]}, {n: n % 3 for n in range(5, 25)}),
    ):
        wanted = Counter({number: times for number, times in expected.items() if times})
        for world_size in (1, 3):
            found = Counter[int]()
            for rank in range(world_size):
                pipe = Pipeline().exact(str(folder), seed=2, tail="pad", **settings)
                found += Counter(numbers_of(pipe, rank=rank, world_size=world_size))
            assert found == wanted


@pytest.mark.parametrize(
    ("source", "settings", "told"),
    [
        (Resampled, {"weights": "json.kind"}, "it is text, which is no weight; use `balance: json.kind`"),
        (Resampled, {"weights": "json.neg"}, r"the weight of sample 0 .* is -1.0; weights are 0 or more"),
        (Resampled, {"balance": "json.f"}, "`balance` needs whole numbers or text"),
        (Resampled, {"weights": "json.w", "range": [0, 1]}, "column json.w: the sum of its weights is 0.0"),
        (Resampled, {"weights": "json.huge"}, "column json.huge: the sum of its weights is inf"),
        (Exact, {"repeat": {"column": "json.f"}}, "`repeat` needs whole numbers"),
        (Exact, {"repeat": {"column": "json.w"}}, "`repeat` needs numbers from 0 to 16"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_column_of_other_values_is_refused(folder: Path, source: Any, settings: dict[str, Any], told: str):
    with pytest.raises(SelectionError, match=told):
        source(shards=str(folder), **settings).plan()
