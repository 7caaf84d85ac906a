"""Plans on disk give back the rows that went in, whichever are asked for, and see keys that come twice."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shards import bytes_in, samples_in

from wdskit import RowError, pack
from wdskit.packing import api
from wdskit.packing import store as recorded
from wdskit.packing import store as spool
from wdskit.packing.references import KINDS, FileBytes
from wdskit.packing.row import Row
from wdskit.packing.store import Spool, check_unique, decode_rows, encode_row

TEXTS = st.text(st.characters(codec=None, min_codepoint=1), max_size=12)  # surrogates too
REFERENCES = st.builds(
    FileBytes, TEXTS, st.integers(0, 1 << 38), st.integers(0, 1 << 62), st.integers(0, (1 << 64) - 1)
)
FIELDS = st.lists(st.tuples(st.text("abc.", min_size=1, max_size=5), st.binary(max_size=40) | REFERENCES), max_size=4)
ROWS = st.builds(lambda key, fields, where: Row(key, tuple(fields), where), st.text("kéy/", max_size=9), FIELDS, TEXTS)


@given(st.lists(ROWS, max_size=6))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_record_is_the_row(rows):
    assert list(decode_rows(b"".join(map(encode_row, rows)))) == rows


def filled(rows: list[Row], *, most: int | None, folder: Path) -> Spool:
    made = Spool(lambda: folder, most=most)
    for row in rows:
        made.add(row)
    made.finish()
    return made


@given(st.lists(ROWS, min_size=1, max_size=12), st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_any_rows_are_given_back_in_any_order_by_any_process(rows, data):
    numbers = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20)), dtype=np.int64)
    expected = [rows[number] for number in numbers]
    with tempfile.TemporaryDirectory() as folder:
        for most in (None, 0, 3):
            with filled(rows, most=most, folder=Path(folder)) as made:
                taken = made.take(numbers)
                assert len(taken) == len(expected)
                assert list(pickle.loads(pickle.dumps(taken))) == list(taken) == list(taken) == expected
                assert [made[number] for number in range(len(made))] == rows
            assert list(Path(folder).iterdir()) == []


def test_rows_that_stand_together_are_read_together_and_no_more_than_a_piece_at_once(tmp_path, monkeypatch):
    rows = [Row(f"{n}", (("bin", bytes(n * 100)),), "here") for n in range(50)]
    monkeypatch.setattr(recorded, "_READ_BYTES", 5000)
    reads = []
    true_read = recorded.read_exactly
    monkeypatch.setattr(recorded, "read_exactly", lambda fd, a, b: reads.append(b - a) or true_read(fd, a, b))
    with filled(rows, most=0, folder=tmp_path) as made:
        assert list(made.take(np.arange(50))) == rows
        assert len(reads) < 40
        assert max(reads) <= 5100
        reads.clear()
        assert list(made.take(np.array([3, 4, 5, 4, 9]))) == [rows[n] for n in (3, 4, 5, 4, 9)]
        assert len(reads) == 3


def test_a_plan_that_was_cut_is_an_error(tmp_path):
    with filled([Row("a", (("bin", bytes(99)),), "here")], most=0, folder=tmp_path) as made:
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(OSError, match="cut short"):
            list(made.take(np.array([0])))


def test_every_kind_of_reference_may_stand_in_a_plan():
    """Frozen, of texts, whole numbers and truth values: what a record can hold."""
    for kind in KINDS.values():
        parts = {name: str(hint) for name, hint in kind.__annotations__.items()}
        assert set(parts.values()) <= {"str", "int", "bool"}
        assert kind.__dataclass_params__.frozen


# Keys that come twice.


@pytest.mark.parametrize("most", [None, 0])
def test_of_keys_that_come_twice_the_first_is_told_with_both_places(tmp_path, most):
    for first in range(4):
        for second in range(first + 1, 5):
            keys = [f"k{n}" for n in range(6)]
            keys[second] = keys[first]
            keys[5] = keys[first]
            rows = [Row(key, (("cls", b"1"),), f"line {n}") for n, key in enumerate(keys)]
            with filled(rows, most=most, folder=tmp_path) as made:
                with pytest.raises(
                    RowError, match=f"^line {second}: its key 'k{first}' is also the key of line {first}"
                ):
                    check_unique(made, None)
                check_unique(made, np.array([n for n in range(6) if keys[n] != keys[first]]))


def test_keys_whose_hashes_are_equal_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "hash", len, raising=False)
    rows = [Row(key, (("cls", b"1"),), key) for key in ("aa", "bb", "c")]
    with filled(rows, most=0, folder=tmp_path) as made:
        check_unique(made, None)
    with filled([*rows, rows[1]], most=0, folder=tmp_path) as made, pytest.raises(RowError, match=r"^bb: its key 'bb'"):
        check_unique(made, None)


@pytest.mark.parametrize("clash", [False, True])
def test_keys_of_an_addition_are_compared_too(tmp_path, monkeypatch, clash):
    """Those of another run by their hashes, and where these are equal by themselves."""
    if clash:
        monkeypatch.setattr(spool, "hash", len, raising=False)
        monkeypatch.setattr("wdskit.packing.destination.hash", len, raising=False)
    monkeypatch.setattr(api, "ROWS_IN_MEMORY", 1)
    for name, keys in (("a", "pqr"), ("b", "stu"), ("c", "vq")):
        lines = "".join(f'{{"key": "{key}"}}\n' for key in keys)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    pack(tmp_path / "a.jsonl", tmp_path / "out", allow_no_image=True)
    pack(tmp_path / "b.jsonl", tmp_path / "out", allow_no_image=True, append=True)
    before = bytes_in(tmp_path / "out")
    with pytest.raises(RowError, match=r"c.jsonl:2: its key 'q' is in .*out already"):
        pack(tmp_path / "c.jsonl", tmp_path / "out", allow_no_image=True, append=True)
    assert bytes_in(tmp_path / "out") == before
    assert list(samples_in(tmp_path / "out")) == list("pqrstu")


def test_large_plans_take_little_memory(tmp_path):
    """A few numbers a row."""
    import tracemalloc

    tracemalloc.start()
    with Spool(lambda: tmp_path, most=1000) as made:
        for number in range(30_000):
            made.add(Row(f"{number:08d}", (("cls", b"1"),), f"line {number}"))
        made.finish()
        held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 30_000 * 40
