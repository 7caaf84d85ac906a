"""A plan returns the rows that were added, in memory and on disk, and finds repeated keys and images."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shards import bytes_in, samples_in

from wdskit import PackError, RowError, pack
from wdskit.packing import plan as plans
from wdskit.packing.plan import Plan, StreamedKeys, decode_row, encode_row, image_digest
from wdskit.packing.references import KINDS, FileBytes, PartBytes
from wdskit.packing.row import Row
from wdskit.packing.sources import Duplicate

TEXTS = st.text(max_size=9) | st.binary(max_size=9).map(os.fsdecode)  # also names of files that are not UTF-8
NUMBERS = st.integers(0, (1 << 64) - 1)
REFERENCES = st.builds(FileBytes, TEXTS, NUMBERS, NUMBERS, NUMBERS) | st.builds(
    PartBytes, TEXTS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS
)
FIELDS = st.lists(st.tuples(st.text("abc.", min_size=1, max_size=5), st.binary(max_size=40) | REFERENCES), max_size=4)
ROWS = st.builds(lambda key, fields, where: Row(key, tuple(fields), where), st.text("kéy/", max_size=9), FIELDS, TEXTS)


@given(ROWS)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_record_is_the_row(row):
    assert decode_row(encode_row(row)) == row


def filled(rows: list[Row], folder: Path, *, is_held: bool = False) -> Plan:
    made = Plan(lambda: folder, is_held=is_held)
    for row in rows:
        made.add(row)
    made.flush()
    return made


SMALL_ROWS = st.builds(
    lambda key, fields, where: Row(key, tuple(fields), where),
    st.text("kéy/", max_size=9),
    st.lists(st.tuples(st.just("a"), st.binary(max_size=40)), max_size=4),
    TEXTS,
)


@pytest.mark.parametrize("most", [0, 3, 100])
@pytest.mark.parametrize("is_held", [False, True])
@given(rows=st.lists(SMALL_ROWS, min_size=1, max_size=12), data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_any_rows_are_given_back_in_any_order_to_any_process(most, is_held, rows, data):
    numbers = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20)), dtype=np.int64)
    first = data.draw(st.integers(0, len(rows) - 1))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(plans, "ROWS_IN_MEMORY", most)
        patch.setattr(plans, "_BATCH_ROWS", 2)
        with closing(filled(rows, Path(folder), is_held=is_held)) as made:
            for chosen in (numbers, np.arange(first, len(rows))):
                taken = made.take(chosen)
                expected = [rows[number] for number in chosen]
                assert list(pickle.loads(pickle.dumps(taken))) == list(taken) == list(taken) == expected
            assert [made[number] for number in range(len(made))] == rows
        assert list(Path(folder).iterdir()) == []


def test_every_kind_of_reference_may_stand_in_a_plan():
    """A reference is a tuple of texts, integers and booleans, the types that a row can store; the path comes first."""
    for kind in KINDS.values():
        hints = {str(hint) for hint in kind.__annotations__.values()}
        assert hints <= {"str", "int", "bool"} | {f"ForwardRef('{name}')" for name in ("str", "int", "bool")}
        assert issubclass(kind, tuple)
        assert kind._fields[0] == "path"


def test_the_digest_depends_on_rows_and_their_order_but_not_on_where_they_are(tmp_path):
    def digest(*rows: Row) -> str:
        with closing(filled(list(rows), tmp_path)) as made:
            return made.digest

    one = Row("a", (("jpg", FileBytes("x/a.jpg", 5, 6, 7)),), "x/a.jpg")
    other = Row("b", (("cls", b"1"),), "line 2")
    assert digest(one, other) == digest(Row("a", (("jpg", FileBytes("y/a.jpg", 5, 6, 7)),), "y/a.jpg"), other)
    digests = [digest(one, other), digest(other, one), digest(one), digest()]
    others = [Row("c", one.fields, one.where), Row("a", (("png", one.fields[0][1]),), one.where)]
    facts = ((4, 6, 7), (5, 5, 7), (5, 6, 6))
    others += [Row("a", (("jpg", FileBytes("x/a.jpg", *each)),), "") for each in facts]
    digests += [digest(changed, other) for changed in others]
    digests.append(digest(one, Row("b", (("cls", b"2"),), "line 2")))
    assert len({*digests}) == len(digests)


# Repeated keys.


@pytest.mark.parametrize("most", [0, 100])
def test_of_keys_that_repeat_the_first_is_named_with_both_places(tmp_path, most, monkeypatch):
    monkeypatch.setattr(plans, "ROWS_IN_MEMORY", most)
    for first in range(4):
        for second in range(first + 1, 5):
            keys = [f"k{n}" for n in range(6)]
            keys[second] = keys[first]
            keys[5] = keys[first]
            rows = [Row(key, (("cls", b"1"),), f"line {n}") for n, key in enumerate(keys)]
            with closing(filled(rows, tmp_path)) as made:
                problem = f"^line {second}: its key 'k{first}' is also the key of line {first}"
                with pytest.raises(RowError, match=problem):
                    made.check_unique()
            with closing(filled(rows, tmp_path)) as made:
                made.check_unique(keep_first=True)
                assert made.kept.tolist() == [n for n in range(6) if n not in (second, 5)]
                assert made.num_kept == made.num_fields["cls",] == 4
            with closing(filled(rows, tmp_path)) as made:
                made.leave_out([second, 5])
                made.check_unique()


def test_keys_of_an_addition_are_compared_too(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "ROWS_IN_MEMORY", 1)
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


@pytest.mark.parametrize("most", [0, 5, 100])
@given(keys=st.lists(st.sampled_from("abcdefgé"), max_size=20))
@settings(max_examples=30)
def test_a_key_that_came_before_is_found_in_a_stream(most, keys):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(plans, "ROWS_IN_MEMORY", most)
        streamed = StreamedKeys(lambda: Path(folder))
        for number, key in enumerate(keys):
            first = keys.index(key)
            assert streamed.add(key, f"\udcff{number}") == (None if first == number else f"\udcff{first}")
        streamed.close()


def test_a_folder_that_takes_no_plan_is_a_pack_error(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "ROWS_IN_MEMORY", 0)
    with pytest.raises(PackError, match=r"missing: the plan of this run cannot be written there: No such file"):
        filled([Row("a", (("cls", b"1"),), "here")], tmp_path / "missing")


MEASURE = """
import contextlib, resource, sys
from pathlib import Path
from wdskit.packing.plan import Plan, divide_plan
from wdskit.packing.division import make_limits
from wdskit.packing.references import PartBytes
from wdskit.packing.row import Row
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with contextlib.closing(Plan(lambda: Path(sys.argv[1]))) as plan:
    for number in range(int(sys.argv[2])):
        plan.add(Row(f"{number:09d}", (("cls", b"1"), ("jpg", PartBytes("a.tar", 99, number, 1, 2, 3))), "a.tar"))
    plan.flush()
    plan.check_unique()
    divide_plan(plan, limits=make_limits(None, None), shuffle=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_large_plans_take_little_memory(tmp_path):
    """They take a cache of 64 MB and some numbers per row: 300,000 whole rows of 200 bytes would take more."""
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path, "300000"], check=True, capture_output=True)
    assert int(done.stdout) * 1024 < (64 << 20) + 300_000 * 60 + (20 << 20)


