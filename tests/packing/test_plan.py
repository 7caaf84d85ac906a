"""The plan of a run: unique keys, one dtype for each npy column, and a division that a simple model gives too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import HastyDisk
from formats import read_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wdskit import PackError, RowError, pack
from wdskit.codecs.fields import encode_field
from wdskit.packing import plan as plan_module
from wdskit.packing.plan import NO_LIMIT, Limits, Plan
from wdskit.packing.row import Row, Values
from wdskit.shards.shares import parse_shares

pytestmark = pytest.mark.usefixtures("hasty_disk")

KEEP = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=40)


def planned(folder: Path, rows: list[Row | RowError], *, split: str = "", **options: Any) -> Plan:
    plan = Plan(folder, parse_shares(split) if split else {}, skips_bad=False, disk=HastyDisk())
    how = {"classes": None, "reads_labels": True, "on_progress": lambda *_: None}
    plan.read(iter(rows), **{**how, **options})
    return plan


def rows_of(sizes: list[int]) -> list[Row]:
    return [Row(f"k{number}", {"bin": bytes(size)}, f"row {number}") for number, size in enumerate(sizes)]


def blocks_of(size: int) -> int:
    return 1 + -(-size // 512)


def divide_simply(sizes: list[int], limits: Limits) -> list[list[int]] | None:
    """Fill one shard after another, as long as the next row fits. None: a row fits no shard."""
    shards: list[list[int]] = []
    for number, size in enumerate(sizes):
        taken = 2 + sum(blocks_of(sizes[each]) for each in shards[-1]) if shards else 0
        if 512 * (2 + blocks_of(size)) > limits.max_bytes:
            return None
        if not shards or len(shards[-1]) == limits.max_samples or 512 * (taken + blocks_of(size)) > limits.max_bytes:
            shards.append([])
        shards[-1].append(number)
    return shards


@KEEP
@given(SIZES, st.integers(1, 9), st.integers(2048, 9000))
def test_shards_are_filled_to_the_limits_in_order(
    tmp_path: Path, sizes: list[int], max_samples: int, max_bytes: int
) -> None:
    limits = Limits(max_samples, max_bytes, None)
    plan = planned(tmp_path, [*rows_of(sizes)])
    expected = divide_simply(sizes, limits)
    if expected is None:
        with pytest.raises(RowError, match=rf"^row \d+: .* more than max_bytes {max_bytes}"):
            plan.divide(limits, lambda _, number: f"{number}", shuffle=None, options=b"")
    else:
        [shards] = plan.divide(limits, lambda _, number: f"{number}", shuffle=None, options=b"").values()
        assert [shard.numbers.tolist() for shard in shards] == expected
        assert [shard.name for shard in shards] == [f"{number}" for number in range(len(shards))]
        sums = [sum(blocks_of(sizes[number]) for number in part) for part in expected]
        assert [shard.num_bytes for shard in shards] == [512 * (2 + blocks) for blocks in sums]
    plan.close()


@KEEP
@given(SIZES, st.integers(1, 45), st.none() | st.integers(0, 5))
def test_a_number_of_shards_is_kept_and_their_sizes_differ_by_one_sample(
    tmp_path: Path, sizes: list[int], num_shards: int, shuffle: int | None
) -> None:
    plan = planned(tmp_path, [*rows_of(sizes)])
    limits = Limits(NO_LIMIT, NO_LIMIT, num_shards)
    if num_shards > len(sizes):
        with pytest.raises(PackError, match=f"{len(sizes)} samples cannot fill {num_shards} shards"):
            plan.divide(limits, lambda *_: "", shuffle=shuffle, options=b"")
    else:
        [shards] = plan.divide(limits, lambda *_: "", shuffle=shuffle, options=b"").values()
        counts = [shard.num_samples for shard in shards]
        assert (len(counts), sum(counts)) == (num_shards, len(sizes))
        assert max(counts) - min(counts) <= 1
        numbers = [number for shard in shards for number in shard.numbers.tolist()]
        assert sorted(numbers) == [*range(len(sizes))]
        assert shuffle is not None or numbers == sorted(numbers)
    plan.close()


def test_a_split_depends_on_the_key_alone_and_takes_its_share(tmp_path: Path) -> None:
    shares, num = "train=0.7,val=0.2,test=0.1", 3000
    rows: list[Any] = rows_of([0] * num)

    def divide(given: list[Any], shuffle: int | None) -> dict[str, set[str]]:
        plan = planned(tmp_path, given, split=shares)
        found = plan.divide(
            Limits(100, NO_LIMIT, None), lambda split, at: f"{split}-{at}", shuffle=shuffle, options=b""
        )
        assert all(shard.name == f"{name}-{at}" for name, shards in found.items() for at, shard in enumerate(shards))
        keys = {name: {given[n].key for shard in shards for n in shard.numbers} for name, shards in found.items()}
        plan.close()
        return keys

    whole = divide(rows, None)
    assert [*whole] == ["train", "val", "test"]
    assert sum(map(len, whole.values())) == num
    for name, share in parse_shares(shares).items():
        assert abs(len(whole[name]) - num * share) < 4 * (num * share * (1 - share)) ** 0.5
    other = divide([row for row in rows[::-1] if row.key.endswith(("1", "2"))], 7)
    assert all(other[name] == {key for key in whole[name] if key.endswith(("1", "2"))} for name in whole)


# Keys.


@pytest.mark.parametrize("num_hashes", [None, 3, 1])
def test_keys_are_unique_and_equal_hashes_are_no_equal_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_hashes: int | None
) -> None:
    """The error names both rows. Rows that are left out have no key, and the keys of existing samples count."""
    if num_hashes is not None:
        monkeypatch.setattr(plan_module, "hash_key", lambda key: bytes([sum(key.encode()) % num_hashes, *[0] * 7]))
    rows: list[dict[str, Any]] = [{"__key__": f"k{number:02d}", "txt": "x"} for number in range(20)]
    quick: dict[str, Any] = {"workers": 1}
    pack(rows, tmp_path / "d", **quick)
    more = [{"__key__": f"n{number:02d}", "txt": "x"} for number in range(9)]
    pack(more, tmp_path / "d", append=True, **quick)
    assert len(read_folder(tmp_path / "d")) == 29
    with pytest.raises(RowError, match=r"^row 1 \('k07'\): its key 'k07' is also the key of .*d-000000\.tar"):
        pack([{"__key__": "o", "txt": "x"}, rows[7]], tmp_path / "d", append=True, **quick)
    rows[17] = {"__key__": "k04", "png": b"no image"}
    with pytest.raises(RowError, match=r"^row 17 \('k04'\): its key 'k04' is also the key of row 4 "):
        pack(rows, tmp_path / "e", validate="none", **quick)
    pack(rows, tmp_path / "f", skip_bad=True, **quick)
    assert [*read_folder(tmp_path / "f")] == [f"k{number:02d}" for number in range(20) if number != 17]


# Values.


def values_of(array: np.ndarray[Any, Any]) -> Values:
    return Values(encode_field("npy", array))


DTYPES = ["<i8", "<i4", "<u1", "<f4", "<f8", "|b1"]


@KEEP
@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5))
def test_arrays_of_a_column_get_the_dtype_that_holds_all_of_them(tmp_path: Path, dtypes: list[str]) -> None:
    arrays = [np.arange(99).astype(dtype) for dtype in dtypes]
    rows = [Row(f"k{n}", {"npy": values_of(array), "txt": b"x"}, "") for n, array in enumerate(arrays)]
    plan = planned(tmp_path, [*rows])
    assert plan.dtypes == {"npy": np.result_type(*arrays)}
    found = [plan_module.with_dtypes(row, plan.dtypes).fields["npy"] for row in plan.rows(np.arange(len(rows)))]
    assert all(isinstance(each, Values) and each.array.dtype == plan.dtypes["npy"] for each in found)
    [shards] = plan.divide(Limits(100, NO_LIMIT, None), lambda *_: "", shuffle=None, options=b"").values()
    size = sum(512 * (3 + -(-(128 + 99 * plan.dtypes["npy"].itemsize) // 512)) for _ in rows) + 1024
    assert shards[0].num_bytes == size
    plan.close()


def test_a_whole_number_that_a_float_column_would_round_is_an_error(tmp_path: Path) -> None:
    row = Row("a", {"npy": values_of(np.array([2**53 + 1]))}, "row 7")
    with pytest.raises(RowError, match=r"^row 7: its field 'npy' has whole numbers that would be rounded"):
        plan_module.with_dtypes(row, {"npy": np.dtype("<f8")})
