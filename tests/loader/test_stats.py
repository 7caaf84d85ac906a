"""Statistics as text: a report, a line, and one sentence where the consumer waits."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from wdskit import LoaderStats, StageStats
from wdskit.loader.stats import format_duration
from wdskit.storage.traffic import Traffic

STATS = LoaderStats(
    loader="train",
    rank=3,
    epoch=7,
    steps=101,
    samples=1010,
    replaced=0,
    elapsed_s=100.0,
    wait_s=1.0,
    wait_ratio=0.01,
    first_wait_s=5.0,
    samples_per_s=10.0,
    bytes_read=10**6,
    bytes_per_s=1e4,
    traffic=Traffic(),
    stages={
        "read": StageStats(1010, 0.02, 20.2, 0.013),
        "decode-crop": StageStats(1010, 1.5, 1515.0, 0.987),
    },
)
SLOW = replace(STATS, wait_s=50.0, wait_ratio=0.5)


def test_the_report_for_people():
    assert str(replace(STATS, replaced=1)) == (
        "train, epoch 7: 101 steps, 1010 samples (1 replaced), 10.0 samples/s, 10.0 kB/s; waited 1.0% of 100 s, "
        "first wait 5 s.\n"
        "stage        share   mean    total\n"
        "read          1.3%  20 ms   20.2 s\n"
        "decode-crop  98.7%  1.5 s  1,515 s\n"
        "The loader keeps up with its consumer."
    )


def test_the_line_for_the_log():
    """Without what there is none of: a first wait in a later part of an epoch, bytes where nothing was read."""
    line = "train, epoch 7: 101 steps, 1010 samples, 10.0 samples/s, 10.0 kB/s; waited 1.0% of 100 s, first wait 5 s."
    assert STATS.line() == line
    assert replace(STATS, bytes_read=0, first_wait_s=0.0).line() == (
        "train, epoch 7: 101 steps, 1010 samples, 10.0 samples/s; waited 1.0% of 100 s."
    )


def test_a_consumer_that_waits_gets_one_sentence():
    """The largest stage, and the command that finds better settings."""
    sentence = (
        "The consumer waits for the loader: `decode-crop` takes 99% of the stages' time, and "
        "`wdskit bench` finds the workers and threads."
    )
    assert str(SLOW).splitlines()[-1] == sentence
    assert SLOW.line().endswith(f"; waited 50.0% of 100 s, first wait 5 s. {sentence}")
    without = "The consumer waits for the loader: `wdskit bench` finds the workers and threads."
    assert replace(SLOW, stages={}).line().endswith(f" 5 s. {without}")


@pytest.mark.parametrize("stats", [replace(SLOW, wait_ratio=0.049), replace(SLOW, elapsed_s=0.019)])
def test_a_small_share_or_a_short_time_says_nothing(stats):
    assert "bench" not in stats.line()
    assert str(stats).endswith("The loader keeps up with its consumer.")


def test_it_is_frozen_and_plain_json_with_the_names_of_the_fields():
    written = json.loads(json.dumps(STATS.to_json()))
    assert written == asdict(STATS) | {"traffic": STATS.traffic._asdict()}
    assert written["stages"]["read"].keys() == {"num", "mean_s", "total_s", "share_ratio"}
    with pytest.raises(FrozenInstanceError):
        STATS.steps = 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (9.96e-7, "0.996 us"),
        (1.234e-5, "12.3 us"),
        (9.999e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (99.94, "99.9 s"),
        (999.5, "1,000 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_durations_are_written_in_three_digits(seconds, text):
    assert format_duration(seconds) == text
