"""wdskit beside other loaders: the same samples, the same crop, one interleaved run.

    python tools/bench_peers.py [--only NAME ...] [--rounds N] [--parts bytes,small,images] [--quick]
                                [--folder DIR] [--venvs DIR] [--no-install] [--json FILE]

Needs the extras `bench` and `dev`, and some 10 GB below --folder. Each contestant stands in tools/peers/ and runs in
its own process, those with requirements of their own in an environment made below --venvs; one that cannot be
installed is a line that says why. A run is a fresh process: an epoch that warms up, then whole epochs for at least
--seconds. The order turns with each round. Numbers are medians, ratios medians of the ratios to the bare loop of the
same round.

    samples/s      of the measured epochs; of images in the middle of each, where all decoders have work
    CPU ms         of the whole tree of processes, a sample
    first batch    seconds from the end of the imports to the first batch
    from start     seconds from the start of the process
    next epoch     seconds from an epoch's end to the next one's first batch
    PSS            of the tree, shared pages once; the most of eight samples in the warm-up epoch and one at the end

Whoever delivers other samples, other shapes, other pixels (mean and deviation) or the packed order is not listed with
numbers but with what was wrong. The consumer touches each page of each batch, the same way for all. All run with
OMP_NUM_THREADS=1: four decoders are four, and no pools of threads within them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers import install, report
from peers.catalogue import CONTESTANTS
from peers.job import Job
from peers.parts import PARTS, Entry, Part, parts

TOOLS = Path(__file__).resolve().parent
MIN_ROUNDS = 5
TIMEOUT_S = 300
BARE = next(contestant for contestant in CONTESTANTS if contestant.name == "bare")


class Failed(Exception):
    """A run that gave no result, and why."""


def run_part(part: Part, pythons: dict[str, str], rounds: int) -> dict[str, Any]:
    """Measure one table: every round runs all entries, each in a fresh process."""
    entries = part.entries([contestant for contestant in CONTESTANTS if contestant.name in pythons])
    prepare(part, entries, pythons)
    for number in range(rounds):
        for entry in turned(entries, number):
            if not entry.problem:
                log(f"{part.key}, round {number + 1} of {rounds}: {entry.title}")
                try:
                    entry.rounds.append(run(entry, part.job, pythons, launched=time.monotonic()))
                except Failed as error:
                    entry.problem = f"failed: {error}"
    base = next((entry for entry in entries if entry.contestant == BARE), None)
    bare = base.rounds[0] if base is not None and base.rounds else None
    for entry in entries:
        wrong = [text for result in entry.rounds for text in report.problems(part.job, result, bare)]
        entry.problem = entry.problem or "; ".join(wrong[:2])
    summaries = [report.summary(entry, base) for entry in entries]
    runs = {entry.key: entry.rounds for entry in entries}
    return {"key": part.key, "title": part.title, "lines": summaries, "runs": runs}


def prepare(part: Part, entries: list[Entry], pythons: dict[str, str]) -> None:
    """Write the samples, unless they are: for the bare loop, which all start from, then in each one's own format."""
    folder = Path(part.job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    problems = {contestant.name: "" for contestant in [BARE, *(entry.contestant for entry in entries)]}
    for contestant in CONTESTANTS:
        if contestant.name in problems and contestant.writes:
            log(f"{part.key}: the data of {contestant.title}")
            try:
                run(Entry(contestant), part.job, pythons, mode="prepare")
            except Failed as error:
                problems[contestant.name] = f"failed to write its data: {error}"
    for entry in entries:
        entry.problem = problems[BARE.name] or problems[entry.contestant.name]
    for path in folder.rglob("*"):  # into the page cache
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 22):
                    pass


def run(entry: Entry, common: Job, pythons: dict[str, str], **changes: Any) -> dict[str, Any]:
    """Run a contestant in a process of its own; its result. Raises Failed."""
    name, setting = entry.contestant.name, entry.setting
    job = replace(common, workers=setting.workers, threads=setting.threads, chain=setting.chain, **changes)
    command = [pythons.get(name, sys.executable), "-m", "peers.harness", name, job.text()]
    paths = os.pathsep.join([str(TOOLS), str(TOOLS.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    timeout = TIMEOUT_S if job.mode == "run" else 4 * TIMEOUT_S
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"no result within {timeout} s") from None
        finally:
            with suppress(ProcessLookupError):  # what is left of it, its workers included
                os.killpg(process.pid, 9)
    if process.returncode or not stdout.strip():
        raise Failed(install.last_line(stderr.splitlines()))
    result: dict[str, Any] = json.loads(stdout)
    return result


def log(text: str) -> None:
    """Print what is going on, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def turned(entries: list[Entry], number: int) -> list[Entry]:
    """The order of a round: another one begins, and every second round goes backwards."""
    start = number * max(len(entries) // MIN_ROUNDS, 1) % max(len(entries), 1)
    order = entries[start:] + entries[:start]
    return order[::-1] if number % 2 else order


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="wdskit beside other loaders.")
    names = [contestant.name for contestant in CONTESTANTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} or more, unless --quick")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--seconds", type=float, default=1.5, help="to measure in each run, at least")
    parser.add_argument("--quick", action="store_true", help="so few samples that the numbers say nothing")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="for the samples in all formats")
    parser.add_argument("--venvs", type=Path, default=Path(".bench"), help="for the contestants' environments")
    parser.add_argument("--no-install", action="store_true", help="take only those who are installed already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every number of every run")
    options = parser.parse_args()
    if options.rounds < MIN_ROUNDS and not options.quick:
        parser.error(f"--rounds is {MIN_ROUNDS} or more")
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Install and measure."""
    found: dict[str, Any] = {"machine": report.machine(), "rounds": options.rounds, "missing": {}, "parts": []}
    pythons: dict[str, str] = {}
    for contestant in CONTESTANTS:
        if contestant.name in options.only:
            log(f"the environment of {contestant.title}")
            venvs = options.venvs.resolve() / "venvs"
            try:
                pythons[contestant.name] = install.python_of(contestant, venvs, install=not options.no_install)
            except install.NotInstalled as error:
                found["missing"][contestant.title] = str(error)
    data = str(options.folder.resolve() / "data")
    for part in parts(options.parts, data, quick=options.quick, seconds=options.seconds):
        found["parts"].append(run_part(part, pythons, options.rounds))
        results = [result for one in found["parts"] for rounds in one["runs"].values() for result in rounds]
        found["versions"] = {name: version for result in results for name, version in result["versions"].items()}
        if options.json:  # after each part: all of them take an hour, and may be stopped
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    print(report.markdown(measure(arguments())))
