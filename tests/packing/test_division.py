"""The division of rows into shards, the names of shards, and the options for both."""

from __future__ import annotations

import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from disks import HastyDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from images import make_folder
from shards import bytes_in, samples_in

from wdskit import PackError, RowError, pack
from wdskit.packing import division, plan
from wdskit.packing.division import Limits, RowTooLarge, ShardNames, divide, divide_stream, make_limits, row_bytes
from wdskit.packing.row import Row

ROWS = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), min_size=1, max_size=30)
LIMITS = {"max_samples": st.integers(1, 8), "max_bytes": st.integers(16_000, 40_000)}


def rows_of(sizes: list[list[int]]) -> list[Row]:
    """Return rows with fields of these sizes."""
    return [
        Row(f"k{number}", tuple((f"f{at}", bytes(size)) for at, size in enumerate(fields)), "here")
        for number, fields in enumerate(sizes)
    ]


class Shard(NamedTuple):
    rows: list[Row]
    num_bytes: int


def shards_of(rows: list[Row], limits: Limits) -> list[Shard]:
    """Return the shards of a stream of rows."""
    return [Shard(list(shard), shard.num_bytes) for shard in divide_stream(rows, limits)]


def check_plan(rows: list[Row], max_samples: int, max_bytes: int, planner=shards_of) -> None:
    """Check, with real tars, that no file exceeds a limit and that no file had room for the next row."""
    shards = planner(rows, Limits(max_samples, max_bytes))
    assert [row for shard in shards for row in shard.rows] == rows
    for number, shard in enumerate(shards):
        assert 1 <= len(shard.rows) <= max_samples
        assert tar_bytes(shard.rows) == shard.num_bytes <= max_bytes
        if number + 1 < len(shards):
            more = [*shard.rows, shards[number + 1].rows[0]]
            assert len(more) > max_samples or tar_bytes(more) > max_bytes


def tar_bytes(rows) -> int:
    """Return the size of a tar of these rows: a header block of 512 bytes each, data in whole blocks, two at the end.

    The rule is written again here, so that wdskit's code is not compared with itself.
    """
    blocks = sum(1 + (len(data) + 511) // 512 for row in rows for _, data in row.fields)
    return 512 * (blocks + 2)


@given(sizes=ROWS, **LIMITS)
@settings(max_examples=300)
def test_no_file_is_over_a_limit_and_none_could_have_held_the_next_row(sizes, max_samples, max_bytes):
    check_plan(rows_of(sizes), max_samples, max_bytes)


@given(sizes=ROWS, **LIMITS)
@settings(max_examples=40)
def test_the_files_on_disk_are_those_of_the_plan(sizes, max_samples, max_bytes):
    folder = Path(tempfile.mkdtemp())
    rows = [
        {"__key__": f"k{number}", **{f"f{at}": bytes(size) for at, size in enumerate(fields)}}
        for number, fields in enumerate(sizes)
    ]
    try:
        pack(rows, folder / "out", max_samples=max_samples, max_bytes=max_bytes, disk=HastyDisk())
        files = [path.stat().st_size for path in sorted((folder / "out").glob("*.tar"))]
        assert files == [shard.num_bytes for shard in shards_of(rows_of(sizes), Limits(max_samples, max_bytes))]
        assert max(files) <= max_bytes
        assert len(samples_in(folder / "out")) == len(rows)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("member_bytes", lambda size: size),  # only the payload, as webdataset counts
        ("member_bytes", lambda size: 512 + size),  # no padding
        ("member_bytes", lambda size: 512 + size + 512),  # too much
        ("END_BYTES", 0),  # no end marker
    ],
)
def test_a_planner_that_miscounts_is_caught(monkeypatch, name, value):
    """The mutants are planners with wrong rules."""
    monkeypatch.setattr(division, name, value)
    with pytest.raises(AssertionError):
        for size in range(0, 2048, 100):
            check_plan(rows_of([[size]] * 40), 100, 20_000)


