"""Charts as plain values, which the page of `view` and the report of `stats --html` draw."""

from __future__ import annotations

from wdskit.shards.tally import NumberTally
from wdskit.text import format_bytes
from wdskit.view.charts import bar_levels, make_histogram


def test_the_longest_bar_has_100_percent_and_a_count_over_0_is_seen():
    assert bar_levels([1, 1000, 0, 500]) == [1, 100, 0, 50]
    assert bar_levels([]) == []
    assert bar_levels([0, 0]) == [0, 0]


def test_a_histogram_says_in_text_what_its_bars_show():
    numbers = NumberTally()
    for value in (1000, 1000, 3000):
        numbers.add(value)
    chart = make_histogram("Bytes", numbers.result(), format_bytes)
    assert chart.ends == ("1.00 kB", "median 1.00 kB", "3.00 kB")
    assert chart.label == "Bytes: 3 from 1.00 kB to 3.00 kB, median 1.00 kB"
    assert [level for level, _ in chart.bars if level] == [100, 50]
    assert sum(int(text.rpartition(": ")[2]) for _, text in chart.bars) == 3


def test_no_numbers_give_a_histogram_without_bars():
    assert make_histogram("Bytes", NumberTally().result()).bars == ()
