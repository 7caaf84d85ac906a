"""Ways of doing the same, measured in turns: a table of bench.py, and the checks before it."""

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
    """One table: ways of doing the same, by name, compared with the first of them.

    A run of each way does `num` of `unit`. `before` is called with the way's name before each run, outside of its time.
    """

    title: str
    num: float
    ways: Mapping[str, Way]
    before: Callable[[str], object] = str
    unit: str = "samples"


def measure(case: Case, rounds: int) -> None:
    """Run the ways in turns (a first round warms up and does not count) and print a line for each."""
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
    """End the benchmark where a check failed: its figures would be of something else."""
    if not right:
        raise SystemExit(f"{what}. No figure is printed.")


def must_equal(what: str, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Name the first difference."""
    wrong = next((name for name in [*expected, *found] if found.get(name) != expected.get(name)), "")
    require(found == expected, f"{what}: {wrong} is missing or different ({len(found)} of {len(expected)} are there)")
