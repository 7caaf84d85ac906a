"""Measure several ways to do one task, in turns: the tables of bench_parts.py, and the checks before them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from peers.harness import cpu_s

Way = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One table: ways to do one task, by name; the first way is the reference for the others.

    Each run of a way processes `num` items, counted in `unit`. `before` is called with the way's name before each run;
    its time does not count.
    """

    title: str
    num: float
    ways: Mapping[str, Way]
    before: Callable[[str], object] = str
    unit: str = "samples"


def measure(case: Case, rounds: int) -> None:
    """Run all ways in each of `rounds` rounds, after a round that warms up, and print a line for each way."""
    walls: dict[str, list[float]] = {name: [] for name in case.ways}
    cpus: dict[str, list[float]] = {name: [] for name in case.ways}
    for number in range(-1, rounds):
        for name in list(case.ways)[:: 1 if number % 2 else -1]:
            case.before(name)
            cpu, start = cpu_s(), time.perf_counter()
            case.ways[name]()
            wall = time.perf_counter() - start
            if number >= 0:
                walls[name].append(wall)
                cpus[name].append(max(cpu_s() - cpu, 1e-6))
    width, base = max(24, *(len(name) + 2 for name in case.ways)), next(iter(case.ways))
    print(f"{case.title}\n{'':<{width}}{case.unit + '/s':>14}{'x first':>10}{'CPU us':>12}{'x first':>10}")
    for name in case.ways:
        rate, cpu_us = case.num / statistics.median(walls[name]), statistics.median(cpus[name]) / case.num * 1e6
        faster = statistics.median(np.divide(walls[base], walls[name]))
        dearer = statistics.median(np.divide(cpus[name], cpus[base]))
        print(f"{name:<{width}}{rate:>14,.1f}{faster:>10.2f}{cpu_us:>12,.2f}{dearer:>10.2f}")
    print(flush=True)


def require(right: object, what: str) -> None:
    """Raise SystemExit with the text `what` if the check `right` failed, because the figures would be wrong."""
    if not right:
        raise SystemExit(f"{what}. No figure is printed.")


def must_equal(what: str, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise SystemExit that names the first difference, if `found` and `expected` are not equal."""
    wrong = next((name for name in [*expected, *found] if found.get(name) != expected.get(name)), "")
    require(found == expected, f"{what}: {wrong} is missing or different ({len(found)} of {len(expected)} are there)")
