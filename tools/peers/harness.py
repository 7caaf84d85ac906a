"""Runs a contestant: an epoch to warm up, in which memory is sampled, then whole epochs that are measured."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from peers import measure
from peers.job import Job
from peers.tally import Tally

Batch = tuple[Any, Any]
"""Images and labels, or a list of bytes and their JSON documents (None without)."""

PSS_SAMPLES = 8
EDGE = 6  # the part of an epoch's batches at either end that the rate of image batches leaves out, as 1/EDGE


@dataclass
class Opened:
    """A contestant's loader.

    Args:
        epoch: Gives the batches of one more epoch.
        close: Ends what it started.
    """

    epoch: Callable[[], Iterable[Batch]]
    close: Callable[[], object] = lambda: None


@dataclass
class Measured:
    """One epoch."""

    first: float = 0.0
    last: float = 0.0
    cpu: float = 0.0
    middle_s: float = 0.0
    middle_samples: int = 0
    tally: dict[str, Any] = field(default_factory=dict)


def main(prepare: Callable[[Job], object], open_: Callable[[Job], Opened], packages: tuple[str, ...] = ()) -> None:
    """Do the job on the command line. What packages print goes to stderr; the result alone to stdout."""
    imported = time.monotonic()
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    result: dict[str, Any] = {}
    if job.mode == "prepare":
        prepare(job)
    else:
        result = run(job, open_, imported)
        result["versions"] = {name: version(name) for name in packages}
    stdout.write(json.dumps(result) + "\n")
    stdout.close()
    sys.stderr.flush()
    measure.end_below()
    os._exit(0)  # what a peer does at its end is no part of this, and some hang there


def run(job: Job, open_: Callable[[Job], Opened], imported: float) -> dict[str, Any]:
    """Measure."""
    opened = open_(job)
    memory: list[dict[str, float]] = []
    every = max(job.steps // PSS_SAMPLES, 1)

    def sample_memory(step: int) -> None:
        if step % every == every - 1:
            memory.append(measure.pss_mb())

    warm = one_epoch(job, opened, sample_memory, digests=True)
    epochs: list[Measured] = []
    start, cpu = time.monotonic(), measure.cpu_s()
    while not epochs or epochs[-1].last - start < job.seconds:
        epochs.append(one_epoch(job, opened))
    cpu_s = measure.cpu_s() - cpu
    memory.append(measure.pss_mb())
    opened.close()
    samples: int = sum(epoch.tally["samples"] for epoch in epochs)
    return {
        "samples": samples,
        "epochs": len(epochs),
        "cpu_ms": cpu_s / samples * 1000,
        "samples_per_s": rate(job, epochs, start),
        "first_s": warm.first - imported,
        "start_s": warm.first - job.launched,
        "next_epoch_s": epochs[0].first - warm.last,
        "pss_mb": max(memory, key=lambda parts: parts["Pss"]),
        "tallies": [epoch.tally for epoch in [warm, *epochs]],
    }


def rate(job: Job, epochs: list[Measured], start: float) -> float:
    """Samples a second: of all epochs, or for images with workers or threads without each epoch's ends.

    Decoders stand still while an epoch drains. Over an epoch of a million images that is nothing, over these few it
    is not, so it is left out; memory that only reads can be read in advance, so there it must not be.
    """
    if job.kind == "images":
        return sum(epoch.middle_samples for epoch in epochs) / sum(epoch.middle_s for epoch in epochs)
    samples: int = sum(epoch.tally["samples"] for epoch in epochs)
    return samples / (epochs[-1].last - start)


def one_epoch(
    job: Job, opened: Opened, at_step: Callable[[int], object] | None = None, *, digests: bool = False
) -> Measured:
    """All batches of an epoch."""
    measured, tally = Measured(), Tally(job.kind, job.num, digests=digests)
    begin, end = max(job.steps // EDGE, 1), job.steps - max(job.steps // EDGE, 1)
    begun = 0.0
    for step, (values, labels) in enumerate(opened.epoch()):
        now = time.monotonic()
        if step == 0:
            measured.first = now
        if step == begin:
            begun = now
        if step == end:
            measured.middle_s, measured.middle_samples = now - begun, (end - begin) * job.batch
        tally.take(values, labels)
        if at_step is not None:
            at_step(step)
    measured.last = time.monotonic()
    measured.tally = tally.found()
    return measured
