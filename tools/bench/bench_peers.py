"""Compare wdskit with other loaders: the same samples, the same crop, interleaved runs.

    python tools/bench/bench_peers.py [--only NAME ...] [--rounds N] [--parts bytes,small,images] [--quick]
                                [--folder DIR] [--no-install] [--json FILE]

Needs the extras `bench` and `dev`, and about 10 GB below --folder. Each peer is a module in `peers` and runs in its own
process. A peer with its own requirements gets an environment below --folder; if that cannot be installed, the
peer's line says why. A run is a fresh process: an epoch that warms up, then whole epochs for at least 1.5 s. The order
changes with each round. Numbers are medians; a ratio is the median of the ratios to the bare loop in the same round.

    samples/s      of the measured epochs; for images, of the middle of each epoch, when all decoders have work
    CPU ms         of the whole process tree, per sample
    first batch    seconds from the end of the imports to the first batch
    from start     seconds from the start of the process
    next epoch     seconds from an epoch's end to the next one's first batch
    PSS            of the process tree, shared pages once; maximum of eight values in the warm-up epoch, one at the end

A peer that delivers other samples, other shapes, other pixels (mean and deviation) or the packed order is listed with
the fault, without numbers. The consumer touches each page of each batch in the same way for all peers. All peers run
with OMP_NUM_THREADS=1, so that four decoders are four threads, without thread pools inside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from environments import REQUIREMENTS, NotInstalled, python_of, reason
from peers import report
from peers.common import Job

HERE = Path(__file__).resolve().parent
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))  # also tools/, and the repository
MIN_ROUNDS = 5
TIMEOUT_S = 300
DECODERS = 4
COMMON = ("numpy", "orjson", "pillow", "simplejpeg", "torch", "wdskit", "webdataset")


@dataclass(frozen=True)
class Line:
    """A line of a table: a peer with some settings of its `Job`, for images or for samples that are only read.

    `native` decides whether wdskit runs with its native code.
    """

    peer: str
    title: str
    images: bool = False
    workers: int = 0
    threads: int = 0
    chain: str = ""
    native: bool = True


LINES = (
    Line("bare", "bare loop"),
    Line("bare", "bare loop, 4 threads", images=True, threads=DECODERS),
    Line("bare", "bare loop, 1 thread", images=True),
    Line("wdskit", "wdskit"),
    Line("wdskit", "wdskit, 0 x 4", images=True, threads=4),
    Line("wdskit", "wdskit, 1 x 4", images=True, workers=1, threads=4),
    Line("wdskit", "wdskit, 2 x 2", images=True, workers=2, threads=2),
    Line("wdskit", "wdskit, 4 x 1", images=True, workers=4, threads=1),
    Line("wdskit", "wdskit, Python", native=False),
    Line("wdskit", "wdskit, Python, 0 x 4", images=True, threads=4, native=False),
    Line("wdskit", "wdskit, Python, 2 x 2", images=True, workers=2, threads=2, native=False),
    Line("webdataset", "webdataset"),
    Line("webdataset", "webdataset, Pillow", images=True, workers=DECODERS),
    Line("webdataset", "webdataset, simplejpeg, torch", images=True, workers=DECODERS, chain="fast"),
    Line("streaming", "MosaicML streaming"),
    Line("streaming", "MosaicML streaming", images=True, workers=DECODERS),
    Line("litdata", "litdata"),
    Line("litdata", "litdata", images=True, workers=DECODERS),
    Line("grain", "array_record, grain"),
    Line("grain", "array_record, DataLoader", chain="torch"),
    Line("grain", "array_record, grain", images=True, workers=DECODERS),
    Line("dali", "DALI on the CPU"),
    Line("dali", "DALI on the CPU", images=True, threads=DECODERS),
    Line("ffcv", "FFCV"),
    Line("ffcv", "FFCV", images=True, threads=DECODERS),
)
NAMES = list(dict.fromkeys(line.peer for line in LINES))
WITHOUT_DATA = {"wdskit", "webdataset"}  # these peers read the files of the bare loop

PARTS = {
    "bytes": [Job("bytes", "", 65_536, 3_000, 64), Job("bytes", "", 2_048, 100_000, 64)],
    "small": [Job("small", "", 65_536, 2_000, 256)],
    "images": [Job("images", "", 2_048, 0, 64, dtype) for dtype in ("uint8", "float32")],
}
TITLES = {
    "bytes": "bytes only, {kb} kB, batches of {job.batch}, one process",
    "small": "{kb} kB and JSON, batches of {job.batch}, one process",
    "images": "photographs to batches of {job.batch} as {job.dtype}, {decoders} decoders",
}


class Failed(Exception):
    """A run gave no result. The message is the reason."""


def measure_part(job: Job, lines: list[Line], pythons: dict[str, str], rounds: int) -> dict[str, Any]:
    """Measure one table and return it. Every round runs all lines, each in a fresh process."""
    key = f"{job.kind}-{job.dtype if job.kind == 'images' else job.size}"
    wrong = prepare(job, [line.peer for line in lines], pythons)
    failed = {line.title: wrong["bare"] or wrong[line.peer] for line in lines}
    runs: dict[str, list[dict[str, Any]]] = {line.title: [] for line in lines}
    for number in range(rounds):
        for line in turned(lines, number):
            if failed[line.title]:
                continue
            log(f"{key}, round {number + 1} of {rounds}: {line.title}")
            settings = {
                name: value for name, value in asdict(line).items() if name not in {"title", "images", "native"}
            }
            one = replace(job, **settings, launched=time.monotonic())
            try:
                runs[line.title].append(run("run", one, pythons, is_native=line.native))
            except Failed as error:
                failed[line.title] = f"failed: {error}"
    base = next((runs[line.title] for line in lines if line.peer == "bare"), [])
    found = []
    for line in lines:
        texts = [text for one in runs[line.title] for text in report.problems(job, one, base[0] if base else None)]
        problem = failed[line.title] or "; ".join(texts[:2])
        row = {"peer": line.peer, "title": line.title, "problem": problem}
        found.append(row | ({} if problem else report.medians(runs[line.title], base)))
    title = TITLES[job.kind].format(job=job, kb=job.size // 1000, decoders=DECODERS)
    return {"key": key, "title": title, "lines": found, "runs": runs}


def prepare(job: Job, names: list[str], pythons: dict[str, str]) -> dict[str, str]:
    """Write the bare loop's samples, from which all peers start, then each peer's format, unless they exist.

    Returns a text for each peer: why its data was not written, or an empty text.
    """
    wrong = dict.fromkeys(["bare", *names], "")
    for name in [name for name in wrong if name not in WITHOUT_DATA]:
        log(f"{job.kind}: the data of {name}")
        try:
            run("prepare", replace(job, peer=name), pythons)
        except Failed as error:
            wrong[name] = f"failed to write its data: {error}"
    for path in Path(job.folder).rglob("*"):  # into the page cache
        if path.is_file():
            path.read_bytes()
    return wrong


def run(mode: str, job: Job, pythons: dict[str, str], *, is_native: bool = True) -> dict[str, Any]:
    """Run a peer in a process of its own and return its result. Raises Failed if it fails or takes too long."""
    command = [pythons.get(job.peer, sys.executable), "-m", "peers.harness", mode, json.dumps(asdict(job))]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if job.peer == "wdskit":
        environment["WDSKIT_NATIVE"] = "require" if is_native else "0"
    timeout_s = TIMEOUT_S if mode == "run" else 4 * TIMEOUT_S
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"no result within {timeout_s} s") from None
        finally:
            with suppress(ProcessLookupError):  # kill what still runs, workers included
                os.killpg(process.pid, 9)
    if process.returncode or not stdout.strip():
        raise Failed(reason(stderr))
    result: dict[str, Any] = json.loads(stdout)
    return result


def log(text: str) -> None:
    """Print progress to stderr; the tables go to stdout."""
    print(text, file=sys.stderr, flush=True)


def turned(lines: list[Line], number: int) -> list[Line]:
    """Return the lines in the order of round `number`: each round starts at another line, every second is reversed."""
    start = number * max(len(lines) // MIN_ROUNDS, 1) % max(len(lines), 1)
    order = lines[start:] + lines[:start]
    return order[::-1] if number % 2 else order


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="wdskit beside other loaders.")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} or more (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--quick", action="store_true", help="one round of few samples; its numbers mean nothing")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="folder for samples and environments")
    parser.add_argument("--no-install", action="store_true", help="use only peers that are installed already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number of every run to FILE")
    options = parser.parse_args()
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds: {options.rounds}: fewer than {MIN_ROUNDS}")
    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: no such part. Name some of {', '.join(PARTS)}.")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Install the peers, measure all parts and return the numbers."""
    rounds = 1 if options.quick else options.rounds
    found: dict[str, Any] = {"machine": report.machine(), "rounds": rounds, "missing": {}, "parts": []}
    pythons: dict[str, str] = {}
    for name in options.only:
        log(f"the environment of {name}")
        try:
            pythons[name] = python_of(name, options.folder / "venvs", install=not options.no_install)
        except NotInstalled as error:
            found["missing"][name] = str(error)
    pins = dict(pin.split("==") for name in pythons for pin in REQUIREMENTS.get(name, ()))
    found["versions"] = {name: version(name) for name in COMMON} | pins
    for job in [job for name in options.parts.split(",") for job in PARTS[name][: 1 if options.quick else None]]:
        lines = [line for line in LINES if line.peer in pythons and line.images == (job.kind == "images")]
        if options.quick:
            job = replace(job, num=job.batch * 3, batch=job.batch // 8, seconds=0.01)
            lines = list({line.peer: line for line in lines[::-1]}.values())[::-1]  # the first of each
        folder = options.folder.resolve() / "data" / f"{job.kind}-{job.size}-{job.num}"
        found["parts"].append(measure_part(replace(job, folder=str(folder)), lines, pythons, rounds))
        if options.json:  # after each part, because all parts take an hour and may be stopped
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    print(report.markdown(measure(arguments())))