# Repeated images.


def rows_of(images: list[bytes]) -> list[Row]:
    return [Row(f"k{n}", (("cls", b"%d" % n), ("jpg", image)), f"row {n}") for n, image in enumerate(images)]


def duplicates_in(rows: list[Row], image_fields: tuple[str, ...] = ()) -> list[Duplicate]:
    with closing(filled(rows, Path("nowhere"))) as made:
        digests = ((n, image_digest(row.read_fields(), image_fields)) for n, row in enumerate(rows))
        made.add_digests((number, digest) for number, digest in digests if digest is not None)
        return [*made.find_duplicates()]


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=12))
def test_each_row_that_repeats_an_image_names_the_first_one(images):
    found = duplicates_in(rows_of(images))
    expected = [(n, f"k{images.index(image)}") for n, image in enumerate(images) if images.index(image) < n]
    assert [(one.number, one.first_key) for one in found] == expected
    assert all(one.sha256 == hashlib.sha256(images[one.number]).hexdigest() for one in found)


def test_a_line_names_both_rows_and_the_image():
    (one,) = duplicates_in(rows_of([b"x", b"x"]))
    assert one.to_dict() == {
        "key": "k1",
        "where": "row 1",
        "first_key": "k0",
        "first_where": "row 0",
        "sha256": hashlib.sha256(b"x").hexdigest(),
    }


def test_rows_without_an_image_repeat_nothing_and_other_fields_do_not_count():
    assert duplicates_in([Row("a", (("txt", b"x"),), "0"), Row("b", (("txt", b"x"),), "1")]) == []
    assert len(duplicates_in([Row("a", (("jpg", b"x"),), "0"), Row("b", (("jpg", b"x"), ("txt", b"y")), "1")])) == 1


def test_of_several_images_all_count_or_those_that_are_named():
    one = Row("a", (("jpg", b"x"), ("seg.png", b"1")), "0")
    other = Row("b", (("jpg", b"x"), ("seg.png", b"2")), "1")
    assert duplicates_in([one, other]) == []
    assert len(duplicates_in([one, other], ("jpg",))) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_repeated_images_are_found_while_other_processes_read_the_plan(tmp_path, workers, monkeypatch):
    """The plan is on disk, with bad rows, repeated images and splits, and so large that pages of the file change."""
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for number in range(3000):
        image = b"\xff\xd8" + b"%d" % (number % 2000) * 20
        (tmp_path / "photos" / "a" / f"{number:06d}.jpg").write_bytes(b"bad" if number % 100 == 7 else image)
    options = {"duplicates": "drop", "skip_bad": True, "validate": "magic", "split": "train=0.7,val=0.3"}
    expected = pack(tmp_path / "photos", tmp_path / "out", **options)
    assert (len(expected.rejected), len(expected.duplicates)) == (30, 990)
    monkeypatch.setattr(plans, "ROWS_IN_MEMORY", 1)
    found = pack(tmp_path / "photos", tmp_path / "again" / "out", workers=workers, **options)
    assert found.duplicates == expected.duplicates
    assert [err.where for err in found.rejected] == [err.where for err in expected.rejected]
    assert bytes_in(tmp_path / "again" / "out") == bytes_in(tmp_path / "out")


def test_a_row_that_is_missing_from_the_file_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "ROWS_IN_MEMORY", 0)
    with closing(filled([Row(f"{n}", (("cls", b"1"),), "here") for n in range(5)], tmp_path)) as made:
        for numbers in (np.arange(3, 7), np.array([4, 9])):
            with pytest.raises(OSError, match=r"the plan of this run cannot be read: row \d is missing"):
                list(made.take(numbers))
