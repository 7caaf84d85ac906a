"""Which workers and threads are tried, which are recommended, and the sentence that says why."""

from __future__ import annotations

import dataclasses

import pytest

from wdskit.loader.bench_advice import choose, default_settings, explain, spread_ratio, warn
from wdskit.loader.bench_types import LoaderBench, Measured, PartBench, Setting


def rate(value: float, *others: float) -> Measured:
    return Measured.of([value, *others])


def loader(
    workers: int,
    threads: int,
    alone: float,
    python: float | None = None,
    training: float | None = None,
    headspace: float = 1e6,
) -> LoaderBench:
    busy = [None if each is None else rate(each) for each in (python, training)]
    return LoaderBench(Setting(workers, threads), rate(alone), rate(0.9), rate(1), rate(1), *busy, rate(headspace))


def part(what: str, processes: int, threads: int, samples_per_s: float) -> PartBench:
    return PartBench(what, processes, threads, rate(samples_per_s), 1e6, rate(1.0))


PARTS = [part("read", 1, 1, 20_000), part("decode", 1, 1, 700), part("decode", 1, 4, 2700), part("decode", 4, 1, 2900)]


def test_the_settings_for_four_cpus() -> None:
    assert default_settings(4) == [(0, 1), (0, 2), (0, 4), (1, 2), (1, 4), (2, 2), (4, 1)]


@pytest.mark.parametrize("num_cpus", [*range(1, 40), 64, 128, 192])
def test_settings_use_at_most_all_cpus_and_one_of_them_uses_all(num_cpus: int) -> None:
    settings = default_settings(num_cpus)
    used = [max(1, each.workers) * each.threads for each in settings]
    assert max(used) == num_cpus
    assert min(used) >= 1
    assert len(set(settings)) == len(settings)
    assert {(0, 1), (0, num_cpus), (1, num_cpus)} <= set(settings)
    assert max(each.workers for each in settings) <= 16


def test_of_those_as_good_the_one_with_fewest_processes_is_taken_but_not_none() -> None:
    """Measured alone they are equal; the training process's own threads are the ones that a busy loop stops."""
    loaders = [loader(0, 4, 1000), loader(1, 4, 980), loader(2, 2, 1010), loader(4, 1, 990)]
    assert choose(loaders).setting == (1, 4)
    assert choose([loader(0, 4, 1000), loader(1, 4, 940)]).setting == (0, 4)
    assert choose([loader(1, 2, 960), loader(1, 4, 1000)]).setting == (1, 2)
    assert choose([loader(0, 1, 5)]).setting == (0, 1)


def test_the_worst_of_a_setting_counts() -> None:
    loaders = [loader(0, 4, 2900, 170, 2800), loader(1, 4, 2700, 2100, 2700), loader(4, 1, 2800, 2200, 1500)]
    assert choose(loaders).setting == (1, 4)


def test_each_reason_is_told() -> None:
    gil = [loader(0, 4, 2900, 170, 2800), loader(1, 4, 2760, 2090, 2700)]
    assert explain(gil[1], gil, PARTS) == (
        "beside a busy Python thread, threads of the training process fall to 170 samples/s, since all wait for its "
        "lock (GIL); these keep 2,090."
    )
    slow = [part("read", 1, 1, 500), part("decode", 1, 1, 2000)]
    disk = [loader(0, 1, 400), loader(1, 4, 480)]
    assert (
        explain(disk[1], disk, slow) == "reading is what limits: it gives 500 samples/s where 2,000 could be decoded."
    )
    locked = [*PARTS[:2], part("decode", 1, 4, 900), part("decode", 4, 1, 2900)]
    python = [loader(1, 4, 880), loader(4, 1, 2800)]
    assert explain(python[1], python, locked) == (
        "the stages wait for Python's lock (GIL): threads of one process decode 900 samples/s, as many processes 2,900."
    )
    assert explain(python[1], python, PARTS) == (
        "it is the fastest: 2,800 samples/s, and 880 with workers: 1, threads: 4."
    )
    near = [loader(1, 4, 980), loader(4, 1, 1000)]
    assert explain(near[0], near, PARTS) == (
        "nothing is faster by more than 5%, and of those as fast it needs the fewest processes."
    )
    busy = [loader(1, 4, 900, 900, 900), loader(2, 2, 1000, 100, 900)]
    assert explain(busy[0], busy, PARTS) == (
        "workers: 2, threads: 2 is faster alone, but loses more where the training process is busy."
    )
    assert explain(busy[0], busy[:1], PARTS) == "no other was tried."


def test_what_makes_the_figures_doubtful_is_told() -> None:
    quiet = [loader(1, 4, 1000)]
    assert warn(quiet, quiet[0], PARTS, num_cpus=4) == ()
    (told,) = warn(quiet, quiet[0], PARTS, num_cpus=8)
    assert told == "no setting that was tried uses all 8 CPUs; the decode limit does."
    narrow = [loader(1, 4, 1000, headspace=1500)]
    (told,) = warn(narrow, narrow[0], PARTS, num_cpus=4)
    assert told.startswith("free batches come at no more than 1,500 samples/s")
    small = [dataclasses.replace(PARTS[0], cpu_ms=rate(0.05)), dataclasses.replace(PARTS[1], cpu_ms=rate(0.018))]
    (told,) = warn(quiet, quiet[0], small, num_cpus=4)
    assert told.startswith("reading a sample takes 0.05 ms of CPU and decoding it 0.018: reading decides here")
    fast = [dataclasses.replace(quiet[0], limit_ratio=rate(1.4))]
    (told,) = warn(fast, fast[0], PARTS, num_cpus=4)
    assert told.startswith("a loader came to 140% of the decode limit")
    noisy = [LoaderBench(Setting(0, 1), rate(100, 140, 90), *[rate(1)] * 3, None, None, rate(1e6))]
    (told,) = warn(noisy, noisy[0], PARTS, num_cpus=1)
    assert told.startswith("repeats of one setting differ by up to 40%")


def test_the_spread_is_that_of_the_repeat_furthest_away() -> None:
    assert spread_ratio(rate(100, 90, 130)) == pytest.approx(0.3)
    assert spread_ratio(rate(100)) == 0
    assert spread_ratio(rate(0)) == 0