def spans_of(rows: list[Row], limits: Limits) -> list[tuple[int, int]]:
    """Return rows and bytes of each shard, planned for all rows at once."""
    blocks = np.array([row_bytes(row) // 512 for row in rows], dtype=np.uint32)
    spans = divide(blocks, limits)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == len(rows)
    return [(span.stop - span.start, span.num_bytes) for span in spans]


@given(sizes=ROWS, **LIMITS)
@settings(max_examples=300)
def test_rows_planned_at_once_go_where_those_of_a_stream_go(sizes, max_samples, max_bytes):
    rows, limits = rows_of(sizes), Limits(max_samples, max_bytes)
    assert spans_of(rows, limits) == [(len(shard.rows), shard.num_bytes) for shard in shards_of(rows, limits)]


def test_of_rows_that_are_too_large_the_first_is_told():
    with pytest.raises(RowTooLarge) as caught:
        divide(np.array([3, 9, 10], dtype=np.uint32), Limits(10, 512 * 10))
    assert (caught.value.place, caught.value.num_bytes) == (1, 512 * 11)


def test_rows_are_divided_in_little_memory():
    """Ten million rows need 80 MB."""
    blocks = np.full(500_000, 3, np.uint32)
    tracemalloc.start()
    divide(blocks, Limits(10_000, 10**9))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(blocks) * 10


# Balanced shards.


def test_a_number_of_shards_is_met_and_they_are_equal_within_one_sample():
    """Every number of rows up to 40 is divided into every number of shards."""
    for num_rows in range(1, 41):
        blocks = np.arange(1, num_rows + 1, dtype=np.uint32)
        for number in range(1, num_rows + 1):
            spans = divide(blocks, make_limits(None, None, num_shards=number))
            counts = [span.stop - span.start for span in spans]
            assert len(spans) == number
            assert max(counts) - min(counts) <= 1
            assert counts == sorted(counts, reverse=True)  # larger shards come first: no small shard at the end
            assert [span.start for span in spans] == [0, *np.cumsum(counts)[:-1].tolist()]
            assert spans[-1].stop == num_rows
            assert all(512 * (int(blocks[a:b].sum()) + 2) == size for a, b, size in spans)
        with pytest.raises(PackError, match=f"{num_rows} samples cannot fill {num_rows + 1} shards"):
            divide(blocks, make_limits(None, None, num_shards=num_rows + 1))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_shards": 2, "max_samples": 4}, "with 2 shards, one would have 5 samples, more than max_samples 4"),
        ({"num_shards": 2, "max_bytes": 5000}, "with 2 shards, one would have 6144 bytes, more than max_bytes 5000"),
        ({"num_shards": 11}, "10 samples cannot fill 11 shards"),
        ({"num_shards": 0}, "num_shards: 0 is not a number of shards"),
        ({"num_shards": 2.0}, "num_shards: 2.0 is not a whole number"),
    ],
)  # fmt: skip
def test_balanced_shards_that_cannot_be_made_are_an_error(tmp_path, options, problem):
    with pytest.raises(PackError, match=problem):
        pack([{"__key__": f"{n}", "cls": n} for n in range(10)], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists() or list(bytes_in(tmp_path / "out")) == []


def test_packed_shards_are_balanced(tmp_path):
    rows = [{"__key__": f"{n:02d}", "cls": n} for n in range(50)]
    result = pack(rows, tmp_path / "out", num_shards=4)
    assert [entry.num_samples for entry in result.entries] == [13, 13, 12, 12]
    result = pack(rows, tmp_path / "more", num_shards=6, max_samples=10, shuffle=1)
    assert [entry.num_samples for entry in result.entries] == [9, 9, 8, 8, 8, 8]
    assert (
        sorted(samples_in(tmp_path / "more")) == list(samples_in(tmp_path / "out")) == [f"{n:02d}" for n in range(50)]
    )


def test_a_number_of_shards_lifts_the_usual_limits_only():
    assert make_limits(None, None) == Limits(10_000, 10**9)
    assert len(divide(np.ones(25_000, dtype=np.uint32), make_limits(None, None, num_shards=2))) == 2
    assert make_limits(7, None, num_shards=2).max_samples == 7


@pytest.mark.parametrize("option", ["num_shards", "workers"])
def test_a_stream_cannot_be_balanced(tmp_path, option):
    with pytest.raises(PackError, match=f"{option}: rows that can be read only once"):
        pack(iter([{"__key__": "a", "cls": 1}]), tmp_path / "out", **{option: 2})


@pytest.mark.parametrize("options", [{"shuffle": 0}, {"split": {"a": 0.5, "b": 0.5}}])
def test_a_stream_refuses_options_whose_values_are_0_or_mappings(tmp_path, options):
    with pytest.raises(PackError, match=f"{next(iter(options))}: rows that can be read only once"):
        pack(iter([{"__key__": "a", "cls": 1}]), tmp_path / "out", **options)


# Dry runs.


@pytest.mark.parametrize("kind", ["folder", "rows", "large"])
def test_a_dry_run_tells_what_is_written_and_writes_nothing(tmp_path, kind, monkeypatch):
    if kind == "large":
        monkeypatch.setattr(plan, "ROWS_IN_MEMORY", 2)
    source = make_folder(tmp_path / "photos", {"cat": 5, "dog": 4})
    (source / "cat" / "0001.jpg").write_bytes(b"bad")
    rows = [*({"__key__": f"{n:02d}", "cls": n, **({"txt": "x"} if n > 3 else {})} for n in range(9)), 5]
    given = rows if kind == "rows" else source
    options = {"shuffle": 5, "max_samples": 3, "skip_bad": True}
    planned = pack(given, tmp_path / "out", dry_run=True, **options)
    assert not (tmp_path / "out").exists()
    assert planned.entries == ()
    done = pack(given, tmp_path / "out", **options)
    assert planned.plan == done.plan
    assert [(s.name, s.num_samples, s.num_bytes) for s in planned.plan.shards] == [
        (entry.name, entry.num_samples, entry.num_bytes) for entry in done.entries
    ]
    assert (planned.num_samples, planned.num_bytes) == (done.num_samples, done.num_bytes)
    assert [str(err) for err in planned.rejected] == [str(err) for err in done.rejected]
    samples = samples_in(tmp_path / "out")
    assert planned.plan.first_key == next(iter(samples))
    assert planned.plan.last_key == next(reversed(samples))
    assert planned.plan.num_fields == {
        field: sum(field in fields for fields in samples.values()) for field in planned.plan.num_fields
    }
    assert set(planned.plan.num_fields) == {field for fields in samples.values() for field in fields}


def test_a_dry_run_refuses_what_a_run_would(tmp_path):
    pack([{"__key__": "a", "cls": 1}], tmp_path / "out")
    before = bytes_in(tmp_path / "out")
    with pytest.raises(PackError, match="packed and indexed already"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out", dry_run=True)
    with pytest.raises(RowError, match="its key 'a' is in"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out", append=True, dry_run=True)
    assert pack([{"__key__": "b", "cls": 1}], tmp_path / "out", append=True, dry_run=True).plan.shards[0].name == (
        "out-000001.tar"
    )
    assert bytes_in(tmp_path / "out") == before
    with pytest.raises(PackError, match="dry_run: rows that can be read only once"):
        pack(iter([{"__key__": "b", "cls": 1}]), tmp_path / "b", dry_run=True)


@pytest.mark.parametrize(("samples", "num_bytes"), [(-1, 0), (1, 0), (0, -512), (0, 512)])
def test_a_planner_that_is_off_by_one_is_caught(samples, num_bytes):
    """Mutants divide a sample or a block too early or too late; limits that files meet exactly show it."""

    def wrong(rows, limits):
        return shards_of(rows, Limits(limits.max_samples + samples, limits.max_bytes + num_bytes))

    rows = rows_of([[0]] * 40)
    for max_samples, max_bytes in ((7, 20_480), (100, 512 * 12)):
        check_plan(rows, max_samples, max_bytes)
    with pytest.raises(AssertionError):
        check_plan(rows, 7, 20_480, wrong)
        check_plan(rows, 100, 512 * 12, wrong)


def test_a_row_over_the_limit_alone_is_an_error(tmp_path):
    with pytest.raises(
        RowError, match=r"row 1 \('b'\): even alone in its shard it takes 12288 bytes, more than max_bytes 12287"
    ):
        pack([{"__key__": "a", "bin": b""}, {"__key__": "b", "bin": bytes(10752)}], tmp_path / "out", max_bytes=12287)
    assert list(bytes_in(tmp_path / "out")) == []  # the plan is made before a file is written
    pack([{"__key__": "b", "bin": bytes(10752)}], tmp_path / "out", max_bytes=12288)
    assert (tmp_path / "out" / "out-000000.tar").stat().st_size == 12288


@pytest.mark.parametrize("workers", [1, 7])
def test_more_workers_than_shards_are_fine(tmp_path, workers):
    pack([{"__key__": f"{n}", "cls": n} for n in range(3)], tmp_path / "out", max_samples=2, workers=workers)
    assert list(samples_in(tmp_path / "out")) == ["0", "1", "2"]


# Shuffling.


def test_a_shuffle_is_a_permutation_by_its_seed(tmp_path):
    rows = [{"__key__": f"{n:03d}", "cls": n} for n in range(50)]
    orders = {}
    for seed in (None, 0, 1, 2**63, 2**64 - 1):
        pack(rows, tmp_path / f"{seed}", shuffle=seed, pattern="p-%d.tar")
        orders[seed] = tuple(samples_in(tmp_path / f"{seed}"))
        pack(rows, tmp_path / f"{seed} again", shuffle=seed, pattern="p-%d.tar")
        assert bytes_in(tmp_path / f"{seed} again") == bytes_in(tmp_path / f"{seed}")
    assert orders[None] == tuple(f"{n:03d}" for n in range(50))
    assert {tuple(sorted(order)) for order in orders.values()} == {orders[None]}
    assert len(set(orders.values())) == 5


def test_a_shuffle_mixes_over_all_shards(tmp_path):
    """Rows of each tenth of the source are in more than half of the shards."""
    pack([{"__key__": f"{n}", "cls": n} for n in range(1000)], tmp_path / "out", shuffle=3, max_samples=100)
    places: dict[int, set[int]] = {}
    for at, key in enumerate(samples_in(tmp_path / "out")):
        places.setdefault(int(key) // 100, set()).add(at // 100)
    assert all(len(shards) > 5 for shards in places.values())


def test_the_order_of_a_shuffle_is_that_of_every_version(tmp_path):
    """The order is committed: packing again with a later wdskit or numpy gives the same shards."""
    pack([{"__key__": f"{n}", "cls": n} for n in range(12)], tmp_path / "out", shuffle=7)
    assert [int(key) for key in samples_in(tmp_path / "out")] == [8, 2, 5, 9, 0, 10, 6, 11, 4, 7, 1, 3]


# Names.


@pytest.mark.parametrize(
    "pattern",
    [
        "a.tar", "%d-%d.tar", "%06d-%s.tar", "a-%06d", "a/%06d.tar", "/a%06d.tar", "..\\%d.tar", "%s.tar", ".%06d.tar",
        "a-%06d.tar.gz", "a-%06d.TAR", "", "%%06d.tar", "a%-%06d.tar", "%6d.tar", "%+d.tar", "%-6d.tar", "%x.tar",
        "%0100d.tar", "{0..9}-%06d.tar", "a*%d.tar", "a?%d.tar", "a[0]%d.tar", "a::%d.tar", "s3:%d.tar", "a\n%d.tar",
        "a%d\x00.tar", "\udcff%d.tar", "%(n)d.tar",
    ],
)  # fmt: skip
def test_patterns_that_name_no_shards_are_refused(pattern, tmp_path):
    with pytest.raises(PackError, match="must be a file name with one %0Nd"):
        ShardNames(pattern)
    with pytest.raises(PackError, match="must be a file name with one %0Nd"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / "out", pattern=pattern)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("pattern", "name"), [("a-%06d.tar", "a-000012.tar"), ("%d.tar", "12.tar"), ("ä b%00d.x.tar", "ä b12.x.tar")]
)
def test_a_pattern_names_shards_by_number(pattern, name):
    assert ShardNames(pattern)[12] == name


def test_names_that_would_not_sort_are_refused():
    assert ShardNames("a-%03d.tar")[999] == "a-999.tar"
    with pytest.raises(PackError, match="no name for shard 1000"):
        ShardNames("a-%03d.tar")[1000]


def test_too_many_shards_for_a_pattern_are_refused_before_anything_is_written(tmp_path):
    rows = [{"__key__": f"{n}", "cls": n} for n in range(101)]
    with pytest.raises(PackError, match=r"has no name for shard 100\. Use more digits"):
        pack(rows, tmp_path / "out", max_samples=1, pattern="p-%02d.tar")
    assert list(bytes_in(tmp_path / "out")) == []


@given(st.sampled_from(["a-%06d.tar", "%d.tar", "1%d1.tar", "a.+%03d.tar"]), st.integers(0, 10**5), st.text(max_size=9))
def test_a_name_gives_its_number_back_and_no_other_name_does(pattern, number, other):
    names = ShardNames(pattern)
    try:
        name = names[number]
    except PackError:
        return
    assert names.number_of(name) == number
    for near in (other, f"{name}.idx", f"0{name}", name.replace("0", "00", 1), name.replace(".", "x")):
        found = names.number_of(near)
        assert found is None or names[found] == near


@pytest.mark.parametrize(
    ("folder", "name"), [("train", "train-000000.tar"), ("a/./val/", "val-000000.tar"), (".", "here-000000.tar")]
)
def test_shards_are_called_after_their_folder(tmp_path, monkeypatch, folder, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert pack([{"__key__": "a", "cls": 1}], folder).entries[0].name == name


@pytest.mark.parametrize("folder", [".hidden", "50%", "a{1}", "a:b", "a\n", "\udcff"])
def test_a_folder_that_shards_cannot_be_called_after_needs_a_pattern(tmp_path, folder):
    with pytest.raises(PackError, match=r"shards cannot be named after this folder\. Name them: --pattern"):
        pack([{"__key__": "a", "cls": 1}], tmp_path / folder)
    assert list(tmp_path.iterdir()) == []
    assert pack([{"__key__": "a", "cls": 1}], tmp_path / folder, pattern="p-%d.tar").num_samples == 1


# Options.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_samples": 0}, "max_samples: 0"),
        ({"max_samples": -1}, "max_samples: -1"),
        ({"max_bytes": 2047}, "max_bytes: 2047"),
        ({"workers": 0}, "workers: 0"),
        ({"keys": "random"}, "keys: 'random'"),
        ({"shuffle": -1}, "seed -1"),
        ({"shuffle": 2**64}, "seed 18446744073709551616"),
        ({"pattern": "x"}, "pattern: 'x'"),
        ({"image_column": "x"}, "is for a table"),
        ({"key_column": ""}, "is for a table"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, options, problem):
    for source in (make_folder(tmp_path / "photos.csv", {"cat": 1}), [{"__key__": "a", "cls": 1}]):
        with pytest.raises(PackError, match=problem):
            pack(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_smallest_max_bytes_holds_the_smallest_sample(tmp_path):
    pack([{"__key__": f"{n}", "bin": bytes(512)} for n in range(3)], tmp_path / "out", max_bytes=2048)
    assert [path.stat().st_size for path in (tmp_path / "out").glob("*.tar")] == [2048] * 3


# Progress.


@pytest.mark.parametrize(("workers", "skip_bad"), [(1, False), (1, True), (2, True)])
def test_progress_counts_each_stage_up_to_the_whole(tmp_path, workers, skip_bad):
    told = []
    rows = [{"__key__": f"{n:04d}", "bin": bytes(n % 700)} for n in range(600)]
    result = pack(rows, tmp_path / "out", max_samples=99, workers=workers, skip_bad=skip_bad, progress=told.append)
    stages = ["reading", "checking", "packing"] if skip_bad else ["reading", "packing"]
    assert list(dict.fromkeys(now.stage for now in told)) == stages
    for stage in stages:
        steps = [(now.num_samples, now.num_bytes) for now in told if now.stage == stage]
        assert steps == sorted(set(steps))
        assert steps[-1] == (600, result.num_bytes - 7 * 1024) or stage == "reading"
    assert told[-1][1:3] == told[-1][3:]
    if workers == 1:
        assert [now.num_samples for now in told if now.stage == "packing"] == list(range(601))


def test_an_addition_tells_of_what_is_read_for_its_keys(tmp_path):
    told = []
    old = pack([{"__key__": f"{n}", "cls": n} for n in range(3)], tmp_path / "out", max_samples=2)
    pack([{"__key__": "a", "cls": 1}], tmp_path / "out", append=True, progress=told.append)
    first = old.entries[0].num_bytes
    assert [tuple(now) for now in told if now.stage == "comparing"] == [
        ("comparing", 0, 0, 3, old.num_bytes),
        ("comparing", 2, first, 3, old.num_bytes),
    ]


def test_progress_of_a_generator_knows_no_whole(tmp_path):
    told = []
    pack(iter([{"__key__": "a", "cls": 1}]), tmp_path / "out", progress=told.append)
    assert [tuple(now) for now in told] == [("packing", 0, 0, None, None), ("packing", 1, 1024, None, None)]
