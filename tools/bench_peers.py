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
from pathlib import Path
from typing import Any

from peers import install, report
from peers.catalogue import CONTESTANTS, Contestant
from peers.job import Job
from peers.parts import PARTS, Entry, Part, parts
from peers.report import Line, problems

TOOLS = Path(__file__).resolve().parent
MIN_ROUNDS = 5
TIMEOUT_S = 300
BASE = "bare"


class Failed(Exception):
    """A run that gave no result, and why."""


class Driver:
    """Runs the contestants.

    Args:
        pythons: The interpreter of each contestant that is there.
        rounds: How many.
    """

    def __init__(self, pythons: dict[str, str], rounds: int) -> None:
        self.pythons, self.rounds = pythons, rounds
        self.versions: dict[str, str] = {}
        self.written: dict[tuple[str, str], str] = {}

    def measure(self, part: Part, contestants: list[Contestant]) -> dict[str, Any]:
        """One table."""
        lines = {entry.key: Line(entry.title) for entry in part.entries(contestants)}
        entries = self.prepared(part, part.entries(contestants), lines)
        warm_cache(Path(part.job.folder))
        for number in range(self.rounds):
            for entry in turned(entries, number):
                line = lines[entry.key]
                if line.problem:
                    continue
                log(f"{part.key}, round {number + 1} of {self.rounds}: {entry.title}")
                try:
                    result = self.run(entry, entry.job(part.job, launched=time.monotonic()))
                except Failed as error:
                    line.problem = f"failed: {error}"
                    continue
                line.rounds.append(result)
                self.versions |= result["versions"]
        base = next((lines[entry.key] for entry in entries if entry.contestant.name == BASE), None)
        bare = base.rounds[0] if base is not None and base.rounds else None
        for line in lines.values():
            wrong = [text for result in line.rounds for text in problems(part.job, result, bare)]
            line.problem = line.problem or "; ".join(wrong[:2])
        summaries = [{"key": key, "problem": line.problem} | line.summary(base) for key, line in lines.items()]
        runs = {key: line.rounds for key, line in lines.items()}
        return {"key": part.key, "title": part.title, "lines": summaries, "runs": runs}

    def prepared(self, part: Part, entries: list[Entry], lines: dict[str, Line]) -> list[Entry]:
        """Those whose data is written; the bare loop's first, which others are written from."""
        Path(part.job.folder).mkdir(parents=True, exist_ok=True)
        bare = next(one for one in CONTESTANTS if one.name == BASE)
        why: dict[str, str] = {}
        for contestant in [bare, *(entry.contestant for entry in entries)]:
            if contestant.name not in why:
                why[contestant.name] = self.prepare(part, contestant) if contestant.writes else why[BASE]
        for entry in entries:
            lines[entry.key].problem = why[entry.contestant.name]
        return [entry for entry in entries if not why[entry.contestant.name]]

    def prepare(self, part: Part, contestant: Contestant) -> str:
        """Write the samples in the contestant's format unless they are; why that failed, or nothing."""
        done = (part.job.folder, contestant.name)
        if done not in self.written:
            log(f"{part.key}: the data of {contestant.title}")
            entry = Entry(contestant, next(iter(contestant.alone + contestant.images)))
            self.written[done] = ""
            try:
                self.run(entry, entry.job(part.job, mode="prepare"))
            except Failed as error:
                self.written[done] = f"failed to write its data: {error}"
        return self.written[done]

    def run(self, entry: Entry, job: Job) -> dict[str, Any]:
        """One process."""
        name = entry.contestant.name
        command = [self.pythons.get(name, sys.executable), "-m", "peers.harness", name, job.text()]
        paths = os.pathsep.join([str(TOOLS), str(TOOLS.parent)])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        timeout = TIMEOUT_S if job.mode == "run" else 4 * TIMEOUT_S
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                raise Failed(f"no result within {timeout} s") from None
            finally:
                end_group(process.pid)
        if process.returncode or not stdout.strip():
            raise Failed(install.last_line(stderr.splitlines()))
        result: dict[str, Any] = json.loads(stdout)
        return result


def log(text: str) -> None:
    """Print what is going on, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def end_group(leader: int) -> None:
    """Kill what is left of a contestant, its workers included."""
    try:
        os.killpg(leader, 9)
    except ProcessLookupError:
        return


def turned(entries: list[Entry], number: int) -> list[Entry]:
    """The order of a round: another one begins, and every second round goes backwards."""
    start = number * max(len(entries) // MIN_ROUNDS, 1) % max(len(entries), 1)
    order = entries[start:] + entries[:start]
    return order[::-1] if number % 2 else order


def warm_cache(folder: Path) -> None:
    """Read everything once."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 22):
                    pass


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
    wanted = [contestant for contestant in CONTESTANTS if contestant.name in options.only]
    pythons: dict[str, str] = {}
    missing: dict[str, str] = {}
    for contestant in wanted:
        try:
            log(f"the environment of {contestant.title}")
            venvs = options.venvs.resolve() / "venvs"
            pythons[contestant.name] = install.python_of(contestant, venvs, install=not options.no_install)
        except install.NotInstalled as error:
            missing[contestant.title] = str(error)
    there = [contestant for contestant in wanted if contestant.name in pythons]
    driver = Driver(pythons, options.rounds)
    data = str(options.folder.resolve() / "data")
    found: dict[str, Any] = {"machine": report.machine(), "rounds": options.rounds, "missing": missing, "parts": []}
    for part in parts(options.parts, data, quick=options.quick, seconds=options.seconds):
        found["parts"].append(driver.measure(part, there))
        found["versions"] = driver.versions
        if options.json:  # after each part: all of them take an hour, and may be stopped
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    print(report.markdown(measure(arguments())))
