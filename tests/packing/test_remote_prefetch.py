"""Rows whose bytes are in a store are read ahead, some megabytes at a time, and keep their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from wdskit.packing import remote_prefetch as ahead
from wdskit.packing.references import ObjectBytes
from wdskit.packing.remote_prefetch import read_ahead
from wdskit.packing.row import Row
from wdskit.storage.objects import ObjectFile, plan_parts

STORE = {f"s3://bucket/{name}.tar": bytes(range(256)) * 40 for name in "ab"}
SIZE = len(STORE["s3://bucket/a.tar"])


@pytest.fixture
def reads(monkeypatch) -> list[tuple[str, list[tuple[int, int]]]]:
    """The requests so far (URL and ranges), which are answered from memory."""
    found = []

    class Ahead:
        def __init__(self, file, ranges):
            found.append((file.url, list(ranges)))
            self.url, self.ranges = file.url, ranges

        def read_at(self, offset, size):
            assert any(start <= offset and offset + size <= stop for start, stop in self.ranges)
            return STORE[self.url][offset : offset + size]

    def start(file, ranges):
        return Ahead(file, ranges)

    monkeypatch.setattr(ObjectFile, "ahead", start)
    monkeypatch.setattr(ObjectFile, "read_at", lambda *_: pytest.fail("a request for itself"))
    return found


def rows(num: int, of: str = "a") -> list[Row]:
    return [
        Row(
            f"{of}{n}",
            (
                ("txt", b"%d" % n),
                ("x", ObjectBytes(f"s3://bucket/{of}.tar", n % 7, 10 * n, SIZE, '"e"', "")),
                ("y", ObjectBytes(f"s3://bucket/{of}.tar", 3, 10 * n + 7, SIZE, '"e"', "")),
            ),
            "",
        )
        for n in range(num)
    ]


def expected(row: Row) -> Row:
    """Return the row with its bytes."""
    fields = []
    for name, data in row.fields:
        if isinstance(data, ObjectBytes):
            fields.append((name, STORE[data.path][data.offset : data.offset + data.num_bytes]))
        else:
            fields.append((name, data))
    return Row(row.key, tuple(fields), row.where)


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 100])
@pytest.mark.parametrize("batch_bytes", [1, 12, 1 << 20])
def test_rows_of_all_kinds_stay_in_their_order(reads, monkeypatch, batch_rows, batch_bytes):
    monkeypatch.setattr(ahead, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(ahead, "BATCH_BYTES", batch_bytes)
    here = [Row(f"k{n}", (("txt", b"%d" % n),), "") for n in range(3)]
    for kinds in itertools.permutations([rows(5), rows(4, "b"), here, []]):
        given = [*itertools.chain(*kinds)]
        assert [*read_ahead(given)] == [*map(expected, given)]
    backwards = [*reversed(rows(9))] + rows(1) * 2
    assert [*read_ahead(backwards)] == [*map(expected, backwards)]


def test_what_stands_side_by_side_is_one_request_and_each_object_is_asked_once_a_batch(reads, monkeypatch):
    monkeypatch.setattr(ahead, "BATCH_ROWS", 8)
    mixed = [row for pair in zip(rows(8), rows(8, "b"), strict=True) for row in pair]
    assert len([*read_ahead(mixed)]) == 16
    assert [url for url, _ in reads] == ["s3://bucket/a.tar", "s3://bucket/b.tar"] * 2
    assert all(len(plan_parts(ranges)) == 1 for _, ranges in reads)


def test_two_batches_are_in_memory_and_no_row_from_python_waits_for_the_next(reads, monkeypatch):
    monkeypatch.setattr(ahead, "BATCH_ROWS", 4)
    taken = 0

    def counted(given: list[Row]) -> Iterator[Row]:
        nonlocal taken
        for row in given:
            taken += 1
            yield row

    for number, _ in enumerate(read_ahead(counted(rows(50)))):
        assert taken <= number + 9
        assert len(reads) <= number // 4 + 2
    taken = 0
    for number, _ in enumerate(read_ahead(counted([Row(str(n), (), "") for n in range(5)]))):
        assert taken == number + 1
