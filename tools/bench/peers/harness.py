"""Run a peer: an epoch to warm up, in which memory is measured, then whole epochs whose time is measured.

    python -m peers.harness prepare|run JOB

JOB and the result are JSON. Everything that the peer prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from peers.common import Epochs, Job

PAGE = 4096
PSS_SAMPLES = 8
EDGE = 6  # the rate of image batches leaves out 1/EDGE of an epoch's batches at each end


def descendants() -> Iterator[psutil.Process]:
    """Yield all living child processes of this process, and their children."""
    yield from psutil.Process().children(recursive=True)


def cpu_s() -> float:
    """Return the CPU seconds of the process tree since its start, ended children included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for process in descendants():
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and both of its own ended children
    return total


def pss_mb() -> float:
    """Return the proportional set size of the process tree in megabytes; shared pages count once."""
    total = 0
    for process in [psutil.Process(), *descendants()]:
        with suppress(OSError, psutil.NoSuchProcess):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total / 1e6


def mark(number: int, value: bytes) -> int:
    """Return a photo's part of an epoch's digest; it depends on the bytes and on the label `number`."""
    return (number + 1) * zlib.crc32(value)


class Epoch:
    """One epoch. The consumer touches each page of each batch and counts what it got, in the same way for all peers.

    A sample is identified by its number: the label of an image or photo, otherwise the first four bytes and the JSON's
    `id`. The warm-up epoch (`first`), whose time does not count, also takes the crc32 of every value, and the memory;
    each epoch takes the `mark` of every photo.
    """

    def __init__(self, job: Job, *, first: bool = False) -> None:
        self.job, self.first = job, first
        self.begin_s = self.end_s = self.middle_s = 0.0
        self.middle_samples = self.in_order = self.mixed = self.num_bytes = self.digest = self.pixels = 0
        self.sum = self.squares = 0.0
        self.seen: NDArray[np.int64] = np.zeros(job.num, dtype=np.int64)
        self.shapes: set[str] = set()
        self.memory: list[float] = []

    def run(self, epochs: Epochs) -> None:
        """Read all batches of the next epoch."""
        edge, every, middle = max(self.job.steps // EDGE, 1), max(self.job.steps // PSS_SAMPLES, 1), 0.0
        for step, (values, *rest) in enumerate(epochs()):
            now = time.monotonic()
            self.begin_s = self.begin_s or now
            if step == edge:
                middle = now
            if step == self.job.steps - edge:
                self.middle_s, self.middle_samples = now - middle, (step - edge) * self.job.batch
            labels = rest[0] if rest else []
            numbers = self.images(values, labels) if self.job.kind == "images" else self.fields(values, labels)
            self.in_order += int(np.count_nonzero(np.diff(numbers) == 1))
            np.add.at(self.seen, numbers, 1)
            if self.first and step % every == every - 1:
                self.memory.append(pss_mb())
        self.end_s = time.monotonic()

    def images(self, values: Any, labels: Any) -> NDArray[np.int64]:
        """Count a batch of images; return the numbers of its samples."""
        pixels = np.asarray(values)
        self.shapes.add(f"{pixels.dtype} {pixels.shape}")
        part = pixels.ravel(order="K")[:: PAGE // pixels.itemsize].astype(np.float64)
        self.pixels += part.size
        self.sum += float(part.sum())
        self.squares += float(part @ part)
        return np.asarray(labels, dtype=np.int64).ravel()

    def fields(self, values: Any, documents: Any) -> NDArray[np.int64]:
        """Count a batch of bytes and their JSON or labels; return the numbers of its samples."""
        has_labels = self.job.kind == "photos"
        numbers = [*map(int, documents)] if has_labels else [int.from_bytes(value[:4], "little") for value in values]
        for number, value in zip(numbers, values, strict=True):
            value[::PAGE]
            if has_labels:
                self.digest += mark(number, value)
            elif self.first:
                self.digest ^= zlib.crc32(value)
            self.num_bytes += len(value)
        if self.job.kind == "small":
            self.mixed += sum(document["id"] != number for document, number in zip(documents, numbers, strict=True))
        self.shapes.add(f"{len(numbers)}")
        return np.asarray(numbers)

    def tally(self) -> dict[str, Any]:
        """Return what the epoch delivered as a JSON object, which the driver checks."""
        samples, pixels = int(self.seen.sum()), max(self.pixels, 1)
        return {
            "samples": samples,
            "distinct": int(np.count_nonzero(self.seen)),
            "in_order": self.in_order / max(samples, 1),
            "mixed": self.mixed,
            "num_bytes": self.num_bytes,
            "digest": self.digest,
            "mean": self.sum / pixels,
            "deviation": (self.squares / pixels - (self.sum / pixels) ** 2) ** 0.5,
            "shapes": sorted(self.shapes),
        }


def measure(job: Job, epochs: Epochs, imported_s: float) -> dict[str, Any]:
    """Return the peer's numbers and what it delivered.

    The rate is that of all measured epochs. For images the ends of each epoch are left out, because decoders are idle
    while an epoch drains: in an epoch of a million images that does not matter, in these small ones it does. Samples
    that are only read can be read in advance, so their rate leaves nothing out.
    """
    warm, measured = Epoch(job, first=True), list[Epoch]()
    warm.run(epochs)
    start_s, cpu = time.monotonic(), cpu_s()
    while not measured or measured[-1].end_s - start_s < job.seconds:
        measured.append(Epoch(job))
        measured[-1].run(epochs)
    cpu = cpu_s() - cpu
    pss = max([*warm.memory, pss_mb()])
    tallies = [epoch.tally() for epoch in [warm, *measured]]
    samples = sum(tally["samples"] for tally in tallies[1:])
    rate = samples / (measured[-1].end_s - start_s)
    if job.kind == "images":
        rate = sum(epoch.middle_samples for epoch in measured) / sum(epoch.middle_s for epoch in measured)
    return {
        "samples": samples,
        "epochs": len(measured),
        "cpu_ms": cpu / samples * 1000,
        "samples_per_s": rate,
        "first_s": warm.begin_s - imported_s,
        "start_s": warm.begin_s - job.launched,
        "next_epoch_s": measured[0].begin_s - warm.end_s,
        "pss_mb": pss,
        "tallies": tallies,
    }


def main(mode: str, text: str) -> None:
    """Write the peer's data unless it exists, or measure the peer; print the result as JSON."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.loads(text))
    peer = importlib.import_module(f"peers.{job.peer}")
    imported_s = time.monotonic()
    result: dict[str, Any] = {}
    if mode == "run":
        result = measure(job, peer.open_epochs(job), imported_s)
    elif not (job.home / "done").exists():
        shutil.rmtree(job.home, ignore_errors=True)
        job.home.mkdir(parents=True)
        peer.prepare(job, job.home)
        (job.home / "done").touch()
    stdout.write(json.dumps(result) + "\n")
    stdout.close()
    sys.stderr.flush()
    for process in descendants():  # except Python's resource tracker, which removes their shared memory
        with suppress(psutil.Error):
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()
    os._exit(0)  # a peer's own shutdown is not measured, and some peers hang in it


if __name__ == "__main__":
    main(*sys.argv[1:])
