"""Progress of running commands, and the results of the Python API as text."""

from __future__ import annotations

import pytest

import wdskit
from wdskit.cli import console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that `time.monotonic` shows."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_one_line_a_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal each kind of progress is a line on stderr, from the first minute on."""
    with console.show_packing() as show:
        for seconds in range(0, 181, 5):
            clock[0] = 1000 + seconds
            show("packing", 10 * seconds, 6000)
    assert capsys.readouterr().err == (
        "packing: 600 of 6,000  10 samples/s  0:09:00 left\n"
        "packing: 1,200 of 6,000  10 samples/s  0:08:00 left\n"
        "packing: 1,800 of 6,000  10 samples/s  0:07:00 left\n"
    )
    with console.show_bytes("verifying") as show_bytes:
        for done, total in ((0, 400), (100, 400), (200, None)):
            show_bytes(done * 10**6, total and total * 10**6)
            clock[0] += 61
    assert capsys.readouterr().err == (
        "verifying: 100 MB of 400 MB  1.64 MB/s  0:03:03 left\nverifying: 200 MB  1.64 MB/s\n"
    )
    with console.show_steps() as show_steps:
        for number in range(3):
            show_steps("4 x 2", number, 3)
            clock[0] += 61
    assert capsys.readouterr().err == "4 x 2: 1 of 3  0:02:02 left\n4 x 2: 2 of 3  0:01:01 left\n"


def test_a_value_longer_than_a_line_is_shown_whole(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console.print_tables([console.details_table([("name", "x" * 60)])])
    assert capsys.readouterr().out.split() == ["name", "x" * 31, "x" * 29]


def test_results_are_one_readable_line(tmp_path) -> None:
    """`print(wdskit.pack(...))` shows what was written, not every entry of the index."""
    rows = [{"__key__": str(number), "txt": "x" * 500} for number in range(5)]
    packed = wdskit.pack(rows, tmp_path / "a", max_samples=2)
    assert "num_samples=5, " in str(packed)
    assert len(str(packed)) < 400
    assert str(wdskit.verify(str(tmp_path / "a"))) == f"VerifyResult({tmp_path / 'a'}: 5 samples in 3 shards, clean)"
